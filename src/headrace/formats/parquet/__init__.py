"""Reads Parquet: parses footers and page headers, and decodes columns with pyarrow.

file_end.py      the last bytes of a file           footer.py        columns and row groups, checked
thrift.py        the encoding of footers            page_headers.py  memory use of pages
where.py         predicates compared with bounds    page_index.py    the pages of some rows
page_pruning.py  rows that page indexes exclude     decoding.py      decoded columns of a row group
format.py        the format
"""
