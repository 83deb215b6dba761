"""Workers from their start to their end: what they know, what they carry, and that none outlives its iterator."""

from __future__ import annotations

import dataclasses
import gc
import threading
from typing import Any

import pytest
import torch
from drop_in.classes import ThreadLoader, in_processes
from process.waiting import is_running, wait_until
from torch.utils.data import Dataset, get_worker_info

import headrace as hr

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def as_is(samples: list[Any]) -> list[Any]:
    return samples


class Asking(Dataset[Any]):
    """Samples that are the answers of a function, called with the index where the sample is made."""

    def __init__(self, answer: Any, length: int = 4) -> None:
        self.answer, self.length = answer, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.answer(index)


def answers(loader_class: type[Any], answer: Any, *, length: int = 4, **options: Any) -> list[Any]:
    loader = loader_class(Asking(answer, length), batch_size=1, collate_fn=as_is, **options)
    return [sample for batch in loader for sample in batch]


def pids_of(iterator: Any) -> list[int]:
    return [worker.pid for worker in iterator._workers]


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)), f"the workers {pids} are gone")


# What a worker knows of itself


def test_worker_info_tells_id_count_and_seed_and_is_none_elsewhere(loader_class: type[Any]) -> None:
    def answer(index: int) -> tuple[Any, ...]:
        worker = get_worker_info()
        assert worker is not None
        return worker.id, worker.num_workers, worker.seed - worker.id, (worker.rng, worker.worker_method)

    got = answers(loader_class, answer, num_workers=2)
    assert [(number, count) for number, count, _, _ in got] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert len({base for _, _, base, _ in got}) == 1
    assert {rest for _, _, _, rest in got} == {(None, "thread" if loader_class is ThreadLoader else "multiprocessing")}
    assert get_worker_info() is None
    assert answers(loader_class, lambda index: get_worker_info(), num_workers=0) == [None] * 4


def test_worker_info_cannot_be_changed(loader_class: type[Any]) -> None:
    def answer(index: int) -> list[str]:
        worker = get_worker_info()
        refused = []
        for name in ("id", "num_workers", "seed", "dataset"):
            try:
                setattr(worker, name, 7)
            except (dataclasses.FrozenInstanceError, RuntimeError):  # the latter in older releases of torch
                refused.append(name)
        return refused

    assert answers(loader_class, answer, num_workers=1, length=1) == [["id", "num_workers", "seed", "dataset"]]


class Itself(Dataset[bool]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> bool:
        worker = get_worker_info()
        return worker is not None and worker.dataset is self


def test_worker_info_holds_the_data_set_that_makes_the_samples(loader_class: type[Any]) -> None:
    def init(worker_id: int) -> None:
        worker = get_worker_info()
        assert worker is not None and type(worker.dataset).__name__ == "Itself" and worker.id == worker_id

    assert torch.cat(list(loader_class(Itself(), num_workers=2, worker_init_fn=init))).tolist() == [True] * 3


# Persistent workers, several iterators, threads


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"economic": True}, {"workers": "thread"}])
@pytest.mark.parametrize("taken", [0, 1, 4])
def test_loader_of_persistent_workers_goes_on_with_others_when_its_iterator_was_closed(
    options: dict[str, Any], taken: int
) -> None:
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


# Their end


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
    wait_until_gone([worker.pid for worker in workers])


@in_processes
def test_idle_worker_can_be_terminated(loader_class: type[Any]) -> None:
    loader = loader_class(range(8), batch_size=2, num_workers=1, persistent_workers=True, collate_fn=as_is)
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
    pids = pids_of(iterator)
    gc.disable()
    try:
        del iterator
        wait_until_gone(pids)
    finally:
        gc.enable()
