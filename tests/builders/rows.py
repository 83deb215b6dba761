"""Tables of samples, from and to lists, and their bodies in the memory of a task."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace._util.sample_ranges import LeasedBodies, Rows
from headrace.formats.index import ShardIndex

Plain = Sequence[tuple[bytes, list[tuple[str, int, int]]]]
"""The key of each sample, and (field, offset, size) of each of its members."""


def rows_of(plain: Plain) -> Rows:
    members = [member for _, row in plain for member in row]
    fields = tuple(dict.fromkeys(name for name, _, _ in members))
    return Rows(
        np.array([key for key, _ in plain], np.bytes_) if plain else np.zeros(0, "S1"),
        np.cumsum([0] + [len(row) for _, row in plain]).astype(np.int64),
        np.array([fields.index(name) for name, _, _ in members], np.int32),
        np.array([offset for _, offset, _ in members], np.int64),
        np.array([size for _, _, size in members], np.int64),
        fields,
    )


def listed(rows: Rows) -> Plain:
    members = [
        (rows.fields[field], offset, size)
        for field, offset, size in zip(rows.field.tolist(), rows.offset.tolist(), rows.size.tolist(), strict=True)
    ]
    bounds = rows.starts.tolist()
    return [(key, members[bounds[k] : bounds[k + 1]]) for k, key in enumerate(rows.keys.tolist())]


def laid_out(samples: Sequence[Mapping[str, bytes]], cuts: Sequence[int] = ()) -> tuple[Rows, LeasedBodies]:
    """The table and the bodies of samples, in memory that is cut in pieces at these bytes."""
    data, plain = bytearray(b"before"), []
    for k, sample in enumerate(samples):
        members = []
        for name, body in sample.items():
            members.append((name, len(data), len(body)))
            data += body + b"9"  # which would change a number that is read too far
        plain.append((b"%04d" % k, members))
    ends = sorted({cut for cut in cuts if 0 < cut < len(data)} | {len(data)})
    first = [0, *ends[:-1]]
    views = [memoryview(bytes(data[a:b])) for a, b in zip(first, ends, strict=True)]
    return rows_of(plain), LeasedBodies(views, first)


def listed_index(index: ShardIndex) -> tuple[Any, ...]:
    rows, frames = index.rows, index.frames
    return (
        rows.keys.tolist(),
        rows.starts.tolist(),
        [rows.fields[number] for number in rows.field.tolist()],
        rows.offset.tolist(),
        rows.size.tolist(),
        rows.fields,
        None if index.crc is None else index.crc.tolist(),
        index.size,
        index.etag,
        None if frames is None else (frames.packed.tolist(), frames.unpacked.tolist()),
    )
