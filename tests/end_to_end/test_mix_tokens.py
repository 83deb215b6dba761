"""Mixtures by tokens, of documents whose lengths are known or not."""

import json
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from builders.loops import assert_refused, first_of, state_after
from builders.ranks import ran, whole
from builders.token_files import megatron

import headrace as hr
from headrace.errors import OptionError
from headrace.fetch.stores import memory
from headrace.state.state import merge_states

pytestmark = pytest.mark.usefixtures("warm_server")

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
def test_stats_and_states_count_received_tokens_only() -> None:
    stream = packed()
    with hr.DataLoader(
        stream,
        ranks=hr.Ranks(global_batch_size=6, rank=0, world_size=2),
    ) as first:
        with hr.DataLoader(
            stream,
            ranks=hr.Ranks(global_batch_size=6, rank=1, world_size=2),
        ) as second:
            ranks, come = [(first, iter(first)), (second, iter(second))], [[0, 0], [0, 0]]
            for _ in range(5):
                for k, (loader, batches) in enumerate(ranks):
                    come[k] = np.add(come[k], counted(rows_of(next(batches)))).tolist()
                    assert [*loader.stats().tokens.values()] == come[k]
            state = merge_states([json.loads(json.dumps(loader.state_dict())) for loader, _ in ranks])
    assert state["rows"]["tokens"] == np.sum(come, axis=0).tolist()
    with hr.DataLoader(stream, batch_size=6) as loader:
        loader.load_state_dict(state)
        come.append(counted(rows_of(next(iter(loader)))))
        assert [*loader.stats().tokens.values()] == np.sum(come, axis=0).tolist()


def mixture(**options: Any) -> hr.Stream:
    return hr.mix(sources(), {"web": 1, "books": 1}, by="tokens", **options)


def known(weights: Any = None, **options: Any) -> hr.Stream:
    lengths = {
        name: [len(document(source, n)["input_ids"]) for n in range(count)]
        for source, (name, count) in enumerate({"web": 300, "books": 40}.items())
    }
    return hr.mix(sources(), weights or {"web": 0.7, "books": 0.3}, by="tokens", lengths=lengths, **options)


def packable() -> hr.Stream:
    return hr.mix(sources(20, 20), {"web": 1, "books": 1}, by="tokens")


FEW, NEGATIVE = {"web": [3] * 299, "books": [4] * 40}, {"web": [3, -1]}
EMPTY = {"web": [3] * 300, "books": [0] * 40}
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: first_of(mixture(), batch_size=2), r"put \.pack\(length\) after the mixture"),
    (lambda: first_of(mixture(lengths={"web": [3] * 300}), batch_size=2), "source 'books' have .* read.*lengths="),
    (lambda: first_of(mixture(lengths=FEW), batch_size=2), "of source 'web': there are 299 of them, and 300 documents"),
    (lambda: mixture(lengths=NEGATIVE), r"lengths\['web'\] of hr.mix: document 1 has -1 tokens"),
    (lambda: mixture(lengths={"code": [3]}), "an array for each of web, books"),
    (lambda: hr.mix(sources(), lengths={"web": [3] * 300}), "lengths= needs by='tokens'"),
    (lambda: known().pack(8), r"\.pack\(\) and hr.mix\(…, lengths=…\)"),
    (lambda: known().repeat(2), "bound it first"),
    (lambda: first_of(mixture(lengths=EMPTY), batch_size=2), "source 'books' has no tokens, and is to come"),
    (lambda: list(mixture()), r"put \.pack\(length\) after the mixture"),
    (lambda: first_of(hr.mix({"a": mixture()}, {"a": 1}, until="forever"), batch_size=2), "no length|by tokens"),
    (lambda: mixture().take(5), r"\.take\(5\) of a mixture by tokens"),
    (lambda: mixture().epoch(samples=5), r"\.epoch\(5\) of a mixture by tokens|of a mixture by tokens"),
    (lambda: first_of(mixture().shuffle(), batch_size=1), r"put \.pack\(length\)"),
    (lambda: mixture().enumerate().pack(8), "other positions in the epoch"),
    (lambda: mixture().pack(8, lengths=[3] * 340), "pack each of its inputs"),
    (lambda: first_of(hr.mix({"a": hr.from_map([])}, {"a": 1}, by="tokens").pack(8), batch_size=1), "has no samples"),
    (lambda: list(packable().filter(is_of_web).pack(LENGTH)), "none was left by what leaves samples out|had no tokens"),
]


def is_of_web(one: dict[str, Any]) -> bool:
    return bool(one["input_ids"][0] < 1000)


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_samples_that_cannot_be_mixed_by_tokens_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((OptionError, TypeError), match=message):
        make()


SHARE = 0.7  # of web


def tokens_of(numbers: list[int]) -> list[int]:
    counts = [0, 0]
    for number in numbers:
        source, which = divmod(number - 1, 1000)
        counts[source] += len(document(source, which)["input_ids"])
    return counts


WAYS: dict[str, Callable[[hr.Stream], hr.Stream]] = {
    "padded": lambda data: data.epoch(samples=600).padded_batch(10),
    "bucket": lambda data: data.epoch(samples=600).bucket("input_ids", [30, 90], batch_tokens=400),
    "taken": lambda data: data.take(600).padded_batch(10),
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_padded_and_bucketed_documents_have_their_shares_of_tokens(way: str, workers: int) -> None:
    with hr.DataLoader(WAYS[way](known()), batch_size=None, num_workers=workers) as loader:
        numbers = [int(row[0]) for batch in loader for row in batch["input_ids"]]
    assert len(numbers) == 600
    web, books = tokens_of(numbers)
    assert abs(web - SHARE * (web + books)) < 200  # half of the longest document, of each


@pytest.mark.slow
def test_global_batches_are_the_same_on_any_ranks_and_a_state_goes_on_on_others() -> None:
    make = lambda: known().epoch(samples=240).map(plain)
    options: dict[str, Any] = {"ranks": hr.Ranks(global_batch_size=12), "collate_fn": list}
    expected, _ = ran(1, make, **options)
    begun, states = ran(3, make, most=7, **options)
    gone_on, states = ran(2, make, states[0], most=6, **options)
    ended, _ = ran(4, make, states[0], **options)
    assert whole(begun + gone_on + ended) == whole(expected)
    assert len(json.dumps(states[0])) < 2000


def plain(sample: dict[str, Any]) -> int:
    return int(sample["input_ids"][0])


@pytest.mark.slow
def test_lengths_of_files_of_tokens_are_known() -> None:
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


def with_lengths(first: int) -> hr.Stream:
    return mixture(lengths={"web": [first] + [9] * 299, "books": [90] * 40}).map(plain)


def changed_at(step: int) -> hr.Stream:
    return known(lambda now: {"web": 1 + (now < step), "books": 1}, step=100).map(plain)


CHANGED: list[tuple[Callable[[], hr.Stream], Callable[[], hr.Stream], str]] = [
    (packed, lambda: packed({"web": 0.6, "books": 0.4}), r"weights=0\.7:0\.3, .*by=tokens"),
    (lambda: with_lengths(9), lambda: with_lengths(8), "lengths="),
    (lambda: changed_at(100), lambda: changed_at(1), "not those of this loader's order"),
]


@pytest.mark.parametrize(("saved", "other", "message"), CHANGED)
def test_state_of_other_weights_or_lengths_is_refused(saved: Any, other: Any, message: str) -> None:
    state = state_after(hr.DataLoader(saved(), batch_size=20), 9)
    assert_refused(hr.DataLoader(other(), batch_size=20), state, match=message)
