"""`.join()`: pairs of samples by key, or the samples of two streams as they arrive."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
from collections.abc import AsyncIterator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np

from headrace._util import check
from headrace.dataset.stream import Stream
from headrace.errors import FormatError
from headrace.ops.cache import is_kept
from headrace.ops.combined import check_apart, check_input, streams_of
from headrace.ops.inputs import NestedDataset
from headrace.ops.operator import EachSample, PassOperator, field_of
from headrace.ops.zip import ZipSpec, in_tuples
from headrace.order.orders import ChosenOrder, Order
from headrace.pipeline.epoch_orders import Planning
from headrace.pipeline.pipeline import refusal
from headrace.types import Ints
from headrace.workers.tasks import Step

log = logging.getLogger("headrace")

_KEY = "__key__"
_PLAIN = str, bytes, int, np.generic


def join(inputs: Sequence[object], *, on: object) -> Stream:
    """Pair the samples of two inputs by key. With `on=None`, merge both as they arrive."""
    streams = streams_of("join", inputs)
    check_apart(streams, ".join()")
    if on is None:
        return Stream(FirstComeDataset(streams))
    left, right = streams = [stream.indexed(".join() needs") for stream in streams]
    for number, stream in enumerate(streams):
        check_input(f"input {number} of .join()", stream.pipeline(), ".join()")
        source = stream.pipeline().source
        if source.only_in_order is not None:
            raise refusal("random access", ".join()", source.name, of=f"input {number}", remedy=source.only_in_order)
    spec = JoinSpec.of(left, right, on)
    pairs = in_tuples(spec)
    if not any(spec.changing):
        return pairs
    same = SameKeys(spec.on, spec.changing)
    return pairs._with(EachSample(Step("join", "map", same, is_implied=True)))


class Matches:
    """Pairs of samples of two streams by key, in the left order. Keys are read on first use."""

    def __init__(self, left: Stream, right: Stream, on: tuple[str, str]) -> None:
        self._streams, self._on = (left, right), on

    @functools.cached_property
    def places(self) -> tuple[Ints, Ints]:
        """Positions of matched samples in the left stream, and of their partners in the right one."""
        left, right = map(_keys, range(2), self._streams, self._on)
        by_key: dict[Hashable, int] = {}
        for place, key in enumerate(right):
            if key is not None and by_key.setdefault(key, place) != place:
                needed = "unique in input 1; if it may come several times, that stream comes first"
                raise check.invalid(f".join(): key {self._on[1]}", key, needed)
        pairs = [(place, by_key[key]) for place, key in enumerate(left) if key is not None and key in by_key]
        if not pairs:
            remedy = f"the first keys are {_shown(left)} and {_shown(right)}"
            raise check.empty(f".join(on={self._on[0]!r})", "key that both inputs have", remedy)
        log.info("join: %d of %d samples have a partner among %d", len(pairs), len(left), len(right))
        lefts, rights = np.array(pairs, np.int64).T
        return lefts, rights

    @property
    def digests(self) -> tuple[str, str]:
        left, right = (
            hashlib.blake2b(places.astype("<i8").tobytes(), digest_size=8).hexdigest() for places in self.places
        )
        return left, right


@dataclass(frozen=True, slots=True)
class Matched(PassOperator):
    """Selects samples of one side (0: left, 1: right) with a partner, in the order of pairs."""

    is_constant = is_steady = is_implied = True
    text = "join()"
    matches: Matches
    side: int

    @property
    def in_state(self) -> str:
        return f"matched {self.matches.digests[self.side]}"

    def count(self, count: int) -> int:
        return len(self.matches.places[self.side])

    def apply(self, order: Order, key: tuple[int, ...]) -> Order:
        return ChosenOrder(order, self.matches.places[self.side])


class JoinSpec(ZipSpec):
    """Two zipped streams, each restricted by `Matched` to samples that have a partner."""

    kind = "join"

    def __init__(self, streams: Sequence[Stream], on: object) -> None:
        super().__init__(streams, strict=True)
        self._on = on

    @property
    def on(self) -> tuple[str, str]:
        return _both(self._on)

    @property
    def changing(self) -> tuple[str, ...]:
        """Steps of both sides that may change a key after it was read."""
        return tuple(name for stream in self.streams for name in _steps_of(stream))

    @property
    def arguments(self) -> str:
        return f", on={self._on!r}"

    @classmethod
    def of(cls, left: Stream, right: Stream, on: object) -> JoinSpec:
        """Match two streams by key."""
        matches = Matches(left, right, _both(on))
        for number, pipeline in enumerate((left.pipeline(), right.pipeline())):
            order = pipeline.order
            wrong = next((one for one in order.operators if not one.is_steady), order.passes)
            if wrong is not None or not pipeline.source.is_steady:
                what = "its own order" if wrong is None else f".{wrong.text}"
                raise refusal("steady order", ".join()", what, of=f"input {number}")
        return cls([left._with(Matched(matches, 0)), right._with(Matched(matches, 1))], on)


class SameKeys:
    """Refuses pairs whose keys differ now, because steps before `.join()` changed one.

    Keys of different types, for instance after `.decode()`, are not compared. `changing` names the steps for the error.
    """

    def __init__(self, on: tuple[str, str], changing: Sequence[str]) -> None:
        self._on, self._changing = on, changing

    def __call__(self, pair: tuple[object, object]) -> tuple[object, object]:
        left, right = (
            sample.get(on) if on != _KEY and isinstance(sample, dict) else None
            for sample, on in zip(pair, self._on, strict=True)
        )
        if type(left) is type(right) and isinstance(left, _PLAIN) and left != right:
            changing = ", ".join(self._changing)
            remedy = f"keys are those of the source, before {changing}; put these after .join(), or .cache() before it"
            has, others = f"the key {left!r:.100}", f"{right!r:.100}"
            raise check.unequal(".join(): a left sample", has, "its partner", others, remedy)
        return pair


def _both(on: object) -> tuple[str, str]:
    names = on if isinstance(on, tuple | list) else (on, on)
    if len(names) != 2 or not all(isinstance(name, str) for name in names):
        raise check.invalid(
            ".join(): on", on, "the name of a field, or of one in each input; '__key__' is the sample's key in an index"
        )
    left, right = names
    return left, right


def _keys(side: int, stream: Stream, on: str) -> list[object]:
    source, planning = stream.source.__sample_source__(), Planning(stream.pipeline(), 0)
    names: Sequence[object] = source.keys() if on == _KEY else range(0)
    keys = _read_keys(side, stream, on) if type(names) is range else names  # a range has numbers, no names
    return [_hashable(keys[number], on) for number in _numbers(planning)]


def _read_keys(side: int, stream: Stream, on: str) -> dict[int, Any]:
    """Read the key field of stored or cached samples, or else of those that the steps make, by their numbers."""
    each = stream.pipeline().each
    stored = tuple(one for one in each if one.is_implied or is_kept(one.step))
    try:
        try:
            return _keys_after(stream, stored, on)
        except (FormatError, TypeError):  # samples have no such field yet
            return _keys_after(stream, each, on)
    except Exception as error:
        error.add_note(f".join(on={on!r}) has asked input {side} for its keys")
        raise


def _keys_after(stream: Stream, steps: tuple[EachSample, ...], on: str) -> dict[int, Any]:
    opened = Stream(stream.source, steps)
    keys = [field_of(sample, on) for sample in opened.select(on).on_every_rank()]
    return dict(zip(_numbers(Planning(opened.pipeline(), 0)), keys, strict=True))


def _numbers(planning: Planning) -> list[int]:
    order = planning.passes(0)
    numbers: list[int] = planning.numbers(order, np.arange(order.count, dtype=np.int64)).tolist()
    return numbers


def _steps_of(stream: Stream) -> list[str]:
    """Return the user's steps after the last cache."""
    return [f".{step.name}" for step in stream.pipeline().steps if not step.is_implied and not is_kept(step)]


