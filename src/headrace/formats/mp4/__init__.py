"""Reads clips of MP4 videos: tables of frames, small files of some frames, and pixels.

A file's `moov` box has the location, presentation time and key frame flag of each frame. The bytes of a clip are
therefore known before reading any of them.

Damage raises a ValueError, which `format.py` converts to a FormatError with the shard.
"""
