"""Runs tasks, in a worker process or in a thread of the trainer's process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from headrace._util.functions import unwrapped
from headrace._util.sample_ranges import LeasedBodies
from headrace._util.shared_memory import LARGE_BYTES, PublishedPlaces, aligned, close_all, give_back_freed_memory
from headrace.torch_compat import serialize
from headrace.torch_compat.sample_table import RowsOfTables, SampleTable
from headrace.torch_compat.serialize import PackedEach
from headrace.torch_compat.spec import Mismatch, Slots, Spec
from headrace.workers.chain_runner import Maker, listed
from headrace.workers.failures import Failure, PackedError, failures_among, without_failures
from headrace.workers.sample_chunks import Part, Place, size_of
from headrace.workers.task_inputs import Inputs
from headrace.workers.tasks import CHAINS, Chain, Finish, Reply, StreamChains, TaskMessage

_EACH_BYTES, _EACH_S = 2**18, 0.02  # limits of tasks of several batches: the batch that exceeds one is the last
_ANY_NUMBER = 2**31  # no limit: all samples are held until the last is made
_STARTED_S = 0.001  # minimum start time to report: loading functions and their imports


class _Descriptors:
    """Descriptors of a chain until it is loaded or forgotten."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def close(self) -> None:
        close_all(self.numbers)

    __del__ = close


@dataclass(slots=True)
class _Result:
    """The result of a task until it is written, and the reply that goes with it."""

    order: TaskMessage
    made: Any
    reply: Reply
    skips: bool = False


