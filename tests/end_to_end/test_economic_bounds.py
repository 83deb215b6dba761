"""Economic mode: memory, deaths of workers and early ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.economic import KINDS, Function, Images, Loader, Make, Squares, as_list
from process.waiting import wait_until

import headrace as hr
from headrace.delivery.slabs import HELD_SLABS
from headrace.observe.report import verdict
from headrace.observe.stats import DeliverStats, FetchStats, Stats, WorkStats

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.usefixtures("warm_workers"),
]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["sample", "collate"])
@pytest.mark.parametrize("collate", [None, as_list])
def test_nothing_is_lost_when_a_worker_dies_in_a_batch(
    economic: Make, tmp_path: Path, collate: Any, where: str
) -> None:
    marks = [tmp_path / f"died{k}" for k in range(2)]

    def die_once(at: bool) -> None:
        for mark in marks:
            if at and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def sample(k: int) -> int:
        die_once(where == "sample" and k == 9)
        return k

    def collated(samples: list[int]) -> Any:
        die_once(where == "collate" and 9 in samples)
        return collate(samples)

    loader = economic(Function(sample, 40), batch_size=4, collate_fn=collate and collated)
    assert [int(n) for batch in loader for n in batch] == list(range(40))
    assert all(mark.exists() for mark in marks) == (where == "sample" or collate is not None)


def test_a_sample_that_ends_three_workers_is_named(economic: Make) -> None:
    def sample(k: int) -> int:
        if k == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return k

    iterator = iter(economic(Function(sample, 12), batch_size=4))
    assert next(iterator).tolist() == [0, 1, 2, 3]
    with pytest.raises(hr.WorkerDiedError, match=r"^DataLoader worker \(pid\(s\) \d+\) exited unexpectedly.*key 6"):
        next(iterator)
    assert next(iterator).tolist() == [8, 9, 10, 11]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("collate", [None, as_list])
def test_an_early_break_leaves_nothing_under_way(economic: Make, kind: str, collate: Any) -> None:
    loader = economic(Images(), kind=kind, batch_size=4, collate_fn=collate)
    runtime = loader.economy.runtime
    for _run in range(3):
        for number, _ in enumerate(loader):
            if number == 2:
                break
        del _
        wait_until(lambda: runtime._slabs.limit == 0, "the epoch has ended")
        wait_until(lambda: runtime._workers.is_idle, "")
        wait_until(lambda: not runtime._arena.leased_bytes, "inputs are free")
        wait_until(
            lambda: not runtime._slabs._out, "slabs are free"
        )  # the last batch's may be given back after all else
    assert len(list(loader)) == 10


class OpensSlowly:
    """A batch that takes longer to open than two batches take to arrive."""

    def __init__(self, samples: list[int]) -> None:
        self.samples = samples

    def __setstate__(self, state: dict[str, Any]) -> None:
        time.sleep(0.1)  # what opening takes: nothing is waited for
        self.__dict__.update(state)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch_factor", [1, 2])
def test_engine_has_keys_where_two_batches_are_received_before_one_is_given(prefetch_factor: int) -> None:
    options: dict[str, Any] = {"economic": True, "num_workers": 1, "device": "cpu", "timeout": 30}
    loader: Any = hr.DataLoader(
        range(40), batch_size=4, prefetch_factor=prefetch_factor, collate_fn=OpensSlowly, **options
    )
    assert [n for batch in loader for n in batch.samples] == list(range(40))
    loader.close()


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("collate", [None, as_list])
def test_memory_is_bounded_by_batches_and_not_by_workers(
    economic: Make, tmp_path: Path, num_workers: int, collate: Any
) -> None:
    log = tmp_path / "made"
    log.touch()

    def sample(k: int) -> torch.Tensor:
        with log.open("ab") as file:
            file.write(b".")
        return torch.full((50_000,), float(k))

    loader = economic(
        Function(sample, 48), batch_size=4, num_workers=num_workers, prefetch_factor=3, collate_fn=collate
    )
    slabs, arena = loader.economy.runtime._slabs, loader.economy.runtime._arena
    most = most_inputs = 0
    for number, _ in enumerate(loader):
        most = max(most, len(slabs.segments))
        most_inputs = max(most_inputs, arena.leased_bytes)
        assert log.stat().st_size <= 4 * (number + 1 + 3)
    assert most <= 3 + HELD_SLABS
    if collate is None:
        assert arena.segment_bytes == 0
    else:
        assert most_inputs <= 3 * 4 * 201_000
    assert log.stat().st_size == 48


def test_the_sampler_is_drawn_in_the_callers_thread_one_batch_for_each_next(economic: Make) -> None:
    drawn: list[int] = []

    class Counting:
        def __len__(self) -> int:
            return 20

        def __iter__(self) -> Iterator[int]:
            for k in range(20):
                assert threading.current_thread() is threading.main_thread()
                drawn.append(k)
                yield k

    iterator = iter(economic(Squares(20), sampler=Counting(), batch_size=2, prefetch_factor=3))
    assert len(drawn) == 6
    for number in range(1, 5):
        next(iterator)
        assert len(drawn) == min(20, 6 + 2 * number)


def test_collations_at_once_are_as_many_as_asked_for(economic: Make, tmp_path: Path) -> None:
    inside = tmp_path / "inside"

    def collate(samples: list[int]) -> tuple[list[int], bool]:
        is_alone = not inside.exists()
        inside.touch()
        time.sleep(0.005)
        inside.unlink(missing_ok=True)
        return samples, is_alone

    got = list(
        economic(Squares(60), batch_size=3, num_workers=3, prefetch_factor=4, num_batch_workers=1, collate_fn=collate)
    )
    assert all(is_alone for _, is_alone in got)
    assert [k for samples, _ in got for k in samples] == [k * k for k in range(60)]


def test_several_iterators_live_beside_one_another(economic: Make) -> None:
    loader = economic(Images(), batch_size=4)
    pairs = [(a[1].tolist(), b[1].tolist()) for a, b in zip(loader, loader, strict=True)]
    assert all(a == b for a, b in pairs)
    assert len(pairs) == 10


def test_an_iterator_outlives_its_loader() -> None:
    iterator = iter(Loader(Squares(), batch_size=4, num_workers=1))
    assert len(list(iterator)) == 6


def test_the_report_wants_more_batches_under_way_when_collating_is_slow() -> None:
    def bound(batches_at_once: int, collations_at_once: int, busy_s: dict[str, float]) -> Any:
        work = WorkStats(
            workers=8, busy_s=busy_s, batches_at_once=batches_at_once, collations_at_once=collations_at_once
        )
        deliver = DeliverStats(batches=50, samples=800, wait_s=8.0, trainer_s=2.0)
        snapshot = Stats(
            epoch=0, elapsed_s=10.0, fetch=FetchStats(), work=work, deliver=deliver, shared_bytes=0, budget_bytes=1,
            started_s=0.0,
        )  # fmt: skip
        return verdict(snapshot)

    slow = {"__getitem__": 32.0, "collate": 12.0}
    assert bound(2, 2, slow).bound_by == "collate"
    assert "prefetch_factor=4 and num_batch_workers=3" in bound(2, 2, slow).sentence
    assert "prefetch_factor" not in bound(4, 2, slow).sentence
    assert bound(4, 3, slow).bound_by == "work"
    assert bound(0, 0, slow).bound_by == "work"
    assert bound(2, 2, {"__getitem__": 48.0, "collate": 1.5}).bound_by == "work"
