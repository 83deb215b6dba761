"""Formats: find and decode samples in bytes. Depends on no loader."""
