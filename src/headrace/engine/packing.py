"""Jobs and plans as bytes, for an engine in another process. What a job holds is packed once: plans refer to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from headrace.datasets.base import Operators
from headrace.datasets.faces import IteratedData
from headrace.datasets.inputs.mix_spec import MixSpec
from headrace.datasets.operators.order import OrderOperator
from headrace.datasets.pipeline import Pipeline
from headrace.datasets.planning import Planning
from headrace.datasets.sharing import RanksBy
from headrace.datasets.source import SampleSource, SourceOrders
from headrace.engine.epoch_plan import EpochPlan
from headrace.engine.job import Job
from headrace.errors import OptionError
from headrace.torch_compat import serialize
from headrace.types import Buffer

_REFERRED = (Planning, Pipeline, SampleSource, SourceOrders, OrderOperator, MixSpec, Operators)
"""Of a job, what the order of an epoch may lead to."""


class JobPacker:
    """Packs a job for another process, and then the plans of its epochs.

    What it gives is for `headrace.torch_compat.serialize.write`. It keeps what plans may refer to, as the loader does.

    Args:
        job: what is packed now: what it holds goes as it is at this moment.

    Attributes:
        parts: the job.
        descriptors: that the other process is to have beside it; they are the caller's to close.

    Raises:
        OptionError: a sampler is asked several times for an epoch: only here it draws as it should.
        Exception: what pickling the user's data set or functions has raised.
    """

    def __init__(self, job: Job) -> None:
        self._once = job.pipeline if job.pipeline.passes == (1, None) else None
        source = job.pipeline.source
        is_callers = source.traits.iterated and source.data.loop == "caller"
        self._callers: IteratedData | None = source.data if is_callers else None
        self._known: list[object] = []
        self._numbers: dict[int, int] = {}  # of those, by their ids
        self.descriptors: list[int] = []
        # The list is filled while what comes before it is packed.
        self.parts = serialize.pack_for_workers((job, self._known), self.descriptors, reference=self._note)

    def pack(self, plan: EpochPlan, descriptors: list[int]) -> list[Buffer]:
        """The plan of an epoch of this job.

        Args:
            descriptors: of it alone are put here.
        """
        return serialize.pack_for_workers(plan, descriptors, reference=lambda obj: self._numbers.get(id(obj)))

    def _note(self, obj: object) -> object:
        if self._callers is not None and obj is self._callers:
            return type(obj).__name__, self._callers.ranks_by
        if isinstance(obj, _REFERRED) and id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self._known)
            self._known.append(obj)
            if isinstance(obj, Pipeline) and obj is not self._once:
                _check_samplers(obj)
        return None


def _check_samplers(pipeline: Pipeline) -> None:
    """Of a pipeline that is gone through more than once in an epoch."""
    if not pipeline.order.is_fixed:
        raise OptionError(
            ".sample(sampler) with .repeat() or .epoch(), or in a source of hr.mix: the sampler is asked for each pass "
            "as it comes, and that can be done in the trainer's process only"
        )


class JobUnpacker:
    """The reverse, in that process.

    Args:
        source: where the job was written; arrays are views of it.
        lengths: what `headrace.torch_compat.serialize.write` gave.
        descriptors: the packer's, as they are here; none of them is needed any more after this.

    Attributes:
        job: what is to be done.
    """

    def __init__(self, source: memoryview, lengths: Sequence[int], descriptors: Sequence[int]) -> None:
        self.job: Job
        self._known: list[object]
        self.job, self._known = serialize.unpack_in_worker(
            source, lengths, descriptors, lambda reference: CallersData(*reference)
        )

    def unpack(self, source: memoryview, lengths: Sequence[int], descriptors: Sequence[int]) -> EpochPlan:
        """The plan of an epoch of this job."""
        plan: EpochPlan = serialize.unpack_in_worker(source, lengths, descriptors, self._known.__getitem__)
        return plan


class CallersData:
    """Stands for a data set whose samples belong to the loop of an `async for`, which is in another process.

    Args:
        name: of its class.
        ranks_by: as the data set has it.
    """

    loop = "caller"

    def __init__(self, name: str, ranks_by: RanksBy | None) -> None:
        self.name, self.ranks_by = name, ranks_by

    def aiter(self) -> AsyncIterator[object]:
        """Not here."""
        raise TypeError(f"samples of {self.name} are in the trainer's process: TrainerCalls.samples_of asks for them")

    async def aopen(self) -> None:
        """Whoever has it opens it."""

    async def aclose(self) -> None:
        """Whoever has it closes it."""
