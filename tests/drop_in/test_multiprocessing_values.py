"""What multiprocessing makes for its children works in workers: locks, values, queues, connections."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
from privileges import may_open_any_mapping, without_privileges
from torch.utils.data import Dataset

import headrace as hr

COUNT = 40
SPAWNING = mp.get_context("spawn")
CONTEXTS = [
    pytest.param(
        mp.get_context("fork"),
        id="fork",
        marks=pytest.mark.skipif(not may_open_any_mapping(), reason="its locks have no names, and no descriptors"),
    ),
    pytest.param(SPAWNING, id="spawn"),
]
STYLES: list[dict[str, Any]] = [{}, {"economic": True}]


@pytest.fixture(scope="module", autouse=True)
def _memory_of_multiprocessing() -> None:
    """It keeps what it has reserved once, for the life of the process."""
    mp.RawArray("b", 2**20)


class Asked(Dataset[Any]):
    """What a function says of the data set and an index."""

    def __init__(self, ask: Callable[[Any, int], Any], **things: Any) -> None:
        self.ask = ask
        vars(self).update(things)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self.ask(self, index)


def told(dataset: Dataset[Any], **options: Any) -> list[Any]:
    """What workers say, without any collation."""
    with hr.DataLoader(dataset, 1, num_workers=2, collate_fn=lambda samples: samples[0], **options) as loader:
        return list(loader)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("context", CONTEXTS)
def test_value_counts_for_all_workers_under_its_lock(context: Any, style: dict[str, Any]) -> None:
    def count(self: Any, index: int) -> None:
        for _ in range(20):
            with self.count.get_lock():
                self.count.value += 1

    value = context.Value("q", 0)
    told(Asked(count, count=value), **style)
    assert value.value == 20 * COUNT, "none was lost: the lock is one for both"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Lock", "RLock", "Semaphore", "BoundedSemaphore", "Condition"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_lock_keeps_workers_out_while_the_trainer_holds_it(context: Any, kind: str) -> None:
    lock = getattr(context, kind)()
    data = Asked(lambda self, index: self.lock.acquire(False) and (self.lock.release() or True), lock=lock)
    with lock:
        assert told(data) == [False] * COUNT
    (first, *_) = told(data)
    assert first is True


@pytest.mark.parametrize("context", CONTEXTS)
def test_event_and_barrier_work_between_trainer_and_workers(context: Any) -> None:
    def pass_on(self: Any, index: int) -> Any:
        if index < 2:  # of each worker its first one
            self.barrier.wait()
        if index == 5:
            self.ready.set()
        return self.go.wait()

    ready, go = context.Event(), context.Event()
    data = Asked(pass_on, barrier=context.Barrier(2), ready=ready, go=go)
    with hr.DataLoader(data, None, num_workers=2, prefetch_factor=20) as loader:
        iterator = iter(loader)
        assert not ready.is_set()
        go.set()
        assert list(iterator) == [True] * COUNT
    assert ready.is_set()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Queue", "SimpleQueue", "JoinableQueue"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_queue_carries_from_workers_to_the_trainer_and_back(context: Any, kind: str) -> None:
    questions, answers = getattr(context, kind)(), getattr(context, kind)()
    data = Asked(lambda self, index: self.answers.put(self.questions.get() * 2), questions=questions, answers=answers)
    with hr.DataLoader(data, None, num_workers=2, prefetch_factor=COUNT, collate_fn=lambda sample: 0) as loader:
        iterator = iter(loader)
        for number in range(COUNT):
            questions.put(number)
        assert sorted(answers.get() for _ in range(COUNT)) == [2 * number for number in range(COUNT)]
        assert len(list(iterator)) == COUNT
    for queue in (questions, answers):
        queue.close()
        if hasattr(queue, "join_thread"):
            queue.join_thread()


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_connection_carries_from_a_worker_to_the_trainer(pipe: tuple[Connection, Connection], style: Any) -> None:
    ours, theirs = pipe
    data = Asked(lambda self, index: self.theirs.send(("hello", index)) if index == 3 else None, theirs=theirs)
    told(data, **style)
    assert ours.recv() == ("hello", 3)


@pytest.fixture
def pipe() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = mp.Pipe()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_functions_of_a_stream_have_locks_and_values_too() -> None:
    class Numbers(hr.AsyncDataset):
        def __len__(self) -> int:
            return COUNT

        async def aget(self, index: int) -> int:
            return index

    count = SPAWNING.Value("q", 0)

    def counted(index: int) -> int:
        with count.get_lock():
            count.value += 1
        return index

    with hr.DataLoader(Numbers().map(counted), batch_size=4, num_workers=2) as loader:
        for _ in range(2):
            assert sum(len(batch) for batch in loader) == COUNT
    assert count.value == 2 * COUNT


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Lock", "Event", "Value", "Queue"])
def test_lock_that_only_a_fork_can_have_is_an_error_that_says_what_to_do(kind: str) -> None:
    context: Any = mp.get_context("fork")
    thing = context.Value("q") if kind == "Value" else getattr(context, kind)()
    with without_privileges(), pytest.raises(hr.CannotCarryError, match=r"dataset\.thing.*get_context\(\"spawn\"\)"):
        told(Asked(lambda self, index: 0, thing=thing), fallback="error")
    if kind == "Queue":
        thing.close()
        thing.join_thread()


def test_descriptors_of_multiprocessing_are_as_many_in_each_epoch(pipe: tuple[Connection, Connection]) -> None:
    def look(self: Any, index: int) -> int:
        return len(os.listdir("/proc/self/fd"))

    data = Asked(look, ends=pipe, count=SPAWNING.Value("q"))
    with hr.DataLoader(data, None, num_workers=1, persistent_workers=True) as loader:
        (first,) = set(map(int, loader))
        (later,) = set(map(int, loader))
    assert first == later
