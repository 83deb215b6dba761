"""Turns an epoch's plan into reads, and the bytes read into parts of samples."""
