"""Stages before the trainer: order, errors in their turn, and an end that nobody waits for in vain."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import anyio
import pytest
import torch
from unit.fake_device import FakeBackend

from headrace._util.wakeup import Wakeup, is_readable
from headrace.delivery.device import Mover
from headrace.delivery.staging import Ahead, DeviceStage, PinStage
from headrace.errors import LoaderClosedError

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
def test_batches_and_errors_come_in_their_order(kind: str) -> None:
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
def test_error_of_the_pinning_is_raised_as_torch_words_it(
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


def test_batch_that_arrives_while_one_looks_is_announced_again() -> None:
    class Hooked(Wakeup):
        def clear(self) -> None:
            put(stage, 1)
            assert pinned.wait(DEADLINE_S)
            super().clear()

    pinned = threading.Event()
    with pinning(pin=lambda batch: pinned.set() or batch) as stage:
        stage._arrived = Hooked()
        assert stage.take(DEADLINE_S)() == 1
