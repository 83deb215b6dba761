"""Streams whose samples are kept once they were made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from headrace.datasets.cached_sources import CachedDataset, CacheManyStep, CacheStep
from headrace.datasets.doing import split_steps
from headrace.datasets.methods.adding import AddsOperators
from headrace.datasets.operators.values import EachSample, Operator
from headrace.datasets.pipeline import Pipeline
from headrace.datasets.source import SampleSource
from headrace.datasets.stream import Stream
from headrace.errors import OptionError
from headrace.kept.fingerprint import NotKnownError, ValueDigest
from headrace.kept.keeping import Keeping, fingerprint_of, not_told
from headrace.kept.places import place_of
from headrace.numbers import is_whole
from headrace.tasks import Step

_CALL = ".cache()"


def cached(
    inputs: Sequence[AddsOperators],
    *,
    place: str | os.PathLike[str] | None,
    max_bytes: int | None,
    version: str | int | None,
) -> Stream:
    """The samples of a stream, kept behind its last step.

    Raises:
        OptionError: an argument is of no use; or samples cannot be kept there.
    """
    if max_bytes is not None and not is_whole(max_bytes, 1):
        raise OptionError(f".cache(max_bytes={max_bytes!r}): 1 byte or more, a whole number")
    stream = inputs[0]._as_stream()
    pipeline = stream.pipeline()
    _check(pipeline)
    first, steps = split_steps(pipeline.narrowed_steps, "what is kept", _CALL)
    for step in (step for step in (*first, *steps) if not step.reads):
        _check_step(step, has_version=version is not None)
    where, source = place_of(place, max_bytes), pipeline.source
    keeping = Keeping(
        [step.fn for step in steps if not step.reads],
        [step.fn for step in first if not step.reads],
        where,
        None if version is None else str(version),
        partial(_told_of, source, has_version=version is not None) if where.is_shared else None,
        source.count,
    )
    others = tuple(one for one in stream.operators if not _is_done_before(one, pipeline))
    text = ".".join([source.text, *(one.text for one in pipeline.each if not one.is_implied)])
    data = CachedDataset(source, first, keeping, pipeline.wanted, text)
    is_many, is_random = not pipeline.keeps_count, any(step.random for step in steps)
    makes = (CacheManyStep if is_many else CacheStep)(steps, keeping)
    name = f"cache({'' if place is None else where})"
    return Stream(data, (*others, EachSample(Step(name, "many" if is_many else "map", makes, is_random))))


def _is_done_before(operator: Operator, pipeline: Pipeline) -> bool:
    """Whether it is done to samples before they are kept: all is, but what says which come, and when."""
    if not isinstance(operator, EachSample):
        return False
    return operator.keeps_key is None or all(operator.keeps_key is not keeps for keeps in pipeline.keeps)


def _check(pipeline: Pipeline) -> None:
    """Whether samples can be kept by their numbers."""
    source = pipeline.source
    if source.without_numbers is not None:
        raise OptionError(
            f"{_CALL}: the samples of {source.name} have no numbers before they are read, by which they would be kept; "
            f"{source.without_numbers}"
        )
    if source.draws or not source.keeps_numbers:
        is_steady = source.is_steady and source.keeps_numbers
        why = "its numbers are made of its inputs'" if is_steady else "its samples have other numbers in each epoch"
        raise OptionError(f"{_CALL} behind {source.text:.100}: {why}; put {_CALL} behind each of its inputs")
    if pipeline.is_batched or pipeline.group is not None:
        raise OptionError(f"{_CALL} behind .batch(): it keeps samples; put it before that")
    if pipeline.numbered is not None:
        raise OptionError(
            f"{_CALL} behind {pipeline.numbered.name}: a sample has another place in each epoch; put it behind {_CALL}"
        )
    late = next((regroup.name for regroup in pipeline.regroups), None)
    if late is not None or pipeline.limit is not None:
        raise OptionError(f"{_CALL} behind .{late or f'take({pipeline.limit})'}: it keeps samples; put it before that")


def _check_step(step: Step, *, has_version: bool) -> None:
    """Whether it would be known of a step when it is another one, and whether it gives the same each time."""
    found = ValueDigest()
    try:
        found.of(step.fn)
    except NotKnownError as error:
        if not has_version:
            raise not_told(error) from error
    if step.random and found.draws is not None:
        raise OptionError(
            f"{_CALL} behind {step.name}, which draws random numbers ({found.draws}): what is kept of it would be the "
            f"same in each epoch. Put {step.name} behind {_CALL}; or say random=False in that step if the same is meant"
        )


def _told_of(source: SampleSource, *, has_version: bool) -> bytes:
    """What tells a source's samples from those of all others that may be kept in the same place."""
    parts: list[object] = [source.fingerprint_with(source.starts[1:] - source.starts[:-1])]
    parts.append([_status(url) for url in source.urls])
    if not has_version:
        parts.append(source.data)
    try:
        return fingerprint_of(parts)
    except NotKnownError as error:
        raise not_told(error) from error


def _status(url: str) -> tuple[int, int] | None:
    """Of a file of this machine its size, and when it was written."""
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        with suppress(OSError):
            status = Path(parts.path if parts.scheme else url).stat()
            return status.st_size, status.st_mtime_ns
    return None
