"""Where the documents of a file of tokens begin, by the token that ends each: all of the file is read for that."""

from __future__ import annotations

from contextlib import aclosing

import numpy as np

from headrace.errors import LimitError, masked
from headrace.formats.tokens.layouts import TokenFile, damage
from headrace.indexes.pinned import PinnedObject
from headrace.types import Ints

_PLACE_BYTES = 8


async def documents_by_eos(pinned: PinnedObject, file: TokenFile, eos: int, most_bytes: int) -> Ints:
    """Where documents begin, and where the last one ends, in tokens; what follows the last `eos` is a document, too.

    A few pieces of the file are held at once, and 8 bytes for each document.

    Args:
        most_bytes: of the places.

    Raises:
        FormatError: the file is shorter than it was.
        LimitError: there are too many documents.
        StorageError: it could not be read.
    """
    begin, stop, itemsize = file.begin, file.begin + file.count * file.dtype.itemsize, file.dtype.itemsize
    found = [np.zeros(1, np.int64)]
    count, at, rest = 1, 0, b""
    async with aclosing(pinned.pieces()) as pieces:
        async for piece in pieces:
            data = rest + bytes(piece[max(begin - at, 0) : max(stop - at, 0)])
            at += len(piece)
            whole = len(data) // itemsize * itemsize
            first = (min(at, stop) - begin - len(data)) // itemsize
            rest = data[whole:]
            ends = np.flatnonzero(np.frombuffer(data[:whole], file.dtype) == eos) + first + 1
            found.append(ends.astype(np.int64))
            count += len(ends)
            if _PLACE_BYTES * (count + 1) > most_bytes:
                raise LimitError(
                    f"{masked(file.url)} has {count} documents and more: where each begins takes {_PLACE_BYTES} bytes, "
                    f"over the limit of {most_bytes}",
                    url=file.url,
                )
    if at < stop:
        raise damage(file.url, f"it has {at} bytes, and its tokens end at {stop}")
    places = np.concatenate(found)
    return places if places[-1] == file.count else np.append(places, file.count)
