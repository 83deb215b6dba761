"""Compressed archives: what they unpack to, frame after frame, to the last checksum.

decompressor.py   an archive in order      frames.py   one frame of each kind      seekable.py   by frames: Zstandard
"""
