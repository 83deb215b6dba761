"""Indexes of shards as bytes; `docs/reference/index_format.md` specifies them.

shard.py     what is known of one shard          file.py      an index file: a directory, and a block for each shard
journal.py   what is done while one is made      foreign.py   the files of DALI and wids
named_arrays.py   the container that both consist of
"""
