"""Reads Parquet: parses footers, page indexes and page headers, and decodes columns with pyarrow."""
