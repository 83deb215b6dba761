"""Tables of samples, from and to lists."""

from collections.abc import Sequence

import numpy as np

from headrace._util.sample_ranges import Rows

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