def _hashable(key: Any, on: str) -> Any:
    """Make a key hashable. Plain numbers replace those of numpy and tensors; None replaces NaN."""
    key = key.item() if getattr(key, "ndim", None) == 0 and hasattr(key, "item") else key
    try:
        hash(key)
    except TypeError:
        raise check.invalid(f".join(): field {on!r} of a sample", key, "a number, a text or bytes") from None
    return None if key != key else key  # noqa: PLR0124 (NaN is no key)


def _shown(keys: Sequence[object]) -> str:
    return ", ".join(f"{key!r:.50}" for key in keys[:3]) or "none"


_END = object()


class FirstComeDataset(NestedDataset):
    name = "join"
    why_no_state = (
        "states of .join(other) without on= would have to record which sample was first, which differs in each run; "
        ".interleave(), hr.mix and .join(other, on=…) have states"
    )

    @property
    def text(self) -> str:
        first, *others = map(repr, self.streams)
        return f"{first}.join({', '.join(others)})"

    async def aiter(self) -> AsyncIterator[object]:
        inputs = self.inputs()
        waiting: dict[asyncio.Task[object], tuple[int, AsyncIterator[object]]] = {}
        try:
            iterators = [aiter(one) for one in inputs]
            waiting = {asyncio.ensure_future(_next(one)): (number, one) for number, one in enumerate(iterators)}
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda task: waiting[task][0]):
                    number, iterator = waiting.pop(task)
                    if (sample := task.result()) is not _END:
                        waiting[asyncio.ensure_future(_next(iterator))] = number, iterator
                        yield sample
        finally:
            with anyio.CancelScope(shield=True):
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)
                for one in inputs:
                    await one.aclose()


async def _next(iterator: AsyncIterator[object]) -> object:
    return await anext(iterator, _END)
