"""From the bytes of a window to its tokens, in the workers."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from headrace.formats.format import Format
from headrace.formats.tokens.layouts import Tokens

_SOURCE = ("__key__", "__url__")


class TokenFormat(Format):
    """What files of tokens are called; `hr.tokens` reads them, as windows are no property of the files."""

    name = "tokens"
    suffixes = ()


class TokenOpener:
    """The first step of a stream of tokens. It knows their type by what their bytes are called.

    Args:
        eos: the token that ends each document, by which `document_ids` are found; None: not by that.
        has_ids: whether each member is of a document of its own, by which they are found.
    """

    def __init__(self, eos: int | None, *, has_ids: bool) -> None:
        self.eos, self.has_ids = eos, has_ids

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """The sample: its tokens, in memory of their own, and of each the number of its document in the window."""
        names = [name for name in sample if name not in _SOURCE]
        bodies = [sample[name] for name in names]
        dtype, native = _dtype(names[0])
        whole = bodies[0] if len(bodies) == 1 else b"".join(bodies)
        tokens = np.frombuffer(whole, dtype).astype(native)
        made = {"__key__": sample["__key__"], "__url__": sample["__url__"], "tokens": tokens}
        if self.has_ids:
            sizes = [len(body) // dtype.itemsize for body in bodies]
            made["document_ids"] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        elif self.eos is not None:
            made["document_ids"] = ids_by_eos(tokens, self.eos)
        return made


def ids_by_eos(tokens: Tokens, eos: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Of each token the number of its document: the next one begins behind each `eos`."""
    ids = np.zeros(len(tokens), np.int32)
    np.cumsum(tokens[:-1] == eos, out=ids[1:])
    return ids


@cache
def _dtype(name: str) -> tuple[np.dtype[np.integer], np.dtype[np.integer]]:
    """The type of tokens whose bytes are called so, by its name and the number of a piece; and in our byte order."""
    dtype: np.dtype[np.integer] = np.dtype(name.partition(" ")[0])
    return dtype, dtype.newbyteorder("=")
