"""Mixtures by tokens of documents whose lengths are known."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from builders.loops import state_after
from builders.ranks import ran, whole
from end_to_end.test_mix_tokens import document, known, sources
from end_to_end.token_files import megatron

import headrace as hr
from headrace.errors import StateMismatchError
from headrace.fetch.stores import memory

pytestmark = pytest.mark.usefixtures("warm_workers")

SHARE = 0.7  # of web


def numbers_of(batch: Any) -> list[int]:
    return [int(row[0]) for row in batch["input_ids"]]


def tokens_of(numbers: list[int]) -> list[int]:
    counts = [0, 0]
    for number in numbers:
        source, which = divmod(number - 1, 1000)
        counts[source] += len(document(source, which)["input_ids"])
    return counts


WAYS: dict[str, Callable[[hr.Stream], hr.Stream]] = {
    "padded": lambda data: data.epoch(samples=600).padded_batch(10),
    "bucket": lambda data: data.epoch(samples=600).bucket(
        lambda one: len(one["input_ids"]), [30, 90], batch_tokens=400
    ),
    "taken": lambda data: data.take(600).padded_batch(10),
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_documents_that_are_padded_or_put_into_buckets_have_their_shares_of_tokens(way: str, workers: int) -> None:
    with hr.DataLoader(WAYS[way](known()), batch_size=None, num_workers=workers) as loader:
        numbers = [number for batch in loader for number in numbers_of(batch)]
    assert len(numbers) == 600
    web, books = tokens_of(numbers)
    assert abs(web - SHARE * (web + books)) < 200  # half of the longest document, of each


@pytest.mark.slow
def test_global_batches_are_the_same_on_any_ranks_and_a_state_goes_on_on_others() -> None:
    make = lambda: known().epoch(samples=240).map(plain)
    options: dict[str, Any] = {"global_batch_size": 12, "collate_fn": list}
    expected, _ = ran(1, make, **options)
    begun, states = ran(3, make, most=7, **options)
    gone_on, states = ran(2, make, states[0], most=6, **options)
    ended, _ = ran(4, make, states[0], **options)
    assert whole(begun + gone_on + ended) == whole(expected)
    assert len(json.dumps(states[0])) < 2000


def plain(sample: dict[str, Any]) -> int:
    return int(sample["input_ids"][0])


@pytest.mark.slow
def test_files_of_tokens_that_know_their_lengths_need_nobody_to_say_them() -> None:
    random, files, folder = np.random.default_rng(0), {}, uuid.uuid4().hex
    for k, (name, longest) in enumerate((("web", 40), ("books", 400))):
        lengths = random.integers(1, longest, 120)
        documents = [[np.full(length, 1 + k)] for length in lengths]
        for ending, body in zip((".bin", ".idx"), megatron(documents), strict=True):
            memory.put(f"memory://{folder}/{name}{ending}", body)
        files[name] = hr.tokens(f"memory://{folder}/{name}.bin", documents="samples").shuffle()
    mixed = hr.mix(files, {"web": SHARE, "books": 1 - SHARE}, by="tokens").epoch(samples=3000)
    come = [0, 0]
    with hr.DataLoader(mixed, batch_size=None) as loader:
        for sample in loader:
            come[int(sample["tokens"][0]) - 1] += len(sample["tokens"])
    assert abs(come[0] - SHARE * sum(come)) < 400
    assert sum(come) > 50_000


def test_state_is_refused_where_lengths_are_others() -> None:
    def stream(first: int) -> hr.Stream:
        lengths = {"web": [first] + [9] * 299, "books": [90] * 40}
        return hr.mix(sources(), {"web": 1, "books": 1}, by="tokens", lengths=lengths).map(plain)

    state = state_after(hr.DataLoader(stream(9), batch_size=4), 1)
    with hr.DataLoader(stream(8), batch_size=4) as loader, pytest.raises(StateMismatchError, match="lengths="):
        loader.load_state_dict(state)


def test_state_is_refused_where_weights_of_the_past_are_others() -> None:
    late = 100

    def weights(step: int) -> dict[str, float]:
        return {"web": 1 + (step < late), "books": 1}

    state = state_after(hr.DataLoader(known(weights, step=100).map(plain), batch_size=20), 9)
    late = 1
    with hr.DataLoader(known(weights, step=100).map(plain), batch_size=20) as loader:
        with pytest.raises(StateMismatchError, match="not those of this loader's order"):
            loader.load_state_dict(state)
