"""Decodes windows of tokens in the workers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from headrace._util.sample_ranges import Rows, texts_of
from headrace.formats.columns import Column, ColumnBodies, Columns
from headrace.formats.format import Format
from headrace.formats.tokens.layouts import Tokens

_SOURCE = ("__key__", "__url__")


class TokenFormat(Format):
    """A name for files of tokens. `hr.tokens` reads them, as windows do not depend on the files."""

    name = "tokens"
    suffixes = ()


class TokenOpener:
    """The first step of a stream of tokens. The names of members give the dtype.

    Args:
        eos: Token at the end of each document, for `document_ids`. None: not used.
        has_ids: True if each member is a separate document, for `document_ids`.
    """

    def __init__(self, eos: int | None, *, has_ids: bool) -> None:
        self.eos, self.has_ids = eos, has_ids

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return the sample: its tokens, which own their memory, and the document number of each."""
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
        """Decode many windows at once. None if sizes differ or a window has several members."""
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
    """Return the document number of each token. A new document begins after each `eos`."""
    ids = np.zeros(len(tokens), np.int32)
    np.cumsum(tokens[:-1] == eos, out=ids[1:])
    return ids


@cache
def _dtype(name: str) -> tuple[np.dtype[np.integer], np.dtype[np.integer]]:
    """Return the (stored, native) dtype from a member's name: dtype, and number of a piece."""
    dtype: np.dtype[np.integer] = np.dtype(name.partition(" ")[0])
    return dtype, dtype.newbyteorder("=")
