"""Operators that group samples: order, errors, ranks, refusals, and arrays that are decoded together."""

from __future__ import annotations

import io
import os
import signal
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from builders import loops
from builders.loops import outcomes_of, resumed_anywhere, state_after
from end_to_end.tars import tar
from unit.batchers import Buckets, Budget

import headrace as hr
from headrace.fetch.stores import memory
from headrace.ops import registry as registered


@pytest.fixture(autouse=True)
def _operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "_registered", dict(registered._registered))
    hr.plugins.register_operator(
        "budget", lambda most, **more: hr.plugins.BatchOp(batcher=lambda: Budget(most), measure=weight, **more)
    )
    hr.plugins.register_operator(
        "buckets",
        lambda size, drop_last=False: hr.plugins.BatchOp(
            batcher=lambda: Buckets(size, drop_last=drop_last), measure=weight
        ),
    )
    hr.plugins.register_operator("pairs", lambda: hr.plugins.BatchOp(batcher=lambda: Budget(2)))
    hr.plugins.register_operator("strict", lambda: hr.plugins.BatchOp(batcher=Strict, measure=weight))


class Strict(Budget):
    """It takes no sample of 9."""

    def __init__(self) -> None:
        super().__init__(10)

    def offer(self, measure: int) -> Any:
        if measure == 9:
            raise ValueError("a sample of 9")
        return super().offer(measure)


def weight(n: Any) -> int:
    return int(n if isinstance(n, int) else sum(n))


def broken_at_7(n: int) -> int:
    if n == 7:
        raise ValueError("sample 7 is damaged")
    return n


async def as_it_is(n: Any) -> Any:
    return n


def odd(n: int) -> bool:
    return n % 2 == 1


def got(data: hr.Stream, **options: Any) -> list[Any]:
    with hr.DataLoader(data, **{"batch_size": None, **options}) as loader:
        return [
            "; ".join([str(one), *one.__notes__]) if isinstance(one, Exception) else one for one in outcomes_of(loader)
        ]


