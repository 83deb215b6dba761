"""Workers from their start to their end: processes and threads, and what they share with the trainer."""

import gc
import os
import threading
from typing import Any, NamedTuple

import pytest
from drop_in.acting import Acting, Made, batches_of, read_all
from drop_in.classes import IMPORTS, PREAMBLE, in_processes
from process.waiting import is_running, run_script, wait_until
from torch.utils.data import get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

import headrace as hr


def test_objects_of_local_classes_are_of_the_trainers_class_when_workers_are_forked() -> None:
    class Local(NamedTuple):
        number: int

    loader = hr.DataLoader(Made(Local, 4), None, num_workers=2, multiprocessing_context="fork")
    assert [type(sample) is Local for sample in loader] == [True] * 4


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"economic": True}, {"workers": "thread"}])
@pytest.mark.parametrize("taken", [0, 1, 4])
def test_persistent_workers_are_replaced_after_their_iterator_was_closed(options: dict[str, Any], taken: int) -> None:
    loader = hr.DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=True, **options)
    for _ in range(2):
        iterator: Any = iter(loader)
        for _ in range(taken):
            next(iterator)
        iterator.close()
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    loader.close()


def test_threads_that_share_an_iterator_all_end_and_get_each_batch_once() -> None:
    iterator = iter(hr.DataLoader(range(400), batch_size=2, num_workers=2))
    got: list[list[int]] = []

    def take() -> None:
        got.extend(batch.tolist() for batch in iterator)

    threads = [threading.Thread(target=take, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert sorted(got) == [[k, k + 1] for k in range(0, 400, 2)]


@in_processes
def test_workers_can_be_looked_at_and_are_gone_when_the_iterator_is_exhausted(loader_class: type[Any]) -> None:
    iterator = iter(loader_class(range(8), batch_size=2, num_workers=2))
    workers = list(iterator._workers)
    assert [worker.is_alive() for worker in workers] == [True, True]
    assert [worker.exitcode for worker in workers] == [None, None]
    assert all(is_running(worker.pid) for worker in workers)
    assert len(list(iterator)) == 4
    for worker in workers:
        worker.join(20)
    assert not any(worker.is_alive() for worker in workers)
    assert [worker.exitcode for worker in workers] == [0, 0]
    wait_until(lambda: not any(is_running(worker.pid) for worker in workers), "they are gone")


@in_processes
def test_idle_worker_can_be_terminated(loader_class: type[Any]) -> None:
    loader = loader_class(range(8), batch_size=2, num_workers=1, persistent_workers=True, collate_fn=list)
    iterator = iter(loader)
    assert len(list(iterator)) == 4
    worker = iterator._workers[0]
    worker.join(0)
    assert worker.is_alive(), "an idle worker waits for the next epoch"
    worker.terminate()
    worker.join(20)
    assert not worker.is_alive()
    assert worker.exitcode is not None


def test_iterator_is_freed_by_its_last_reference_alone() -> None:
    loader = hr.DataLoader(range(40), batch_size=2, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    pids = [worker.pid for worker in iterator._workers]
    gc.disable()
    try:
        del iterator
        wait_until(lambda: not any(map(is_running, pids)), "the workers are gone")
    finally:
        gc.enable()


LIVE = """
loader = DataLoader(range(400), batch_size=2, num_workers=2, persistent_workers={persistent})
iterator = iter(loader)
print(next(iterator).tolist(), *(worker.pid for worker in iterator._workers))
{ending}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("persistent", "ending"), [(False, ""), (True, ""), (False, "raise ZeroDivisionError('of the trainer')")]
)
def test_live_iterator_does_not_hold_up_the_exit(loader_class: type[Any], persistent: bool, ending: str) -> None:
    code = IMPORTS[loader_class] + LIVE.format(persistent=persistent, ending=ending)
    returncode, out, err = run_script(code, preamble=PREAMBLE)
    assert (returncode, err.rstrip().endswith("ZeroDivisionError: of the trainer")) == (bool(ending), bool(ending)), err
    assert err == "" or ending
    pids = [int(pid) for pid in out.removeprefix("[0, 1] ").split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)), "the workers are gone")


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
