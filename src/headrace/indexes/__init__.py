"""Indexes of shards: numbers of samples and their locations, from any store or this machine's cache."""
