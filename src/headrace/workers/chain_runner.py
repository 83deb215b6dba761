"""Makes samples with the functions of a chain, and batches of samples."""

from __future__ import annotations

import contextlib
import itertools
import operator
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from headrace._util.context import divided, part_position
from headrace._util.fork_guard import Original
from headrace.errors import CollateError, DecodeError, StageError, masked, printable
from headrace.torch_compat import serialize
from headrace.torch_compat.collate_by_torch import collate_by_torch, why_no_batch
from headrace.torch_compat.serialize import PackedEach
from headrace.workers.failures import (
    NOWHERE,
    AllMade,
    Failure,
    Origin,
    PackedError,
    Placeholder,
    failures_among,
    shown,
    without_failures,
)
from headrace.workers.randomness import begin_sample, key_number, seed_global_generators
from headrace.workers.sample_chunks import Part, offset_in
from headrace.workers.task_inputs import Inputs, runs
from headrace.workers.tasks import CHAINS, NO_STEP, Chain, Step, TaskMessage

Busy = dict[str, float]  # seconds per step

DROPPED = object()
"""Takes the place of a sample that a step has filtered out."""

_AFTER, _COLLATE = -1, -2  # stages of a batch, beside the chains of its samples


class Maker:
    """Makes the samples and batches of tasks.

    Args:
        everywhere: True to seed the global random number generators for each sample (in a worker process).
        progress: At index 0: the index of the current sample in the task, or -1.
    """

    def __init__(self, inputs: Inputs, *, everywhere: bool, progress: list[int] | memoryview[int], number: int) -> None:
        self._inputs, self._everywhere, self._progress, self.number = inputs, everywhere, progress, number
        self._original = Original()
        self._at: tuple[Sequence[Part], int] = (), 0  # (parts, index) of the current sample
        self._first_number: int | None = None  # of the task's samples
        self._begun: dict[int, weakref.ref[Chain]] = {}

    def make(
        self, chain: Chain, order: TaskMessage, busy: Busy, at_once: int = 1
    ) -> Generator[list[object], None, None]:
        """Run the steps on each sample. A Failure replaces a sample that could not be made.

        At most `at_once` samples are made in advance, and lists of at most this size are yielded.
        """
        if chain.many is not None:
            yield from _apart(self._make_many(chain, chain.many, order, busy), at_once)
            return
        failures, is_quick = order.failures, at_once > 1 and not order.failures and not order.one_by_one
        key = order.key if chain.by_key else stage_key(order.key, order.chain % CHAINS)
        index = 0
        self._progress[0], self._first_number = 0, order.first_number
        try:
            for done, samples in runs(chain, order, self._inputs, busy):
                if done and done == len(chain.steps):
                    yield from _apart(samples, at_once)
                    index += len(samples)
                    self._progress[0] = index
                    continue
                steps, waiting = chain.steps[done:], iter(samples)
                while is_quick and len(steps) == 1 and (done or chain.by_key):
                    some = list(itertools.islice(waiting, at_once - index % at_once))  # no more than a batch needs
                    made = self._in_turn(chain, steps[0], some, key, order, index, busy) if some else None
                    if made is None:  # they need the general way, or there are none
                        waiting = itertools.chain(some, waiting)
                        break
                    index += len(some)
                    del some
                    yield made
                    del made
                for sample in waiting:
                    self._at = order.parts, index
                    if index in failures:
                        yield [Failure(failures[index])]
                    else:
                        yield [self._apply(chain, steps, sample, key, order.each_position(index), busy)]
                    index += 1
                    self._progress[0] = index  # also while it is read, or decoded with others
        finally:  # also if the consumer stops early
            self._at = (), 0
        self._progress[0] = -1  # no sample is running

    def _in_turn(
        self, chain: Chain, step: Step, some: list[object], key: int, order: TaskMessage, first: int, busy: Busy
    ) -> list[object] | None:
        """Run the only remaining step on samples. None: they need the general way."""
        is_placed = any(issubclass(kind, Placeholder) for kind in set(map(type, some)))
        if step.kind != "map" or step.is_numbered or is_placed:
            return None

        began, made = time.perf_counter(), list[object]()
        for index, sample in enumerate(some, first):
            self._progress[0] = index
            try:
                if step.random is not None:
                    number = key_number(sample) if chain.by_key else order.each_position(index)
                    begin_sample(key, number)
                    if step.random and self._everywhere:
                        seed_global_generators(key, number)
                result = _call(step.fn, sample, step.name)
            except BaseException as error:
                self._at = order.parts, index
                result = self._failed(chain, step, error, sample, order.each_position(index))
            made.append(result)
        self._original.check()
        busy[step.name] = busy.get(step.name, 0.0) + time.perf_counter() - began
        self._progress[0] = first + len(some)
        return made

    def _make_many(
        self, chain: Chain, many: Callable[[list[Any]], Sequence[object]], order: TaskMessage, busy: Busy
    ) -> list[object]:
        """Make all samples of a task by one call. If it fails, each becomes a Failure."""
        keys = list(self._inputs.samples(order.parts, busy))
        sendable, failed = without_failures(keys), dict(failures_among(keys))
        name = chain.steps[0].name
        if not sendable:
            return keys
        self._begin(order.key, key_number(sendable[0]))
        began = time.perf_counter()
        try:
            samples = _call(many, sendable, name)
            if type(samples) is not list:
                raise TypeError(
                    f"{name} gave a {type(samples).__qualname__}: economic=True divides a batch among workers, "
                    "and of lists alone it is known how to put the parts together: give a list, or economic=False"
                )
            if len(samples) != len(sendable):
                raise ValueError(f"{name} gave {len(samples)} samples for {len(sendable)} keys")
        except BaseException as error:
            worker = self.number if self._everywhere else None
            origin = note_origin(error, chain.steps[0], None, order.position, worker, keys)
            samples = [Failure(self.pack(chain, error, origin))] * len(sendable)
        busy[name] = busy.get(name, 0.0) + time.perf_counter() - began
        made = iter(samples)
        return [failed[k] if k in failed else next(made) for k in range(len(keys))]

    def _apply(
        self, chain: Chain, steps: Sequence[Step], sample: object, key: int, position: int, busy: Busy
    ) -> object:
        source = sample
        if isinstance(sample, Placeholder):
            is_final = sample.is_final
            sample, source = sample.take()
            if is_final:
                return sample
        number: int | None = None
        is_seeded, at = not self._everywhere, NO_STEP
        try:
            for index, step in enumerate(steps, 1):
                at = step
                if step.random is not None:
                    if number is None:
                        number = key_number(source) if chain.by_key else position
                        begin_sample(key, number)
                    if step.random and not is_seeded:
                        seed_global_generators(key, number)
                        is_seeded = True
                began = time.perf_counter()
                result = _call(step.fn, (self._number_at(position), sample) if step.is_numbered else sample, step.name)
                busy[step.name] = busy.get(step.name, 0.0) + time.perf_counter() - began
                if step.kind == "map":
                    sample = result
                elif step.kind == "many":
                    return self._each(chain, steps[index:], result, key, position, busy)
                elif not result:
                    return DROPPED
        except BaseException as error:
            return self._failed(chain, at, error, source, position)
        self._original.check()
        return sample

    def _number_at(self, position: int) -> int:
        return position if self._first_number is None else self._first_number + self._at[1]

    def _failed(self, chain: Chain, at: Step, error: BaseException, source: object, position: int) -> Failure:
        self._original.check()
        if isinstance(error, DecodeError):
            error.place(offset_in(*self._at))
        worker = self.number if self._everywhere else None
        origin = note_origin(error, at, source, position, worker, source if chain.by_key else None)
        return Failure(self.pack(chain, error, origin))

    def _each(
        self, chain: Chain, steps: Sequence[Step], parts: Sequence[object], key: int, position: int, busy: Busy
    ) -> _Several:
        several = _Several()
        for number, part in enumerate(parts):
            made = self._apply(chain, steps, part, key, part_position(position, number, len(steps)), busy)
            several += listed([made])[1]
        return several

    def group(self, chain: Chain, made: Sequence[object], order: TaskMessage, busy: Busy) -> object:
        """Collate a group. Samples that failed before are skipped, or fail the group.

        Skipped failures keep their places among the results.
        """
        failed, several = failures_among(made), _Several()
        if failed and not chain.skips:
            return failed[0][1]
        if len(failed) < len(made):
            key = stage_key(order.key, order.chain % CHAINS)
            whole = self.collate(chain, without_failures(made), replace(order, key=key, batch=0), busy)
            if isinstance(whole, Failure):  # belongs to no single sample
                return Failure(whole.error.widened())
            several += listed([whole])[1]
        for k, failure in failed:
            several.insert(k, failure)
        return several

    def packed(
        self, chain: Chain, made: Sequence[object], order: TaskMessage, busy: Busy
    ) -> tuple[object, Sequence[tuple[int, PackedError]]]:
        """Collate pieces with notes: (result, errors of skipped pieces).

        The result is one sample in any case. If all pieces have failed, or none may be skipped, it is the first
        failure.
        """
        failed, own = failures_among(made), replace(order, key=stage_key(order.key, order.chain % CHAINS))
        if failed and (len(failed) == len(made) or not chain.skips):
            return failed[0][1], [(k, failure.error) for k, failure in failed[1:]] if chain.skips else ()
        both = zip(order.notes, made, strict=True)
        told: list[object] = [(*note, sample) for note, sample in both if type(sample) is not Failure]
        whole, left_out = self.collate(chain, told, own, busy), [(k, failure.error) for k, failure in failed]
        return Failure(whole.error.widened()) if isinstance(whole, Failure) else whole, left_out

    def alone(self, chain: Chain, made: Sequence[object], order: TaskMessage, number: int, busy: Busy) -> object:
        """Collate the batch `number` of a task of several. The result may be a Failure."""
        if order.each == 1:
            (sample,) = made
            is_unchanged = chain.collate is None or (chain.unchanged is not None and chain.unchanged(sample))
            if is_unchanged and not chain.after:
                return sample
        self._progress[0] = -1  # as for other batches
        position = order.position_of(number * order.each)
        own = replace(order, batch=order.batch + number, position=position, positions=None)
        batch = self.collate(chain, made, own, busy)
        return Failure(batch.error.widened()) if type(batch) is Failure else batch

    def collate(self, chain: Chain, made: Sequence[object], order: TaskMessage, busy: Busy) -> object:
        if failed := failures_among(made):
            return failed[0][1]
        kept = made if isinstance(made, AllMade) else [sample for sample in made if sample is not DROPPED]
        batch = kept[0] if chain.collate is None else DROPPED
        if chain.collate is not None:
            began = time.perf_counter()
            key = stage_key(order.key, _COLLATE)
            self._begin(key, order.first_position)
            try:
                batch = _call(chain.collate, kept, "collate_fn")
                self._original.check()
            except BaseException as error:
                return Failure(self.pack(chain, collate_error(error, chain.collate, kept, order.batch)))
            finally:
                busy["collate"] = busy.get("collate", 0.0) + time.perf_counter() - began
        return self._apply(chain, chain.after, batch, stage_key(order.key, _AFTER), order.first_position, busy)

    def _begin(self, key: int, position: int) -> None:
        begin_sample(key, position)
        if self._everywhere:
            seed_global_generators(key, position)

    def begin(self, number: int, chain: Chain) -> None:
        begun = self._begun.get(number)
        if begun is not None and begun() is chain:
            return
        if chain.begin is not None:
            chain.begin(self.number)
        self._begun[number] = weakref.ref(chain)

    def pack(self, chain: Chain, error: BaseException, origin: Origin = NOWHERE) -> PackedError:
        if chain.pack_error is None:
            return serialize.pack_error(error, origin)
        return chain.pack_error(error, origin, self.number)

    def measured(
        self, samples: list[object], kept: Sequence[int], chain: Chain, order: TaskMessage, busy: Busy
    ) -> list[int]:
        """Return the measure of each sample, if any. Samples without one become Failures."""
        if chain.measure is None:
            return []
        began, measures = time.perf_counter(), [0] * len(samples)
        for self._progress[0], (k, sample) in zip(kept, enumerate(samples), strict=True):
            if isinstance(sample, Failure):
                continue
            try:
                measures[k] = operator.index(chain.measure.fn(sample))
            except BaseException as error:
                worker = self.number if self._everywhere else None
                origin = note_origin(error, chain.measure, sample, order.position_of(kept[k]), worker)
                samples[k] = Failure(self.pack(chain, error, origin))
        self._progress[0] = -1
        busy["measure"] = busy.get("measure", 0.0) + time.perf_counter() - began
        return measures

    def packed_samples(self, samples: list[object], chain: Chain) -> list[serialize.PickledPart]:
        """Pickle samples for the next stage. Samples that cannot be pickled become Failures."""
        try:
            return serialize.pack(samples)
        except Exception:
            samples[:] = [self._sendable(sample, chain) for sample in samples]
            return serialize.pack(samples)

    def packed_apart(self, samples: list[object], chain: Chain) -> PackedEach:
        """Pickle samples one by one. Samples that cannot be pickled become Failures."""
        try:
            return PackedEach.of(samples)
        except Exception:
            samples[:] = [self._sendable(sample, chain) for sample in samples]
            return PackedEach.of(samples)

    def _sendable(self, sample: object, chain: Chain) -> object:
        try:
            serialize.pack(sample)
        except Exception as error:
            name = next((step.name for step in reversed(chain.steps) if step.kind == "map"), "fetch")
            text = f"stage: {name}; what it gave, of type {type(sample).__name__}, cannot be sent to the next stage"
            key = key_of(sample)
            error.add_note(text + ("" if key is None else f"; key {key!r}"))
            return Failure(self.pack(chain, error, Origin(name, key="" if key is None else repr(key))))
        return sample


