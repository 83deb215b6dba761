"""Zip archives, whose members are known from the directory at the end, and the arrays of .npz files."""
