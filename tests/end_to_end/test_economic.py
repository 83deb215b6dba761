"""Economic mode: all workers make the samples of one batch. Batches equal torch's."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.loops import flat, outcomes_of
from drop_in.acting import Acting, Made, raising
from process.waiting import wait_until
from torch.utils.data import Subset, get_worker_info
from torch.utils.data.dataloader import default_collate

import headrace as hr
from headrace.delivery.slabs import HELD_SLABS
from headrace.observe import DeliverStats, FetchStats, Stats, WorkStats
from headrace.observe.report import verdict
from headrace.testing.decoders import same

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.usefixtures("warm_server"),
]
KINDS = pytest.mark.parametrize("kind", ["process", "thread"])
Make = Callable[..., hr.DataLoader[Any]]


@pytest.fixture
def economic() -> Iterator[Make]:
    """Makes loaders in economic mode, which are closed after the test."""
    with ExitStack() as made:

        def make(data: Any, *, kind: str = "process", **options: Any) -> hr.DataLoader[Any]:
            settings = {"num_workers": 2, "prefetch_factor": 2, "memory_budget": 2**28, **options}
            return made.enter_context(hr.DataLoader(data, economic=True, workers=kind, **settings))

        yield make


def runtime_of(loader: Any) -> Any:
    return loader._behind._economy.runtime


def image(k: int) -> tuple[torch.Tensor, int]:
    """A sample that is large enough for slabs."""
    return torch.full((3, 100, 100), float(k)), k


def squared(k: int) -> int:
    return k * k


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"batch_size": 4, "drop_last": True},
        {"batch_size": 5, "shuffle": True, "collate_fn": list},
        {"batch_size": None},
        {"batch_size": 4, "sampler": torch.tensor([3, 1, 1, 7, 2])},
    ],
)
def test_batches_are_torchs_in_the_samplers_order(economic: Make, kind: str, options: dict[str, Any]) -> None:
    for data in (Made(squared, 23), Made(lambda k: k if k % 4 else k + 0.5)):  # of one form, and of several
        torch.manual_seed(7)
        wanted = list(torch.utils.data.DataLoader(data, **options))
        torch.manual_seed(7)
        got = list(economic(data, kind=kind, **options))
        assert same(got, wanted)


@KINDS
def test_samples_are_written_into_slots_when_they_are_of_one_form(economic: Make, kind: str) -> None:
    loader = economic(Made(image, 40), kind=kind, batch_size=6)
    seen = 0
    for number, (images, labels) in enumerate(loader):
        wanted = default_collate([image(k) for k in range(6 * number, min(40, 6 * number + 6))])
        assert images.equal(wanted[0])
        assert labels.equal(wanted[1])
        seen += len(labels)
    assert seen == 40
    stats = runtime_of(loader).stats(0)
    assert "collate" not in stats.work.busy_s
    assert stats.shared_bytes == runtime_of(loader)._slabs.nbytes  # nothing of it was input


def test_error_of_collate_replaces_its_batch_and_later_batches_follow(economic: Make) -> None:
    iterator = iter(economic(Made(lambda k: torch.ones(3 if k == 5 else 2)), batch_size=4))
    assert next(iterator).shape == (4, 2)
    with pytest.raises(RuntimeError, match=r"(?s)^Caught RuntimeError in DataLoader worker process \d.*stack expects"):
        next(iterator)
    assert [len(batch) for batch in iterator] == [4, 4, 4]

    def collate(samples: list[int]) -> list[int]:
        if 5 in samples:
            raise LookupError("five")
        return samples

    *got, error, last = outcomes_of(economic(list(range(8)), batch_size=2, collate_fn=collate))
    assert [*got, last] == [[0, 1], [2, 3], [6, 7]]
    assert str(error).splitlines()[-2] == "LookupError: five"


@pytest.mark.slow
@pytest.mark.parametrize("collate", [None, list])
@KINDS
def test_an_error_is_torchs_and_iteration_goes_on(economic: Make, kind: str, collate: Any) -> None:
    data = Acting(raising(lambda: ValueError("no sample 5")))
    iterator = iter(economic(data, kind=kind, batch_size=3, collate_fn=collate))
    assert list(next(iterator)) == [0, 1, 2]
    with pytest.raises(ValueError) as caught:
        next(iterator)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"Caught ValueError in DataLoader worker {kind} ")
    assert lines[1] == "Original Traceback (most recent call last):"
    assert "in __getitem__" in str(caught.value)
    assert "key 5" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(caught.value.__cause__) == "no sample 5"
    assert [list(batch) for batch in iterator] == [[6, 7, 8], [9, 10, 11], [12, 13, 14], [15, 16, 17], [18, 19]]


@pytest.mark.slow
@pytest.mark.parametrize("collate", [None, list])
@KINDS
def test_batches_are_as_long_as_the_batch_sampler_says(economic: Make, kind: str, collate: Any) -> None:
    plan = [[3, 1], [0], [5, 4, 2, 8, 9, 7, 11], [6], list(range(20)), [1, 1, 1]]
    loader = economic(Made(image, 40), kind=kind, batch_sampler=plan, collate_fn=collate)
    got = list(loader)
    if collate is None:
        assert [labels.tolist() for _, labels in got] == plan
        assert all(images[:, 2, 9, 9].tolist() == labels.tolist() for images, labels in got)
        assert "collate" not in runtime_of(loader).stats(0).work.busy_s
    else:
        assert [[label for _, label in batch] for batch in got] == plan
    assert [len(b) for b in economic(Made(squared), batch_sampler=[[], [1], [], [], [2, 3], []], collate_fn=list)] == [
        *(0, 1, 0, 0, 2, 0)
    ]


class AnyKey(Made):
    def __getitem__(self, key: Any) -> tuple[str, float]:
        return repr(key), hr.rng().random()


KEYS = ["a", "ä", 3, -4, 2**70, (1, "b"), None, b"c", 1.5, frozenset({"x"}), np.int64(9), torch.tensor(8)]


@KINDS
def test_keys_are_of_any_type_and_random_numbers_go_by_them(economic: Make, kind: str) -> None:
    def drawn(keys: list[Any], **options: Any) -> dict[str, float]:
        torch.manual_seed(1)
        return dict(flat(economic(AnyKey(repr), kind=kind, sampler=keys, collate_fn=list, **options)))

    first = drawn(KEYS, batch_size=5)
    assert list(first) == [repr(key) for key in KEYS]
    assert drawn(KEYS[::-1], batch_size=2, num_workers=1) == first
    assert len(set(first.values())) == len(KEYS)


def test_random_numbers_of_collate_do_not_depend_on_workers(economic: Make) -> None:
    def drawn(**options: Any) -> list[Any]:
        torch.manual_seed(3)
        return list(economic(Made(int, 24), batch_size=6, collate_fn=lambda samples: torch.rand(3).tolist(), **options))

    first = drawn(num_workers=1)
    assert drawn(num_workers=4) == drawn(num_batch_workers=1) == first
    assert len({tuple(batch) for batch in first}) == 4


@KINDS
def test_workers_answer_as_torchs_do(economic: Make, kind: str) -> None:
    def tell(_: int) -> Any:
        info = get_worker_info()
        return info.id, info.num_workers, info.seed, info.dataset.begun, type(info.dataset).__name__, os.getpid()

    def begin(number: int) -> None:
        info = get_worker_info()
        assert info.id == number
        if kind == "process":
            info.dataset.begun = number
            assert torch.get_num_threads() == 1

    data = Made(tell, 30)
    data.begun = None  # type: ignore[attr-defined]
    torch.manual_seed(5)
    base = torch.empty((), dtype=torch.int64).random_().item()
    torch.manual_seed(5)
    got = flat(economic(data, kind=kind, batch_size=3, worker_init_fn=begin, collate_fn=list))
    for number, count, seed, begun, name, pid in got:
        assert (count, seed, name) == (2, base + number, "Made")
        assert begun == (number if kind == "process" else None)
        assert (pid == os.getpid()) == (kind == "thread")
    assert get_worker_info() is None

    def fail(_: int) -> None:
        raise ValueError("not today")

    with pytest.raises(ValueError, match=r"(?s)Caught ValueError in DataLoader worker.*not today"):
        next(iter(economic(Made(squared), kind=kind, worker_init_fn=fail)))


@pytest.mark.parametrize("persistent", [False, True])
def test_data_set_is_sent_again_without_persistent_workers(economic: Make, tmp_path: Path, persistent: bool) -> None:
    begun = tmp_path / "begun"

    def begin(number: int) -> None:
        with begun.open("a") as file:
            file.write(f"{number} ")

    data = Made(int, 3)
    loader = economic(data, batch_size=3, persistent_workers=persistent, worker_init_fn=begin, num_workers=1)
    assert [b.tolist() for b in loader] == [[0, 1, 2]]
    data.make = lambda k: torch.full((2,), k)
    assert [b.tolist() for b in loader] == ([[0, 1, 2]] if persistent else [[[0, 0], [1, 1], [2, 2]]])
    assert begun.read_text().split() == ["0"] * (1 if persistent else 2)


class Many(Made):
    def __init__(self, count: int, lacks: int = 0) -> None:
        super().__init__(int, count)
        self.lacks = lacks

    def __getitems__(self, keys: list[int]) -> list[tuple[int, int]]:
        return [(k, len(keys)) for k in keys[self.lacks :]]


@KINDS
def test_getitems_of_the_data_set_is_used(economic: Make, kind: str) -> None:
    got = list(economic(Many(24), kind=kind, batch_size=12, collate_fn=list))
    assert [k for batch in got for k, _ in batch] == list(range(24))
    assert {count for batch in got for _, count in batch} <= {3, 6}
    assert flat(economic(Subset(Made(squared), [3, 4]), kind=kind, collate_fn=list)) == [9, 16]
    with pytest.raises(ValueError, match="__getitems__ gave 1 samples for 2 keys"):
        next(iter(economic(Many(8, lacks=1), kind=kind, batch_size=8)))


@KINDS
def test_batches_arrive_in_any_order(economic: Make, kind: str) -> None:
    got = [batch.tolist() for batch in economic(Made(squared, 23), kind=kind, batch_size=4, in_order=False)]
    assert sorted(got) == [[k * k for k in range(a, min(a + 4, 23))] for a in range(0, 23, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["sample", "collate"])
@pytest.mark.parametrize("collate", [None, list])
def test_nothing_is_lost_when_a_worker_dies(economic: Make, tmp_path: Path, collate: Any, where: str) -> None:
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

    loader = economic(Made(sample, 40), batch_size=4, collate_fn=collate and collated)
    assert [int(n) for batch in loader for n in batch] == list(range(40))
    assert all(mark.exists() for mark in marks) == (where == "sample" or collate is not None)


def test_a_sample_that_ends_three_workers_is_named(economic: Make) -> None:
    def sample(k: int) -> int:
        if k == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return k

    iterator = iter(economic(Made(sample, 12), batch_size=4))
    assert next(iterator).tolist() == [0, 1, 2, 3]
    with pytest.raises(
        hr.errors.WorkerDiedError, match=r"^DataLoader worker \(pid\(s\) \d+\) exited unexpectedly.*key 6"
    ):
        next(iterator)
    assert next(iterator).tolist() == [8, 9, 10, 11]


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("collate", [None, list])
def test_early_break_releases_all_memory(economic: Make, kind: str, collate: Any) -> None:
    loader = economic(Made(image, 40), kind=kind, batch_size=4, collate_fn=collate)
    runtime = runtime_of(loader)
    for _run in range(3):
        for number, _ in enumerate(loader):
            if number == 2:
                break
        del _
        wait_until(lambda: runtime._slabs.limit == 0, "the epoch has ended")
        wait_until(lambda: runtime._workers.is_idle, "")
        wait_until(lambda: not runtime._arena.leased_bytes, "inputs are free")
        wait_until(lambda: not runtime._slabs._out, "slabs are free")  # the last one may be given back after all else
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
    options: Any = {"economic": True, "num_workers": 1, "device": "cpu", "prefetch_factor": prefetch_factor}
    with hr.DataLoader(range(40), batch_size=4, collate_fn=OpensSlowly, timeout=30, **options) as loader:
        assert [n for batch in loader for n in batch.samples] == list(range(40))


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("collate", [None, list])
def test_memory_is_bounded_by_batches(economic: Make, tmp_path: Path, num_workers: int, collate: Any) -> None:
    log = tmp_path / "made"
    log.touch()

    def sample(k: int) -> torch.Tensor:
        with log.open("ab") as file:
            file.write(b".")
        return torch.full((50_000,), float(k))

    options = {"batch_size": 4, "num_workers": num_workers, "prefetch_factor": 3}
    loader = economic(Made(sample, 48), collate_fn=collate, **options)
    slabs, arena = runtime_of(loader)._slabs, runtime_of(loader)._arena
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

    iterator = iter(economic(Made(squared), sampler=Counting(), batch_size=2, prefetch_factor=3))
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

    options = {"batch_size": 3, "num_workers": 3, "prefetch_factor": 4, "num_batch_workers": 1}
    got = list(economic(Made(squared, 60), collate_fn=collate, **options))
    assert all(is_alone for _, is_alone in got)
    assert [k for samples, _ in got for k in samples] == [k * k for k in range(60)]


def test_several_iterators_of_a_loader_work_at_once_and_outlive_it(economic: Make) -> None:
    loader = economic(Made(image, 40), batch_size=4)
    pairs = [(a[1].tolist(), b[1].tolist()) for a, b in zip(loader, loader, strict=True)]
    assert all(a == b for a, b in pairs)
    assert len(pairs) == 10
    iterator = iter(hr.DataLoader(Made(squared, 23), batch_size=4, num_workers=1, economic=True))
    assert len(list(iterator)) == 6


def test_report_advises_more_batches_at_once_when_collating_is_slow() -> None:
    def bound(batches: int, collations: int, getitem_s: float = 32.0, collate_s: float = 12.0) -> Any:
        busy_s = {"__getitem__": getitem_s, "collate": collate_s}
        work = WorkStats(workers=8, busy_s=busy_s, batches_at_once=batches, collations_at_once=collations)
        deliver = DeliverStats(batches=50, samples=800, wait_s=8.0, trainer_s=2.0)
        rest: Any = {"epoch": 0, "elapsed_s": 10.0, "started_s": 0.0, "shared_bytes": 0, "budget_bytes": 1}
        return verdict(Stats(fetch=FetchStats(), work=work, deliver=deliver, **rest))

    assert bound(2, 2).bound_by == "collate"
    assert "prefetch_factor=4 and num_batch_workers=3" in bound(2, 2).sentence
    assert "prefetch_factor" not in bound(4, 2).sentence
    assert bound(4, 3).bound_by == bound(0, 0).bound_by == bound(2, 2, 48.0, 1.5).bound_by == "work"
