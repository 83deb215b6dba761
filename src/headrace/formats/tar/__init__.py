"""Scans tar archives for the byte ranges of samples, and compares headers with an index."""