class _Several(list[object]): ...


def listed(made: Sequence[object]) -> tuple[list[int], list[object]]:
    """Flatten results, without filtered samples: (input index of each, samples)."""
    kept: list[int] = []
    samples: list[object] = []
    for k, one in enumerate(made):
        if type(one) is _Several:
            kept += [k] * len(one)
            samples += one
        elif one is not DROPPED:
            kept.append(k)
            samples.append(one)
    return kept, samples


def _apart(samples: Sequence[object], at_once: int) -> Iterator[list[object]]:
    for start in range(0, len(samples), at_once):
        yield list(samples[start : start + at_once])


def stage_key(key: int, chain: int) -> int:
    """Return the RNG seed of a stage, as stages must not draw equal random numbers."""
    return key ^ (chain * 0xD1342543DE82EF95 & 2**64 - 1)


def _call(function: Callable[[Any], Any], argument: object, name: str) -> Any:
    try:
        return function(argument)
    except StopIteration as error:
        raise RuntimeError(f"{name} raised StopIteration") from error


_FORMS_MOST = 400  # characters


def note_origin(
    error: BaseException, step: Step, sample: object, position: int, worker: int | None, key: object = None
) -> Origin:
    url: object = None
    if key is None:
        key, url = _names(sample)
    address = "" if url is None else printable(masked(str(url)))
    key_text = "" if key is None else shown(key)
    origin = Origin(step.name, divided(position)[0], key_text, address, worker, passed=step.passed)
    with contextlib.suppress(Exception):
        error.add_note(origin.note)
    if isinstance(error, StageError) and error.key is None:
        error.key = key
    return origin


