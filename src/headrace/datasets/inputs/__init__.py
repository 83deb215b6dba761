"""Streams of several streams: one after the other, side by side, by weight, by keys, and branches of one."""
