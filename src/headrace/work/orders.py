"""What a task is to a worker, and what is said of one that ends workers."""

from __future__ import annotations

import signal
from typing import Any

from headrace.errors import WorkerDiedError
from headrace.memory import Lease
from headrace.tasks import KeyPart, Task

DEATHS = 3  # workers that a sample may cost


def order_of(number: int, task: Task, parts: list[Any]) -> dict[str, Any]:
    """A task in the form that goes to a worker."""
    return {
        "task": number,
        "chain": task.chain,
        "key": task.key,
        "batch": task.batch,
        "finish": task.finish,
        "parts": parts,
        "position": task.position,
        "positions": task.positions,
        "slot": task.slot,
        "capacity": task.capacity,
        "place": None if task.place is None else address_of(task.place),
        "scan": task.scan,
        "failures": task.failures,
    }


def address_of(place: Lease) -> tuple[int, int, int]:
    """Where a lease is, for those who have its segment mapped."""
    return place.segment.number, place.offset, place.size


def told(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "its exit status is not known"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def died(task: Task, sample: int, pid: int, code: int | None) -> WorkerDiedError:
    """The error of a sample that has ended as many workers as one may."""
    key, url = _origin(task, sample)
    if task.scan is not None:
        url, which = task.scan[0].url, "the search for the samples"
    elif sample >= 0:
        position = task.position + sample if task.positions is None else task.positions[sample]
        which = f"sample {position} of the epoch" + (f", key {key!r}" if key is not None else "")
    else:
        which = f"batch {task.batch} of the epoch, before or after its samples' own steps"
        which += f" (its first key: {key!r})" if key is not None else ""
    where = f" of {url}" if url else ""
    return WorkerDiedError(
        f"DataLoader worker (pid(s) {pid}) exited unexpectedly ({told(code)}); {DEATHS} did so, all on {which}{where}",
        pid=pid,
        exitcode=code,
        key=key,
        url=url,
        batch=task.batch,
    )


def _origin(task: Task, sample: int) -> tuple[Any, str | None]:
    """Key and address of a sample, where they can be told without unpacking it."""
    index = max(sample, 0)
    for part in task.parts:
        if index < part.count:
            if isinstance(part, KeyPart):
                return part.keys[part.start + index], None
            kind, *rest = part.describe()[0]
            if kind != "raw":
                return None, None
            rows, shards, urls, _ = rest
            return bytes(rows.keys[index]).decode("utf-8", "surrogateescape"), urls[int(shards[index])]
        index -= part.count
    return None, None
