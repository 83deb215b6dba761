"""The engine of a loader of ours, hosted by a thread of the trainer's process: what goes in is used as it is there."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.deliver.iterator import BatchIterator, Watcher
from headrace.engine.blueprint import Blueprint
from headrace.engine.calls import TrainerCalls
from headrace.engine.epoch_plan import EpochPlan
from headrace.engine.job import Job
from headrace.errors import LoaderClosedError
from headrace.runtime import Runtime


class ThreadHost:
    """Has the epochs of a job run. It belongs to the loader, and the thread does not hold it.

    Args:
        runtime: what they run on.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._blueprint: Blueprint | None = None

    def take(self, job: Job) -> None:
        """Have the epochs that begin from now on be of this job."""
        self._blueprint = Blueprint(job, self._runtime.parts.of_samples, self._runtime.fetch_meter)

    def iterate(
        self, owner: object, plan: EpochPlan, calls: TrainerCalls, watch: Watcher, *, is_in_use: bool
    ) -> BatchIterator[Any]:
        """An iterator over the batches of an epoch of the job.

        Args:
            owner: kept alive as long as the iterator.
            plan: the epoch's.
            calls: asks the trainer.
            watch: told of what the trainer receives.
            is_in_use: an iterator may still be asked for batches of an epoch before.

        Raises:
            CannotCarryError: a function, or what it refers to, cannot be sent to workers any more.
            LoaderClosedError: the loader was closed, or the process was forked since.
            OptionError: the samples cannot be had so.
        """
        runtime, blueprint = self._runtime, self._blueprint
        assert blueprint is not None, "no job was taken"
        if runtime.renew(blueprint.chains, is_in_use=is_in_use):
            blueprint.forget_form()
        runtime.read_ahead(2 * blueprint.sources.window_bytes(plan))
        spec = blueprint.spec(
            plan, runtime.reader(blueprint.storage_options, blueprint.data_set), calls, runtime.meters
        )
        return runtime.iterate(owner, spec, watch, _weakly(blueprint.prepare))


def _weakly(prepare: Callable[[Runtime], Awaitable[None]]) -> Callable[[Runtime], Awaitable[None]]:
    """The same method, without keeping its object alive."""
    method = weakref.WeakMethod(prepare)

    async def call(runtime: Runtime) -> None:
        found = method()
        if found is None:
            raise LoaderClosedError("the loader is gone")
        await found(runtime)

    return call
