"""Zip archives, whose members are known from the directory at the end, and the arrays of .npz files.

Functions raise a ValueError for damage. `format.py` makes a FormatError of it that names the shard.
"""
