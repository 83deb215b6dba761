"""From the bytes of a window to its tokens, in the workers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from headrace.formats.columns import Column, ColumnBodies, Columns
from headrace.formats.format import Format
from headrace.formats.tokens.layouts import Tokens
from headrace.rows import Rows, texts_of

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

    def columns(self, rows: Rows, bodies: ColumnBodies, urls: Sequence[str]) -> Columns | None:
        """The same of many windows at once; None where they differ in size, or are in pieces."""
        if self.has_ids or not len(rows) or rows.block is not None or not (np.diff(rows.starts) == 1).all():
            return None
        size = int(rows.size[0])
        if (rows.size != size).any() or (rows.field != rows.field[0]).any():
            return None
        dtype, native = _dtype(rows.fields[int(rows.field[0])])
        shape = (size // dtype.itemsize,)
        values: Tokens | None = None
        if dtype != native or self.eos is not None:
            values = bodies.gather(rows.offset, size).view(dtype).astype(native)
        made: dict[str, Column | Sequence[str]] = {"__key__": texts_of(rows.keys), "__url__": urls}
        made["tokens"] = Column(native, shape, False, 0, rows.offset, values)
        if self.eos is not None and values is not None:
            ids = np.stack([ids_by_eos(one, self.eos) for one in values])
            made["document_ids"] = Column(ids.dtype, shape, False, 0, rows.offset, ids)
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