def collate_error(error: BaseException, function: object, samples: Sequence[object], batch: int) -> BaseException:
    """Add the batch to an error. Errors of default_collate become CollateErrors."""
    keys = [key for key in (key_of(s) for s in samples[:1]) if key is not None]
    if isinstance(error, CollateError):
        error.batch = batch
    elif function is collate_by_torch:
        if (why := why_no_batch(samples)) is None:
            forms = "; ".join(sorted({_form(sample) for sample in samples})[:4])
            forms = forms if len(forms) <= _FORMS_MOST else forms[: _FORMS_MOST - 1] + "…"
            why = f"{error}. Their forms: {forms}. Give them one shape, or give a collate_fn"
        made = CollateError(
            f"the samples of batch {batch} do not make a batch: {why}",
            stage="collate",
            batch=batch,
            key=keys[0] if keys else None,
        )
        made.__cause__ = error
        return made
    error.add_note(f"stage: collate; batch {batch}" + (f", whose first key is {keys[0]!r}" if keys else ""))
    return error


def _form(sample: object) -> str:
    if isinstance(sample, dict):
        return "{" + ", ".join(f"{k!r}: {_form(v)}" for k, v in sample.items()) + "}"
    if isinstance(sample, tuple | list):
        return "(" + ", ".join(_form(v) for v in sample) + ")"
    shape = getattr(sample, "shape", None)
    return f"{type(sample).__name__}{list(shape)}" if shape is not None else type(sample).__name__


def key_of(sample: object) -> object:
    return _names(sample)[0]


def _names(sample: object) -> tuple[object, object]:
    return (sample.get("__key__"), sample.get("__url__")) if isinstance(sample, dict) else (None, None)
