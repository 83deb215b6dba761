"""Folders that Megatron-Energon has prepared: tar shards, with an index of samples beside each.

catalogue.py   which shards a split has      format.py   the shards and their indexes
"""
