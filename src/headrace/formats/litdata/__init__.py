"""LitData's chunks: a catalogue beside them, a table of offsets in each.

catalogue.py   what index.json says      leaves.py   from the bytes of a leaf to its value
trees.py       from the leaves of an item to a sample      format.py   all of it as a format

Functions raise a ValueError for damage. `format.py` makes a FormatError of it that names the shard.
"""
