"""Workers that are threads: what they share with the trainer, and what they do not."""

import os
import threading
from typing import Any

import pytest
from drop_in.acting import Acting, Made, batches_of
from drop_in.reading import read_all
from torch.utils.data import get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

import headrace as hr


def test_data_set_in_a_thread_is_the_trainers_own_object() -> None:
    asked: list[int] = []
    data = Acting(asked.append, at=tuple(range(20)))
    loader = hr.DataLoader(data, collate_fn=lambda samples: get_worker_info().dataset, num_workers=1, workers="thread")
    assert all(batch is data for batch in loader)
    assert asked == list(range(20))


def test_batch_of_a_thread_is_the_very_object_that_collate_fn_gave_whether_it_pickles_or_not() -> None:
    made: list[Any] = []

    def collate(samples: list[int]) -> Any:
        made.append([threading.Lock(), samples])
        return made[-1]

    batches = list(hr.DataLoader(range(20), 4, collate_fn=collate, num_workers=1, workers="thread"))
    assert [samples for _, samples in batches] == batches_of(4)
    assert all(batch is of for batch, of in zip(batches, made, strict=True))


def test_nothing_keeps_a_threads_batch_when_the_epoch_is_left_before_its_turn() -> None:
    gone = threading.Semaphore(0)

    class Batch:
        def __del__(self) -> None:
            gone.release()

    arrived = threading.Semaphore(0)

    def collate(samples: list[int]) -> Any:
        arrived.release()
        return Batch()

    iterator = iter(hr.DataLoader(range(8), collate_fn=collate, num_workers=1, workers="thread", prefetch_factor=3))
    for _ in range(3):
        assert arrived.acquire(timeout=20)
    del iterator
    for _ in range(3):
        assert gone.acquire(timeout=20)


def test_workers_are_threads_of_this_process_that_end_with_the_iterator() -> None:
    iterator = iter(hr.DataLoader(range(8), num_workers=2, workers="thread", collate_fn=list))
    workers = list(iterator._workers)
    assert {worker.pid for worker in workers} == {os.getpid()}
    assert [(worker.is_alive(), worker.exitcode) for worker in workers] == [(True, None)] * 2
    assert next(iterator) == [0]
    del iterator
    for worker in workers:
        worker.join(20)
    assert [(worker.is_alive(), worker.exitcode) for worker in workers] == [(False, 0)] * 2


@pytest.mark.filterwarnings("ignore:Local function is not supported by pickle:UserWarning")
def test_graph_is_each_threads_own_copy_and_may_hold_lambdas() -> None:
    graph = IterableWrapper(range(20)).sharding_filter().map(lambda x: x)
    loader = hr.DataLoader(graph, None, num_workers=2, workers="thread")
    for _ in range(2):
        assert read_all(iter(loader)) == list(range(20))


def test_worker_info_is_each_threads_own_and_the_trainers_stays_none() -> None:
    met = threading.Barrier(2)

    def ask(index: int) -> Any:
        met.wait(20)
        worker = get_worker_info()
        return index, worker.id, worker.num_workers, worker.worker_method

    loader = hr.DataLoader(Made(ask, 2), None, num_workers=2, workers="thread")
    assert list(loader) == [[0, 0, 2, "thread"], [1, 1, 2, "thread"]]
    assert get_worker_info() is None
