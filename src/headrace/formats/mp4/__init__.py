"""MP4, as far as clips of its video need it: the tables of its frames, files of some of these, and their pixels.

A file's `moov` box says of each frame where it lies, when it is shown, and whether one can begin to decode there. So
the bytes of a clip are known before any of them is read.

Functions raise a ValueError for damage. `format.py` makes a FormatError of it that names the shard.
"""
