"""Documents that must be read to know their lengths, packed in lanes: the same on any ranks, resumed anywhere."""

import contextlib
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from builders.loops import assert_refused, first_of, flat, iterated_later, loaded, outcomes, rest_of, saved, state_after
from builders.numbers import Made, later
from builders.ranks import Rows, ran, whole
from end_to_end.state.sources import rows
from unit.test_packed_rows import by_hand

import headrace as hr
from headrace.errors import OptionError, StateMismatchError
from headrace.state.state import merge_states

pytestmark = pytest.mark.usefixtures("warm_server")

RESUMES = int(os.environ.get("HEADRACE_RESUMES", "12"))
LENGTH = 16


def text(number: int) -> dict[str, Any]:
    length = int(np.random.default_rng(number).integers(0, 25))
    tokens = 1000 * (number + 1) + np.arange(length, dtype=np.int32)
    return {"input_ids": tokens, "drawn": np.full(length, hr.rng().integers(1 << 30)), "number": number}


def is_kept(document: dict[str, Any]) -> bool:
    return bool(document["number"] % 3 != 1)


def several(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [document] * (document["number"] % 4 % 3)


def with_bad_ones(document: dict[str, Any]) -> dict[str, Any]:
    if document["number"] % 11 == 3:
        raise ValueError(f"document {document['number']} is damaged")
    return document


def texts(count: int = 60) -> hr.Stream:
    return hr.from_map(list(range(count))).map(text)


def by_lanes(documents: list[list[dict[str, Any]]], lanes: int, method: str) -> list[tuple[list[int], list[int]]]:
    """(tokens, which of its documents each one is of) of each sequence, of what came of each position, by hand."""
    sequences = []
    for lane in range(lanes):
        own = [document for some in documents[lane::lanes] for document in some]
        sizes = [(k, 0, len(document["input_ids"])) for k, document in enumerate(own)]
        sequences.append([])
        for pieces in by_hand(method, LENGTH, sizes):
            tokens = [own[k]["input_ids"][start:end].tolist() for k, _, start, end in pieces]
            sequences[-1].append((flat(tokens), [which for which, some in enumerate(tokens) for _ in some]))
    steps = range(max(map(len, sequences)))
    return [some[step] for step in steps for some in sequences if step < len(some)]


def kept_documents(count: int) -> list[list[dict[str, Any]]]:
    return [several(text(n)) if is_kept(text(n)) else [] for n in range(count)]


def tokens_of(batches: Any) -> list[list[int]]:
    """Tokens of rows that were padded with -1."""
    return [[token for token in row if token >= 0] for batch in batches for row in batch["input_ids"].tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["concat", "best_fit"])
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_packed_of_their_own_documents(method: Any, workers: int) -> None:
    stream = texts().filter(is_kept).map(later).flat_map(several)
    stream = stream.pack(LENGTH, method=method, fields="drawn", pad_value={"input_ids": -1})
    with hr.DataLoader(stream, batch_size=4, num_workers=workers) as loader:
        batches = list(loader)
        with pytest.raises(TypeError, match="is known only later"):
            len(loader)
    assert [len(batch["input_ids"]) for batch in batches[:-1]] == [4] * (len(batches) - 1)
    found = []
    for batch in batches:
        for tokens, ids in zip(batch["input_ids"].tolist(), batch["document_ids"].tolist(), strict=True):
            filled = ids.index(-1) if -1 in ids else LENGTH
            assert tokens[filled:] == [-1] * (LENGTH - filled)
            found.append((tokens[:filled], ids[:filled]))
    assert found == by_lanes(kept_documents(60), 4, method)
    assert {str(batch["input_ids"].dtype) for batch in batches} == {"torch.int32"}


def test_a_stream_by_itself_has_one_lane() -> None:
    for method in ("concat", "best_fit"):
        stream = texts(20).filter(is_kept).pack(LENGTH, method=method, pad_value=-1)  # type: ignore[arg-type]
        expected = by_lanes([[text(n)] if is_kept(text(n)) else [] for n in range(20)], 1, method)
        for found in (list(stream), iterated_later(stream)):
            assert [[token for token in one["input_ids"].tolist() if token >= 0] for one in found] == [
                tokens for tokens, _ in expected
            ]


def noted(sequence: dict[str, Any]) -> dict[str, Any]:
    return {**sequence, "row": int(hr.rng().integers(1 << 40))}


def by_tokens() -> hr.Stream:
    sources = {"a": texts(50).shuffle(), "b": texts(9), "c": texts(20).shuffle()}
    return hr.mix(sources, lambda step: {"a": 5, "b": 2, "c": min(step, 3)}, by="tokens", step=200)


def prepared(name: str, method: str) -> hr.Stream:
    ways: dict[str, Callable[[], hr.Stream]] = {
        "filtered": lambda: texts().shuffle().filter(is_kept),
        "many": lambda: texts(61).map(later).flat_map(several),
        "bad": lambda: texts().shuffle().map(with_bad_ones),
        "mixed": lambda: hr.mix({"a": texts(50).shuffle(), "b": texts(9)}, {"a": 0.8, "b": 0.2}, until="all"),
        "by tokens": lambda: by_tokens().map(later).filter(is_kept).flat_map(several),
        "bad by tokens": lambda: by_tokens().map(with_bad_ones),
    }
    return ways[name]().pack(LENGTH, method=method, fields=["drawn"]).map(noted)  # type: ignore[arg-type]


def run(number: int) -> int:
    rng = random.Random(number)
    name = rng.choice(["filtered", "many", "bad", "mixed", "by tokens", "by tokens", "bad by tokens"])
    method, lanes, steps = rng.choice(["concat", "best_fit"]), 8, rng.randint(3, 12)
    stream = prepared(name, method).epoch(samples=steps * lanes)
    options: dict[str, Any] = {"ranks": hr.Ranks(global_batch_size=lanes), "seed": rng.choice([None, 7])}
    if "tokens" in name and rng.random() < 0.5:
        options |= {"exclude": hr.Exclude(samples=[3, 20, 61])}
    if "bad" in name:
        options |= {"errors": hr.Skip(max_in_row=None)}
    expected = whole(ran(1, lambda: stream, **options)[0])
    assert [len(step) for step in expected] == [lanes] * steps
    got = list[Rows]()
    state, resumes, worlds = None, 0, []
    while len(got) < steps:
        size, most = rng.choice([1, 2, 3, 5, 8]), rng.randint(0, steps - len(got))
        worlds.append(size)
        workers = rng.choice([0, 0, 0, 1]) if size == 1 else 0
        found, states = ran(size, lambda: stream, state, most, num_workers=workers, **options)
        got, state, resumes = got + whole(found), merge_states(states), resumes + 1
    assert got == expected, f"{number}: {name}, {method}, {worlds}"
    return resumes


@pytest.mark.slow
@pytest.mark.timeout(0 if "HEADRACE_RESUMES" in os.environ else 600)
def test_packed_global_batches_are_the_same_on_other_ranks_resumed_anywhere() -> None:
    resumes = number = 0
    while resumes < RESUMES:
        resumes += run(number)
        number += 1


def test_failed_documents_are_skipped_and_counted_once() -> None:
    bad = [n for n in range(60) if n % 11 == 3]
    stream = texts().map(with_bad_ones).pack(LENGTH, pad_value=-1)
    with hr.DataLoader(stream, batch_size=4, errors=hr.Skip(max_in_row=None)) as loader:
        batches = list(loader)
        assert sorted(skipped.position for skipped in loader.stats().skipped_samples) == bad
    documents = [[text(n)] if n not in bad else [] for n in range(60)]
    assert tokens_of(batches) == [tokens for tokens, _ in by_lanes(documents, 4, "concat")]
    with pytest.raises(ValueError, match="is damaged"):
        loaded(stream, batch_size=4, errors=hr.Skip(max_in_epoch=2, max_in_row=None))


def test_a_document_that_fails_is_an_error_in_the_place_of_its_batch() -> None:
    stream = texts().map(with_bad_ones).pack(LENGTH)
    came = outcomes(stream, batch_size=4)
    got = [str(one) if isinstance(one, ValueError) else len(one["input_ids"]) for one in came]
    assert got[0] == "document 3 is damaged"
    assert got.count(4) > 5
    assert {one for one in got if isinstance(one, str)} <= {f"document {n} is damaged" for n in range(3, 60, 11)}


@pytest.mark.parametrize(("size", "ranks"), [(8, 3), (70, 2)])
@pytest.mark.parametrize("method", ["concat", "best_fit"])
def test_ranks_with_an_uneven_end_pack_each_document_once_resumed_anywhere(method: Any, size: int, ranks: int) -> None:
    """States of ranks after the same step can be merged, for any number of ranks. Others are refused."""

    def loader(rank: int, world: int, state: Any = None) -> hr.DataLoader[Any]:
        stream = texts(31).filter(is_kept).flat_map(several).pack(LENGTH, method=method, pad_value=-1)
        made = hr.DataLoader(
            stream, ranks=hr.Ranks(global_batch_size=size, rank=rank, world_size=world, last_batch="uneven")
        )
        made.load_state_dict(state or {})
        return made

    expected = sorted(some for some, _ in by_lanes(kept_documents(31), size, method))
    whole, states = list[list[list[list[int]]]](), list[list[Any]]()
    for rank in range(ranks):
        with loader(rank, ranks) as own:
            before, got = [saved(own)], list[list[list[int]]]()
            for batch in own:
                got.append(tokens_of([batch]))
                before.append(saved(own))
        whole.append(got)
        states.append(before[:-1])
        for done, state in enumerate(states[rank]):
            with loader(rank, ranks, state) as own:
                assert [tokens_of([batch]) for batch in own] == got[done:]
    assert sorted(row for own in whole for batch in own for row in batch) == expected
    merged = list[Any]()
    for of_ranks in zip(*states, strict=False):
        with contextlib.suppress(StateMismatchError):
            merged.append((of_ranks[0]["batches"], merge_states(of_ranks)))
    assert merged or not all(whole)  # a rank without documents has no state within the epoch
    for done, state in merged:
        with loader(0, 1, state) as own:
            assert (
                sorted([row for some in whole for batch in some[:done] for row in batch] + tokens_of(own)) == expected
            )


def empty(document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "input_ids": document["input_ids"][:0]}


def always_bad(document: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("damaged")


BAD = texts(50).map(always_bad).shuffle("global").repeat()
SHORT = hr.from_map([{"input_ids": [n] * n} for n in (0, 1, 0, 2)])


def test_documents_without_tokens_may_end_an_epoch_or_be_shuffled() -> None:
    assert list(texts().map(empty).pack(LENGTH)) == []
    assert first_of(SHORT.shuffle().repeat().pack(2), batch_size=2)["input_ids"].shape == (2, 2)


def test_first_steps_of_an_epoch_do_not_depend_on_its_length_and_can_be_skipped() -> None:
    def loader(steps: int) -> hr.DataLoader[Any]:
        stream = texts().shuffle().filter(is_kept).pack(LENGTH).epoch(samples=4 * steps)
        return hr.DataLoader(stream, batch_size=4)

    with loader(9) as longer, loader(5) as shorter, loader(9) as skipping:
        whole = [rows(batch) for batch in longer]
        assert [rows(batch) for batch in shorter] == whole[:5]
        skipping.skip(3)
        assert [rows(batch) for batch in skipping] == whole[3:]


REPEATED = texts().shuffle().repeat().filter(is_kept)
TWO = hr.Ranks(global_batch_size=4, rank=0, world_size=2)
OTHERS: list[tuple[hr.Stream, dict[str, Any], str]] = [
    (REPEATED.pack(LENGTH), {"batch_size": 8}, "packed in 4 rows, one for each sample"),
    (REPEATED.pack(LENGTH), {"batch_size": 4, "seed": 3}, "the seed differs"),
    (REPEATED.pack(LENGTH + 1), {"batch_size": 4}, "pack.16, concat"),
    (REPEATED.pack(LENGTH, method="best_fit"), {"batch_size": 4}, "pack.16, best_fit"),
    (REPEATED.pack(LENGTH), {"ranks": hr.Ranks(global_batch_size=6, rank=0, world_size=2)}, "in 4 rows"),
]


@pytest.mark.parametrize(("stream", "options", "message"), OTHERS)
def test_state_of_other_rows_is_refused(stream: hr.Stream, options: dict[str, Any], message: str) -> None:
    state = state_after(hr.DataLoader(REPEATED.pack(LENGTH), batch_size=4), 2)
    assert_refused(hr.DataLoader(stream, **options), state, match=message)


def test_state_of_other_documents_of_one_rank_or_of_another_step_is_refused() -> None:
    forwards, backwards = (hr.from_map(range(60)).sample(range(60)[::k]).map(text).pack(LENGTH) for k in (1, -1))
    state = state_after(hr.DataLoader(forwards, batch_size=4), 4)
    assert_refused(hr.DataLoader(backwards, batch_size=4), state, match="not those of this loader's order")
    first, second = (
        state_after(
            hr.DataLoader(REPEATED.pack(LENGTH), ranks=hr.Ranks(global_batch_size=4, rank=k, world_size=2)), 2 + k
        )
        for k in (0, 1)
    )
    alone = hr.DataLoader(REPEATED.pack(LENGTH), ranks=hr.Ranks(global_batch_size=4))
    assert_refused(alone, first, match="rank 0 of 2 alone")
    with pytest.raises(StateMismatchError, match="must be of one step"):
        merge_states([first, second])


def test_state_within_a_document_that_has_changed_is_refused() -> None:
    cut = [99]
    data = hr.from_map([{"input_ids": np.arange(40)}] * 9).map(lambda one: {"input_ids": one["input_ids"][: cut[0]]})
    state = state_after(hr.DataLoader(data.pack(LENGTH), batch_size=2), 1)
    cut[0] = 10
    with pytest.raises(StateMismatchError, match="not those that the state was in the middle of"):
        rest_of(hr.DataLoader(data.pack(LENGTH), batch_size=2), state)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["concat", "best_fit"])
@pytest.mark.parametrize("size", [1, 2])
def test_excluded_documents_are_packed_as_empty_ones_also_after_a_resume(method: Any, size: int) -> None:
    rng, count = random.Random(f"{method} {size}"), 40
    stream = texts(count).shuffle(seed=3).pack(LENGTH, method=method).epoch(samples=200)
    excluded = {"exclude": hr.Exclude(samples=[5, 17, 30])}

    def run(states: Any, most: int | None, **options: Any) -> tuple[list[list[int]], Any]:
        steps, states = ran(
            size, lambda: stream, states, most, ranks=hr.Ranks(global_batch_size=4, compare=False), **options
        )
        return [list(row[1]) for batch in whole(steps) for row in batch], states

    def of(sequences: list[list[int]]) -> set[int]:
        return {token // 1000 - 1 for row in sequences for token in row if token}

    expected, _ = run(None, None, **excluded)
    assert of(expected) == {n for n in range(count) if len(text(n)["input_ids"])} - {5, 17, 30}
    begin, states = run(None, rng.randint(1, 20), **excluded)
    assert begin + run(states, None, **excluded)[0] == expected


def endless(stream: hr.Stream, size: int) -> None:
    first_of(stream, batch_size=size, errors=hr.Skip(max_in_row=None))


SOME = texts().filter(is_kept)
NONE, FAILED = "documents one after the other had no tokens", "documents one after the other had no tokens, or failed"
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: first_of(SOME.pack(8), ranks=TWO), r"put \.epoch\(samples=N\) after"),
    (lambda: first_of(texts().pack(8).epoch(samples=10), ranks=TWO), r"multiple of 4 sequences, not 10.*\(samples=8\)"),
    (lambda: first_of(texts().pack(8), in_order=False), r"in_order=False and \.pack\(8, concat\)"),
    (lambda: first_of(texts().pack(8), exclude=hr.Exclude(steps=[(3, 4)])), "exclude documents by their numbers"),
    (lambda: texts().pack(8).filter(bool).pipeline(), r"\.filter\(bool\) cannot follow \.pack"),
    (lambda: texts().pack(8).batch(2).unbatch().pipeline(), r"\.batch\(2\) cannot follow \.pack"),
    (lambda: texts().pack(8).enumerate(), r"\.enumerate\(\) cannot follow \.pack"),
    (lambda: texts().pack(8).shuffle().pipeline(), r"\.shuffle\(window, samples=2048\) cannot follow \.pack"),
    (lambda: texts().pack(8).repeat().pipeline(), r"put \.repeat\(None\) before \.pack"),
    (lambda: texts().pack(8).pack(9).pipeline(), r"pack\(9\) cannot follow \.pack\(8, concat\)"),
    (lambda: texts().batch(2).unbatch().pack(8), r"cannot follow \.batch\(2\)"),
    (lambda: SOME.take(4).pack(8), r"cannot follow \.take\(4\)"),
    (lambda: endless(texts().map(empty).repeat().pack(LENGTH), 2), NONE),
    (lambda: endless(SHORT.repeat().pack(2), 2), r"a row of the batch lacks some; without \.shuffle\(\) before \.pack"),
    (lambda: endless(BAD.pack(LENGTH), 4), FAILED),
    (lambda: endless(BAD.pack(LENGTH, method="best_fit"), 4), FAILED),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_rows_that_cannot_be_packed_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_error_of_a_document_that_cannot_be_packed_names_it() -> None:
    with pytest.raises(KeyError, match="no field 'input_ids'; it has: it is a list"):
        first_of(hr.from_map([[1]]).pack(8))
    with pytest.raises(ValueError, match=r"have different lengths: {'input_ids': 2, 'mask': 1}"):
        first_of(hr.from_map([{"input_ids": [1, 2], "mask": [1]}]).pack(8, fields="mask"))
    data = hr.from_map([{"input_ids": "text" if n == 7 else [n]} for n in range(9)])
    with pytest.raises(TypeError, match="whole numbers in one dimension are needed") as caught:
        list(data.filter(lambda one: one["input_ids"] != [3]).pack(2))
    assert any(
        "stage: pack(2, concat); sample 7 of the epoch; operators: FromMap(…) → filter(" in note
        for note in caught.value.__notes__
    )


def damaged(document: dict[str, Any]) -> dict[str, Any]:
    if int(document["input_ids"][0]) >= 24:
        raise ValueError("damaged")
    return document


TOGETHER: dict[str, Callable[[hr.Stream], hr.Stream]] = {
    "concat": lambda data: data.pack(LENGTH),
    "best_fit": lambda data: data.pack(LENGTH, method="best_fit"),
    "bucket of a size": lambda data: data.bucket("input_ids", [4, 8], batch_size=2),
    "bucket of tokens": lambda data: data.bucket("input_ids", [4, 8], batch_tokens=10),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("workers", [0, 2])
def test_error_is_raised_at_once_when_its_row_or_bucket_never_fills(name: str, workers: int) -> None:
    data, got = Made(lambda key: {"input_ids": np.full(5, key)}, 100_000), 0
    stream = TOGETHER[name](data.map(damaged))
    size = None if name.startswith("bucket") else 2
    with hr.DataLoader(stream, batch_size=size, num_workers=workers) as loader, pytest.raises(ValueError, match="dam"):
        for _ in loader:
            got += 1
    assert got == {"bucket of a size": 12, "bucket of tokens": 11, "concat": 3, "best_fit": 0}[name]
    assert len(data.asked) < 10_000


@pytest.mark.parametrize(("rows", "expected"), [(20, (10, 0)), (8, (0, 14))])
def test_ranks_count_repeated_and_unread_documents(rows: int, expected: tuple[int, int]) -> None:
    documents = hr.from_map([{"input_ids": [n] * 3} for n in range(30)]).filter(bool)
    counted = [0, 0]
    for rank in range(2):
        stream = documents.pack(6).epoch(samples=rows)
        with hr.DataLoader(
            stream, ranks=hr.Ranks(global_batch_size=4, rank=rank, world_size=2), num_workers=0
        ) as loader:
            assert len(list(loader)) == rows // 4
            stats = loader.stats()
        counted = [counted[0] + stats.repeated, counted[1] + stats.unread]
    assert tuple(counted) == expected
