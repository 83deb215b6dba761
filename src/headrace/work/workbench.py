"""Where a task is worked on: the same in a worker process and, with `num_workers=0`, in a thread of the trainer's."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headrace.errors import CollateError, StageError
from headrace.tasks import Chain, Description, Failure, Finish, Made, Part, Reply, Step, member_pieces
from headrace.torch_compat import collate, packing
from headrace.types import Buffer, Rows
from headrace.work.randomness import begin_sample

# A task as workers see it: leases have become (segment's number, offset, size).
Order = dict[str, Any]

_DROPPED = object()


class Workbench:
    """Carries out tasks against the segments and chains it was told of.

    Args:
        everywhere: set the global random number generators for each sample (in a process of our own).
        progress: called with the index of the sample that is begun, and -1 when none is.
        number: the worker's number.
    """

    def __init__(self, *, everywhere: bool, progress: Callable[[int], None], number: int = 0) -> None:
        self._everywhere = everywhere
        self._progress = progress
        self._number = number
        self._segments: dict[int, memoryview] = {}
        self._chains: dict[int, Callable[[], Chain]] = {}
        self._specs: dict[int, collate.Spec] = {}
        self._held: dict[int, tuple[Order, Any]] = {}

    def attach(self, number: int, view: memoryview) -> None:
        """Make a segment known."""
        self._segments[number] = view

    def detach(self, number: int) -> None:
        """Forget a segment."""
        self._segments.pop(number, None)

    def learn(self, number: int, load: Callable[[], Chain]) -> None:
        """Make a chain known; `load` gives it whenever it is needed."""
        self._chains[number] = load

    def learn_spec(self, number: int, spec: bytes) -> None:
        """Make known in which form the samples of a chain are written into slots."""
        self._specs[number] = collate.Spec.loads(spec)

    def work(self, order: Order) -> Reply:
        """Carry out one task. Whatever goes wrong is in the reply."""
        busy: dict[str, float] = {}
        try:
            if order["finish"] is Finish.SCAN:
                return self._scan(order)
            chain = self._chains[order["chain"]]()
            made = self._make(chain, order, busy)
            if order["finish"] is Finish.BATCH:
                made = self._collate(chain, made, order, busy)
                if isinstance(made, Failure):
                    return Reply("failed", errors=[(order["slot"], made.blob)], busy_s=busy)
                made = _packed_batch(made, order["batch"])
            elif order["finish"] is Finish.SAMPLES:
                order["kept"] = [k for k, m in enumerate(made) if m is not _DROPPED]
                made = _packed_samples([made[k] for k in order["kept"]], chain)
            elif order["finish"] is Finish.CHECK:
                errors = [(order["slot"] + k, m.blob) for k, m in enumerate(made) if isinstance(m, Failure)]
                return Reply("written", errors=errors, busy_s=busy)
        except Exception as error:
            self._progress(-1)  # what ends the process instead, such as a SystemExit, leaves it at the sample
            return Reply("failed", errors=[(order["slot"], packing.pack_error(error))], busy_s=busy)
        return self._write(order, made, busy)

    def place(self, task: int, place: tuple[int, int, int]) -> Reply:
        """Write what is held for a task."""
        order, made = self._held.pop(task)
        order["place"] = place
        return self._write(order, made, {})

    def let_go(self, task: int) -> None:
        """Forget what is held for a task, if anything is."""
        self._held.pop(task, None)

    def _write(self, order: Order, made: Any, busy: dict[str, float]) -> Reply:
        began = time.perf_counter()
        try:
            write = self._write_slots if order["finish"] is Finish.SLOTS else self._write_packed
            return write(order, made, busy)
        except Exception as error:
            return Reply("failed", errors=[(order["slot"], packing.pack_error(error))], busy_s=busy)
        finally:
            busy["write"] = busy.get("write", 0.0) + time.perf_counter() - began

    def _write_packed(self, order: Order, parts: Any, busy: dict[str, float]) -> Reply:
        size = packing.packed_size(parts)
        place = order["place"]
        if place is None or place[2] < size:
            self._held[order["task"]] = order, parts
            return Reply("held", size=size, busy_s=busy)
        lengths = packing.write(parts, self._view(place))
        return Reply("written", lengths=lengths, kept=order.get("kept", ()), busy_s=busy)

    def _write_slots(self, order: Order, made: list[Any], busy: dict[str, float]) -> Reply:
        slot = order["slot"]
        errors = [(slot + k, sample.blob) for k, sample in enumerate(made) if isinstance(sample, Failure)]
        if len(errors) == len(made):
            return Reply("written", errors=errors, busy_s=busy)
        spec, place = self._specs.get(order["chain"]), order["place"]
        if spec is None or place is None:
            self._held[order["task"]] = order, made
            form = spec or collate.Spec.of(next(sample for sample in made if not isinstance(sample, Failure)))
            if form is None:
                return Reply("held", busy_s=busy)
            return Reply("held", spec=form.dumps(), size=form.nbytes(order["capacity"]), busy_s=busy)
        if errors:
            # The batch raises: what is in its slots is never seen.
            return Reply("written", errors=errors, busy_s=busy)
        try:
            columns = spec.write(made, self._view(place), slot, order["capacity"])
        except collate.Mismatch:
            return Reply("mismatch", busy_s=busy)
        return Reply("written", columns=columns, busy_s=busy)

    def _scan(self, order: Order) -> Reply:
        scanner, offset, last = order["scan"]
        began = time.perf_counter()
        rows = scanner.feed(self._view(order["place"]), offset, last)
        return Reply("written", value=(rows, scanner), busy_s={"scan": time.perf_counter() - began})

    def _make(self, chain: Chain, order: Order, busy: dict[str, float]) -> list[Any]:
        """Each sample through the steps; a Failure in the place of one that could not be made."""
        made: list[Any] = []
        failures, positions = order["failures"], order["positions"]
        key = stage_key(order["key"], order["chain"])
        if positions is None:
            positions = itertools.count(order["position"])
        for index, (sample, position) in enumerate(zip(self.samples(order["parts"], busy), positions, strict=False)):
            if index in failures:
                made.append(Failure(failures[index]))
                continue
            self._progress(index)
            made.append(self._apply(chain.steps, sample, key, position, busy))
        self._progress(-1)  # what follows is no sample's doing
        if order["finish"] is Finish.SLOTS:
            _remember(order["parts"], made)
        return made

    def _apply(self, steps: Sequence[Step], sample: Any, key: int, position: int, busy: dict[str, float]) -> Any:
        if isinstance(sample, Failure):
            return sample
        if isinstance(sample, Made):
            return sample.value
        is_begun = False
        name, source = "", sample
        try:
            for step in steps:
                name = step.name
                if step.random and not is_begun:
                    begin_sample(key, position, everywhere=self._everywhere)
                    is_begun = True
                began = time.perf_counter()
                result = _call(step, sample)
                busy[name] = busy.get(name, 0.0) + time.perf_counter() - began
                if step.kind == "map":
                    sample = result
                elif not result:
                    return _DROPPED
        except Exception as error:
            note_origin(error, name, source, position, self._number if self._everywhere else None)
            return Failure(packing.pack_error(error))
        return sample

    def _collate(self, chain: Chain, made: list[Any], order: Order, busy: dict[str, float]) -> Any:
        for sample in made:
            if isinstance(sample, Failure):
                return sample
        kept = [sample for sample in made if sample is not _DROPPED]
        batch = kept[0] if chain.collate is None else _DROPPED
        if chain.collate is not None:
            began = time.perf_counter()
            try:
                batch = _quietly(chain.collate, kept)
            except Exception as error:
                return Failure(packing.pack_error(_collate_error(error, chain.collate, kept, order["batch"])))
            finally:
                busy["collate"] = busy.get("collate", 0.0) + time.perf_counter() - began
        return self._apply(chain.after, batch, stage_key(order["key"], -1), order["position"], busy)

    def samples(self, parts: Sequence[Description], busy: dict[str, float]) -> Iterator[Any]:
        """The samples of the described parts, in order."""
        for kind, *rest in parts:
            began = time.perf_counter()
            ways: dict[str, Callable[..., list[Any]]] = {"raw": self._raw, "packed": self._packed, "list": _listed}
            samples = ways[kind](*rest)
            busy["read"] = busy.get("read", 0.0) + time.perf_counter() - began
            yield from samples

    def _packed(self, place: tuple[int, int, int], lengths: Sequence[int], start: int, stop: int) -> list[Any]:
        samples: list[Any] = packing.unpack(self._view(place), lengths, copy=True)
        return samples[start:stop]

    def _raw(
        self, rows: Rows, shards: Any, urls: Sequence[str], places: Sequence[tuple[int, int, int, int]]
    ) -> list[dict[str, Any]]:
        views = [self._view(place[1:]) for place in places]
        first = [place[0] for place in places]
        ends = [place[0] + place[3] for place in places]
        starts, fields, names = rows.starts.tolist(), rows.field.tolist(), rows.fields
        offsets, sizes = rows.offset.tolist(), rows.size.tolist()
        samples = []
        for k, (key, shard) in enumerate(zip(rows.keys.tolist(), shards.tolist(), strict=True)):
            sample: dict[str, Any] = {"__key__": key.decode("utf-8", "surrogateescape"), "__url__": urls[shard]}
            for m in range(starts[k], starts[k + 1]):
                offset, size = offsets[m], sizes[m]
                inside = offset - first[0]
                if len(views) == 1 or (inside >= 0 and offset + size <= ends[0]):
                    body = bytes(views[0][inside : inside + size])
                else:
                    body = b"".join(views[s][a:b] for s, a, b in member_pieces(first, ends, offset, size))
                sample[names[fields[m]]] = body
            samples.append(sample)
        return samples

    def _view(self, place: tuple[int, ...]) -> memoryview:
        number, offset, size = place
        return self._segments[number][offset : offset + size]


def _packed_batch(batch: Any, number: int) -> list[Buffer]:
    try:
        return packing.pack(batch)
    except Exception as error:
        error.add_note(f"stage: collate; batch {number}, of type {type(batch).__name__}, cannot be sent to the trainer")
        raise


def _packed_samples(samples: list[Any], chain: Chain) -> list[Buffer]:
    """Samples for the next stage; a Failure in the place of one that cannot be sent there."""
    try:
        return packing.pack(samples)
    except Exception:
        return packing.pack([_sendable(sample, chain) for sample in samples])


def _sendable(sample: Any, chain: Chain) -> Any:
    try:
        packing.pack(sample)
    except Exception as error:
        name = next((step.name for step in reversed(chain.steps) if step.kind == "map"), "fetch")
        told = f"stage: {name}; what it gave, of type {type(sample).__name__}, cannot be sent to the next stage"
        key = _key_of(sample)
        error.add_note(told + ("" if key is None else f"; key {key!r}"))
        return Failure(packing.pack_error(error))
    return sample


def _listed(samples: list[Any], start: int, stop: int) -> list[Any]:
    return samples[start:stop]


def _remember(parts: Sequence[Description], made: Sequence[Any]) -> None:
    """Should the batch be made in another way, the same objects must not go through the steps a second time."""
    ((kind, *rest),) = parts
    if kind == "list":
        samples, start, stop = rest
        samples[start:stop] = [m if isinstance(m, Failure) else Made(m) for m in made]


def stage_key(key: int, chain: int) -> int:
    """The key of a stage's random numbers: the stages of one sample must not draw the same ones."""
    return key ^ (chain * 0xD1342543DE82EF95 & 2**64 - 1)


