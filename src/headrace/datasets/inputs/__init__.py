"""Streams of several streams: concatenated, interleaved, zipped, mixed, joined or forked."""
