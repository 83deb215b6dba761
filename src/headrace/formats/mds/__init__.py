"""MDS, the shards of MosaicML's streaming: a catalogue beside them, a table of offsets in each.

catalogue.py   what index.json says      table.py   what the head of a shard says
encodings.py   from the bytes of a column to its value      format.py   all of it as a format
"""
