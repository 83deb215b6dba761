"""Runs programs with one class of loader, and records everything that they can observe.

A file of programs runs as a script, so that its classes belong to `__main__`, as most users' do. Each program is a
function of the class and of a function that records a value:

    @program
    def batches_of_numbers(loader: Any, note: Note) -> None:
        for batch in loader(range(10), batch_size=4, num_workers=2):
            note(batch)

    if __name__ == "__main__":
        run()

Warnings, the error that ends a program, and its state of random numbers are recorded too.
"""

from __future__ import annotations

import dataclasses
import enum
import gc
import hashlib
import importlib
import itertools
import json
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

Note = Callable[..., None]
Program = Callable[[Any, Note], None]

CLASSES = {"torch": "torch.utils.data", "headrace": "headrace"}
PROGRAMS: dict[str, Program] = {}

ENDED_BY = "ended by"

# About the machine, torch's start of workers, and our workers that have to be forks.
_IGNORED_WARNINGS = ("This DataLoader will create", "use of fork()", "is multi-threaded", "cannot be sent to a worker")


def program(function: Program) -> Program:
    """Makes a program of a function."""
    PROGRAMS[function.__name__] = function
    return function


def run() -> None:
    """Run the programs of this script: `SCRIPT CLASS RECORD [PROGRAM ...]`; a RECORD of - is standard output."""
    which, record, *names = sys.argv[1:]
    loader = importlib.import_module(CLASSES[which]).DataLoader
    gc.collect()
    gc.freeze()  # libraries are garbage of no program: a collection of them takes a fifth of a second, after each one
    told = {}
    for name in names or PROGRAMS:
        told[name] = _notes_of(PROGRAMS[name], loader)
        if record == "-":
            sys.stdout.writelines(f"{name}: {line}\n" for line in told[name])
        else:
            Path(record).write_text(json.dumps(told))


def _notes_of(function: Program, loader: Any) -> list[str]:
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)  # noqa: NPY002
    notes: list[str] = []

    def note(*things: Any) -> None:
        notes.append(" ".join(thing if isinstance(thing, str) else described(thing) for thing in things))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            function(loader, note)
        except BaseException as error:
            note(ENDED_BY, described_error(error))
        gc.collect()
    for warning in caught:
        if not any(text in str(warning.message) for text in _IGNORED_WARNINGS):
            note("warned", warning.category.__name__, str(warning.message))
    note("drawn", torch.rand(1).item(), random.random(), np.random.rand())  # noqa: NPY002
    return notes


class Asking(Dataset[Any]):
    """Samples are results of a function of the data set and the index."""

    count = 6

    def __init__(self, ask: Callable[..., Any], **things: Any) -> None:
        self.ask = ask
        vars(self).update(things)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.ask(self, index)


