"""Hosts the engine in a thread of the trainer's process."""

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
    """Runs the epochs of a job. Belongs to the loader; the thread does not hold it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._blueprint: Blueprint | None = None

    def take(self, job: Job) -> None:
        self._blueprint = Blueprint(job, self._runtime.parts.of_samples, self._runtime.fetch_meter)

    def iterate(
        self, owner: object, plan: EpochPlan, calls: TrainerCalls, watch: Watcher, *, is_in_use: bool
    ) -> BatchIterator[Any]:
        """Return an iterator over the batches of an epoch.

        Raises:
            CannotCarryError: a function, or an object it refers to, cannot be sent to workers any more.
            LoaderClosedError: the loader was closed, or the process was forked since.
            OptionError: the samples cannot be read with these options.
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
    """Wrap a method without keeping its object alive."""
    method = weakref.WeakMethod(prepare)

    async def call(runtime: Runtime) -> None:
        found = method()
        if found is None:
            raise LoaderClosedError("the loader is gone")
        await found(runtime)

    return call
