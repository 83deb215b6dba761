"""What is known of shards before they are read: how many samples they have, and where those lie.

index.py        an index as data sets use it: read lazily, from wherever it lies
whereabouts.py  where that is: beside the shards, or on this machine
building.py     makes the index of many shards: for the command, and where none is there yet
one_shard.py    finds the samples of one shard, by reading it whole or by its headers
pinned.py       one version of an object
"""
