"""Samples that lie in blocks, opened where they are worked on: once, and kept while rows of them are wanted."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from headrace.errors import DecodeError, StageError, masked
from headrace.formats.format import Block, Format
from headrace.formats.limits import Limits

BLOCK = "__block__"
"""Under this name lies, until a sample is opened, what it is a row of."""

PLACE = "__place__"
"""Under this name lies, until a sample is opened, where it begins in its shard, in bytes; if that is known there."""

_LEFT_OUT = "__left_out__"  # under this name lies something where a sample is none of those that are wanted
_OPENED = "__opened__"  # under this name lie the fields of a sample that was opened with others

_Rows = Sequence[Mapping[str, object] | None]

_HELD_BYTES = 512 * 2**20  # of blocks as they were read, or as they say that they are
_WHY_MOST = 500
_ABOUT = frozenset(("__key__", "__url__", PLACE))
_OF_ONE_MEMBER = 3  # as many names has a sample, with its key and its address
_TOGETHER_BYTES = 128 * 1024  # opened at once: what is made of them lies in the processor's cache then
_TOGETHER_AT_FIRST, _TOGETHER_MOST = 16, 1024


class SharedBlock:
    """A block that several samples are rows of, not opened yet; it lives as long as the task that they are of.

    Args:
        number: no other block of this process has it; 0: it is opened for one row alone.
        row: of the sample.
        members: gives the bytes of the block's members, by what the format calls these.
        about: of the block, as `Rows` has it.
    """

    __slots__ = ("about", "members", "number", "row")

    def __init__(self, number: int, row: int, members: Callable[[], dict[str, bytes]], about: object = None) -> None:
        self.number, self.row, self.members, self.about = number, row, members, about


class Opener:
    """The first step of a stream whose samples are no plain members: from the bytes of its block to a sample.

    Blocks that many samples share are opened once in a process, and kept until too many others were opened since.
    """

    def __init__(self, form: Format, limits: Limits) -> None:
        self.format, self.limits = form, limits
        self._opened: OrderedDict[int, tuple[int, _Rows, Exception | None]] = OrderedDict()
        self._held_bytes = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return Opener, (self.format, self.limits)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """The sample, with its key and its shard's address.

        Raises:
            DecodeError: it is damaged.
            FormatError, LimitError: its block is.
        """
        key, url, shared = sample["__key__"], sample["__url__"], sample.get(BLOCK)
        place = sample.get(PLACE)
        if (opened := sample.get(_OPENED)) is not None:
            return {"__key__": key, "__url__": url, **opened}
        try:
            if shared is None:
                members = {name: body for name, body in sample.items() if name not in _ABOUT}
                fields = self._open(url, members)[0]
            else:
                fields = self._rows(url, shared)[shared.row]
            if fields is None:
                return {"__key__": key, "__url__": url, _LEFT_OUT: True}
            taken = next(filter(_is_taken, fields), None)
            if taken is not None:
                raise ValueError(f"its field {taken!r} begins with '__'; such names are taken")
        except StageError as error:
            error.key, error.url = key, error.url or url
            raise
        except (ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
            why = str(error)[:_WHY_MOST] or type(error).__name__
            text = f"sample {key!r} of {masked(url)} does not open as {self.format.name}: {why}"
            failure = DecodeError(text, key=key, url=url)
            failure.place(place)
            raise failure from error
        return {"__key__": key, "__url__": url, **fields}

    @property
    def prepare(self) -> Callable[[Iterator[object]], Iterator[object]] | None:
        """Opens samples before each is asked for, many at once; None where the format does not."""
        return None if type(self.format).open_many is Format.open_many else self._prepared

    def _prepared(self, samples: Iterator[object]) -> Iterator[object]:
        """The samples, opened where the format gives them; the others, and what must be refused, as they were."""
        count = _TOGETHER_AT_FIRST
        while together := list(itertools.islice(samples, count)):
            nbytes = self._open_together(together)
            count = max(1, min(_TOGETHER_MOST, _TOGETHER_BYTES * len(together) // max(nbytes, 1)))
            yield from together

    def _open_together(self, samples: Sequence[object]) -> int:
        """Have the fields of samples in them, where they can be opened together; gives the bytes that these were."""
        raw = [one for one in samples if type(one) is dict and len(one) == _OF_ONE_MEMBER and BLOCK not in one]
        if not raw:
            return 0
        *_, member = raw[0]
        block = Block(raw[0]["__url__"], (member,), self.limits)
        raw = [one for one in raw if member in one]
        bodies = [one[member] for one in raw]
        for one, fields in zip(raw, self.format.open_many(block, bodies), strict=False):
            if fields is not None and not ("__" in "".join(fields) and any(map(_is_taken, fields))):
                del one[member]
                one[_OPENED] = fields
        return sum(map(len, bodies))

    def _open(self, url: str, members: dict[str, bytes], about: object = None) -> _Rows:
        return self.format.open_block(Block(url, tuple(members), self.limits, about), list(members.values()))

    def _rows(self, url: str, shared: SharedBlock) -> _Rows:
        with self._lock:  # other threads that want the same block wait for it
            if shared.number and shared.number in self._opened:
                self._opened.move_to_end(shared.number)
                _, rows, error = self._opened[shared.number]
            else:
                rows, error = self._newly(url, shared)
        if error is not None:
            raise deepcopy(error)  # each sample adds notes about itself
        return rows

    def _newly(self, url: str, shared: SharedBlock) -> tuple[_Rows, Exception | None]:
        members = shared.members()
        rows: _Rows = ()
        failure: Exception | None = None
        try:
            rows = self._open(url, members, shared.about)
        except Exception as error:
            failure = error.with_traceback(None)  # a frame would keep the bytes alive
            failure.__cause__ = failure.__context__ = None
        nbytes = sum(map(len, members.values()))
        nbytes = max(nbytes, getattr(rows, "nbytes", 0))
        if shared.number:
            self._opened[shared.number] = nbytes, rows, failure
            self._held_bytes += nbytes
        while self._held_bytes > _HELD_BYTES and len(self._opened) > 1:
            _, (oldest, *_) = self._opened.popitem(last=False)
            self._held_bytes -= oldest
        return rows, failure


def is_kept(sample: Mapping[str, object]) -> bool:
    """Whether its format does not leave it out."""
    return _LEFT_OUT not in sample


def _is_taken(name: str) -> bool:
    return name.startswith("__")
