"""An input of a combined stream, run in the loop, workers and memory of the loader that reads the whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from typing import Any, Self

from headrace._util.context import running_charge, running_reader
from headrace._util.functions import as_it_is
from headrace.dataset.stream import Stream
from headrace.delivery.channel import ChannelFailedError
from headrace.engine.epoch_builder import EpochBuilder
from headrace.engine.epoch_plan import EpochPlan
from headrace.engine.open_readers import TrainerCalls, running_settings
from headrace.engine.scheduler.assembler import Outlet
from headrace.engine.scheduler.epoch_run import Epoch
from headrace.errors import LoaderClosedError
from headrace.observe import LoaderMeters
from headrace.ops.operator import Operator
from headrace.options import Settings
from headrace.pipeline.compile import PipelineBuilder
from headrace.session.epoch_planner import NextEpoch
from headrace.session.runtime import running_runtime
from headrace.torch_compat import serialize
from headrace.torch_compat.ranks import RankShare
from headrace.types import Tail
from headrace.workers.failures import Failure
from headrace.workers.task_runner import open_part


class _BatchesAsSamples(Operator):
    """Makes batches the samples of the stream, as if another operator followed."""

    is_implied = True
    text = "batches as samples"

    def add_to(self, builder: PipelineBuilder) -> None:
        builder.close()


class Input:
    """The samples of one epoch of an input, on this rank.

    It is created, iterated and closed on the loop of the engine. `iter` is for other threads.

    Attributes:
        taken: Number of samples returned, failed ones included.
    """

    def __init__(self, stream: Stream, *, rank: int, world: int, seed: int, epoch: int) -> None:
        is_batched, outer = stream.pipeline().group is not None, running_settings.get()
        tail: Tail = "uneven" if is_batched or outer.tail == "uneven" else "short"
        self._runtime, self._settings = running_runtime.get(), _settings_of_input(outer, seed, tail)
        self._next = NextEpoch(stream._with(_BatchesAsSamples()), self._settings, lambda: RankShare(rank, world))
        self._next.set_epoch(epoch, is_in_use=False)
        self._loop = asyncio.get_running_loop()
        self._ends = contextlib.AsyncExitStack()
        self._lock = asyncio.Lock()
        self._is_closed = False
        self._epoch: Epoch | None = None  # this and the next ones are set once it is open
        self._plan: EpochPlan | None = None
        self._outlet: Outlet | None = None
        self._asked: Future[object] | None = None  # of another thread
        self._samples = deque[object]()  # taken from the outlet
        self.taken = 0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, before the first sample."""
        self._next.load(state, force=False)

    def state_dict(self) -> dict[str, object]:
        """Return the state after the samples that were returned."""
        return self.snapshot(self.taken)()

    def snapshot(self, taken: int) -> Callable[[], dict[str, object]]:
        """Return a function that returns the state after the first `taken` samples. Numbers never decrease."""
        if self._plan is None or self._outlet is None:
            return partial(as_it_is, self._next.state(None))
        return partial(self._plan.save, self._outlet.after(taken, self._plan.received()))

    async def next_or_failure(self) -> object:
        """Return the next sample, or the failure in its place.

        Raises:
            StopAsyncIteration: the epoch is over.
            LoaderClosedError: the input was closed.
        """
        async with self._lock:
            self._check_open()
            if self._outlet is None:
                self._outlet = await self._open()
            while not self._samples:
                try:
                    part = await self._outlet.take()
                except ChannelFailedError as error:
                    raise serialize.unpack_error(error.failure) from None
                if part is None:
                    raise StopAsyncIteration
                try:
                    self._samples += open_part(part)
                finally:
                    part.release()
            self.taken += 1
            return self._samples.popleft()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> object:
        sample = await self.next_or_failure()
        if type(sample) is Failure:
            raise serialize.unpack_error(sample.error)
        return sample

    def __iter__(self) -> Iterator[object]:
        """Iterate in another thread than the loop's."""
        end = object()
        while not self._is_closed:
            self._asked = asyncio.run_coroutine_threadsafe(_next(self, end), self._loop)
            try:
                sample = self._asked.result()
            except CancelledError:
                break
            if sample is end:
                return
            yield sample
        self._check_open()

    async def aclose(self) -> None:
        """End the epoch. A consumer that waits gets a LoaderClosedError."""
        self._is_closed = True
        if self._asked is not None:
            self._asked.cancel()
        if self._epoch is not None:
            self._epoch.stop()
        async with self._lock:
            await self._ends.aclose()

    def _check_open(self) -> None:
        if self._is_closed:
            raise LoaderClosedError("the loader was closed while this epoch was running")

    async def _open(self) -> Outlet:
        runtime = self._runtime
        runtime.check()
        ranks = self._next.find_out()
        plan = self._next.plan()
        self._ends.callback(runtime.take_back_chains, first_chain := runtime.lend_chains())
        self._builder = builder = EpochBuilder(  # kept, as threads refer to its chains weakly
            self._next.stream.pipeline(),
            self._settings,
            self._next.planning,
            (ranks.world, ranks.rank),
            runtime.parts.of_samples,
            runtime.fetch_meter,
            first_chain=first_chain,
            is_input=True,
        )
        if builder.chains:
            runtime.learn(builder.chains)
        reader = runtime.new_reader(builder.storage_options, builder.data_set)
        self._ends.push_async_callback(reader.aclose)
        if builder.opens is not None:
            await builder.opens.aopen()
            self._ends.push_async_callback(builder.opens.aclose)
            self._check_open()
        runtime.read_ahead(2 * builder.window_bytes(plan))
        meters = LoaderMeters()  # only the loader's samples are counted
        spec = builder.spec(plan, reader, TrainerCalls(None, self._loop), meters)
        outlet = Outlet(spec.position_map, runtime.budget)
        self._epoch = epoch = Epoch(spec, runtime.resources(meters), outlet, outlet.attach)

        async def run() -> None:
            running_reader.set(reader)
            running_charge.set(None)  # of the outer epoch
            await epoch.run()

        running = asyncio.create_task(run())

        async def end() -> None:
            epoch.stop()
            await asyncio.wait([running])
            self._samples.clear()

        self._ends.push_async_callback(end)
        self._plan = plan
        return outlet


async def _next(samples: Input, end: object) -> object:
    return await anext(samples, end)


def _settings_of_input(settings: Settings, seed: int, tail: Tail) -> Settings:
    """Return the options of a loader, for single samples of an input. Failed ones are returned in their places."""
    return replace(
        settings,
        batch_size=1,
        global_batch_size=None,
        is_single=True,
        tail=tail,
        prefetch_factor=max(1, settings.prefetch_factor),
        seed=seed,
        in_order=True,
        skips=None,
        exclude=None,
        balance=None,
        together=64,  # samples per task
    )