def untold(_: int) -> None:
    """Progress that nobody asks for."""


def open_part(part: Part) -> list[Any]:
    """The samples of a part, in the process that has its leases."""
    description, segments = part.describe()
    bench = Workbench(everywhere=False, progress=untold)
    for segment in segments:
        bench.attach(segment.number, segment.view)
    return list(bench.samples([description], {}))


def _call(step: Step, sample: Any) -> Any:
    try:
        return step.fn(sample)
    except StopIteration as error:
        raise RuntimeError(f"{step.name} raised StopIteration") from error


def _quietly(function: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    try:
        return function(samples)
    except StopIteration as error:
        raise RuntimeError("collate_fn raised StopIteration") from error


def _collate_error(error: Exception, function: Any, samples: Sequence[Any], batch: int) -> Exception:
    """What torch's own function raises is made to say which batch; the user's function keeps its exception."""
    keys = [key for key in (_key_of(s) for s in samples[:1]) if key is not None]
    if function is collate.default_collate:
        forms = sorted({_form(sample) for sample in samples})[:4]
        made = CollateError(
            f"the samples of batch {batch} do not make a batch: {error}. Their forms: {'; '.join(forms)}. "
            "Give them one shape, or give a collate_fn",
            stage="collate",
            batch=batch,
            key=keys[0] if keys else None,
        )
        made.__cause__ = error
        return made
    error.add_note(f"stage: collate; batch {batch}" + (f", whose first key is {keys[0]!r}" if keys else ""))
    return error


def _form(sample: Any) -> str:
    if isinstance(sample, dict):
        return "{" + ", ".join(f"{k!r}: {_form(v)}" for k, v in sample.items()) + "}"
    if isinstance(sample, tuple | list):
        return "(" + ", ".join(_form(v) for v in sample) + ")"
    shape = getattr(sample, "shape", None)
    return f"{type(sample).__name__}{list(shape)}" if shape is not None else type(sample).__name__


def _key_of(sample: Any) -> Any:
    return sample.get("__key__") if isinstance(sample, dict) else None


def note_origin(error: BaseException, step: str, sample: Any, position: int, worker: int | None) -> None:
    """Say on the exception itself where it happened."""
    key, url = (sample.get("__key__"), sample.get("__url__")) if isinstance(sample, dict) else (None, None)
    where = [f"stage: {step}", f"sample {position} of the epoch"]
    if key is not None:
        where.append(f"key {key!r}")
    if url is not None:
        where.append(f"url {url}")
    if worker is not None:
        where.append(f"worker {worker}")
    with contextlib.suppress(Exception):
        error.add_note("; ".join(where))
    if isinstance(error, StageError) and error.key is None:
        error.key = key
