"""Checks of streams with several inputs, and the choice of how to read them."""

from __future__ import annotations

from headrace.dataset.asynchronous import AsyncDataset
from headrace.dataset.base import Operators
from headrace.dataset.stream import Stream
from headrace.errors import OptionError, masked
from headrace.ops.combined import JoinedSpec
from headrace.ops.combined_sources import JoinedDataset, JoinedShards, JoinedStep
from headrace.ops.operator import EachSample
from headrace.ops.run_inline import split_steps
from headrace.pipeline.needs import refusal
from headrace.pipeline.pipeline import Pipeline
from headrace.sources.constructors import from_map
from headrace.workers.tasks import Step

_NO_MAPS = frozenset(("IterableDataset", "Mapping", "bytes", "dict", "str"))  # types with __len__ and __getitem__


def input_stream(label: str, data: object) -> Stream:
    """Return an input as a stream. A map-style data set is read as by `hr.from_map`.

    Raises:
        OptionError: It is no data set.
    """
    if isinstance(data, Operators):
        return data._as_stream()
    is_map = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if is_map and _NO_MAPS.isdisjoint(kind.__name__ for kind in type(data).__mro__):
        return from_map(data)
    raise OptionError(
        f"{label} is a {type(data).__name__}: a stream, a list or another data set with __len__ and __getitem__ is "
        "needed; hr.from_iterable(…) reads other iterables"
    )


def check_input(label: str, pipeline: Pipeline, call: str) -> None:
    """Check that a stream can be one of several inputs.

    Raises:
        OptionError: It cannot. `label` and `call` are its names in the message.
    """
    if (advice := pipeline.without_numbers) is not None:
        raise refusal("numbers", call, pipeline.source.name, of=label, remedy=advice)
    if not pipeline.source.keeps_numbers:
        raise OptionError(f"{label} packs shuffled documents: put its .shuffle() behind .pack()")
    if pipeline.group is not None or pipeline.is_batched:
        raise refusal("single samples", call, ".batch()", of=label)
    if pipeline.of_all is not None:
        raise refusal("global batches", call, f".{pipeline.of_all}", of=label)
    if not pipeline.keeps_count:
        raise refusal("known number", call, f".{pipeline.changing[0]}", of=label)
    split_steps(pipeline.steps, label, call)


def check_objects(spec: JoinedSpec) -> None:
    """Check that one reader can read the objects of all inputs.

    Raises:
        OptionError: Their storage options differ.
    """
    files = [one for source in spec.sources for one in source.objects]
    if any(one.storage_options != files[0].storage_options for one in files):
        raise OptionError(f"{spec.call}: hr.files() with different storage_options cannot be put together")


def joined(spec: JoinedSpec) -> Stream:
    """Return the stream of several checked inputs.

    Raises:
        OptionError: The storage options of their objects differ.
    """
    check_objects(spec)
    by_url = _numbers_by_url(spec)
    later = [split_steps(pipeline.narrowed_steps)[1] for pipeline in spec.pipelines]
    is_done = not any(later)
    source: AsyncDataset = JoinedDataset(spec, is_done=is_done) if by_url is None else JoinedShards(spec)
    if is_done and (by_url is None or not spec.adds_names):
        return Stream(source)
    random = any(step.random for steps in later for step in steps)
    steps = [[(step.told, step.fn) for step in some] for some in later]
    each = JoinedStep(spec.labels, spec.names if spec.adds_names else None, steps, by_url)
    return Stream(source, (EachSample(Step(spec.kind, "map", each, random, is_implied=True), names_source=is_done),))


def _numbers_by_url(spec: JoinedSpec) -> dict[str, int] | None:
    """Map the URL of each shard to its input. None: not all inputs can be read by ranges."""
    shards = []
    for pipeline in spec.pipelines:
        source = pipeline.source
        if not source.traits.sharded or source.is_compressed or pipeline.is_by_number:
            return None
        if split_steps(pipeline.steps)[0]:
            return None
        shards.append(source.data)
    if any(one.limits != shards[0].limits or one.storage_options != shards[0].storage_options for one in shards):
        return None
    numbers: dict[str, int] = {}
    for number, one in enumerate(shards):
        for url in one.urls:
            if numbers.setdefault(url, number) != number or numbers.setdefault(masked(url), number) != number:
                return None
    return numbers
