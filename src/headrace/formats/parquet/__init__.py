"""Parquet: a footer that says where the columns of each group of rows lie; pyarrow decodes them.

thrift.py   the encoding of footers and of page heads      schema.py   the columns that a footer describes
footer.py   what a footer says, checked      reading.py   what is read of a file beside its columns
pages.py    the heads of a column's pages      page_index.py   where they lie, and their bounds
where.py    predicates, and what bounds say of them      narrowing.py   rows that page indexes leave out
decoding.py columns of a group, decoded      some_rows.py   some rows of it, by their pages
facts.py    what a worker must know of a group      expansion.py   what text takes once it is decoded
format.py   all of it as a format
"""
