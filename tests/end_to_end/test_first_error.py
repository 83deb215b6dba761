"""The first error of a batch is raised as soon as no earlier sample can fail."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from builders.loops import first_of
from builders.numbers import Iterated, Made
from builders.tars import number_of, numbered_samples, put_shards, tar
from end_to_end.state.runs import take

import headrace as hr
from headrace.testing import FaultServer

WORKERS = [0, 2]


def waiting(bad: int, missing: range) -> Made:
    """160 samples. One fails, and some others never come."""

    async def get(index: int) -> int:
        if index == bad:
            raise ValueError(f"sample {index}")
        if index in missing:
            await asyncio.Event().wait()
        return index

    return Made(get, 160)


def is_kept(_: Any) -> bool:
    return True


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("collate", [None, list])
@pytest.mark.parametrize("bad", [0, 5, 40])
def test_first_error_is_raised_when_later_samples_never_come(bad: int, collate: Any, num_workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 64, "collate_fn": collate, "num_workers": num_workers}
    with hr.DataLoader(waiting(bad, range(bad + 1, 64)), **options) as loader:
        batches = iter(loader)
        with pytest.raises(ValueError, match=f"^sample {bad}\n"):
            next(batches)
        assert [int(k) for batch in batches for k in batch] == list(range(64, 160))
        assert loader.stats().fetch.claimed_bytes == 0
        assert loader.stats().fetch.input_bytes == 0
    with pytest.raises(ValueError, match=f"^sample {bad}\n"):
        first_of(waiting(bad, range(bad + 1, 160)).filter(is_kept), **options)


@pytest.mark.parametrize("num_workers", WORKERS)
def test_earlier_error_is_raised_when_a_later_one_came_first(num_workers: int) -> None:
    is_later_told = threading.Event()

    async def get(index: int) -> int:
        if index == 9:
            is_later_told.set()
            raise ValueError("the later one")
        if index == 4:
            await asyncio.to_thread(is_later_told.wait)
            raise ValueError("the earlier one")
        if index > 9:
            await asyncio.Event().wait()
        return index

    with hr.DataLoader(Made(get, 64), batch_size=64, num_workers=num_workers) as loader:
        batches = iter(loader)
        with pytest.raises(ValueError, match="the earlier one"):
            next(batches)
        assert list(batches) == []


@pytest.mark.parametrize("num_workers", WORKERS)
def test_error_of_an_asynchronous_step_is_raised_when_the_next_sample_never_comes(num_workers: int) -> None:
    async def two_samples() -> AsyncIterator[int]:
        yield 0
        yield 1
        await asyncio.Event().wait()

    async def fails(sample: int) -> int:
        if sample:
            raise ValueError("no ones")
        return sample

    with pytest.raises(ValueError, match="no ones"):
        first_of(Iterated(two_samples).map(fails), batch_size=64, num_workers=num_workers)


def served(server: FaultServer, count: int, silent: range, size: int = 10) -> list[str]:
    return [
        server.add(f"{k}.tar", tar(numbered_samples(k * size, size, 10)), *(["hang"] if k in silent else []))
        for k in range(count)
    ]


def no_threes(sample: dict[str, bytes]) -> int:
    if sample["cls"] == b"3":
        raise ValueError("no threes")
    return int(sample["cls"])


def shards_behind_a_missing_one(server: FaultServer) -> Any:
    urls = served(server, 12, range(2, 12))
    return hr.stream([urls[0], f"{server.url}/missing.tar", *urls[2:]]).to_tuple("cls")


def files_behind_a_missing_one(server: FaultServer) -> Any:
    return hr.files([f"{server.url}/missing.bin", *(server.add(f"{k}.bin", b"x", "hang") for k in range(63))])


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(
    ("make", "collate", "error"),
    [
        (shards_behind_a_missing_one, None, hr.errors.ObjectMissingError),
        (shards_behind_a_missing_one, list, hr.errors.ObjectMissingError),
        (lambda server: hr.stream(served(server, 12, range(1, 12))).map(no_threes), None, ValueError),
        (files_behind_a_missing_one, None, hr.errors.ObjectMissingError),
    ],
)
def test_first_error_needs_no_later_answer(make: Any, collate: Any, error: Any, num_workers: int) -> None:
    with FaultServer() as server, pytest.raises(error, match=r"missing|no threes"):
        first_of(make(server), batch_size=64, collate_fn=collate, num_workers=num_workers)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", WORKERS)
def test_iteration_and_states_continue_after_the_batch_of_a_failed_shard(num_workers: int) -> None:
    with FaultServer() as server:
        urls = served(server, 12, range(0), 20)
        urls[1] = f"{server.url}/missing.tar"
        urls[6] = f"{server.url}/missing.tar"
        data = hr.stream(urls).map(number_of)

        def loader() -> hr.DataLoader[Any]:
            return hr.DataLoader(data, batch_size=32, num_workers=num_workers, collate_fn=list)

        with loader() as first:
            told = list(failures_too(first))
        # samples 0 to 19, a failure, 40 to 119, a failure, and 140 to 239
        numbers = [*range(20), None, *range(40, 120), None, *range(140, 240)]
        cut = [numbers[k : k + 32] for k in range(0, len(numbers), 32)]
        assert ["missing.tar" if None in batch else batch for batch in cut] == [
            "missing.tar" if "missing.tar" in outcome else outcome for outcome, _ in told
        ]
        check_states(loader, told, [] if num_workers == 0 else [3])


def failures_too(loader: hr.DataLoader[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each batch, or the text of its error, with the state after it."""
    batches = iter(loader)
    while (outcome := take(batches)) is not None:
        if isinstance(outcome, Exception):
            outcome = getattr(outcome, "url", "") or str(outcome).partition("\n")[0]
        yield outcome, loader.state_dict()


