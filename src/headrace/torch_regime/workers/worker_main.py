"""A worker for torch's data sets: its tasks and results, and the making of batches as torch's workers do."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.utils.data._utils.collate import default_collate

from headrace._util.fork_guard import Original
from headrace._util.shared_memory import Segment, close_all, keep_freed_memory
from headrace.torch_compat import serialize, worker_info
from headrace.torch_compat.collate import is_extended, plain_collate
from headrace.torch_compat.serialize import cannot_carry_index, is_death, pack_worker_error
from headrace.torch_compat.spec import Mismatch, Slots, Spec
from headrace.torch_compat.stateful import PackedStates, failed, is_stateful, load, packed_states, unpacked_states
from headrace.torch_compat.worker_info import is_iterated_pipe, is_pipe, seeded, traversing
from headrace.workers.failures import PackedError
from headrace.workers.forkserver.fd_socket import BlockingWire, ObjectCodec
from headrace.workers.randomness import begin_sample
from headrace.workers.worker_main import WorkerEnd

Result = (
    # segment, samples, slots, columns outside the slots, packed spec
    tuple[Literal["slots"], int, int, int, list[list[object]], bytes]
    | tuple[Literal["packed"], int, tuple[int, ...]]  # segment, lengths of the pickle and its buffers
    | tuple[Literal["inline"], list[bytes]]  # the pickle and its buffers
    | tuple[Literal["object"], object]  # the batch itself, from a thread of this process
    | tuple[Literal["error", "died"], PackedError]  # "died": no subclass of Exception, which would end a torch worker
    | tuple[Literal["end"]]  # the worker's data set has no more samples
)
"""A worker's result on the wire: a kind and its fields."""


def segment_of(result: Result) -> int | None:
    return result[1] if result[0] == "slots" or result[0] == "packed" else None


def failed_by(error: BaseException, number: int, *, in_thread: bool) -> Result:
    kind: Literal["error", "died"] = "died" if is_death(error) else "error"
    return kind, pack_worker_error(error, f"in DataLoader worker {'thread' if in_thread else 'process'} {number}")


def packed_index(index: object) -> object:
    """Return a batch's index for the wire: bytes, unless it consists of plain values.

    Raises:
        CannotCarryError: it cannot be sent to another process. The message names the attribute at fault.
    """
    kinds = set(map(type, index)) if isinstance(index, list) else {type(index)}
    if kinds <= _PLAIN:
        return copy.copy(index)  # threads get the object, and may change it
    try:
        return serialize.pack_bytes(index)
    except Exception as error:
        raise cannot_carry_index(error, index) from error


def unpacked_index(packed: object) -> Any:
    return serialize.unpack_bytes(packed) if isinstance(packed, bytes) else packed


_PLAIN = {int, str, float, bool, type(None)}  # and lists of them


StateAfter = tuple[PackedStates | None, bool]
"""Sent with a result: states of the worker's copy of the data set after it, and whether the copy is over."""

UNTOLD: StateAfter = (None, False)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    dataset: Any
    is_iterable: bool
    auto_collation: bool
    collate_fn: Callable[[Any], object]
    drop_last: bool
    base_seed: int
    init_fn: Callable[[int], object] | None
    num_workers: int
    shared_seed: int | None
    step: str  # name of the making of samples in `stats()`


@dataclass(frozen=True, slots=True)
class Start:
    """Resume point of a worker.

    Attributes:
        is_over: True if the data set has no more samples.
        made: Number of batches that the worker had made in this epoch.
        again: (packed index, count) of batches to make again and drop.
        is_finished: True if the epoch was over, so that the next one starts.
    """

    blob: PackedStates | None = None
    is_over: bool = False
    made: int = 0
    again: tuple[tuple[object, int], ...] = ()
    is_finished: bool = False


# Memory that workers share with the trainer.

# Words of each worker: current task, and index of its current sample. The first word makes all workers end.
WORDS = 2
TASK, SAMPLE = range(WORDS)


class WorkerProgress:
    """The trainer's view of the words shared with workers."""

    def __init__(self, workers: int) -> None:
        self._segment = Segment.create(8 * (1 + WORDS * workers))
        self._words = self._segment.view.cast("q")

    def place_of(self, worker: int) -> tuple[tuple[str, int, int], list[int]]:
        return ("words", self._segment.size, _first_of(worker)), [self._segment.fd]

    def have_all_end(self) -> None:
        self._words[0] = True

    def taken(self, worker: int) -> tuple[int, int]:
        """Return and reset (task, index of the sample) of a worker that ended. -1: not in a sample."""
        first = _first_of(worker)
        task, sample = self._words[first + TASK], self._words[first + SAMPLE]
        self._words[first + TASK], self._words[first + SAMPLE] = 0, -1
        return task, sample

    def close(self) -> None:
        self._segment.close()


