"""Arrays of tar shards that are put together: decoded many at once, and what that cannot do one by one."""

from __future__ import annotations

import io
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from builders import loops
from end_to_end.tars import tar

import headrace as hr
from headrace.fetch.stores import memory

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
