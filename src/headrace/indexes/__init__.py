"""Indexes of shards: the number of samples and their locations.

index.py        an index as data sets use it: read lazily, from any store
whereabouts.py  paths of index files: beside the shards, or in this machine's cache
building.py     builds the index of many shards, for the command and for missing indexes
one_shard.py    finds the samples of one shard, by reading it completely or only its headers
pinned.py       one version of an object
"""
