"""Reads clips of MP4 videos: tables of frames, small files of some frames, and pixels."""
