"""Fingerprints of shards."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice

import numpy as np

from headrace.types import Ints

_CHUNK = 2**14


def fingerprint_of(urls: Sequence[str], sizes: Ints | None = None) -> str:
    """Return a digest of the shards' file names, which ignores their location, and sizes."""
    digest = hashlib.blake2b(digest_size=8)
    source, separator = iter(urls), ""
    while chunk := list(islice(source, _CHUNK)):  # in chunks: there may be millions
        names = separator + "\n".join(url.partition("?")[0].rpartition("/")[2] for url in chunk)
        digest.update(names.encode("utf-8", "surrogateescape"))
        separator = "\n"
    if sizes is not None:
        digest.update(np.ascontiguousarray(sizes, "<i8").tobytes())
    return digest.hexdigest()
