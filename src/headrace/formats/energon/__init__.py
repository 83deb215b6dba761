"""Folders that Megatron-Energon has prepared: tar shards, with an index of samples beside each.

catalogue.py   which shards a split has      offsets.py   where the samples of a shard begin
format.py      all of it as a format
"""