class TaskRunner:
    """Runs tasks, with the segments and chains registered before."""

    def __init__(self, *, everywhere: bool, progress: list[int] | memoryview[int], number: int = 0) -> None:
        self._everywhere, self._progress, self.number = everywhere, progress, number
        self._inputs = Inputs()
        self._maker = Maker(self._inputs, everywhere=everywhere, progress=progress, number=number)
        self._streams: dict[int, Callable[[], StreamChains]] = {}
        self._specs: dict[int, tuple[Spec, bytes]] = {}
        self._held: dict[int, _Result] = {}
        self._init: object = None  # code of the initialization function that has run
        self._had_large = False  # large samples, whose freed memory the process has kept

    def attach(self, number: int, view: memoryview) -> None:
        self._inputs.attach(number, view)

    def detach(self, number: int) -> None:
        self._inputs.detach(number)

    def detach_all(self) -> None:
        self._inputs.detach_all()

    def learn(self, stream: int, load: Callable[[], StreamChains]) -> None:
        """Register the chains of a stream, replacing older ones. `load` returns them when needed."""
        self._streams[stream] = load
        self._specs = {number: spec for number, spec in self._specs.items() if number // CHAINS != stream}

    def learn_packed(self, stream: int, view: memoryview, lengths: Sequence[int], descriptors: list[int]) -> None:
        """Register pickled chains. Their descriptors are closed once they are loaded or forgotten."""
        self.learn(stream, cache(partial(self._load, view, lengths, _Descriptors(descriptors))))

    def _load(self, view: memoryview, lengths: Sequence[int], descriptors: _Descriptors) -> StreamChains:
        chains: StreamChains = serialize.unpack_in_worker(view, lengths, descriptors.numbers)
        descriptors.close()
        init = next(iter(chains.values())).init
        function = init and unwrapped(init)
        code = getattr(getattr(function, "__func__", function), "__code__", type(function))
        if init is not None and code is not self._init:  # each copy of a function sent by value has own globals
            init(self.number)
            self._init = code
        return chains

    def learn_spec(self, number: int, spec: bytes) -> None:
        """Register the spec of a chain's samples. Empty: the next task determines it."""
        if spec:
            self._specs[number] = Spec.loads(spec), spec
        else:
            self._specs.pop(number, None)

    def work(self, order: TaskMessage) -> Reply:
        """Run one task. Errors are part of the reply."""
        busy: dict[str, float] = {}
        chain, result = Chain(), _Result(order, None, Reply("written"))
        try:
            if order.finish is Finish.SCAN:
                return self._scan(order)
            began = time.perf_counter()
            chain = self._streams[order.chain // CHAINS]()[order.chain]
            result.skips = chain.skips
            self._maker.begin(order.chain, chain)
            self._had_large = self._had_large or (self._everywhere and any(part.has_large for part in order.parts))
            if (start_s := time.perf_counter() - began) > _STARTED_S:
                busy["start"] = start_s
            began = time.perf_counter()
            reply = self._make(chain, result, busy)
            result.reply.took_s = time.perf_counter() - began
            if reply is not None:
                reply.took_s = result.reply.took_s
        except BaseException as error:  # a SystemExit of user functions must not end the worker
            self._progress[0] = -1  # only a crash leaves it at the sample
            return Reply("failed", errors=[(order.slot, self._maker.pack(chain, error))], busy_s=busy)
        return self._write(result, busy) if reply is None else reply

    def _make(self, chain: Chain, result: _Result, busy: dict[str, float]) -> Reply | None:
        """Make the result to write, or return the reply if there is nothing to write.

        Inputs are not held when this returns, as writing needs as much memory again.
        """
        order, reply, rows = result.order, result.reply, None
        if order.finish in (Finish.COLLATE, Finish.GROUP):
            tables = self._inputs.tables(order.parts) if takes_tables(chain) else None
            made: Sequence[Any] = list(self._inputs.samples(order.parts, busy)) if tables is None else tables
        elif order.finish is Finish.SLOTS and self._may_fill(order):
            return self._fill(chain, order, busy)
        elif order.finish is Finish.EACH:
            return self._make_each(chain, result, busy)
        elif (rows := decoded(chain, order, self._inputs, busy)) is not None:
            made = rows
        else:
            made = self._make_in_time(chain, order, busy)
            if self._had_large:
                give_back_freed_memory()  # memory of the inputs; the next step needs as much
            if order.finish is Finish.SLOTS and not chain.by_key:
                _remember(order.parts, made)
            if order.each:
                reply.batches = len(made) // order.each
                made = made[: reply.batches * order.each]
        if order.finish in (Finish.BATCH, Finish.COLLATE):
            if chain.skips:
                reply.errors = _failed(made, order)
                made = without_failures(made)
                if not made:
                    return Reply("written", errors=reply.errors, busy_s=busy)
            batch = self._maker.collate(chain, made, order, busy)
            if isinstance(batch, Failure):
                return Reply("failed", errors=[(order.slot, batch.error)], busy_s=busy)
            result.made = _packed_batch(batch, order.batch)
        elif order.finish in (Finish.SAMPLES, Finish.GROUP):
            if order.finish is Finish.GROUP and order.notes:
                packed, reply.left_out = self._maker.packed(chain, made, order, busy)
                made = [packed]
            elif order.finish is Finish.GROUP:
                made = [self._maker.group(chain, made, order, busy)]
            reply.kept, samples = listed(made) if rows is None else (range(len(rows)), rows.views())
            reply.measures = self._maker.measured(samples, reply.kept, chain, order, busy)
            if chain.measure is None:
                result.made = self._maker.packed_samples(samples, chain)
            elif (table := table_of(samples, rows, self._inputs)) is not None:
                result.made, reply.is_table = table.packed(), True
            else:  # groups may need samples that are not consecutive
                result.made = packed = self._maker.packed_apart(samples, chain)
                reply.pieces = packed.pieces
            failed = failures_among(samples)
            reply.failed = [k for k, _ in failed]
            reply.errors = [(order.slot + reply.kept[k], failure.error) for k, failure in failed]
        elif order.finish is Finish.CHECK:
            return Reply("written", errors=_failed(made, order), busy_s=busy)
        else:
            result.made = made
        return None

    def _make_in_time(self, chain: Chain, order: TaskMessage, busy: dict[str, float]) -> list[object]:
        """Make all samples. If the task has several batches, stop after a long time, with a batch or more."""
        began, made = time.perf_counter(), list[object]()
        lots = self._maker.make(chain, order, busy, order.each or _ANY_NUMBER)
        for lot in lots:
            made += lot
            if order.each and len(made) >= order.each and time.perf_counter() - began > _EACH_S:
                lots.close()
                self._progress[0] = -1
                break
        return made

    def _make_each(self, chain: Chain, result: _Result, busy: dict[str, float]) -> Reply | None:
        """Make batches, until a limit of bytes or time is reached.

        If they are published, it ends also at the first one that cannot be: finished batches must not wait for it.
        """
        order, reply, packed, waiting = result.order, result.reply, PackedEach(), list[object]()
        target = self._inputs.view(order.place) if order.publishes and order.place is not None else memoryview(b"")
        places = PublishedPlaces(target)
        if len(target):
            places.begin(order.attempt)
        began = time.perf_counter()
        lots, each = self._maker.make(chain, order, busy, order.each), order.each
        is_over = is_published = False
        for lot in lots:
            waiting += lot
            while len(waiting) >= each and not is_over:
                made, waiting = waiting[:each], waiting[each:]
                self._pack_batch(chain, made, result, packed, busy)
                is_published = not reply.errors and packed.publish(target, places)
                is_over = packed.nbytes > _EACH_BYTES or time.perf_counter() - began > _EACH_S
                is_over = is_over or (order.publishes and not is_published)
            if is_over:
                break
        lots.close()
        self._progress[0] = -1
        if self._had_large:
            give_back_freed_memory()
        result.made, reply.pieces, reply.batches, reply.busy_s = packed, packed.pieces, len(packed.pieces), busy
        if is_published:
            reply.size = packed.nbytes + PublishedPlaces.NBYTES
        return reply if is_published or not packed.nbytes else None

    def _pack_batch(
        self, chain: Chain, made: Sequence[object], result: _Result, packed: PackedEach, busy: dict[str, float]
    ) -> None:
        """Collate and pickle the next batch of a task of several."""
        order, reply, number = result.order, result.reply, len(packed.pieces)
        first = number * order.each
        failed = [(order.slot + first + k, failure.error) for k, failure in failures_among(made)]
        if failed and (not chain.skips or len(failed) == len(made)):
            packed.skip()
            reply.errors += failed
            return
        batch = self._maker.alone(chain, without_failures(made) if failed else made, order, number, busy)
        if type(batch) is not Failure:
            try:
                packed.add(batch)
            except Exception as error:
                error.add_note(_unsent(batch, order.batch + number))
                batch = Failure(self._maker.pack(chain, error).widened())
        if type(batch) is Failure:  # belongs to no single sample
            packed.skip()
            failed = [(order.slot + first, batch.error)]
        reply.errors += failed

    def place(self, task: int, place: Place) -> Reply:
        result = self._held.pop(task)
        result.order.place = place
        return self._write(result, {})

    def let_go(self, task: int) -> None:
        self._held.pop(task, None)

    def tidy(self) -> None:
        """Return freed memory of large samples to the system, as few samples need as much."""
        if self._had_large:
            self._had_large = bool(self._held)
            give_back_freed_memory()

    def _write(self, result: _Result, busy: dict[str, float]) -> Reply:
        began = time.perf_counter()
        try:
            write = self._write_slots if result.order.finish is Finish.SLOTS else self._write_packed
            reply = write(result, busy)
            reply.took_s = result.reply.took_s
            return reply
        except Exception as error:
            return Reply("failed", errors=[(result.order.slot, serialize.pack_error(error))], busy_s=busy)
        finally:
            busy["write"] = busy.get("write", 0.0) + time.perf_counter() - began

    def _write_packed(self, result: _Result, busy: dict[str, float]) -> Reply:
        made, place = result.made, result.order.place
        is_each = type(made) is PackedEach
        size = made.nbytes if is_each else serialize.packed_size(made)
        size += PublishedPlaces.NBYTES * result.order.publishes
        if place is None or size_of(place) < size:
            self._held[result.order.task] = result
            return Reply("held", size=size, busy_s=busy)
        view, reply = self._inputs.view(place), result.reply
        if is_each:
            made.write(view)
        else:
            reply.lengths = serialize.write(made, view)
        reply.size, reply.busy_s, reply.copies = size, busy, self._copies(place, [(0, size)])
        return reply

    def _copies(self, place: Place, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, bytes]]:
        """Return the written bytes, for a trainer without shared memory."""
        return self._inputs.taken(ranges) if isinstance(place, int) else []

    def _write_slots(self, result: _Result, busy: dict[str, float]) -> Reply:
        order, made, batches = result.order, result.made, result.reply.batches
        errors = _failed(made, order)
        if len(errors) == len(made):
            return Reply("written", errors=errors, batches=batches, busy_s=busy)
        (spec, known), place = self._specs.get(order.chain, (None, b"")), order.place
        if spec is None or place is None:
            self._held[order.task] = result
            first = without_failures(made)[0]
            form = spec or Spec.of(first)
            if form is None or (spec is None and self._are_too_large(form.columns(first))):
                return Reply("held", busy_s=busy)
            return Reply("held", spec=known or form.dumps(), size=form.nbytes(order.capacity), busy_s=busy)
        if errors and not (result.skips or order.each):
            # The batch raises, so its slots are never read.
            return Reply("written", errors=errors, busy_s=busy)
        whole = without_failures(made) if errors else made
        try:
            columns = spec.write(whole, self._inputs.view(place), order.slot, order.capacity)
        except Mismatch:
            return Reply("mismatch", busy_s=busy)
        if self._are_too_large(columns):
            return Reply("mismatch", busy_s=busy)
        copies = self._copies(place, _ranges(spec, order.slot, len(whole), order.capacity))
        return Reply("written", columns=columns, errors=errors, batches=batches, busy_s=busy, copies=copies)

    def _are_too_large(self, columns: list[list[Any]]) -> bool:
        """True if values without slots are too large for a message, which is copied several times."""
        return self._everywhere and any(len(value) > LARGE_BYTES for column in columns for value in column)

    def _scan(self, order: TaskMessage) -> Reply:
        assert order.scan is not None
        assert order.place is not None
        scanner, offset, last = order.scan
        began = time.perf_counter()
        rows = scanner.feed(self._inputs.view(order.place), offset, last)
        return Reply("written", value=(rows, scanner), busy_s={"scan": time.perf_counter() - began})

    def _may_fill(self, order: TaskMessage) -> bool:
        """True if samples can be written as they are made, without keeping them for a retry."""
        is_known = order.chain in self._specs and order.place is not None
        return is_known and not any(part.are_objects for part in order.parts)

    def _fill(self, chain: Chain, order: TaskMessage, busy: dict[str, float]) -> Reply:
        """Write samples into slots while they are in the processor's cache."""
        assert order.place is not None
        spec, _ = self._specs[order.chain]
        slots = Slots(spec, self._inputs.view(order.place), order.slot, order.capacity)
        if chain.columns is not None and not order.one_by_one and self._fill_columns(chain, slots, order, busy):
            copies = self._copies(order.place, _ranges(spec, order.slot, slots.count, order.capacity))
            batches = slots.count // order.each if order.each else 0
            return Reply("written", columns=slots.columns, batches=batches, busy_s=busy, copies=copies)
        errors: list[tuple[int, PackedError]] = []
        began, made_s, first = time.perf_counter(), sum(busy.values()), order.slot
        try:
            lots = self._maker.make(chain, order, busy, order.each or slots.at_once)
            for some in lots:
                errors += [(first + k, failure.error) for k, failure in failures_among(some)]
                if not errors or chain.skips or order.each:  # an error makes a batch raise: its slots are never read
                    slots.add(without_failures(some) if errors else some)
                first += len(some)
                del some  # lets the next samples reuse the memory
                if order.each and first >= order.each and time.perf_counter() - began > _EACH_S:
                    lots.close()
                    self._progress[0] = -1
                    break
            slots.flush()
        except Mismatch:
            return Reply("mismatch", busy_s=busy)
        if self._are_too_large(slots.columns):
            return Reply("mismatch", busy_s=busy)
        made_s = sum(busy.values()) - made_s
        busy["write"] = busy.get("write", 0.0) + time.perf_counter() - began - made_s
        copies = self._copies(order.place, _ranges(spec, order.slot, slots.count, order.capacity))
        batches = first // order.each if order.each else 0
        errors = [(slot, error) for slot, error in errors if not order.each or slot < batches * order.each]
        return Reply("written", columns=slots.columns, errors=errors, batches=batches, busy_s=busy, copies=copies)

    def _fill_columns(self, chain: Chain, slots: Slots, order: TaskMessage, busy: dict[str, float]) -> bool:
        """Write all samples into slots by columns. False if that is not possible."""
        if len(order.parts) > 1:
            return False
        (part,) = order.parts
        found = columns_of(chain, part, self._inputs, busy)
        if found is None:
            return False
        began = time.perf_counter()
        is_written = slots.fill_columns(*found)
        busy["write"] = busy.get("write", 0.0) + time.perf_counter() - began
        return is_written


def _failed(made: Sequence[object], order: TaskMessage) -> list[tuple[int, PackedError]]:
    return [(order.slot + k, failure.error) for k, failure in failures_among(made)]


def _remember(parts: Sequence[Part], made: Sequence[object]) -> None:
    """Store the results of samples that are objects. The last ones may be missing."""
    start = 0
    for part in parts:
        stop = min(start + part.count, len(made))
        part.remember(made[start:stop])
        start = stop


def _packed_batch(batch: object, number: int) -> list[serialize.PickledPart]:
    try:
        return serialize.pack(batch)
    except Exception as error:
        error.add_note(_unsent(batch, number))
        raise


def _unsent(batch: object, number: int) -> str:
    return f"stage: collate; batch {number}, of type {type(batch).__name__}, cannot be sent to the trainer"


def open_part(part: Part) -> list[object]:
    """Return the samples of a part, in the process that has its leases."""
    sent, segments = part.sent()
    inputs = Inputs()
    for segment in segments:
        inputs.attach(segment.number, segment.view)
    return list(inputs.samples([sent], {}))


def _ranges(spec: Spec, slot: int, count: int, capacity: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of the slots [slot, slot + count)."""
    offset = 0
    for leaf in spec.leaves:
        if leaf.dtype is not None and leaf.nbytes:
            yield offset + slot * leaf.nbytes, count * leaf.nbytes
            offset += aligned(leaf.nbytes * capacity)


Busy = dict[str, float]


def takes_tables(chain: Chain) -> bool:
    """True if the chain collates samples directly from tables."""
    return getattr(chain.collate, "takes_tables", False)


def columns_of(chain: Chain, part: Part, inputs: Inputs, busy: Busy) -> tuple[Any, LeasedBodies, int] | None:
    """Apply all steps to a part's columns: (result, bytes, count). None: not possible."""
    assert chain.columns is not None
    found = part.undecoded(inputs)
    if found is None:
        return None
    rows, bodies, urls = found
    began = time.perf_counter()
    columns = chain.columns(rows, bodies, urls)
    name = chain.steps[0].name
    busy[name] = busy.get(name, 0.0) + time.perf_counter() - began
    return None if columns is None else (columns, bodies, len(rows))


def decoded(chain: Chain, order: TaskMessage, inputs: Inputs, busy: Busy) -> RowsOfTables | None:
    """Return the samples of a task as rows of tables. None: they are made one by one."""
    is_of_use = takes_tables(chain) if order.finish is Finish.BATCH else chain.measure is not None
    if chain.columns is None or order.one_by_one or not is_of_use:
        return None
    tables = []
    for part in order.parts:
        found = columns_of(chain, part, inputs, busy)
        table = None if found is None else SampleTable.of_columns(*found)
        if table is None:
            return None
        tables.append((table, range(table.count)))
    return RowsOfTables(tables)


def table_of(samples: Sequence[object], made_of: RowsOfTables | None, inputs: Inputs) -> SampleTable | None:
    """Return a table of samples, perhaps from `made_of`. None: each is pickled separately."""
    if not inputs.shares_memory or failures_among(samples):  # without shared memory a table would be sent for each use
        return None
    table = None if made_of is None else made_of.only
    # The measure function may have changed a sample's dict.
    return table if table is not None and isinstance(table.names, int) else SampleTable.of(samples)