def _first_of(worker: int) -> int:
    return 1 + WORDS * worker


_INLINE_BYTES = 16384  # smaller batches go with the message: a segment would cost more than the copy
_SLOTS_FROM_BYTES = 4096  # smaller samples are collated by torch: writing them one by one is slower


class _Ended(Exception): ...


class BatchBuilder:
    """Makes batches.

    Args:
        in_thread: True in a thread of the trainer, which passes batches as objects.
        place: Returns (segment number, memory of at least this size) for the current batch.
        progress: Shared memory. [0] is the index in its batch of the sample being made, or -1.
        start: Resume point. None: the start.

    Attributes:
        collate_ns: Total time in the collate function.
    """

    def __init__(
        self,
        config: WorkerConfig,
        number: int,
        *,
        in_thread: bool,
        place: Callable[[int], tuple[int, memoryview]],
        progress: memoryview,
        start: Start | None = None,
    ) -> None:
        self._config, self._number, self._in_thread = config, number, in_thread
        self._original = Original()
        self._place, self._progress = place, progress
        self._dataset = config.dataset
        self._failure: Result | None = None
        self._shared: PackedStates | None = None  # error in place of the state of a data set that threads share
        self._has_begun = False  # one-time initialization has succeeded
        self._index: object = None
        self._are_small = False  # the previous samples were too small for slots
        self._spec: Spec | None = None
        self._packed_spec = b""
        self._iterator: Iterator[object] | None = None
        self._is_over = self._has_reported_end = False
        self._made = 0
        self._collates_plainly = config.collate_fn is default_collate
        self.is_stateful = False
        self.collate_ns = 0
        self._begin(start)

    def reset(self, shared_seed: int | None) -> None:
        if self._has_begun:
            self._failure = None
            with self._kept_error():
                self._dataset = seeded(self._dataset, shared_seed)
                self._open()

    def make(self, index: Any) -> Result:
        """Make the batch of an index, or of the next samples. Errors are returned as results."""
        if self._failure is not None:
            return self._failure
        self._index = index
        try:
            if self._is_over:
                return ("end",)
            if not self._config.auto_collation:
                return self._pack(self._collate(self._one(index)))
            if self._collates_plainly and not self._are_small and not is_extended():
                return self._into_slots(index)
            samples = self._fetched(index)
            self._are_small = self._collates_plainly and _is_small(samples)
            return self._pack(self._collate(samples))
        except _Ended:
            return ("end",)
        except BaseException as error:
            self._original.check()
            return self._failed(error)
        finally:
            self._progress[0] = -1

    def state(self) -> PackedStates | None:
        """Return the states of this worker's data set and iterator, or None without any."""
        if self._shared is not None:
            return self._shared
        return packed_states(self._dataset, self._iterator) if self._failure is None and self.is_stateful else None

    def state_after(self, result: Result, every: int) -> StateAfter | None:
        """Return the states to send with a result, and whether the data set is over. None: nothing."""
        if result[0] == "end":
            is_due, self._has_reported_end = not self._has_reported_end, True
        else:
            self._made += 1
            is_due = self._is_over or (every > 0 and self._made % every == 0)
        is_due = is_due and self._has_begun
        return (self.state(), self._is_over) if is_due and (self.is_stateful or self._is_over) else None

    def _begin(self, start: Start | None) -> None:
        config = self._config
        with self._kept_error():
            if self._in_thread and (is_pipe(self._dataset) or is_stateful(self._dataset)):
                self._copy_dataset()
            set_info = worker_info.set_in_thread if self._in_thread else worker_info.set_in_process
            set_info(self._number, config.num_workers, config.base_seed, self._dataset)
            if is_iterated_pipe(self._dataset):
                self._dataset = seeded(self._dataset, config.shared_seed)
                set_info(self._number, config.num_workers, config.base_seed, self._dataset)
            begin_sample(config.base_seed, self._number)  # for `hr.rng()`
            if config.init_fn is not None:
                config.init_fn(self._number)
            self._has_begun = True
            if start is None:
                self._open()
            else:
                self._go_on(start)

    def _copy_dataset(self) -> None:
        """Copy the data set for this thread. One that cannot be copied is shared, without a state."""
        try:
            with traversing if is_pipe(self._dataset) else contextlib.nullcontext():
                self._dataset = serialize.copied(self._dataset)
        except Exception as error:
            if is_pipe(self._dataset):
                raise
            note = (
                "the data set cannot be copied for each thread: all use the one there is, and it has no state for each"
            )
            self._shared = failed(error, note)

    def _go_on(self, start: Start) -> None:
        if self._shared is not None and start.blob is not None:
            unpacked_states(self._shared)  # raises
        states = unpacked_states(start.blob)
        load(self._dataset, states, "dataset")
        self._open()
        load(self._iterator, states, "iterator")
        self._is_over, self._made = start.is_over, start.made
        for packed, times in start.again:
            index = unpacked_index(packed)
            for _ in range(times):
                with contextlib.suppress(Exception):  # raised when the batch was first made
                    self._collate(self._fetched(index) if self._config.auto_collation else self._one(index))
        if start.is_finished:
            self._open()

    def _open(self) -> None:
        self._is_over = self._has_reported_end = False
        self._made = 0
        self._iterator = None
        if self._config.is_iterable:
            self._iterator = iter(self._dataset)
        self.is_stateful = is_stateful(self._dataset) or is_stateful(self._iterator)

    @contextlib.contextmanager
    def _kept_error(self) -> Iterator[None]:
        """Make an error in this context the result of all further tasks."""
        try:
            yield
        except BaseException as error:
            self._failure = self._failed(error)

    def _failed(self, error: BaseException) -> Result:
        return failed_by(error, self._number, in_thread=self._in_thread)

    # Samples.

    def _one(self, key: object) -> object:
        if self._iterator is None:
            self._progress[0] = 0
            return _item(self._dataset, key)
        try:
            return next(self._iterator)
        except StopIteration:
            self._is_over = True
            raise _Ended from None

    def _samples(self, index: Iterable[object]) -> Iterator[object]:
        dataset, progress = self._dataset, self._progress
        if self._iterator is not None:
            for _ in index:
                try:
                    sample = next(self._iterator)
                except StopIteration:
                    self._is_over = True
                    return
                self._original.check()
                yield sample
        else:
            for k, key in enumerate(index):
                progress[0] = k
                sample = _item(dataset, key)
                self._original.check()
                yield sample

    def _fetched(self, index: Sequence[object]) -> object:
        if self._iterator is not None:
            return self._complete(list(self._samples(index)), index)
        dataset, progress = self._dataset, self._progress
        if getattr(dataset, "__getitems__", None):
            return _items(dataset, index)
        samples: list[object] = []
        key = None
        try:
            for k, key in enumerate(index):
                progress[0] = k
                samples.append(dataset[key])
        except StopIteration as error:
            raise _stopped(key) from error
        return samples

    # Batches.

    def _collate(self, samples: object) -> object:
        self._progress[0] = -1
        self._original.check()
        began = time.perf_counter_ns()
        try:
            return plain_collate(samples) if self._collates_plainly else self._config.collate_fn(samples)
        except StopIteration as error:
            which = "" if self._iterator is not None else f" for the samples {self._index!r:.200}"
            raise RuntimeError(f"collate_fn raised StopIteration{which}") from error
        finally:
            self.collate_ns += time.perf_counter_ns() - began

    def _into_slots(self, index: Sequence[object]) -> Result:
        """Write each sample directly into the batch, if samples are large and of one form."""
        if self._iterator is None and getattr(self._dataset, "__getitems__", None):
            items = _items(self._dataset, index)
            if type(items) is not list:
                self._are_small = True
                return self._pack(self._collate(items))
            samples = iter(items)
        else:
            samples = self._samples(index)
        waiting = list(itertools.islice(samples, 1))
        spec = self._spec_of(waiting[0]) if waiting else None
        if spec is None:
            self._are_small = _is_small(waiting)
            return self._pack(self._collate(self._complete([*waiting, *samples], index)))
        capacity = len(index)
        segment, view = self._place(spec.nbytes(capacity))
        slots = Slots(spec, view, 0, capacity)
        slots.waiting, waiting = waiting, []
        try:
            slots.fill(samples)
        except Mismatch:
            self._spec = None
            made = [*slots.written(), *slots.waiting, *samples]
            return self._pack(self._collate(self._complete(made, index)))
        if self._iterator is not None and self._config.drop_last and slots.count < capacity:
            raise _Ended
        return "slots", segment, slots.count, capacity, slots.columns, self._packed_spec

    def _complete(self, samples: list[object], index: Sequence[object]) -> list[object]:
        """Check that samples form a batch. An iterable data set may have ended before."""
        if self._iterator is not None and (not samples or (self._config.drop_last and len(samples) < len(index))):
            raise _Ended
        return samples

    def _spec_of(self, sample: object) -> Spec | None:
        if self._spec is None or not self._spec.fits(sample):
            self._spec = None if _is_small([sample]) else Spec.of(sample)
            if self._spec is not None:
                self._packed_spec = self._spec.dumps()
        return self._spec

    def _pack(self, batch: object) -> Result:
        if self._in_thread:
            return "object", batch
        try:
            parts = serialize.pack(batch)
        except Exception as error:
            which = "" if self._iterator is not None else f" of the samples {self._index!r:.100}"
            text = f"stage: collate; the batch{which}, of type {type(batch).__name__}, cannot be sent to the trainer"
            error.add_note(text)
            raise
        size = serialize.packed_size(parts)
        if size <= _INLINE_BYTES:
            return "inline", [bytes(part) for part in parts]
        segment, view = self._place(size)
        return "packed", segment, serialize.write(parts, view)