STREAMS: dict[str, tuple[Callable[[hr.Stream], hr.Stream], list[Any]]] = {
    "at once": (lambda data: data.apply_op("budget", 9), [[0, 1, 2, 3], [4, 5], [6], [7], [8], [9], [10]]),
    "not measured": (lambda data: data.apply_op("pairs"), [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]),
    "after a coroutine": (
        lambda data: data.map(as_it_is).apply_op("budget", 9).map(as_it_is).map(sum),
        [6, 9, 6, 7, 8, 9, 10],
    ),
    "after a filter": (lambda data: data.filter(odd).apply_op("budget", 9), [[1, 3, 5], [7], [9]]),
    "taken": (lambda data: data.apply_op("budget", 9).take(2), [[0, 1, 2, 3], [4, 5]]),
    "taken before": (lambda data: data.filter(odd).take(3).apply_op("budget", 9), [[1, 3, 5]]),
    "first ones taken": (lambda data: data.take(5).apply_op("budget", 9), [[0, 1, 2, 3], [4]]),
    "of groups": (lambda data: data.apply_op("pairs").apply_op("budget", 14).map(len), [2, 1, 1, 1, 1]),
    "apart": (lambda data: data.apply_op("buckets", 3).flat_map(list), [0, 3, 6, 1, 4, 7, 2, 5, 8, 9, 10]),
    "whole ones": (lambda data: data.apply_op("buckets", 3, drop_last=True), [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
    "of a batch": (
        lambda data: data.batch(2).unbatch().map(int).apply_op("budget", 9, collate=sum),
        [6, 9, 6, 7, 8, 9, 10],
    ),
    "none": (lambda data: data.filter(lambda n: False).apply_op("buckets", 2), []),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_groups_are_samples_of_what_follows(name: str) -> None:
    make, expected = STREAMS[name]
    assert got(make(hr.from_map(range(11)))) == expected


def test_groups_are_put_in_batches_and_collated_by_the_loader() -> None:
    data = hr.from_map([torch.arange(3) + k for k in range(6)]).apply_op("pairs").map(torch.stack)
    assert [tuple(batch.shape) for batch in got(data, batch_size=2)] == [(2, 2, 3), (1, 2, 3)]


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_fail_are_left_out_of_their_groups_when_they_are_skipped(workers: int) -> None:
    data = hr.from_map(range(11)).map(broken_at_7).apply_op("buckets", 3)
    with hr.DataLoader(data, batch_size=None, num_workers=workers, on_error="skip") as loader:
        assert list(loader) == [[0, 3, 6], [2, 5, 8], [1, 4, 10], [9]]
        assert loader.stats().skipped == 1


def test_groups_fail_with_their_samples_and_with_their_functions_in_their_places() -> None:
    def unmeasured(n: int) -> int:
        return 1 // (n - 4)

    def never(samples: list[int]) -> Any:
        raise ValueError(f"not {samples}") if 3 in samples else KeyError(samples[0])

    data = hr.from_map(range(6))
    assert got(data.map(lambda n: 7 * n).map(broken_at_7).apply_op("pairs"))[1:] == [[14, 21], [28, 35]]
    assert "sample 7 is damaged" in got(data.map(lambda n: 7 * n).map(broken_at_7).apply_op("pairs"))[0]
    hr.plugins.register_operator(
        "unmeasured", lambda: hr.plugins.BatchOp(batcher=lambda: Budget(0), measure=unmeasured)
    )
    told = got(data.map(int).apply_op("unmeasured"))[0]
    assert "stage: unmeasured(); sample 4 of the epoch; operators: FromMap(…) → map(int) → unmeasured()" in told
    hr.plugins.register_operator("no_number", lambda: hr.plugins.BatchOp(batcher=lambda: Budget(2), measure=str))
    assert "'str' object cannot be interpreted as an integer" in got(data.apply_op("no_number"))[0]
    told = got(data.apply_op("budget", 4, collate=never))
    assert len(told) == 4
    assert "not [3]" in told[1]


def test_error_of_a_batcher_has_its_place_and_the_others_go_on() -> None:
    told = got(hr.from_map([4, 9, 4, 9, 4]).apply_op("strict"))
    assert told[0] == told[1] == "a sample of 9; stage: strict(), while samples were put together"
    assert told[2:] == [[4, 4], [4]]


@pytest.mark.parametrize("edited", [[], [[1, 3], [1, 3]], [[-5, 2]], [[0, 3]], 3])
def test_state_is_refused_or_sums_up_when_what_it_says_of_groups_was_edited(edited: Any) -> None:
    data = hr.from_map(range(30)).apply_op("buckets", 4)
    state = state_after(hr.DataLoader(data, batch_size=None), 1)
    assert state["passed"]
    with hr.DataLoader(data, batch_size=None) as loader, pytest.raises(hr.StateMismatchError):
        loader.load_state_dict({**state, "passed": edited})


@pytest.mark.slow
def test_ranks_share_groups_when_an_epoch_has_a_number_of_them() -> None:
    data = hr.from_map(range(60)).shuffle(seed=1).apply_op("buckets", 3).epoch(samples=16)
    came = []
    for rank in range(2):
        options: dict[str, Any] = {"batch_size": 2, "collate_fn": list, "rank": rank, "world_size": 2}
        (whole,) = resumed_anywhere(lambda options=options: hr.DataLoader(data, **options))
        state = state_after(hr.DataLoader(data, **options), 1)
        assert state["passed"]
        with (
            hr.DataLoader(data, **{**options, "rank": 0, "world_size": 1}) as other,
            pytest.raises(hr.StateMismatchError),
        ):
            other.load_state_dict(state)
        came.append([n for batch in whole for group in batch for n in group])
        assert [len(batch) for batch in whole] == [2] * 4
    assert not set(came[0]) & set(came[1])


@pytest.mark.slow
def test_sample_whose_measure_ends_workers_is_left_out_and_no_other() -> None:
    def deadly(n: int) -> int:
        if n == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

    data = hr.from_map(range(20)).bucket(deadly, [2], batch_size=3)
    with hr.DataLoader(data, num_workers=2, on_error="skip", timeout=60) as loader:
        assert sorted(n for batch in loader for n in batch.tolist()) == [n for n in range(20) if n != 7]
    with (
        hr.DataLoader(data, num_workers=1, timeout=60) as loader,
        pytest.raises(hr.errors.WorkerDiedError, match="all on sample 7 of the epoch"),
    ):
        list(loader)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda data: hr.DataLoader(data.apply_op("pairs"), in_order=False), r"in_order=False and \.pairs\(\)"),
        (lambda data: next(iter(hr.DataLoader(data.apply_op("pairs"), rank=0, world_size=2))), r"pairs\(\) changes"),
        (
            lambda data: hr.plugins.BatchOp(batcher=Strict, measure=as_it_is),
            "measure=as_it_is must be a plain function",
        ),
        (lambda data: hr.plugins.BatchOp(batcher=3), "batcher=3 must be a plain function"),
        (lambda data: hr.plugins.BatchOp(batcher=Strict, collate=None), "collate=None must be a plain function"),
    ],
)
def test_operator_is_refused_by_name_when_it_makes_no_sense(make: Callable[[Any], Any], told: str) -> None:
    with pytest.raises(hr.OptionError, match=told):
        make(hr.from_map(range(9)))


