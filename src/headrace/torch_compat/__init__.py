"""Compatibility with torch: collation, and pickling of tensors."""
