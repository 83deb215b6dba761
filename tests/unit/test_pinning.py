"""The pin thread: order, bound, errors in their turn, and an end that nobody waits for in vain."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import anyio
import pytest
import torch

from headrace._util.wakeup import Wakeup, is_readable
from headrace.delivery.pinning import PinThread
from headrace.errors import LoaderClosedError

DEADLINE_S = 20.0


class Batch:
    """Can be referred to weakly."""


class Batches:
    """A `take` whose batches come when the test puts them."""

    def __init__(self, *batches: Any) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.taken = 0
        for batch in batches:
            self.put(batch)

    def put(self, batch: Any) -> None:
        self._queue.put(batch)

    def end(self) -> None:
        self.put(StopIteration())

    def __call__(self) -> Any:
        batch = self._queue.get(timeout=DEADLINE_S)
        if isinstance(batch, BaseException):
            raise batch
        self.taken += 1
        return batch


def same(batch: Any) -> Any:
    return batch


@contextmanager
def pinning(
    take: Batches, pin: Callable[[Any], Any] = same, depth: int = 2, device_index: int | None = None
) -> Iterator[PinThread]:
    thread = PinThread(take, pin, depth, device_index)
    try:
        yield thread
    finally:
        take.end()
        thread.close()


def wait_until_ready(thread: PinThread) -> None:
    assert is_readable(thread.fileno(), DEADLINE_S)


def rest(thread: PinThread) -> list[Any]:
    return list(iter_of(thread))


def iter_of(thread: PinThread) -> Iterator[Any]:
    while True:
        try:
            batch = thread.next(DEADLINE_S)
        except StopIteration:
            return
        yield batch


def test_batches_come_pinned_and_in_order() -> None:
    take = Batches(*range(20), StopIteration())
    with pinning(take, lambda batch: batch * 10) as thread:
        assert rest(thread) == [number * 10 for number in range(20)]


def test_end_stays_the_end() -> None:
    with pinning(Batches(StopIteration())) as thread:
        for _ in range(3):
            with pytest.raises(StopIteration):
                thread.next(DEADLINE_S)
            with pytest.raises(StopIteration):
                thread.try_next()


def test_batches_run_in_the_thread_with_one_core() -> None:
    seen = []

    def pin(batch: Any) -> Any:
        seen.append((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))
        return batch

    with pinning(Batches(1), pin) as thread:
        thread.next(DEADLINE_S)
    assert seen == [(False, 1)]


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_is_taken_than_the_depth_when_nobody_asks(depth: int) -> None:
    take = Batches(*range(10), StopIteration())
    with pinning(take, depth=depth) as thread:
        for number in range(10 - depth):
            assert thread.next(DEADLINE_S) == number
            assert take.taken <= number + 1 + depth
        assert len(rest(thread)) == depth


def test_try_next_would_block_when_nothing_is_ready() -> None:
    take = Batches()
    with pinning(take) as thread:
        with pytest.raises(anyio.WouldBlock):
            thread.try_next()
        take.put("late")
        wait_until_ready(thread)
        assert thread.try_next() == "late"
        with pytest.raises(anyio.WouldBlock):
            thread.try_next()
        assert not is_readable(thread.fileno(), 0)


def test_next_would_block_when_its_time_has_passed() -> None:
    take = Batches()
    with pinning(take) as thread:
        with pytest.raises(anyio.WouldBlock):
            thread.next(0.001)
        take.put("late")
        assert thread.next(DEADLINE_S) == "late"


def test_error_of_the_pinning_is_raised_in_its_turn_as_torch_words_it() -> None:
    class Odd(ValueError):
        pass

    def pin(batch: int) -> int:
        if batch == 1:
            raise Odd("one is odd")
        return batch

    with pinning(Batches(0, 1, 2, StopIteration()), pin, device_index=None) as thread:
        assert thread.next(DEADLINE_S) == 0
        with pytest.raises(Odd) as caught:
            thread.next(DEADLINE_S)
        assert rest(thread) == [2]
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

    with (
        pinning(Batches(0), pin) as thread,
        pytest.raises(Picky, match=r"^Caught Picky in pin memory") as caught,
    ):
        thread.next(DEADLINE_S)
    assert isinstance(caught.value.__cause__, Picky)
    assert caught.value.__cause__.args == (1, 2)


def test_stop_iteration_of_the_pinning_does_not_end_the_loop_in_silence() -> None:
    def pin(_: Any) -> None:
        raise StopIteration

    with pinning(Batches(0), pin) as thread, pytest.raises(RuntimeError, match="Caught StopIteration in pin memory"):
        thread.next(DEADLINE_S)


def test_error_of_the_take_is_raised_as_it_is_in_its_turn() -> None:
    error = KeyError("of a worker")
    with pinning(Batches("first", error, "third", StopIteration())) as thread:
        assert thread.next(DEADLINE_S) == "first"
        with pytest.raises(KeyError) as caught:
            thread.next(DEADLINE_S)
        assert caught.value is error
        assert rest(thread) == ["third"]


def test_death_of_the_thread_is_told_after_what_was_ready() -> None:
    def pin(batch: int) -> int:
        if batch == 1:
            raise SystemExit(3)
        return batch

    with pinning(Batches(0, 1), pin) as thread:
        assert thread.next(DEADLINE_S) == 0
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"^Pin memory thread exited unexpectedly$") as caught:
                thread.next(DEADLINE_S)
    assert isinstance(caught.value.__cause__, SystemExit)


def test_device_that_cannot_be_chosen_is_told() -> None:
    if torch.accelerator.is_available():
        pytest.skip("every index may be right")
    with pinning(Batches(0), device_index=0) as thread:
        with pytest.raises(RuntimeError, match=r"^Pin memory thread exited unexpectedly$"):
            thread.next(DEADLINE_S)


def test_close_ends_the_thread_when_it_waits_for_room() -> None:
    take = Batches(0, 1, 2)
    thread = PinThread(take, same, 1, None)
    wait_until_ready(thread)
    thread.close()
    assert not thread._thread.is_alive()
    assert take.taken == 1


def test_close_ends_the_thread_when_take_is_made_to_return() -> None:
    take = Batches()
    thread = PinThread(take, same, 1, None)
    take.put(LoaderClosedError("by the owner"))
    thread.close()
    assert not thread._thread.is_alive()


def test_close_tells_those_who_wait() -> None:
    take = Batches()
    told: list[str] = []

    def wait(thread: PinThread) -> None:
        try:
            thread.next()
        except LoaderClosedError as error:
            told.append(str(error))

    thread = PinThread(take, same, 1, None)
    waiting = [threading.Thread(target=wait, args=(thread,)) for _ in range(3)]
    closing = threading.Thread(target=thread.close)
    for each in (*waiting, closing):
        each.start()
    for each in waiting:
        each.join(DEADLINE_S / 4)
    are_waiting = any(each.is_alive() for each in waiting)
    take.end()  # only now: the close itself has told them
    closing.join(DEADLINE_S)
    assert not are_waiting
    assert told == ["this iterator was closed; make a new one with iter(loader)"] * 3


def test_close_drops_what_is_ready() -> None:
    batch = Batch()
    gone = weakref.ref(batch)
    take = Batches(batch)
    thread = PinThread(take, same, 1, None)
    wait_until_ready(thread)
    del batch
    take.end()
    thread.close()
    assert gone() is None


def test_close_drops_what_is_taken_meanwhile() -> None:
    batch = Batch()
    gone = weakref.ref(batch)
    take = Batches()
    thread = PinThread(take, same, 1, None)
    closing = threading.Thread(target=thread.close)
    closing.start()
    wait_until_ready(thread)  # it says that it is closed
    take.put(batch)
    closing.join(DEADLINE_S)
    del batch
    assert gone() is None


def test_closed_thread_says_so_however_often_it_is_closed() -> None:
    take = Batches()
    take.end()
    thread = PinThread(take, same, 1, None)
    for _ in range(2):
        thread.close()
        with pytest.raises(LoaderClosedError, match="this iterator was closed"):
            thread.next()


def test_close_does_not_wait_for_itself_when_the_thread_calls_it() -> None:
    threads: queue.SimpleQueue[PinThread] = queue.SimpleQueue()
    take = Batches(0)
    thread = PinThread(take, lambda _: threads.get(timeout=DEADLINE_S).close(), 1, None)
    threads.put(thread)
    thread._thread.join(DEADLINE_S)
    assert not thread._thread.is_alive()


def test_batch_is_not_kept_by_the_thread_when_it_was_handed_over() -> None:
    batch = Batch()
    unpinned = weakref.ref(batch)
    take = Batches(batch)
    with pinning(take, lambda _: "pinned", depth=2) as thread:
        del batch
        assert thread.next(DEADLINE_S) == "pinned"
        take.put("next")
        assert thread.next(DEADLINE_S) == "pinned"
        assert unpinned() is None


def test_every_batch_goes_to_one_of_several_consumers() -> None:
    count, consumers = 300, 4
    take = Batches(*range(count), StopIteration())
    got: list[list[int]] = [[] for _ in range(consumers)]
    with pinning(take) as thread:

        def consume(mine: list[int]) -> None:
            mine.extend(iter_of(thread))

        running = [threading.Thread(target=consume, args=(mine,)) for mine in got]
        for each in running:
            each.start()
        for each in running:
            each.join(DEADLINE_S)
        assert not any(each.is_alive() for each in running)
    assert sorted(number for mine in got for number in mine) == list(range(count))
    assert all(mine == sorted(mine) for mine in got)


def test_batch_that_comes_while_one_looks_is_announced_to_the_others() -> None:
    class Hooked(Wakeup):
        def clear(self) -> None:
            if not are_ready.is_set():
                take.put(1)
                take.put(2)
                assert are_ready.wait(DEADLINE_S)
            super().clear()

    are_ready = threading.Event()
    take = Batches()
    calls = 0

    def counted() -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            are_ready.set()
        return take()

    started = threading.Event()
    thread = PinThread(lambda: (started.wait(DEADLINE_S), counted())[1], same, 3, None)
    try:
        thread._arrived = Hooked()
        started.set()
        assert thread.try_next() == 1
        assert is_readable(thread.fileno(), 0)
    finally:
        take.end()
        thread.close()


def test_error_of_a_batch_goes_when_it_is_let_go_of() -> None:
    gone: list[weakref.ref[Batch]] = []

    def pin(batch: Any) -> Any:
        if isinstance(batch, Batch):
            gone.append(weakref.ref(batch))
            raise ValueError("cannot be pinned")
        return batch

    take = Batches(Batch())
    with pinning(take, pin) as thread:
        gc.disable()
        try:
            with suppress(ValueError):
                thread.next(DEADLINE_S)
            take.put("next")
            assert thread.next(DEADLINE_S) == "next"  # the thread is done with the one before
            assert gone[0]() is None
        finally:
            gc.enable()