def test_stream_says_where_samples_are_put_together_and_has_no_length() -> None:
    data = hr.from_map(range(9)).apply_op("buckets", 3)
    assert repr(data).endswith(".buckets(3)")
    assert data.describe().splitlines()[-1] == "  .buckets(3)  [workers]"
    with pytest.raises(TypeError, match=r"how many samples buckets\(3\) gives is known only later"):
        len(data)


def test_batches_of_buckets_are_not_collated_once_more() -> None:
    """The function would be given a padded batch, and not the samples that it asks for."""
    buckets = hr.from_map([[1], [2, 2]]).bucket(len, [9], batch_size=2)
    with pytest.raises(hr.OptionError, match="makes batches of lists"):
        buckets.collate(list)
    lists = hr.from_map([1, 2]).batch(2).collate(list)
    with pytest.raises(hr.OptionError, match="makes batches of lists"):
        lists.collate(list)
    assert list(hr.DataLoader(hr.from_map([[1], [2]]).bucket(len, [9], batch_size=2).map(repr))) == [
        "tensor([[1],\n        [2]])"
    ]


COUNT, SHARDS, BROKEN = 150, 2, 77
WORKERS = pytest.mark.parametrize("workers", [0, 1, 2, "thread"])


def values(n: int, *, even: bool) -> Any:
    return np.arange(n, n + (5 if even else 1 + n % 7), dtype=np.float32)


def shards(*, even: bool, is_broken: bool = False) -> list[str]:
    urls = [f"memory://{uuid.uuid4().hex}/{shard}.tar" for shard in range(SHARDS)]
    for shard, url in enumerate(urls):
        samples = []
        for n in range(shard * COUNT, (shard + 1) * COUNT):
            body = io.BytesIO()
            np.save(body, values(n, even=even))
            data = b"no array" if is_broken and n == BROKEN else body.getvalue()
            samples.append((f"{n:06d}", {"npy": data, "cls": str(n).encode()}))
        memory.put(url, tar(samples))
    return urls


def kind(sample: tuple[Any, int]) -> int:
    return sample[1] % 3


def padded(numbers: list[int], *, even: bool) -> torch.Tensor:
    arrays = [torch.from_numpy(values(n, even=even)) for n in numbers]
    return torch.nn.utils.rnn.pad_sequence(arrays, batch_first=True, padding_value=-1)


def loaded(data: hr.Stream, workers: int | str, **more: Any) -> list[Any]:
    options = {"num_workers": 2, "workers": "thread"} if workers == "thread" else {"num_workers": workers}
    return loops.loaded(data, **options, **more)


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("even", [True, False])
def test_batches_are_padded_the_same_whoever_makes_them(workers: int | str, *, even: bool) -> None:
    data = hr.stream(shards(even=even), index=None).decode().to_tuple("npy", "cls")
    batches = loaded(data.padded_batch(64, pad_value={"0": -1}), workers)
    assert [n for _, numbers in batches for n in numbers.tolist()] == list(range(SHARDS * COUNT))
    for arrays, numbers in batches:
        assert numbers.dtype is torch.int64
        assert torch.equal(arrays, padded(numbers.tolist(), even=even))


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("even", [True, False])
def test_buckets_have_the_same_samples_whoever_makes_them(workers: int | str, *, even: bool) -> None:
    data = hr.stream(shards(even=even), index=None).decode().to_tuple("npy", "cls")
    batches = loaded(data.bucket(kind, [0, 1], batch_size=16, pad_value={"0": -1}), workers)
    expected = list[list[int]]()
    waiting: dict[int, list[int]] = {}
    for n in range(SHARDS * COUNT):
        bucket = waiting.setdefault(n % 3, [])
        bucket.append(n)
        if len(bucket) == 16:
            expected.append(waiting.pop(n % 3))
    assert [numbers.tolist() for _, numbers in batches] == [*expected, *waiting.values()]
    assert all(torch.equal(arrays, padded(numbers.tolist(), even=even)) for arrays, numbers in batches)


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("made", ["padded_batch", "bucket"])
def test_a_broken_array_is_told_or_left_out_among_those_that_are_decoded_at_once(workers: int | str, made: str) -> None:
    data = hr.stream(shards(even=True, is_broken=True), index=None).decode().to_tuple("npy", "cls")
    data = data.padded_batch(10) if made == "padded_batch" else data.bucket(kind, [0, 1], batch_size=10)
    numbers = [n for _, some in loaded(data, workers, on_error="skip") for n in some.tolist()]
    assert sorted(numbers) == [n for n in range(SHARDS * COUNT) if n != BROKEN]
    with pytest.raises(hr.DecodeError) as raised:
        loaded(data, workers)
    assert f"{BROKEN:06d}" in str(raised.value) + "".join(raised.value.__notes__)