def _item(dataset: Any, key: object) -> object:
    try:
        return dataset[key]
    except StopIteration as error:
        raise _stopped(key) from error


def _stopped(key: object) -> RuntimeError:
    return RuntimeError(f"dataset[{key!r}] raised StopIteration")


def _items(dataset: Any, keys: Sequence[object]) -> object:
    try:
        return dataset.__getitems__(keys)
    except StopIteration as error:
        raise RuntimeError(f"dataset.__getitems__({keys!r:.200}) raised StopIteration") from error


def _is_small(samples: object) -> bool:
    """True if samples are small, or are not in a list, so that torch collates them faster."""
    if type(samples) is not list or not samples or type(samples[0]) in (int, float, bool, str, bytes):
        return True
    spec = Spec.of(samples[0])
    return spec is not None and spec.sample_bytes < _SLOTS_FROM_BYTES


_SEGMENTS_AT_MOST = 2**20  # per worker, so that segment numbers are unique


class BatchServer(WorkerEnd):
    """The worker's end of a connection.

    Args:
        start: Number of earlier workers with this number. Segment numbers follow from both.
        config: The configuration, unless it arrives over the wire.
    """

    def __init__(
        self, wire: BlockingWire, number: int, start: int, config: WorkerConfig | None, *, in_thread: bool = False
    ) -> None:
        super().__init__(wire)
        self._number, self._config, self._in_thread = number, config, in_thread
        self._builder: BatchBuilder | None = None
        self._start: Start | None = None
        self._epoch = 0
        self._every = 0
        self._has_reported_start = False
        self._refusal: Result | None = None  # the result of every task, if there is no builder
        self._segments: dict[int, memoryview] = {}
        self._given: tuple[int, ...] | None = None  # segment for the current batch
        self._numbers = itertools.count((number * 1024 + start) * _SEGMENTS_AT_MOST + 1)
        self._words = memoryview(bytearray(8 * (1 + WORDS))).cast("q")
        self._first_word = 0
        self._spent_ns: dict[str, int] = {}  # by step, since the last result

    def serve(self, is_wanted: Callable[[], bool] | None = None) -> None:
        super().serve(is_wanted)
        self._builder = None  # break a cycle: a thread's memory must not wait for the collector

    # Messages.

    def on_words(self, size: int, first: int) -> None:
        """Map the shared words of all workers. This worker's start at `first`."""
        self._words = self.map(size).cast("q")
        self._first_word = first

    def on_job(self, size: int, lengths: tuple[int, ...]) -> None:
        view = self.map(size, privately=True)

        def load() -> None:
            try:
                self._config = serialize.unpack_in_worker(view, lengths, self.descriptors)
            except Exception as error:
                error.add_note(
                    "What the trainer has sent cannot be put together again in a worker; with "
                    'multiprocessing_context="fork" workers inherit it, and nothing is sent.'
                )
                raise

        self._guarded(load)
        close_all(self.descriptors)

    def on_start(self, epoch: int, start: Start | None) -> None:
        self._epoch, self._start = epoch, start

    def on_every(self, every: int) -> None:
        self._every = every

    def on_reset(self, shared_seed: int | None, epoch: int) -> None:
        self._epoch, self._has_reported_start = epoch, False
        if self._builder is not None:
            self._builder.reset(shared_seed)
            self._tell_start()
        elif self._start is not None:
            self._start = replace(self._start, is_finished=True)

    def on_tell(self) -> None:
        self._begin_once()
        self.wire.send(("states", None if self._builder is None else self._builder.state()))

    def on_begin(self) -> None:
        self._begin_once()
        if not self._has_reported_start:
            self.wire.send(("started", self._epoch, None))

    def on_segment(self, number: int, size: int) -> None:
        self._segments[number] = self.map(size)

    def on_forget(self, number: int) -> None:
        self._segments.pop(number, None)

    def on_make(self, task: int, index: object, place: tuple[int, ...] | None) -> None:
        if self._words[0]:  # all workers must end
            raise EOFError
        self._words[self._first_word + TASK] = task
        self._begin_once()
        if self._builder is None:
            assert self._refusal is not None
            result = self._refusal
        else:
            assert self._config is not None
            self._given = place
            began, collated_ns = time.perf_counter_ns(), self._builder.collate_ns
            result = self._builder.make(unpacked_index(index))
            collate_ns = self._builder.collate_ns - collated_ns
            self._spent_ns[self._config.step] = time.perf_counter_ns() - began - collate_ns
            self._spent_ns["collate"] = collate_ns
        self._words[self._first_word + TASK] = 0
        state = None if self._builder is None else self._builder.state_after(result, self._every)
        spent_ns, self._spent_ns = self._spent_ns, {}
        self.wire.send(("made", task, result, spent_ns) if state is None else ("made", task, result, spent_ns, state))

    # For the builder.

    def _begin_once(self) -> None:
        if self._builder is None and self._refusal is None:
            self._guarded(self._begin)

    def _begin(self) -> None:
        assert self._config is not None
        self._builder = BatchBuilder(
            self._config,
            self._number,
            in_thread=self._in_thread,
            place=self._place,
            progress=self._words[self._first_word + SAMPLE :],
            start=self._start,
        )
        self._tell_start()

    def _tell_start(self) -> None:
        assert self._builder is not None
        assert self._config is not None
        if self._builder.is_stateful or self._config.is_iterable:
            self.wire.send(("started", self._epoch, self._builder.state()))
            self._has_reported_start = True

    def _place(self, size: int) -> tuple[int, memoryview]:
        if self._given is not None and self._given[1] >= size:
            return self._given[0], self._segments[self._given[0]]
        segment = Segment.create(max(size, 1), next(self._numbers))
        self.wire.send(("segment", segment.number, segment.size), [segment.fd])
        self._segments[segment.number] = segment.view
        segment.close()
        return segment.number, self._segments[segment.number]

    def _guarded(self, do: Callable[[], None]) -> None:
        began = time.perf_counter_ns()
        try:
            do()
        except BaseException as error:
            self._refusal = failed_by(error, self._number, in_thread=self._in_thread)
        self._spent_ns["start"] = self._spent_ns.get("start", 0) + time.perf_counter_ns() - began


def main(sock: socket.socket, number: int, start: int) -> None:
    _begin_process()
    BatchServer(BlockingWire(sock), number, start, None).serve()


def main_of_context(sock: socket.socket, number: int, start: int, config: WorkerConfig) -> None:
    _begin_process()
    parent = os.getppid()
    # A sibling may hold the other end of this socket open.
    BatchServer(BlockingWire(sock), number, start, config).serve(lambda: os.getppid() == parent)


def main_of_thread(sock: socket.socket, number: int, start: int, config: WorkerConfig, codec: ObjectCodec) -> None:
    with contextlib.closing(BlockingWire(sock, codec)) as wire:
        BatchServer(wire, number, start, config, in_thread=True).serve()


def _begin_process() -> None:
    import torch
    from torch.utils.data._utils import signal_handling

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    handlers: Any = signal_handling
    handlers._set_worker_signal_handlers()  # they report a bus error or a segmentation fault
    with contextlib.suppress(AttributeError):  # since torch 2.7
        torch.multiprocessing._set_thread_name("pt_data_worker")
    torch.set_num_threads(1)
    keep_freed_memory()
