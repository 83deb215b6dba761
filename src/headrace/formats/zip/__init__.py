"""Reads zip archives by their directory, and the arrays of .npz files.

Damage raises a ValueError, which `format.py` converts to a FormatError with the shard.
"""