class Made(Asking):
    """Two samples of each function in turn: a batch of two is of one function."""

    def __init__(self, makers: dict[str, Callable[[int], Any]]) -> None:
        functions = list(makers.values())
        super().__init__(lambda _, index: functions[index // 2](index), count=2 * len(functions))


class Images(Dataset[Any]):
    """Images with a random offset, and their numbers."""

    def __init__(self, count: int = 10) -> None:
        self.count, self.transform = count, unchanged

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.full((3, 4, 4), float(index)) + torch.rand(1)), index


def share(items: Iterable[Any]) -> Iterator[Any]:
    """The items of this worker. All items if there are no workers."""
    worker = get_worker_info()
    return itertools.islice(items, worker.id, None, worker.num_workers) if worker else iter(items)


def seed_worker(worker: int) -> None:
    torch.manual_seed(torch.initial_seed() % 2**32 + worker)


def unchanged(sample: Any) -> Any:
    return sample


def compare(loader: Any, note: Note, makers: dict[str, Callable[[int], Any]]) -> None:
    """Note what each makes, collated in twos, alone, and as it is; without workers and with them."""
    for workers in (0, 2):
        for name, batch in zip(makers, tried(loader(Made(makers), 2, num_workers=workers), 500), strict=True):
            note(workers, "collated", name, batch)
        for size, collate in ((None, None), (None, unchanged), (2, unchanged)):
            loading = loader(Made(makers), size, num_workers=workers, collate_fn=collate)
            for number, sample in enumerate(tried(loading, 500)):
                note(workers, "as it is" if collate else "converted", size, number, sample)


def read(
    loader: Any, note: Note, *given: Any, workers: Iterable[int] = (0, 2), epochs: int = 1, **options: Any
) -> None:
    """Note all batches of loaders with so many workers, and a random number after each epoch."""
    for count in workers:
        loading = loader(*given, num_workers=count, **options)
        for epoch in range(epochs):
            for batch in tried(loading):
                note(count, epoch, batch)
            note("after the epoch", torch.rand(1).item(), random.random())
        gc.collect()  # errors keep torch's iterators in cycles, which no fork may collect


def tried(batches: Iterable[Any], at_most: int = 50) -> Iterator[Any]:
    """Each batch, or the error in its place as text, up to the end; also if there is no iterator."""
    try:
        iterator = iter(batches)
    except BaseException as error:
        yield described_error(error)
        return
    for _ in range(at_most):
        try:
            told = next(iterator)
        except StopIteration:
            return
        except BaseException as error:
            told = described_error(error)
        yield told


def attempt(act: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """The result of the call, or its error as text."""
    try:
        return act(*given, **options)
    except BaseException as error:
        return described_error(error)


def described_error(error: BaseException) -> str:
    """Type and text; of a traceback in the text, only what is in the script, as the rest is the loader's own."""
    text, within, kept = str(error), False, []
    for line in text.split("\n"):
        if re.match(r'  File ".*", line \d+', line):
            within = Path(sys.argv[0]).name not in line
        elif not line.startswith("    "):
            within = False
        if not within and not set(line.strip()) <= set("~^"):
            kept.append(re.sub(r'File ".*/', 'File "', line))
    bases = [base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"]
    return f"{type(error).__qualname__} ({bases[0]}): " + "\n".join(kept)


def described(value: Any) -> str:
    """A text that is equal only if all types, bits and attributes are."""
    kind = _name(type(value))
    if isinstance(value, torch.Tensor):
        return f"{kind}[{_tensor(value)}]{_attributes(value)}"
    if isinstance(value, np.ndarray):
        return f"{kind}[{_array(value)}]"
    if isinstance(value, np.generic):
        return f"{kind}[{value.dtype!r} {value!r}]"
    if isinstance(value, Mapping):
        parts = ", ".join(f"{described(key)}: {described(part)}" for key, part in value.items())
        return f"{kind}{{{parts}}}{_attributes(value)}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | range | memoryview):
        return f"{kind}[{', '.join(map(described, value))}]{_attributes(value)}"
    if isinstance(value, set | frozenset):
        return f"{kind}{{{', '.join(sorted(map(described, value)))}}}"
    if isinstance(value, BaseException):
        return f"the error {described_error(value)}"
    if isinstance(value, type):
        return f"the type {_name(value)}"
    if dataclasses.is_dataclass(value):
        fields = (f"{field.name}={described(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{kind}({', '.join(fields)})"
    if value is None or isinstance(value, int | float | complex | str | bytes | bytearray | range | enum.Enum):
        return f"{kind} {value!r}"
    return f"{kind}{_attributes(value)}" if hasattr(value, "__dict__") else f"{kind} {value!r}"


def _name(kind: type) -> str:
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _attributes(value: Any) -> str:
    own = {key: part for key, part in getattr(value, "__dict__", {}).items() if key not in ("data", "_values")}
    return f" with {described(own)}" if own else ""


def _tensor(value: torch.Tensor) -> str:
    told = f"{value.dtype} {tuple(value.shape)} {value.layout} {value.device}"
    told += f" requires_grad={value.requires_grad} leaf={value.is_leaf}"
    value = value.detach() if type(value) is torch.Tensor else value.detach().as_subclass(torch.Tensor)
    if value.layout is torch.sparse_coo:
        return f"{told} coalesced={value.is_coalesced()} {_tensor(value._indices())} {_tensor(value._values())}"
    if value.layout is torch.sparse_csr:
        return f"{told} {_tensor(value.crow_indices())} {_tensor(value.col_indices())} {_tensor(value.values())}"
    if value.is_nested:
        return f"{told} {[_tensor(part) for part in value.unbind()]}"
    # A tensor with gaps may arrive without, also if its elements share a place: only the order of dimensions counts.
    strides = torch.empty_like(value).stride() if value.numel() else None
    told += f" strides={strides} conj={value.is_conj()} neg={value.is_neg()}"
    if value.is_quantized:
        return f"{told} {value.qscheme()} {value.q_scale()} {value.q_zero_point()} {value.int_repr().tolist()}"
    flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return f"{told} {_bits(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b'')}"


def _array(value: np.ndarray[Any, Any]) -> str:
    flags = f"c={value.flags.c_contiguous} f={value.flags.f_contiguous} writeable={value.flags.writeable}"
    padded = value.dtype.hasobject or value.dtype == np.longdouble
    parts = value.tolist() if padded else _bits(np.ascontiguousarray(value).tobytes())
    return f"{value.dtype!r} {value.shape} strides={value.strides} {flags} {parts}"


def _bits(value: bytes) -> str:
    return value.hex() if len(value) <= 64 else f"{len(value)} bytes, {hashlib.sha256(value).hexdigest()[:16]}"
