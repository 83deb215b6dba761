"""MDS, the shards of MosaicML's streaming: a catalogue beside them, a table of offsets in each.

format.py   the catalogue, and the heads of shards      encodings.py   from the bytes of a column to its value

Functions raise a ValueError for damage. `format.py` makes a FormatError of it that names the shard.
"""
