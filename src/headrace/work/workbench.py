"""Where a task is worked on: the same in a worker process and, with `num_workers=0`, in a thread of the trainer's."""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headrace.errors import CollateError, StageError
from headrace.tasks import Chain, Description, Failure, Finish, Made, Part, Reply, Step
from headrace.torch_compat import collate, packing
from headrace.work.inputs import Inputs
from headrace.work.randomness import EVERY_GENERATOR, begin_sample, key_number
from headrace.work.uses_random import generators_of, is_plain

# A task as workers see it: leases have become (segment's number, offset, size).
Order = dict[str, Any]

_DROPPED = object()
_AFTER, _COLLATE = -1, -2  # stages of a batch, beside the chains of its samples


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
        self._inputs = Inputs()
        self._chains: dict[int, Callable[[], Chain]] = {}
        self._begun: dict[int, weakref.ref[Chain]] = {}
        self._generators: dict[int, frozenset[str]] = {}  # which ones a chain's steps may draw from, of plain samples
        self._specs: dict[int, tuple[collate.Spec, bytes]] = {}
        self._held: dict[int, tuple[Order, Any]] = {}

    def attach(self, number: int, view: memoryview) -> None:
        """Make a segment known."""
        self._inputs.attach(number, view)

    def detach(self, number: int) -> None:
        """Forget a segment."""
        self._inputs.detach(number)

    def learn(self, number: int, load: Callable[[], Chain]) -> None:
        """Make a chain known, in the place of an older one; `load` gives it whenever it is needed."""
        self._chains[number] = load
        self._specs.pop(number, None)

    def learn_spec(self, number: int, spec: bytes) -> None:
        """Make known in which form the samples of a chain are written into slots; none: the next one will tell."""
        if spec:
            self._specs[number] = collate.Spec.loads(spec), spec
        else:
            self._specs.pop(number, None)

    def work(self, order: Order) -> Reply:
        """Carry out one task. Whatever goes wrong is in the reply."""
        busy: dict[str, float] = {}
        chain = Chain()
        try:
            if order["finish"] is Finish.SCAN:
                return self._scan(order)
            chain = self._chains[order["chain"]]()
            order["skips"] = chain.skips
            self._begin(order["chain"], chain)
            if order["finish"] is Finish.COLLATE:
                made = list(self._inputs.samples(order["parts"], busy))
            elif order["finish"] is Finish.SLOTS and self._may_fill(order):
                return self._fill(chain, order, busy)
            else:
                made = list(self._make(chain, order, busy))
                if order["finish"] is Finish.SLOTS and not chain.by_key:
                    _remember(order["parts"], made)
            if order["finish"] in (Finish.BATCH, Finish.COLLATE):
                if chain.skips:
                    order["errors"] = _failed(made, order)
                    made = [sample for sample in made if not isinstance(sample, Failure)]
                    if not made:
                        return Reply("written", errors=order["errors"], busy_s=busy)
                made = self._collate(chain, made, order, busy)
                if isinstance(made, Failure):
                    return Reply("failed", errors=[(order["slot"], made.blob)], busy_s=busy)
                made = _packed_batch(made, order["batch"])
            elif order["finish"] is Finish.SAMPLES:
                order["kept"] = [k for k, m in enumerate(made) if m is not _DROPPED]
                samples = [made[k] for k in order["kept"]]
                made = self._packed_samples(samples, chain)
                failed = zip(order["kept"], samples, strict=True)
                order["errors"] = [(order["slot"] + k, m.blob) for k, m in failed if isinstance(m, Failure)]
            elif order["finish"] is Finish.CHECK:
                return Reply("written", errors=_failed(made, order), busy_s=busy)
        except Exception as error:
            self._progress(-1)  # what ends the process instead, such as a SystemExit, leaves it at the sample
            return Reply("failed", errors=[(order["slot"], self._pack(chain, error))], busy_s=busy)
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
        lengths = packing.write(parts, self._inputs.view(place))
        kept, errors = order.get("kept", ()), order.get("errors", [])
        return Reply("written", lengths=lengths, kept=kept, errors=errors, busy_s=busy)

    def _write_slots(self, order: Order, made: list[Any], busy: dict[str, float]) -> Reply:
        errors = _failed(made, order)
        if len(errors) == len(made):
            return Reply("written", errors=errors, busy_s=busy)
        (spec, told), place = self._specs.get(order["chain"], (None, b"")), order["place"]
        if spec is None or place is None:
            self._held[order["task"]] = order, made
            form = spec or collate.Spec.of(next(sample for sample in made if not isinstance(sample, Failure)))
            if form is None:
                return Reply("held", busy_s=busy)
            return Reply("held", spec=told or form.dumps(), size=form.nbytes(order["capacity"]), busy_s=busy)
        if errors and not order["skips"]:
            # The batch raises: what is in its slots is never seen.
            return Reply("written", errors=errors, busy_s=busy)
        whole = [sample for sample in made if not isinstance(sample, Failure)]
        try:
            columns = spec.write(whole, self._inputs.view(place), order["slot"], order["capacity"])
        except collate.Mismatch:
            return Reply("mismatch", busy_s=busy)
        return Reply("written", columns=columns, errors=errors, busy_s=busy)

    def _scan(self, order: Order) -> Reply:
        scanner, offset, last = order["scan"]
        began = time.perf_counter()
        rows = scanner.feed(self._inputs.view(order["place"]), offset, last)
        return Reply("written", value=(rows, scanner), busy_s={"scan": time.perf_counter() - began})

    def _may_fill(self, order: Order) -> bool:
        """Whether samples can be written as they are made, and need not be kept for another attempt."""
        is_known = order["chain"] in self._specs and order["place"] is not None
        return is_known and all(kind != "list" for kind, *_ in order["parts"])

    def _fill(self, chain: Chain, order: Order, busy: dict[str, float]) -> Reply:
        """Samples into their slots while they are in the processor's cache."""
        spec, _ = self._specs[order["chain"]]
        slots = collate.Slots(spec, self._inputs.view(order["place"]), order["slot"], order["capacity"])
        if chain.columns is not None and not order["failures"] and self._fill_columns(chain, slots, order, busy):
            return Reply("written", columns=slots.columns, busy_s=busy)
        errors: list[tuple[int, bytes]] = []
        began, made_s = time.perf_counter(), sum(busy.values())
        numbers = itertools.count(order["slot"])

        def leaves_out(sample: Any) -> bool:
            slot = next(numbers)
            if isinstance(sample, Failure):
                errors.append((slot, sample.blob))
                return True
            return bool(errors) and not chain.skips  # with one the batch raises: what is in its slots is never seen

        try:
            slots.fill(self._make(chain, order, busy), leaves_out=leaves_out)
        except collate.Mismatch:
            return Reply("mismatch", busy_s=busy)
        made_s = sum(busy.values()) - made_s
        busy["write"] = busy.get("write", 0.0) + time.perf_counter() - began - made_s
        return Reply("written", columns=slots.columns, errors=errors, busy_s=busy)

    def _fill_columns(self, chain: Chain, slots: collate.Slots, order: Order, busy: dict[str, float]) -> bool:
        """All samples at once into their slots; whether they are such that this could be done."""
        assert chain.columns is not None
        ((kind, *rest),) = order["parts"]
        if kind != "raw":
            return False
        rows, _, _, places = rest
        bodies = self._inputs.bodies(places)
        began = time.perf_counter()
        columns = chain.columns(rows, bodies)
        decoded = time.perf_counter()
        name = chain.steps[0].name
        busy[name] = busy.get(name, 0.0) + decoded - began
        if columns is None:
            return False
        is_written = slots.fill_columns(columns, bodies, len(rows))
        busy["write"] = busy.get("write", 0.0) + time.perf_counter() - decoded
        return is_written

    def _make(self, chain: Chain, order: Order, busy: dict[str, float]) -> Iterator[Any]:
        """Each sample through the steps; a Failure in the place of one that could not be made."""
        if chain.many is not None:
            keys = list(self._inputs.samples(order["parts"], busy))
            yield from self._make_many(chain, chain.many, keys, order, busy)
            return
        failures, positions = order["failures"], order["positions"]
        # The numbers of chains may differ between two runs; one that goes by keys has no other stage beside it.
        key = order["key"] if chain.by_key else stage_key(order["key"], order["chain"])
        if positions is None:
            positions = itertools.count(order["position"])
        for index, (sample, position) in enumerate(
            zip(self._inputs.samples(order["parts"], busy), positions, strict=False)
        ):
            if index in failures:
                yield Failure(failures[index])
                continue
            self._progress(index)
            yield self._apply(chain, chain.steps, sample, key, position, busy, self._generators[order["chain"]])
        self._progress(-1)  # what follows is no sample's doing

    def _make_many(
        self,
        chain: Chain,
        many: Callable[[list[Any]], Sequence[Any]],
        keys: list[Any],
        order: Order,
        busy: dict[str, float],
    ) -> list[Any]:
        """All samples of a task by one call; where that fails, a Failure in the place of each."""
        sendable = [key for key in keys if not isinstance(key, Failure)]
        name = chain.steps[0].name
        if not sendable:
            return keys
        begin_sample(order["key"], key_number(sendable[0]), everywhere=self._everywhere)
        began = time.perf_counter()
        try:
            samples = list(_quietly(many, sendable, name))
            if len(samples) != len(sendable):
                raise ValueError(f"{name} gave {len(samples)} samples for {len(sendable)} keys")
        except Exception as error:
            note_origin(error, name, None, order["position"], self._number if self._everywhere else None, keys)
            samples = [Failure(self._pack(chain, error))] * len(sendable)
        busy[name] = busy.get(name, 0.0) + time.perf_counter() - began
        made = iter(samples)
        return [key if isinstance(key, Failure) else next(made) for key in keys]

    def _apply(
        self,
        chain: Chain,
        steps: Sequence[Step],
        sample: Any,
        key: int,
        position: int,
        busy: dict[str, float],
        generators: frozenset[str] = EVERY_GENERATOR,
    ) -> Any:
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
                    number = key_number(source) if chain.by_key else position
                    if generators != EVERY_GENERATOR and not is_plain(sample):
                        generators = EVERY_GENERATOR
                    begin_sample(key, number, everywhere=self._everywhere, generators=generators)
                    is_begun = True
                began = time.perf_counter()
                result = _call(step, sample)
                busy[name] = busy.get(name, 0.0) + time.perf_counter() - began
                if step.kind == "map":
                    sample = result
                elif not result:
                    return _DROPPED
        except Exception as error:
            worker = self._number if self._everywhere else None
            note_origin(error, name, source, position, worker, source if chain.by_key else None)
            return Failure(self._pack(chain, error))
        return sample

    def _collate(self, chain: Chain, made: list[Any], order: Order, busy: dict[str, float]) -> Any:
        for sample in made:
            if isinstance(sample, Failure):
                return sample
        kept = [sample for sample in made if sample is not _DROPPED]
        batch = kept[0] if chain.collate is None else _DROPPED
        if chain.collate is not None:
            began = time.perf_counter()
            key = stage_key(order["key"], _COLLATE)
            begin_sample(key, _first_position(order), everywhere=self._everywhere)
            try:
                batch = _quietly(chain.collate, kept, "collate_fn")
            except Exception as error:
                return Failure(self._pack(chain, _collate_error(error, chain.collate, kept, order["batch"])))
            finally:
                busy["collate"] = busy.get("collate", 0.0) + time.perf_counter() - began
        return self._apply(chain, chain.after, batch, stage_key(order["key"], _AFTER), _first_position(order), busy)

    def _begin(self, number: int, chain: Chain) -> None:
        begun = self._begun.get(number)
        if begun is not None and begun() is chain:
            return
        if chain.begin is not None:
            chain.begin(self._number)
        self._generators[number] = _generators(chain.steps) if self._everywhere else EVERY_GENERATOR
        self._begun[number] = weakref.ref(chain)

    def _pack(self, chain: Chain, error: BaseException) -> bytes:
        return packing.pack_error(error) if chain.pack_error is None else chain.pack_error(error, self._number)

    def _packed_samples(self, samples: list[Any], chain: Chain) -> list[packing.Part]:
        """Samples for the next stage; a Failure in the place of one that cannot be sent there."""
        try:
            return packing.pack(samples)
        except Exception:
            samples[:] = [self._sendable(sample, chain) for sample in samples]
            return packing.pack(samples)

    def _sendable(self, sample: Any, chain: Chain) -> Any:
        try:
            packing.pack(sample)
        except Exception as error:
            name = next((step.name for step in reversed(chain.steps) if step.kind == "map"), "fetch")
            told = f"stage: {name}; what it gave, of type {type(sample).__name__}, cannot be sent to the next stage"
            key = _key_of(sample)
            error.add_note(told + ("" if key is None else f"; key {key!r}"))
            return Failure(self._pack(chain, error))
        return sample


