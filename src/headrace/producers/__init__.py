"""Between plan and fetch: turns what an epoch's plan wants into reads, and what was read into parts of samples.

keys.py             samples by their keys, and of iterators
resumable.py        iterables that say how far they have come
shards.py           shards that are read as they lie; shard_ranges.py, unpack.py, reading_ahead.py: their ranges
shuffle_buffer.py   samples drawn from a buffer
indexed_shards.py   shards whose samples' places are known; members.py: the bytes of single members
without.py          without what was delivered before
adaptive_concurrency.py     how many reads at once are worth while
"""
