"""Runs a loader for data sets made for torch, with torch's semantics, or in economic mode."""
