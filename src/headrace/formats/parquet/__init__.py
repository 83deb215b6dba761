"""Parquet: a footer with the places of the columns of row groups; pyarrow decodes the columns that were read.

file_end.py      the last bytes of a file           footer.py        columns and row groups, checked
thrift.py        the encoding of footers            page_headers.py  the memory that pages take
where.py         predicates compared with bounds    page_index.py    the pages of some rows
page_pruning.py  rows that page indexes exclude     decoding.py      columns of a row group, decoded
format.py        all of it as a format
"""