def _generators(steps: Sequence[Step]) -> frozenset[str]:
    """Which generators the steps may draw from that have random numbers, where the first of them gets a plain sample.

    What is between them counts too: the next one must get nothing that is not understood.
    """
    numbers = [k for k, step in enumerate(steps) if step.random]
    between = steps[numbers[0] : numbers[-1] + 1] if numbers else ()
    return frozenset[str]().union(*(generators_of(step.fn) for step in between))


def _failed(made: Sequence[Any], order: Order) -> list[tuple[int, bytes]]:
    """(slot, packed exception) of each sample that could not be made."""
    return [(order["slot"] + k, sample.blob) for k, sample in enumerate(made) if isinstance(sample, Failure)]


def _packed_batch(batch: Any, number: int) -> list[packing.Part]:
    try:
        return packing.pack(batch)
    except Exception as error:
        error.add_note(f"stage: collate; batch {number}, of type {type(batch).__name__}, cannot be sent to the trainer")
        raise


def _remember(parts: Sequence[Description], made: Sequence[Any]) -> None:
    """Should the batch be made in another way, the same objects must not go through the steps a second time."""
    ((kind, *rest),) = parts
    if kind == "list":
        samples, start, stop = rest
        samples[start:stop] = [m if isinstance(m, Failure) else Made(m) for m in made]


