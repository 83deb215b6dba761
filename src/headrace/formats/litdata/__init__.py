"""Reads LitData's chunks: a catalogue, and a table of offsets in each chunk.

catalogue.py   parses index.json     trees.py   decodes leaves, and builds samples     format.py   the format

Damage raises a ValueError, which `format.py` converts to a FormatError with the shard.
"""
