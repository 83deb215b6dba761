"""Batches of samples that are slow to come: the wait for missing samples is bounded."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from builders.loops import flat, lists, loaded
from builders.numbers import Made, streamed

import headrace as hr

LONG_S = 3600.0  # a test that waited for it would not end


def first_ten() -> hr.AsyncIterableDataset:
    return streamed(range(10), "position")


class Messages(hr.AsyncIterableDataset):
    """Endless numbers that the test sends."""

    ranks_by = "shard_info"

    def __init__(self) -> None:
        self.next = 0
        self._may, self._more = 0, threading.Condition()

    def send(self, count: int) -> None:
        with self._more:
            self._may += count
            self._more.notify_all()

    async def aiter(self) -> AsyncIterator[int]:
        while True:
            while self.next >= self._may:
                await asyncio.to_thread(self._wait)
            self.next += 1
            yield self.next - 1

    def _wait(self) -> None:
        with self._more:
            self._more.wait_for(lambda: self.next < self._may, timeout=0.1)  # a loader may be closed meanwhile


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_batch_is_emitted_without_samples_that_do_not_arrive(workers: int) -> None:
    messages = Messages()
    with hr.DataLoader(messages.map(abs).batch(4, max_wait_s=0.02), num_workers=workers, timeout=60) as loader:
        batches, came = iter(loader), list[int]()
        for count in (1, 3, 9, 2):
            messages.send(count)
            wanted = len(came) + count
            while len(came) < wanted:
                batch = next(batches)
                assert 1 <= len(batch) <= 4
                came += batch.tolist()
        assert came == list(range(15))


@pytest.mark.parametrize(("workers", "kind"), [(0, "process"), (2, "thread"), (2, "process")])
def test_finished_batches_do_not_wait_for_a_function_that_waits_for_the_trainer(
    workers: int, kind: Literal["process", "thread"], tmp_path: Path
) -> None:
    waits_at, after = (403, 777), dict[int, dict[str, object]]()

    def waits(number: int) -> int:
        late_s = time.monotonic() + 60
        while number in waits_at and not (tmp_path / str(number)).exists():
            assert time.monotonic() < late_s
            time.sleep(0.01)
        return number

    stream = hr.from_map(range(1000)).map(waits)
    with hr.DataLoader(stream, batch_size=4, num_workers=workers, workers=kind, timeout=90) as loader:
        came = list[int]()
        for batch in loader:
            came += batch.tolist()
            for number in waits_at:
                if number - 4 < len(came) <= number:
                    (tmp_path / str(number)).touch()
                    after[len(came)] = loader.state_dict()
        assert came == list(range(1000))
    for count, state in after.items():
        with hr.DataLoader(stream, batch_size=4) as resumed:
            resumed.load_state_dict(state)
            assert flat(lists(resumed)) == list(range(count, 1000))


def test_batch_is_emitted_without_slow_samples_of_a_map() -> None:
    may_go = threading.Event()

    async def slow(key: int) -> int:
        while key >= 3 and not may_go.is_set():
            await asyncio.to_thread(may_go.wait, 0.1)
        return key

    with hr.DataLoader(Made(slow).batch(8, max_wait_s=0.02), timeout=60) as loader:
        batches, came = iter(loader), list[int]()
        while len(came) < 3:
            came += next(batches).tolist()
        may_go.set()
        assert came + flat(lists(batches)) == list(range(8))


def test_ranks_make_as_many_steps_of_batches_of_any_size() -> None:
    """All that ranks that train together need: none may wait for a step that the others do not make."""
    came = []
    for rank in range(2):
        stream = first_ten().batch(2, max_wait_s=LONG_S).epoch(samples=4)
        with hr.DataLoader(stream, ranks=hr.Ranks(rank=rank, world_size=2), timeout=60) as loader:
            batches = lists(loader)
            assert len(batches) == 2
            came += flat(batches)
    assert sorted(came) == list(range(8))
    with pytest.raises(hr.OptionError, match="come to their end on rank 0 of 2 after 3 of 4 batches"):
        loaded(first_ten().batch(2, max_wait_s=LONG_S).epoch(samples=8), ranks=hr.Ranks(rank=0, world_size=2))
    with pytest.raises(hr.OptionError, match=r"last_batch='uneven'.*\.epoch\(samples=N\)"):
        loaded(first_ten().batch(2, max_wait_s=1), ranks=hr.Ranks(rank=0, world_size=2))


def batches_of(stream: hr.Stream, ranks: int, steps: int | None, state: Any) -> tuple[list[list[int]], Any]:
    """(what ranks get in so many steps or all, one state of all of them)."""
    loaders = [
        hr.DataLoader(stream, ranks=hr.Ranks(rank=rank, world_size=ranks), batch_size=None, timeout=60)
        for rank in range(ranks)
    ]
    try:
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        came = [
            [sample.reshape(-1).tolist() for sample in itertools.islice(map(torch.as_tensor, loader), steps)]
            for loader in loaders
        ]
        return [*itertools.chain(*came)], json.loads(
            json.dumps(hr.merge_states([loader.state_dict() for loader in loaders]))
        )
    finally:
        for loader in loaders:
            loader.close()


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("wait_s", [LONG_S, 1e-6, None])
def test_merged_states_resume_on_other_ranks(before: int, after: int, wait_s: float | None) -> None:
    """As of samples that are counted as they come and given one by one, for which nothing waits."""
    data = hr.from_map(range(72)).shuffle()
    if wait_s is None:
        stream = data.filter(lambda n: n < 60).epoch(samples=48)
    else:
        stream = data.batch(4, max_wait_s=wait_s).epoch(samples=12)
    first, state = batches_of(stream, before, 2, None)
    rest, _ = batches_of(stream, after, None, state)
    numbers = [n for batch in first + rest for n in batch]
    assert len(first) + len(rest) == (48 if wait_s is None else 12)
    assert len(numbers) == len(set(numbers))
    if wait_s == LONG_S:
        assert len(numbers) == 48


def test_failed_samples_are_skipped_and_no_batch_is_empty() -> None:
    def broken(n: int) -> int:
        if n < 5:
            raise ValueError(f"{n} is damaged")
        return n

    stream = first_ten().map(broken).batch(4, max_wait_s=LONG_S)
    assert stream.describe().splitlines()[-1] == "  .batch(4, max_wait_s=3600)  [workers]"
    with hr.DataLoader(stream, errors=hr.Skip()) as loader:
        assert [batch.tolist() for batch in loader] == [[5, 6, 7], [8, 9]]
        assert loader.stats().skipped == 5


NO_TIMES = (0, -1, float("nan"), float("inf"), "1", True, torch.ones(2))


def timed(max_wait_s: Any, _: Any = None) -> hr.Stream:
    return first_ten().batch(4, max_wait_s=max_wait_s)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda data: data.filter(len), r"\.filter\(len\) cannot follow \.batch\(4, max_wait_s=1\): .* time cuts"),
        (lambda data: data.unbatch(), r"\.unbatch\(\) cannot"),
        (lambda data: data.flat_map(list), r"\.flat_map\(list\) cannot"),
        (lambda data: data.map(list).batch(2), r"\.batch\(2\) cannot"),
        (lambda data: data.take(3).padded_batch(2), r"\.padded_batch\(2\) cannot"),
        (lambda data: data.bucket(len, [3], batch_size=2), r"\.bucket\(len, \[3\], batch_size=2\) cannot"),
        (lambda data: data.batch(2, max_wait_s=2), r"\.batch\(2, max_wait_s=2\) cannot"),
        (lambda data: data.collate(list).collate(list), "makes batches of lists"),
        (lambda data: hr.DataLoader(data, collate_fn=list), r"collate_fn=list and .*: put \.collate\(list\) right"),
        (lambda data: hr.DataLoader(data, batch_size=3), r"batch_size=3 and \.batch\(4, max_wait_s=1\) exclude"),
        (lambda data: hr.DataLoader(data, drop_last=True), r"drop_last=True and \.batch\(4, max_wait_s=1\)"),
        (lambda data: hr.DataLoader(data, in_order=False), r"in_order=False and \.batch\(4, max_wait_s=1\)"),
        (lambda _: first_ten().batch(4, drop_last=True, max_wait_s=2), "drop_last"),
        *((partial(timed, wait_s), "must be a number of seconds above 0") for wait_s in NO_TIMES),
    ],
)
def test_operators_whose_result_would_depend_on_time_are_refused(make: Callable[[hr.Stream], Any], match: str) -> None:
    with pytest.raises(hr.OptionError, match=match):
        make(timed(1))
