"""Reads MDS, the shards of MosaicML's streaming: a catalogue, and offsets in each shard.

format.py   the catalogue, and the heads of shards      encodings.py   decodes columns

Damage raises a ValueError, which `format.py` converts to a FormatError with the shard.
"""
