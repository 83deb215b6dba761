"""Mixtures by tokens: shares are those of the tokens that come, and what cannot be had is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from builders.loops import state_after

import headrace as hr
from headrace.errors import OptionError, StateMismatchError
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
    "numbered": (lambda: mixture().enumerate().pack(8), "no places in the epoch"),
    "lengths": (lambda: mixture().pack(8, lengths=[3] * 340), "pack each of its sources"),
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
