"""Runs a loader of torch's data sets, with torch's semantics, or in economic mode."""
