"""`.apply()`: functions from an iterator over all samples to another iterator."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from headrace._util import check
from headrace._util.functions import is_async, name_of
from headrace.dataset.stream import Stream
from headrace.ops.flat_map import is_async_generator
from headrace.ops.inputs import NestedDataset
from headrace.ops.operator import SampleFunction

if TYPE_CHECKING:
    from headrace.session.input import Input

_END = object()


class AppliedDataset(NestedDataset):
    """The results of a function of an iterator over the samples.

    Args:
        fn: Gets an asynchronous iterator if it is an asynchronous generator function, else a plain iterator.
    """

    def __init__(self, stream: Stream, fn: SampleFunction) -> None:
        super().__init__([stream])
        self.fn, self._is_async = fn, is_async_generator(fn)
        self.name = f"apply({name_of(fn)})"
        self.why_no_state: str | None = (
            f"states of .{self.name} would have to hold what it keeps of the samples that it has taken; have it be an "
            "object with state_dict() and load_state_dict(state), which know that, or have .map(), .flat_map() or "
            ".batch() in its place"
        )

    @property
    def text(self) -> str:
        return f"{self.streams[0]!r}.{self.name}"

    async def aiter(self) -> AsyncIterator[object]:
        (samples,) = self.inputs()
        try:
            self._begin(samples)
            given = self._asynchronous(samples) if self._is_async else self._in_thread(samples)
            async with contextlib.aclosing(given):
                async for sample in given:
                    yield sample
        except Exception as error:
            error.add_note(f"stage: {self.name}")
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await samples.aclose()

    def _begin(self, samples: Input) -> None: ...

    async def _asynchronous(self, samples: Input) -> AsyncGenerator[object, None]:
        async with contextlib.aclosing(self.fn(aiter(samples))) as given:
            async for sample in given:
                yield sample

    async def _in_thread(self, samples: Input) -> AsyncGenerator[object, None]:
        """Run a plain function in a thread.

        Cancellation abandons the thread; closing the input ends it.
        """

        def begun() -> Iterator[object]:
            given: Iterator[object] = iter(self.fn(iter(samples)))
            return given

        given = await anyio.to_thread.run_sync(begun, abandon_on_cancel=True)
        try:
            while True:
                sample = await anyio.to_thread.run_sync(next, given, _END, abandon_on_cancel=True)
                if sample is _END:
                    return
                yield sample
        finally:
            with anyio.CancelScope(shield=True):
                await samples.aclose()
                await anyio.to_thread.run_sync(_close, given)


class ResumableApplied(AppliedDataset):
    """An `AppliedDataset` with states: those of the function and of its input stream."""

    def __init__(self, stream: Stream, fn: SampleFunction) -> None:
        super().__init__(stream, fn)
        self.why_no_state = None
        self._keeps: Any = fn  # the function; it has state_dict()
        self._input: Input | None = None
        self._loaded: Mapping[str, object] | None = None  # state of the stream, for the next input

    def _begin(self, samples: Input) -> None:
        if self._loaded is not None:
            samples.load_state_dict(self._loaded)
        self._input, self._loaded = samples, None

    def state_dict(self) -> dict[str, object]:
        before = self._loaded if self._input is None or self._loaded is not None else self._input.state_dict()
        return {"before": before, "fn": self._keeps.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        before: Any = state["before"]
        self._loaded = before
        self._keeps.load_state_dict(state["fn"])


def apply(stream: Stream, fn: SampleFunction) -> Stream:
    check.function(".apply(): fn", fn)
    if is_async(fn):
        raise check.invalid(".apply(): fn", fn, "a generator function, also an asynchronous one: it uses `yield`")
    from headrace.torch_compat.stateful import is_stateful

    return Stream((ResumableApplied if is_stateful(fn) else AppliedDataset)(stream, fn))


def _close(given: object) -> None:
    """Close a generator. One that is still running ends by itself."""
    with contextlib.suppress(ValueError):
        getattr(given, "close", bool)()
