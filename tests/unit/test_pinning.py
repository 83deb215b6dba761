"""The pin thread: order, errors in their turn, and an end that nobody waits for in vain."""

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

from headrace._util.wakeup import Wakeup, is_readable
from headrace.delivery.staging import PinStage
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


def put(stage: PinStage, *batches: Any) -> None:
    for batch in batches:
        stage.put(lambda batch=batch: opened(batch))


def opened(batch: Any) -> Any:
    if isinstance(batch, BaseException):
        raise batch
    return batch


def taken(stage: PinStage) -> Any:
    return stage.take(DEADLINE_S)()


def wait_until_ready(stage: PinStage) -> None:
    assert is_readable(stage.fileno(), DEADLINE_S)


def test_batches_come_pinned_and_in_order() -> None:
    with pinning(*range(20), pin=lambda batch: batch * 10) as stage:
        assert [taken(stage) for _ in range(20)] == [number * 10 for number in range(20)]


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


def test_error_of_the_pinning_is_raised_in_its_turn_as_torch_words_it() -> None:
    class Odd(ValueError):
        pass

    def pin(batch: int) -> int:
        if batch == 1:
            raise Odd("one is odd")
        return batch

    with pinning(0, 1, 2, pin=pin) as stage:
        assert taken(stage) == 0
        with pytest.raises(Odd) as caught:
            taken(stage)
        assert taken(stage) == 2
    text = str(caught.value)
    assert text.startswith(
        "Caught Odd in pin memory thread for device None.\nOriginal Traceback (most recent call last)"
    )
    assert text.endswith("Odd: one is odd\n")
    assert isinstance(caught.value.__cause__, Odd)
    assert caught.value.__cause__.args == ("one is odd",)


def test_error_of_another_constructor_keeps_its_type_with_torchs_text() -> None:
    class Picky(Exception):
        def __init__(self, first: int, second: int) -> None:
            super().__init__(first, second)

    def pin(_: Any) -> None:
        raise Picky(1, 2)

    with pinning(0, pin=pin) as stage, pytest.raises(Picky, match=r"^Caught Picky in pin memory") as caught:
        taken(stage)
    assert isinstance(caught.value.__cause__, Picky)
    assert caught.value.__cause__.args == (1, 2)


def test_stop_iteration_of_the_pinning_does_not_end_the_loop_in_silence() -> None:
    def pin(_: Any) -> None:
        raise StopIteration

    with pinning(0, pin=pin) as stage, pytest.raises(RuntimeError, match="Caught StopIteration in pin memory"):
        taken(stage)


def test_error_of_a_batch_is_raised_as_it_is_in_its_turn() -> None:
    error = KeyError("of a worker")
    with pinning("first", error, "third") as stage:
        assert taken(stage) == "first"
        with pytest.raises(KeyError) as caught:
            taken(stage)
        assert caught.value is error
        assert taken(stage) == "third"


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


def test_close_wakes_the_thread_that_waits() -> None:
    raised: list[str] = []

    def wait() -> None:
        try:
            stage.take(None)()
        except LoaderClosedError as error:
            raised.append(str(error))

    stage = PinStage(same, None)
    waiting = threading.Thread(target=wait)
    waiting.start()
    stage.close()
    waiting.join(DEADLINE_S)
    assert raised == ["this iterator was closed; make a new one with iter(loader)"]


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


def test_closed_stage_raises_however_often_it_is_closed() -> None:
    stage = PinStage(same, None)
    for _ in range(2):
        stage.close()
        with pytest.raises(LoaderClosedError, match="this iterator was closed"):
            taken(stage)


def test_close_does_not_wait_for_itself_when_the_thread_calls_it() -> None:
    stage = PinStage(lambda _: stage.close(), None)
    put(stage, 0)
    stage._thread.join(DEADLINE_S)
    assert not stage._thread.is_alive()


def test_batch_is_not_kept_by_the_thread_when_it_was_handed_over() -> None:
    batch = Batch()
    unpinned = weakref.ref(batch)
    with pinning(pin=lambda _: "pinned") as stage:
        put(stage, batch)
        del batch
        assert taken(stage) == "pinned"
        put(stage, "next")
        assert taken(stage) == "pinned"
        assert unpinned() is None


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


def test_error_of_a_batch_is_freed_when_it_was_raised() -> None:
    gone: list[weakref.ref[Batch]] = []

    def pin(batch: Any) -> Any:
        if isinstance(batch, Batch):
            gone.append(weakref.ref(batch))
            raise ValueError("cannot be pinned")
        return batch

    with pinning(pin=pin) as stage:
        gc.disable()
        try:
            put(stage, Batch())
            with suppress(ValueError):
                taken(stage)
            put(stage, "next")
            assert taken(stage) == "next"  # the thread is done with the one before
            assert gone[0]() is None
        finally:
            gc.enable()
