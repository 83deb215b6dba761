"""Indexes of shards as bytes, specified by `docs/reference/index_format.md`.

shard.py     the index of one shard              file.py      an index file: a directory, and a block for each shard
named_arrays.py   the container of both
"""
