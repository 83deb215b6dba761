"""Reads Parquet: parses footers and page headers, and decodes columns with pyarrow.

footer.py  reads a footer; columns and row groups, checked   thrift.py        the encoding of footers
where.py   rows that bounds of groups and pages exclude        page_index.py    the pages of some rows
format.py  the format; decodes columns with pyarrow            page_headers.py  memory use of pages
"""
