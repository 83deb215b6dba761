"""Batches on their way to the trainer: stages in order, and slabs that are reused only after their copies end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import Mock

import anyio
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from unit.fake_device import FakeBackend, FakeEvent, Slabs, address_of, is_full_of

from headrace._util.wakeup import Wakeup, is_readable
from headrace.delivery.device import Backend, Mover, Moving, mover_to
from headrace.delivery.staging import Ahead, DeviceStage, PinStage
from headrace.errors import LoaderClosedError, OptionError


@pytest.fixture
def slabs() -> Iterator[Slabs]:
    made = Slabs()
    yield made
    made.close()


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def mover(backend: FakeBackend) -> Iterator[Mover]:
    made = Mover(backend)
    yield made
    made.close()


def test_slab_is_not_reusable_before_its_copies_end_when_a_later_copy_fails(
    slabs: Slabs, backend: FakeBackend, mover: Mover
) -> None:
    backend.copies_left = 1
    with pytest.raises(MemoryError, match="the device is full"):
        mover.start(slabs.batch(7))
    gc.collect()
    mover.let_go()
    assert slabs.returned == []
    backend.events[0].complete()
    mover.let_go()
    assert slabs.returned == [1]


def test_slab_is_reusable_when_the_device_fails(
    slabs: Slabs, backend: FakeBackend, mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = mover.start(slabs.batch(7))
    with monkeypatch.context() as patch:
        patch.setattr(backend, "synchronize", Mock(side_effect=RuntimeError("the device has fallen off the bus")))
        with pytest.raises(RuntimeError, match="off the bus"):
            mover.drain()
    assert slabs.returned == [1]
    assert moving.host is None


def test_slab_is_not_reusable_while_views_of_it_exist(slabs: Slabs, backend: FakeBackend, mover: Mover) -> None:
    host = slabs.batch(7)
    batch = mover.finish(mover.start({"x": host["x"], "array": host["x"].numpy()}))
    del host
    backend.events[0].complete()
    mover.let_go()
    assert slabs.returned == []
    del batch
    assert slabs.returned == [1]


@pytest.mark.parametrize("end", ["drain", "unlock", "close", "collected"])
def test_slabs_and_pages_are_free_when_their_copies_end(slabs: Slabs, backend: FakeBackend, end: str) -> None:
    mover = Mover(backend)
    moving = [mover.start(slabs.batch(number, number)) for number in (1, 2, 3)]
    mover.lock_pages(1, slabs.memory())
    batches = [mover.finish(each) for each in moving]
    if end == "collected":
        del mover, moving
    elif end == "unlock":
        mover.unlocker()(1)  # the fake asserts that nothing is copied from there
        mover.drain()
    else:
        getattr(mover, end)()
    assert sorted(slabs.returned) == [1, 2, 3]
    assert len(backend.registered) == (end == "drain")
    assert all(is_full_of(batch, number) for number, batch in enumerate(batches, 1))


@settings(max_examples=60)
@given(st.data())
def test_no_slab_is_reused_before_its_copies_end_in_any_order_of_events(data: st.DataObject) -> None:
    slabs, backend = Slabs(), FakeBackend()
    mover = Mover(backend)
    free, out = {1, 2, 3}, dict[int, FakeEvent]()
    begun: list[tuple[Moving, int]] = []
    had: list[tuple[Any, int]] = []
    for value in range(1, data.draw(st.integers(1, 30))):
        step = data.draw(st.sampled_from(["start", "finish", "complete", "let_go", "drop"]))
        done = {n for n, event in out.items() if event.is_done}
        if step == "start" and free:
            number = data.draw(st.sampled_from(sorted(free)))
            free.remove(number)
            begun.append((mover.start(slabs.batch(value, number)), value))
            out[number] = backend.events[-1]
        elif step == "finish" and begun:
            moving, of = begun.pop(0)
            had.append((mover.finish(moving), of))
        elif step == "drop" and begun:
            begun.pop(data.draw(st.integers(0, len(begun) - 1)))
        elif step == "complete" and backend.events:
            data.draw(st.sampled_from(backend.events)).complete()
        else:
            mover.let_go()
            step = "let_go"
        assert step in ("drop", "complete") or done <= set(slabs.returned)
        for number in slabs.returned:
            assert out.pop(number).is_done
            free.add(number)
        slabs.returned.clear()
    mover.close()
    assert set(slabs.returned) == set(out)
    assert all(is_full_of(batch, of) for batch, of in had)
    slabs.close()


def test_trainers_stream_waits_only_for_copies_of_its_batch(slabs: Slabs, backend: FakeBackend, mover: Mover) -> None:
    first, second = mover.start(slabs.batch(1, 1)), mover.start(slabs.batch(2, 2))
    batch = mover.finish(second)
    mover.finish(first)
    (event, tensors), (other, _) = backend.received
    assert (event, other) == (backend.events[1], backend.events[0])
    assert [id(tensor) for tensor in tensors] == [id(batch["x"]), id(batch["y"][0])]


def test_copies_are_freed_with_the_batch(slabs: Slabs, backend: FakeBackend, mover: Mover) -> None:
    batch = mover.finish(mover.start(slabs.batch(7)))
    backend.received.clear()
    backend.events[0].complete()
    backend.events[0]._copies.clear()
    tensor = weakref.ref(batch["x"])
    del batch
    assert tensor() is None


class Graph:
    def __init__(self, device: str) -> None:
        self.device = device

    def to(self, device: str) -> Graph:
        return Graph(device)


def test_other_values_are_moved_by_their_own_method_or_kept(mover: Mover, backend: FakeBackend) -> None:
    there, words, sparse = torch.empty(2, device="meta"), pack_sequence([torch.ones(2)]), torch.eye(3).to_sparse()
    batch = mover.finish(mover.start([there, 1, "text", Graph, Graph("cpu"), words, sparse]))
    assert batch[0] is there
    assert batch[1:4] == [1, "text", Graph]
    assert batch[4].device == "meta"
    assert batch[5].data.device.type == batch[6].device.type == "meta"
    assert batch[6].layout is torch.sparse_coo
    assert backend.received[0][1] == []


@pytest.mark.parametrize("can_register", [True, False])
def test_pages_are_locked_once_for_each_slab(slabs: Slabs, can_register: bool) -> None:
    backend = FakeBackend(can_register)
    mover = Mover(backend)
    slabs.batch(7)
    for _ in range(3):
        mover.lock_pages(1, slabs.memory())
    assert backend.asked == [address_of(slabs.memory())]
    assert backend.registered == backend.asked * can_register
    mover.unlock_pages(1)  # the fake refuses pages that it does not know
    mover.close()


def test_pages_stay_mapped_until_they_are_unlocked(slabs: Slabs, backend: FakeBackend, mover: Mover) -> None:
    slabs.batch(7)
    memory = slabs.memory()
    mapping = weakref.ref(memory.obj)
    mover.lock_pages(1, memory)
    slabs.close()
    del memory
    assert mapping() is not None
    mover.unlock_pages(1)
    assert mapping() is None
    assert backend.registered == []


def test_closed_mover_still_moves_and_locks_no_more_pages(slabs: Slabs, backend: FakeBackend, mover: Mover) -> None:
    mover.close()
    host = slabs.batch(7)
    mover.lock_pages(1, slabs.memory())
    batch = mover.finish(mover.start(host))
    backend.events[-1].complete()
    assert backend.registered == []
    assert is_full_of(batch, 7)


def test_nothing_moves_batches_to_the_host() -> None:
    assert mover_to("cpu") is None


def test_device_without_streams_copies_immediately(slabs: Slabs) -> None:
    mover = Mover(Backend(torch.device("meta")))
    batch = mover.finish(mover.start(slabs.batch(7)))
    assert batch["x"].device.type == "meta"
    assert slabs.returned == [1]


def test_copy_requires_gradients_like_the_original() -> None:
    leaf = torch.ones(2, requires_grad=True)
    copy = Backend(torch.device("meta")).copy(leaf)
    assert copy.requires_grad
    assert copy.is_leaf


@pytest.mark.parametrize("device", ["nonsense", "meta:x", "cuda:4711", 1.5], ids=str)
def test_missing_device_is_refused_by_name(device: Any) -> None:
    with pytest.raises(OptionError, match=f"device={device!r} cannot be used here: "):
        mover_to(device)


DEADLINE_S = 20.0


class Batch:
    """Can be referred to weakly."""


def same(batch: Any) -> Any:
    return batch


@contextmanager
def pinning(*batches: Any, pin: Callable[[Any], Any] = same, device_index: int | None = None) -> Iterator[PinStage]:
    stage = PinStage(pin, device_index)
    put(stage, *batches)
    try:
        yield stage
    finally:
        stage.close()


def put(stage: Ahead, *batches: Any) -> None:
    for batch in batches:
        stage.put(lambda batch=batch: opened(batch))


def opened(batch: Any) -> Any:
    if isinstance(batch, BaseException):
        raise batch
    return batch


def taken(stage: Ahead) -> Any:
    return stage.take(DEADLINE_S)()


def wait_until_ready(stage: PinStage) -> None:
    assert is_readable(stage.fileno(), DEADLINE_S)


STAGES: dict[str, Callable[[FakeBackend], Ahead]] = {
    "opened": lambda _: Ahead(),
    "pinned": lambda _: PinStage(torch.clone, None),
    "moved": lambda backend: DeviceStage(Mover(backend)),
}


@pytest.mark.parametrize("kind", STAGES)
def test_batches_and_errors_keep_their_order(kind: str) -> None:
    backend, error = FakeBackend(), KeyError("of a worker")
    stage = STAGES[kind](backend)
    for start in range(0, 6, stage.depth):
        numbers = range(start, start + stage.depth)
        put(stage, *(error if number == 1 else torch.full((3,), number) for number in numbers))
        for number in numbers:
            if number == 1:
                with pytest.raises(KeyError) as caught:
                    taken(stage)
                assert caught.value is error
            else:
                batch = taken(stage)
                backend.synchronize()
                assert batch.tolist() == [number] * 3
    stage.close()


def test_at_most_three_batches_are_copied_at_once() -> None:
    backend = FakeBackend()
    stage = DeviceStage(Mover(backend))
    put(stage, *(torch.ones(n) for n in range(3)))
    assert [event.is_done for event in backend.events] == [False, False, False]
    put(stage, torch.ones(1))
    assert [event.is_done for event in backend.events] == [True, False, False, False]
    stage.drain()


def test_batches_run_in_the_thread_with_one_core() -> None:
    def pin(_: Any) -> Any:
        return threading.current_thread() is threading.main_thread(), torch.get_num_threads()

    with pinning(1, pin=pin) as stage:
        assert taken(stage) == (False, 1)


def test_take_would_block_when_nothing_is_ready() -> None:
    gate = threading.Event()
    with pinning("late", pin=lambda batch: gate.wait() and batch) as stage:
        for timeout_s in (0, 0.001):
            with pytest.raises(anyio.WouldBlock):
                stage.take(timeout_s)
        gate.set()
        wait_until_ready(stage)
        assert stage.take(0)() == "late"
        with pytest.raises(anyio.WouldBlock):
            stage.take(0)
        assert not is_readable(stage.fileno(), 0)


class Odd(ValueError):
    pass


class Picky(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)


@pytest.mark.parametrize(
    ("error_type", "args", "kind"), [(Odd, ("odd",), Odd), (Picky, (1, 2), Picky), (StopIteration, (), RuntimeError)]
)
def test_pinning_error_has_torchs_wording(
    error_type: type[Exception], args: tuple[Any, ...], kind: type[Exception]
) -> None:
    def pin(batch: int) -> int:
        if batch == 1:
            raise error_type(*args)
        return batch

    with pinning(0, 1, 2, pin=pin) as stage:
        assert taken(stage) == 0
        with pytest.raises(kind) as caught:
            taken(stage)
        assert taken(stage) == 2
    text, name = str(caught.value), error_type.__name__
    assert text.startswith(f"Caught {name} in pin memory thread for device None.\nOriginal Traceback (most recent call")
    assert text.endswith(f"{name}: {error_type(*args)}".removesuffix(": ") + "\n")
    assert type(caught.value.__cause__) is error_type
    assert caught.value.__cause__.args == args


def test_death_of_the_thread_is_raised_after_the_ready_batches() -> None:
    def pin(batch: int) -> int:
        if batch == 1:
            raise SystemExit(3)
        return batch

    with pinning(0, 1, 2, pin=pin) as stage:
        assert taken(stage) == 0
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"^Pin memory thread exited unexpectedly$") as caught:
                taken(stage)
    assert isinstance(caught.value.__cause__, SystemExit)


def test_device_that_cannot_be_chosen_is_an_error() -> None:
    if torch.accelerator.is_available():
        pytest.skip("every index may be right")
    with pinning(0, device_index=0) as stage:
        with pytest.raises(RuntimeError, match=r"^Pin memory thread exited unexpectedly$"):
            taken(stage)


def test_close_wakes_the_thread_that_waits_and_later_ones() -> None:
    raised: list[str] = []

    def wait() -> None:
        try:
            stage.take(None)()
        except LoaderClosedError as error:
            raised.append(str(error))

    stage = PinStage(same, None)
    waiting = threading.Thread(target=wait)
    waiting.start()
    for _ in range(2):
        stage.close()
        waiting.join(DEADLINE_S)
        wait()
    assert raised == ["this iterator was closed; make a new one with iter(loader)"] * 3


@pytest.mark.parametrize("are_ready", [True, False])
def test_close_ends_the_thread_and_drops_its_batches(are_ready: bool) -> None:
    batches = [Batch(), Batch()]
    gone = [weakref.ref(batch) for batch in batches]
    with pinning(*batches) as stage:
        if are_ready:
            wait_until_ready(stage)
    del batches
    assert not stage._thread.is_alive()
    assert [batch() for batch in gone] == [None, None]


def test_close_does_not_wait_for_itself_when_the_thread_calls_it() -> None:
    stage = PinStage(lambda _: stage.close(), None)
    put(stage, 0)
    stage._thread.join(DEADLINE_S)
    assert not stage._thread.is_alive()


@pytest.mark.parametrize("fails", [False, True])
def test_batch_is_freed_when_it_or_its_error_was_handed_over(fails: bool) -> None:
    def pin(batch: Any) -> Any:
        if isinstance(batch, Batch) and fails:
            raise ValueError("cannot be pinned")
        return "pinned"

    batch = Batch()
    unpinned = weakref.ref(batch)
    with pinning(pin=pin) as stage:
        gc.disable()
        try:
            put(stage, batch)
            del batch
            with suppress(ValueError):
                assert taken(stage) == "pinned"
            put(stage, "next")
            assert taken(stage) == "pinned"  # the thread is done with the one before
            assert unpinned() is None
        finally:
            gc.enable()


def test_batch_that_arrives_during_a_check_is_announced() -> None:
    class Hooked(Wakeup):
        def clear(self) -> None:
            put(stage, 1)
            assert pinned.wait(DEADLINE_S)
            super().clear()

    pinned = threading.Event()
    with pinning(pin=lambda batch: pinned.set() or batch) as stage:
        stage._arrived = Hooked()
        assert stage.take(DEADLINE_S)() == 1
