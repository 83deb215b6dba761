"""Reads Parquet: parses footers and page headers, and decodes columns with pyarrow."""