def check_states(
    loader: Callable[[], hr.DataLoader[Any]], told: list[tuple[Any, dict[str, Any]]], places: Sequence[int] = ()
) -> None:
    """See that from each state on the same follows: an error is used up once the next batch is asked for."""
    for at in places or range(len(told)):
        outcome, state = told[at]
        with loader() as resumed:
            resumed.load_state_dict(state)
            wanted = told[at:] if isinstance(outcome, str) else told[at + 1 :]
            assert [outcome for outcome, _ in failures_too(resumed)] == [outcome for outcome, _ in wanted]


def test_states_are_exact_when_shards_fail_after_an_earlier_error() -> None:
    urls = put_shards("first-error", [1] * 96, 10)
    for missing in (0, 20, 40):
        urls[missing] = f"memory://first-error/missing-{missing}.tar"

    def loader() -> hr.DataLoader[Any]:
        return hr.DataLoader(hr.stream(urls).map(number_of), batch_size=32, collate_fn=list, num_workers=0)

    with loader() as first:
        told = list(failures_too(first))
    assert ["missing-0.tar" in told[0][0], "missing-40.tar" in told[1][0]] == [True, True]
    assert told[2][0] == list(range(64, 96))
    check_states(loader, told)


def test_states_of_a_filter_are_exact_when_an_error_came_first() -> None:
    first_told: Future[None] = Future()

    async def get(index: int) -> int:
        if index in (0, 17):
            raise ValueError(f"sample {index}")
        await asyncio.wrap_future(first_told)
        return index

    def loader() -> hr.DataLoader[Any]:
        return hr.DataLoader(Made(get, 48).filter(is_kept), batch_size=8, collate_fn=list, num_workers=0)

    with loader() as first:
        outcomes = failures_too(first)
        told = [next(outcomes)]
        first_told.set_result(None)
        told += outcomes
    batches = [list(range(k, k + 8)) for k in (8, 24, 32, 40)]
    assert [outcome for outcome, _ in told] == ["sample 0", batches[0], "sample 17", *batches[1:]]
    check_states(loader, told)
