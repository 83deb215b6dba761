"""Reads LitData's chunks: a catalogue, a table of offsets in each chunk, and trees of leaves."""
