"""Samples in the memory of a task, as its workers receive them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from builders.rows import rows_of

from headrace._util.sample_ranges import Rows
from headrace.workers.task_inputs import LeasedBodies


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
