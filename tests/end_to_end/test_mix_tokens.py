"""Mixtures by tokens, of documents whose lengths are known or not."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from builders.loops import state_after
from builders.ranks import ran, whole
from end_to_end.token_files import megatron

import headrace as hr
from headrace.errors import OptionError, StateMismatchError
from headrace.fetch.stores import memory
from headrace.state.state import merge_states

pytestmark = pytest.mark.usefixtures("warm_workers")

LENGTH = 64


def document(source: int, number: int) -> dict[str, Any]:
    length = int(np.random.default_rng([source, number]).integers(1, 20)) * (1 + 9 * source)
    return {"input_ids": np.full(length, 1000 * source + number + 1)}


def sources(first: int = 300, second: int = 40) -> dict[str, hr.Stream]:
    web = hr.from_map([(0, n) for n in range(first)]).shuffle().map(lambda at: document(*at))
    books = hr.from_map([(1, n) for n in range(second)]).shuffle().map(lambda at: document(*at))
    return {"web": web, "books": books}


def packed(weights: Any = None, **options: Any) -> hr.Stream:
    mixed = hr.mix(sources(), weights or {"web": 0.7, "books": 0.3}, by="tokens", **options)
    return mixed.filter(lambda one: one["input_ids"][0] % 10 != 3).pack(LENGTH)


def counted(rows: np.ndarray) -> list[int]:
    return [int(((rows > 0) & (rows < 1000)).sum()), int((rows >= 1000).sum())]


def rows_of(batch: dict[str, Any]) -> np.ndarray:
    found: np.ndarray = batch["input_ids"].numpy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_shares_are_those_of_tokens_where_documents_differ_in_length(workers: int) -> None:
    with hr.DataLoader(packed().epoch(samples=4 * 400), batch_size=4, num_workers=workers) as loader:
        come = np.sum([counted(rows_of(batch)) for batch in loader], axis=0)
        stats, report = loader.stats(), loader.report()
    assert abs(come[0] / come.sum() - 0.7) < 0.005
    assert stats.tokens == {"web": come[0], "books": come[1]}
    assert f"tokens: web {come[0] / come.sum():.2%}, books" in report


@pytest.mark.slow
def test_stats_and_states_say_what_has_been_received_and_no_more() -> None:
    stream = packed()
    with hr.DataLoader(stream, global_batch_size=6, rank=0, world_size=2) as first:
        with hr.DataLoader(stream, global_batch_size=6, rank=1, world_size=2) as second:
            ranks, come = [(first, iter(first)), (second, iter(second))], [[0, 0], [0, 0]]
            for _ in range(5):
                for k, (loader, batches) in enumerate(ranks):
                    come[k] = np.add(come[k], counted(rows_of(next(batches)))).tolist()
                    assert [*loader.stats().tokens.values()] == come[k]
            state = merge_states([json.loads(json.dumps(loader.state_dict())) for loader, _ in ranks])
    assert state["packing"]["tokens"] == np.sum(come, axis=0).tolist()
    with hr.DataLoader(stream, batch_size=6) as loader:
        loader.load_state_dict(state)
        come.append(counted(rows_of(next(iter(loader)))))
        assert [*loader.stats().tokens.values()] == np.sum(come, axis=0).tolist()


def test_state_is_refused_by_a_mixture_with_other_weights() -> None:
    state = state_after(hr.DataLoader(packed(), batch_size=4), 1)
    with hr.DataLoader(packed({"web": 0.6, "books": 0.4}), batch_size=4) as loader:
        with pytest.raises(StateMismatchError, match=r"weights=0\.7:0\.3, .*by=tokens"):
            loader.load_state_dict(state)


@pytest.mark.slow
def test_a_source_that_gives_no_tokens_is_an_error() -> None:
    mixed = hr.mix(sources(20, 20), {"web": 1, "books": 1}, by="tokens")
    stream = mixed.filter(lambda one: one["input_ids"][0] < 1000).pack(LENGTH)
    with (
        hr.DataLoader(stream, batch_size=2) as loader,
        pytest.raises(OptionError, match=r"none was left by what leaves samples out|had no tokens"),
    ):
        list(loader)


def first_of(stream: Any, **options: Any) -> Any:
    with hr.DataLoader(stream, **options) as loader:
        return next(iter(loader))


def mixture(**options: Any) -> hr.Stream:
    return hr.mix(sources(), {"web": 1, "books": 1}, by="tokens", **options)


def known(weights: Any = None, **options: Any) -> hr.Stream:
    lengths = {
        name: [len(document(source, n)["input_ids"]) for n in range(count)]
        for source, (name, count) in enumerate({"web": 300, "books": 40}.items())
    }
    return hr.mix(sources(), weights or {"web": 0.7, "books": 0.3}, by="tokens", lengths=lengths, **options)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "not packed": (lambda: first_of(mixture(), batch_size=2), r"put \.pack\(length\) after the mixture"),
    "some lengths": (
        lambda: first_of(mixture(lengths={"web": [3] * 300}), batch_size=2),
        r"source 'books' have is known once they are read.*lengths=",
    ),
    "too few lengths": (
        lambda: first_of(mixture(lengths={"web": [3] * 299, "books": [4] * 40}), batch_size=2),
        r"lengths= of source 'web': there are 299 of them, and 300 documents",
    ),
    "wrong lengths": (
        lambda: mixture(lengths={"web": [3, -1]}),
        r"lengths\['web'\] of hr.mix: document 1 has -1 tokens",
    ),
    "lengths of others": (lambda: mixture(lengths={"code": [3]}), "an array for each of web, books"),
    "lengths by samples": (lambda: hr.mix(sources(), lengths={"web": [3] * 300}), "lengths= needs by='tokens'"),
    "lengths and rows": (lambda: known().pack(8), r"\.pack\(\) and hr.mix\(…, lengths=…\)"),
    "known, unbounded": (lambda: known().repeat(2), "bound it first"),
    "no tokens": (
        lambda: first_of(mixture(lengths={"web": [3] * 300, "books": [0] * 40}), batch_size=2),
        "source 'books' has no tokens, and is to come",
    ),
    "a loop": (lambda: list(mixture()), r"put \.pack\(length\) after the mixture"),
    "within": (
        lambda: first_of(hr.mix({"a": mixture()}, {"a": 1}, until="forever"), batch_size=2),
        "no length|by tokens",
    ),
    "taken": (lambda: mixture().take(5), r"\.take\(5\) of a mixture by tokens"),
    "an epoch": (lambda: mixture().epoch(samples=5), r"\.epoch\(5\) of a mixture by tokens|of a mixture by tokens"),
    "shuffled": (lambda: first_of(mixture().shuffle(), batch_size=1), r"put \.pack\(length\)"),
    "numbered": (lambda: mixture().enumerate().pack(8), "other positions in the epoch"),
    "lengths": (lambda: mixture().pack(8, lengths=[3] * 340), "pack each of its inputs"),
    "empty": (
        lambda: first_of(hr.mix({"a": hr.from_map([])}, {"a": 1}, by="tokens").pack(8), batch_size=1),
        "has no samples",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_mixed_by_tokens_is_refused_by_name(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises((OptionError, TypeError), match=message):
        make()


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
