"""Decodes blocks, usually in workers: once per process, cached while their rows are needed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import DecodeError, StageError, masked, reason_of
from headrace.formats.format import Block, Format, RowsOfBlock, dicts_of
from headrace.formats.limits import Limits
from headrace.types import Ints

BLOCK, ROW = "__block__", "__row__"
"""Fields of an undecoded sample: its block, and its row in the block."""

PLACE = "__place__"
"""Field of an undecoded sample: its offset in its shard, in bytes, if known."""

_LEFT_OUT = "__left_out__"  # field of a sample that its format skips
_IS_OPEN = "__is_open__"  # field of a sample that is decoded already

_Rows = Sequence[Mapping[str, object] | None]
_Made = list[dict[str, object] | None]

Members = Collection[tuple[str, bytes]]
"""(name, bytes) of members. Names may repeat in a block."""

_HELD_BYTES = 512 * 2**20  # of blocks: the larger of encoded and reported size
ABOUT = frozenset(("__key__", "__url__", PLACE))
_TOGETHER_MOST_BYTES = 2 * 2**20  # of rows of a block that are decoded together


class SharedBlock:
    """An undecoded block shared by several samples. Lives as long as their task.

    Args:
        number: Number of the block, unique in this process. 0: decoded for one row only.
        wanted: Rows needed by all tasks. 0: not known, perhaps all.
    """

    __slots__ = ("about", "members", "number", "wanted")

    def __init__(self, number: int, members: Callable[[], Members], about: object = None, wanted: int = 0) -> None:
        self.number, self.members, self.about, self.wanted = number, members, about, wanted


class BlockRows(NamedTuple):
    """Undecoded samples: row `row[i]` of block `block[i]`, with their keys and URLs."""

    keys: Sequence[str]
    urls: Sequence[str]
    blocks: Sequence[SharedBlock]
    block: Ints
    row: Ints

    def sample(self, number: int) -> dict[str, object]:
        block = self.blocks[int(self.block[number])]
        source = {BLOCK: block, ROW: int(self.row[number])} if block.number else dict(block.members())
        return {"__key__": self.keys[number], "__url__": self.urls[number], **source}


class MemberRows(NamedTuple):
    """Undecoded samples of one member each. `bodies` reads those of samples [start, stop)."""

    keys: Sequence[str]
    urls: Sequence[str]
    name: str
    bodies: Callable[[int, int], list[bytes]]

    def sample(self, number: int) -> dict[str, object]:
        (body,) = self.bodies(number, number + 1)
        return {"__key__": self.keys[number], "__url__": self.urls[number], self.name: body}


class _OpenBlock:
    """A decoded block, or one that the holder of its lock decodes."""

    __slots__ = ("error", "given", "is_open", "lock", "nbytes", "rows")

    def __init__(self) -> None:
        self.lock, self.is_open = threading.Lock(), False
        self.rows: _Rows = ()
        self.error: Exception | None = None
        self.nbytes = self.given = 0  # size in bytes, number of rows returned


class Opener:
    """The first step of a stream of undecoded samples: decodes blocks to samples.

    Shared blocks are decoded once per process. They are cached until all needed rows were returned, or other blocks
    evict them.
    """

    def __init__(self, form: Format, limits: Limits) -> None:
        self.format, self.limits = form, limits
        self._opened: OrderedDict[int, _OpenBlock] = OrderedDict()
        self._held_bytes = 0
        self._lock = threading.Lock()  # guards both; acquired after locks of blocks

    def __reduce__(self) -> tuple[object, ...]:
        return Opener, (self.format, self.limits)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return the decoded sample, with its key and the URL of its shard."""
        if sample.pop(_IS_OPEN, False):
            return sample
        key, url, shared = sample["__key__"], sample["__url__"], sample.get(BLOCK)
        place = sample.get(PLACE)
        try:
            if shared is None:
                members = [(name, body) for name, body in sample.items() if name not in ABOUT]
                fields = self._open(url, members)[0]
            else:
                fields = self._rows(url, shared)[sample[ROW]]
                self._gave(shared, 1)
            if fields is None:
                return {"__key__": key, "__url__": url, _LEFT_OUT: True}
            taken = next(filter(_is_taken, fields), None)
            if taken is not None:
                raise ValueError(f"its field {taken!r} begins with '__'; such names are taken")
        except StageError as error:
            error.key, error.url = key, error.url or url
            raise
        except (ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
            text = f"sample {key!r} of {masked(url)} does not open as {self.format.name}: {reason_of(error)}"
            failure = DecodeError(text, key=key, url=url)
            failure.place(place)
            raise failure from error
        return {"__key__": key, "__url__": url, **fields}

    def has(self, number: int) -> bool:
        """Return whether the block with this number is decoded, so that its rows take little time."""
        block = self._opened.get(number)
        return block is not None and block.is_open

    def opened(self, samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return decoded samples, which the step in workers passes on. Samples with errors stay undecoded."""
        made = []
        for sample in samples:
            try:
                made.append({**self(sample), _IS_OPEN: True})
            except Exception:  # raised by the step in workers
                made.append(sample)
        return made

    def open_rows(self, samples: BlockRows, start: int, stop: int) -> tuple[_Made, int]:
        """Return (the samples [start, stop), their encoded bytes), decoded by block.

        None marks samples that must be decoded one by one, also to raise their errors.
        """
        keys, urls, part = samples.keys[start:stop], samples.urls[start:stop], slice(start, stop)
        some = BlockRows(keys, urls, samples.blocks, samples.block[part], samples.row[part])
        made, nbytes = _Made([None] * (stop - start)), 0
        for number, chosen in _by_block(some.block):
            if some.blocks[number].number:
                with suppress(Exception):  # decoding one by one raises the error
                    nbytes += self._open_together(some, some.blocks[number], chosen, made)
        return made, nbytes

    def _open_together(self, samples: BlockRows, shared: SharedBlock, chosen: Sequence[int], made: _Made) -> int:
        rows, are_all = self._rows(samples.urls[chosen[0]], shared), len(chosen) == len(made)
        nbytes: int = getattr(rows, "nbytes", 0) * len(chosen) // max(1, len(rows))
        if nbytes > _TOGETHER_MOST_BYTES:
            return nbytes
        keys, urls = (texts if are_all else [texts[k] for k in chosen] for texts in (samples.keys, samples.urls))
        opened = _decoded(rows, _as_range(samples.row if are_all else samples.row[chosen]), keys, urls)
        for place, sample in zip(chosen, opened, strict=True):
            made[place] = sample
        self._gave(shared, len(opened) - opened.count(None))
        return nbytes

    def open_many(self, samples: MemberRows, start: int, stop: int) -> tuple[_Made, int]:
        """Decode the samples [start, stop), which have one member each."""
        keys, urls, bodies = samples.keys[start:stop], samples.urls[start:stop], samples.bodies(start, stop)
        opened = self.format.open_many(Block(urls[0], (samples.name,), self.limits), bodies)
        names = set[str]().union(*filter(None, opened))
        if refused := set(filter(_is_taken, names)):
            opened = [None if fields is None or not refused.isdisjoint(fields) else fields for fields in opened]
        made = [
            None if fields is None else {"__key__": key, "__url__": url, **fields}
            for key, url, fields in zip(keys, urls, opened, strict=False)
        ]
        return [*made, *[None] * (stop - start - len(made))], sum(map(len, bodies))

    def _open(self, url: str, members: Members, about: object = None) -> _Rows:
        names = tuple(name for name, _ in members)
        return self.format.open_block(Block(url, names, self.limits, about), [body for _, body in members])

    def _rows(self, url: str, shared: SharedBlock) -> _Rows:
        if shared.number:
            with self._lock:
                block = self._opened.setdefault(shared.number, _OpenBlock())
                self._opened.move_to_end(shared.number)
        else:
            block = _OpenBlock()
        with block.lock:  # other threads that need the block wait
            if not block.is_open:
                self._open_shared(url, shared, block)
        if block.error is not None:
            raise deepcopy(block.error)  # each sample adds notes about itself
        return block.rows

    def _open_shared(self, url: str, shared: SharedBlock, block: _OpenBlock) -> None:
        members = shared.members()
        try:
            block.rows = self._open(url, members, shared.about)
        except Exception as error:
            block.error = error.with_traceback(None)  # frames would keep the bytes alive
            block.error.__cause__ = block.error.__context__ = None
        block.is_open = True
        nbytes = max(sum(len(body) for _, body in members), getattr(block.rows, "nbytes", 0))
        with self._lock:
            if self._opened.get(shared.number) is not block:
                return  # evicted meanwhile
            block.nbytes = nbytes
            self._held_bytes += nbytes
            while self._held_bytes > _HELD_BYTES and len(self._opened) > 1:
                _, oldest = self._opened.popitem(last=False)
                self._held_bytes -= oldest.nbytes

    def _gave(self, shared: SharedBlock, count: int) -> None:
        """Count returned rows of a block. Evict it after the last one, for reuse of its memory."""
        with self._lock:
            block = self._opened.get(shared.number)
            if block is None:
                return
            block.given += count
            if block.given >= (shared.wanted or len(block.rows)):
                del self._opened[shared.number]
                self._held_bytes -= block.nbytes


def is_kept(sample: Mapping[str, object]) -> bool:
    return _LEFT_OUT not in sample


def _by_block(block: Ints) -> Iterator[tuple[int, Sequence[int]]]:
    """Iterate over (block, ascending positions of its samples)."""
    if (block == block[0]).all():  # usual in shard order
        yield int(block[0]), range(len(block))
        return
    order = np.argsort(block, kind="stable")
    edges = np.flatnonzero(np.diff(block[order])) + 1
    for chosen in np.split(order, edges):
        yield int(block[chosen[0]]), chosen.tolist()


def _as_range(numbers: Ints) -> Sequence[int]:
    first, count = int(numbers[0]), len(numbers)
    is_range = int(numbers[-1]) - first == count - 1 and bool((numbers[1:] - numbers[:-1] == 1).all())
    rows: Sequence[int] = range(first, first + count) if is_range else numbers.tolist()
    return rows


def _decoded(rows: _Rows, numbers: Sequence[int], keys: Sequence[str], urls: Sequence[str]) -> _Made:
    """Return some samples of a block. None for those with invalid names."""
    if not isinstance(rows, RowsOfBlock):
        return _with_fields(keys, urls, [rows[number] for number in numbers])
    columns = rows.columns(numbers)
    if columns is None or any(map(_is_taken, columns)):
        return _with_fields(keys, urls, map(rows.row, numbers))
    return [*dicts_of({"__key__": keys, "__url__": urls, **columns}, len(keys))]


def _with_fields(keys: Sequence[str], urls: Sequence[str], fields: Iterable[Mapping[str, object] | None]) -> _Made:
    """Return samples of these fields, with keys and URLs. None for those with invalid names."""
    made = _Made()
    for key, url, one in zip(keys, urls, fields, strict=True):
        if one is None:
            made.append({"__key__": key, "__url__": url, _LEFT_OUT: True})
        elif any(map(_is_taken, one)):
            made.append(None)
        else:
            made.append({"__key__": key, "__url__": url, **one})
    return made


def _is_taken(name: str) -> bool:
    return name.startswith("__")