def _first_position(order: Order) -> int:
    """The position of the first sample of a task."""
    positions = order["positions"]
    return order["position"] if positions is None or not len(positions) else int(positions[0])


def stage_key(key: int, chain: int) -> int:
    """The key of a stage's random numbers: the stages of one sample must not draw the same ones."""
    return key ^ (chain * 0xD1342543DE82EF95 & 2**64 - 1)


def untold(_: int) -> None:
    """Progress that nobody asks for."""


def open_part(part: Part) -> list[Any]:
    """The samples of a part, in the process that has its leases."""
    description, segments = part.describe()
    inputs = Inputs()
    for segment in segments:
        inputs.attach(segment.number, segment.view)
    return list(inputs.samples([description], {}))


def _call(step: Step, sample: Any) -> Any:
    try:
        return step.fn(sample)
    except StopIteration as error:
        raise RuntimeError(f"{step.name} raised StopIteration") from error


def _quietly(function: Callable[[list[Any]], Any], samples: list[Any], name: str) -> Any:
    try:
        return function(samples)
    except StopIteration as error:
        raise RuntimeError(f"{name} raised StopIteration") from error


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


def note_origin(
    error: BaseException, step: str, sample: Any, position: int, worker: int | None, key: Any = None
) -> None:
    """Say on the exception itself where it happened."""
    url = None
    if key is None and isinstance(sample, dict):
        key, url = sample.get("__key__"), sample.get("__url__")
    where = [f"stage: {step}", f"sample {position} of the epoch"]
    if key is not None:
        where.append(f"key {key!r:.200}")
    if url is not None:
        where.append(f"url {url}")
    if worker is not None:
        where.append(f"worker {worker}")
    with contextlib.suppress(Exception):
        error.add_note("; ".join(where))
    if isinstance(error, StageError) and error.key is None:
        error.key = key
