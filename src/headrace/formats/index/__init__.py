"""Indexes of shards as bytes, specified by `docs/reference/index_format.md`: of one shard, and files of many."""
