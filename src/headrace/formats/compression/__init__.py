"""Decompresses archives frame by frame, and verifies all checksums.

decompressor.py   sequential reads    frames.py   one frame of each kind    seekable.py   random access to zstd frames
"""
