"""Parquet: a footer that says where the columns of each group of rows lie; pyarrow decodes them.

thrift.py   the encoding of footers and of page heads      schema.py   the columns that a footer describes
footer.py   what a footer says, checked      pages.py   the pages of a column, and the index of them
where.py    predicates, and what statistics say of them      expansion.py  what text takes once it is decoded
decoding.py columns of a group, decoded      single.py   one row of it
format.py   all of it as a format
"""
