"""Packing: each token once, as plain Python packs documents, planned or in rows, on any ranks after any resume."""

from __future__ import annotations

import base64
import itertools
import json
import os
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import StateMismatchError
from headrace.order.combined import ChangingShares, ConstantShares, TokenMixing
from headrace.order.orders import ENDLESS
from headrace.order.packed_rows import CHOICE, BestFitRow, ConcatRow, Document, PackedRows, fullest
from headrace.order.packing import BestFitPlan, Bins, Packing, PackPlan
from headrace.order.row_states import InputCursor, RowCursor, RowProgress
from headrace.order.steps import share

LENGTHS = st.one_of(
    st.lists(st.integers(0, 30), max_size=40),
    st.lists(st.sampled_from([0, 1, 4, 7]), max_size=60),
    st.lists(st.integers(0, 300), max_size=8),
)
SIZES = st.integers(1, 24)
PlannedPiece = tuple[int, int, int]


def best_fit(lengths: list[int], size: int, key: int = 5) -> BestFitPlan:
    some = np.array(lengths, np.int64)
    return BestFitPlan(some, size, Bins(some, size), key)


def all_of(plan: PackPlan) -> list[list[PlannedPiece]]:
    found = (plan.pieces(sequence) for sequence in range(plan.count))
    return [list(zip(*(some.tolist() for some in pieces), strict=True)) for pieces in found]


def patterns(lengths: list[int], size: int, key: int = 5) -> list[tuple[int, ...]]:
    return [tuple(stop - start for _, start, stop in some) for some in all_of(best_fit(lengths, size, key))]


def cut(lengths: list[int], size: int) -> list[PlannedPiece]:
    """Documents in pieces of `size` tokens, and what is left of each."""
    return [
        (document, start, min(start + size, length))
        for document, length in enumerate(lengths)
        for start in range(0, length, size)
    ]


def rooms_by_hand(lengths: list[int], size: int) -> list[int]:
    """Best fit, the longest first: the room that is left in each sequence."""
    rooms: list[int] = []
    for length in sorted((stop - start for _, start, stop in cut(lengths, size)), reverse=True):
        fitting = [(room, k) for k, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting)[1]] -= length
        else:
            rooms.append(size - length)
    return sorted(rooms)


@pytest.mark.slow
@given(lengths=LENGTHS, size=SIZES)
def test_best_fit_equals_that_of_documents_one_by_one(lengths: list[int], size: int) -> None:
    found = all_of(best_fit(lengths, size))
    assert sorted(piece for some in found for piece in some) == cut(lengths, size)
    assert sorted(size - sum(stop - start for _, start, stop in some) for some in found) == rooms_by_hand(lengths, size)


@given(lengths=LENGTHS, size=SIZES, random=st.randoms(use_true_random=False))
def test_order_of_documents_changes_no_sequence(lengths: list[int], size: int, random: Random) -> None:
    before, shuffled = patterns(lengths, size), list(lengths)
    random.shuffle(shuffled)
    assert patterns(shuffled, size) == before


@given(lengths=LENGTHS, size=SIZES)
def test_documents_of_equal_length_keep_their_order(lengths: list[int], size: int) -> None:
    come: dict[int, list[PlannedPiece]] = {}
    for piece in itertools.chain(*all_of(best_fit(lengths, size))):
        come.setdefault(piece[2] - piece[1], []).append(piece)
    assert all(pieces == sorted(pieces) for pieces in come.values())


def test_another_key_gives_the_same_sequences_in_another_order() -> None:
    lengths = np.random.default_rng(3).integers(1, 40, 300).tolist()
    one, other = (patterns(lengths, 40, key) for key in (1, 2))
    assert one != other
    assert Counter(one) == Counter(other)


@settings(max_examples=20, deadline=None)
@given(size=st.sampled_from([65_535, 65_536, 100_000]), seed=st.integers(0, 99))
def test_lengths_beyond_16_bits_are_distinct(size: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(0, 3 * size, 30).tolist()
    found = all_of(best_fit(lengths, size))
    assert sorted(piece for some in found for piece in some) == cut(lengths, size)
    assert all(sum(stop - start for _, start, stop in some) <= size for some in found)


RESUMES = int(os.environ.get("HEADRACE_RESUMES", "60"))
METHODS = st.sampled_from(["concat", "best_fit"])
WITH_MIXTURE = pytest.mark.parametrize("is_mixed", [False, pytest.param(True, marks=pytest.mark.slow)])
Piece = tuple[int, int, int, int]  # position, index among the documents made from it, first token, stop
Documents = Callable[[int], list[int]]
Weights = Callable[[int], Sequence[float]]


def tokens_of(pieces: Iterable[Piece]) -> list[tuple[int, int, int]]:
    return [(at, k, token) for at, k, start, stop in pieces for token in range(start, stop)]


def some_documents(seed: int, width: int = 1) -> Documents:
    def of(position: int) -> list[int]:
        rng, longer = random.Random(f"{seed} {position}"), 1 + 3 * (position % width)
        return [longer * rng.choice([0, 1, 2, 3, 5, 7, 12, 30]) for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))]

    return of


def some_weights(rng: random.Random, width: int) -> Weights:
    kinds = [[rng.choice([0, 1, 2, 5]) for _ in range(width)] for _ in range(rng.choice([1, 2]))]
    for weights in kinds:
        weights[rng.randrange(width)] = 3
    return lambda step: kinds[step // 2 % len(kinds)]


def mixing_of(weights: Weights, width: int, step: int) -> TokenMixing:
    return TokenMixing(tuple("abcdef"[:width]), ChangingShares(weights, width, step))


def by_hand(method: str, length: int, documents: list[tuple[int, int, int]]) -> list[list[Piece]]:
    """The sequences of a row with these documents: (position, index, tokens)."""
    waiting = deque((position, number, 0, tokens) for position, number, tokens in documents if tokens)
    sequences: list[list[Piece]] = []
    while waiting:
        position, number, start, stop = waiting.popleft()
        room = length - (stop - start)
        if room < 0:  # a part of a long one
            waiting.appendleft((position, number, start + length, stop))
            sequences.append([(position, number, start, start + length)])
            continue
        sequences.append([(position, number, start, stop)])
        while method == "concat" and room and waiting:
            position, number, start, stop = waiting.popleft()
            end = min(stop, start + room)
            room -= end - start
            sequences[-1].append((position, number, start, end))
            if end < stop:
                waiting.appendleft((position, number, end, stop))
        if method == "best_fit":
            size = lambda one: one[3] - one[2]
            while waiting and sum(map(size, list(waiting)[:CHOICE])) <= room:
                room -= size(waiting[0])
                sequences[-1].append(waiting.popleft())
            first = list(waiting)[:CHOICE]
            best = [first[k] for k in fullest([size(one) for one in first], room)]
            sequences[-1] += best
            waiting = deque(one for one in waiting if one not in best)
    return sequences


def drawn_by_hand(mixing: TokenMixing, row: int, rows: int, documents: Documents) -> list[tuple[int, int, int]]:
    """A row's first 2,000 tokens or more of a mixture, in order: (position, index, tokens) of each document."""
    width, found, shares = len(mixing.names), list[tuple[int, int, int]](), mixing.shares
    rounds, tokens, phases = [0] * width, [0] * width, mixing.phases(row, rows)
    while sum(tokens) < 2000 and sum(rounds) < 200:
        step = Fraction(sum(tokens) * rows, shares.size)
        early, late = shares.due(int(step)), shares.due(int(step) + 1)
        waits: dict[int, Fraction] = {}
        for k in range(width):
            if late[k] > early[k]:
                rate = Fraction(late[k] - early[k], shares.unit * rows)
                due = Fraction(early[k], shares.unit * rows) + rate * (step - int(step))
                whole = sum(documents((rounds[k] * rows + row) * width + k))
                waits[k] = (tokens[k] + Fraction(phases[k], 2 * rows) * whole - due) / rate
        source = min(waits, key=lambda k: (waits[k], k))
        position = (rounds[source] * rows + row) * width + source
        found += [(position, k, n) for k, n in enumerate(documents(position))]
        rounds[source] += 1
        tokens[source] += sum(documents(position))
    return found


def reference(packing: Packing, rows: int, documents: Documents, end: int) -> list[list[list[Piece]]]:
    """The sequences of each row. Without a mixture, of the documents before position `end`."""
    drawn = [
        drawn_by_hand(packing.mixing, row, rows, documents)
        if packing.mixing is not None
        else [(at, k, tokens) for at in range(row, end, rows) for k, tokens in enumerate(documents(at))]
        for row in range(rows)
    ]
    return [by_hand(packing.method, packing.length, some) for some in drawn]


class Run:
    """A rank that reads the documents its rows ask for, a few at a time, and keeps those that are needed."""

    def __init__(self, run: PackedRows) -> None:
        self.run, self.names, self.held = run, dict[int, tuple[int, int]](), set[int]()
        self.asked = self.named = self.given = 0

    def take(self, count: int, documents: Documents, rng: random.Random) -> list[tuple[int, list[Piece]]]:
        found: list[tuple[int, list[Piece]]] = []
        while len(found) < count:
            sequence = self.run.take()
            if sequence is not None:
                assert {one.document.name for one in sequence.pieces} <= self.held
                self.held -= {one.document.name for one in sequence.pieces if one.is_last}
                pieces = [(*self.names[one.document.name], one.start, one.stop) for one in sequence.pieces]
                found.append((sequence.position, pieces))
                continue
            if self.asked == self.run.count:
                break
            stop = min(self.run.count, self.asked + rng.randint(1, 6))
            for position in self.run.positions(self.asked, stop).tolist():
                tokens = documents(position)
                names = {self.named + k: (position, k) for k in range(len(tokens))}
                self.names |= names
                self.held |= names.keys()
                self.held -= set(self.run.arrive(self.named, tokens, [False] * len(tokens)))
                self.named += len(tokens)
            self.asked = stop
        self.given += len(found)
        return found

    def state(self) -> RowProgress:
        return RowProgress.from_json(json.loads(json.dumps(self.run.after(self.given).to_json())))


def ranks_of(
    world: int, packing: Packing, size: int, begin: RowProgress | None = None, *, end: int = ENDLESS, skipped: Any = ()
) -> list[Run]:
    rows = [range(*share(size, rank, world)) for rank in range(world)]
    return [Run(PackedRows(packing, own, size, end, begin and begin.part(own), skipped.__contains__)) for own in rows]


THREE_TO_ONE = TokenMixing(("a", "b"), ConstantShares([3, 1], 1000))


def first_batches(
    packing: Packing, sequences: int, documents: Documents, rng: random.Random
) -> tuple[list[Piece], RowProgress]:
    """The pieces of the first sequences of three rows, and the state after them."""
    (run,) = ranks_of(1, packing, 3)
    return [piece for _, pieces in run.take(sequences, documents, rng) for piece in pieces], run.state()


@WITH_MIXTURE
@given(
    method=METHODS,
    length=st.integers(1, 20),
    rows=st.integers(1, 9),
    width=st.integers(1, 4),
    step=st.integers(1, 300),
    seed=st.integers(0, 999),
)
def test_batches_are_those_of_rows_by_hand_on_any_ranks_after_any_resume(
    is_mixed: bool, method: str, length: int, rows: int, width: int, step: int, seed: int
) -> None:
    rng, steps, width = random.Random(seed), 9, width if is_mixed else 1
    documents = some_documents(seed, width)
    packing = Packing(length, method, mixing_of(some_weights(rng, width), width, step) if is_mixed else None)
    expected = reference(packing, rows, documents, 200 * rows)
    done, state, given = 0, None, [0] * width
    while done < steps:
        count, world = rng.randint(1, steps - done), rng.randint(1, rows)
        ranks = ranks_of(world, packing, rows, state)
        for rank, run in enumerate(ranks):
            low, high = share(rows, rank, world)
            for position, pieces in run.take(count * (high - low), documents, rng):
                at, row = divmod(position, rows)
                assert done <= at < done + count
                assert pieces == expected[row][at]
                for where, _, start, stop in pieces:
                    given[where % width] += stop - start
        state, done = RowProgress.joined([run.state() for run in ranks]), done + count
        assert state is not None
        assert state.tokens == (tuple(given) if is_mixed else ())


@pytest.mark.slow
@given(method=METHODS, length=st.integers(1, 20), rows=st.integers(1, 6), seed=st.integers(0, 999))
def test_epoch_with_an_end_has_each_token_once_after_any_resume(method: str, length: int, rows: int, seed: int) -> None:
    rng, documents, end = random.Random(seed), some_documents(seed), random.Random(seed).randint(0, 60)
    packing, found, state = Packing(length, method), list[tuple[int, list[Piece]]](), None
    while True:
        (run,) = ranks_of(1, packing, rows, state, end=end)
        some = run.take(rng.randint(1, 12), documents, rng)
        found, state = found + some, run.state()
        if not some:
            break
    rows_found = [[pieces for position, pieces in found if position % rows == row] for row in range(rows)]
    assert rows_found == reference(packing, rows, documents, end)
    assert [position for position, _ in found] == sorted(position for position, _ in found)
    all_tokens = [(at, k, token) for at in range(end) for k, n in enumerate(documents(at)) for token in range(n)]
    assert sorted(token for _, pieces in found for token in tokens_of(pieces)) == all_tokens


@pytest.mark.parametrize("is_mixed", [False, True])
def test_no_token_differs_in_runs_that_are_interrupted_and_resumed_on_other_ranks(is_mixed: bool) -> None:
    """`HEADRACE_RESUMES` resumes, on 1 to 64 ranks. Some documents are skipped."""
    resumes = number = 0
    while resumes < RESUMES:
        rng, width = random.Random(number), number % 4 + 1 if is_mixed else 1
        documents, rows = some_documents(number, width), rng.choice([1, 4, 16, 64])
        mixing = mixing_of(some_weights(rng, width), width, rng.choice([50, 3000])) if is_mixed else None
        packing = Packing(rng.choice([5, 16]), rng.choice(["concat", "best_fit"]), mixing)
        skipped, steps = {rng.randrange(20 * rows) for _ in range(rows)}, rng.randint(2, 6)
        (whole,) = ranks_of(1, packing, rows, skipped=skipped)
        expected = [pieces for _, pieces in whole.take(steps * rows, documents, rng)]
        done, state = 0, None
        while done < steps:
            count, world = rng.randint(1, steps - done), rng.randint(1, rows)
            ranks = ranks_of(world, packing, rows, state, skipped=skipped)
            found = [run.take(count * run.run.batch, documents, rng) for run in ranks]
            for position, pieces in (one for some in found for one in some):
                assert pieces == expected[position], f"{number}: {packing}, {rows} rows"
                assert not skipped & {where for where, *_ in pieces}
            assert sorted(at for some in found for at, _ in some) == [*range(done * rows, (done + count) * rows)]
            state, done, resumes = RowProgress.joined([run.state() for run in ranks]), done + count, resumes + 1
        number += 1


def test_documents_skipped_from_a_resume_on_change_nothing_else() -> None:
    """A document that is partly used, or was chosen before, is neither repeated nor lost."""
    packing = Packing(20, "best_fit", THREE_TO_ONE)
    for number in range(20):
        rng, documents = random.Random(number), some_documents(number, 2)
        before, state = first_batches(packing, 3 * 5, documents, rng)
        used = {(at, k) for at, k, *_ in before}
        skipped = {at for at, _ in rng.sample(sorted(used), 3)} | {rng.randrange(120)}
        (then,) = ranks_of(1, packing, 3, state, skipped=skipped)
        rest = [piece for _, pieces in then.take(3 * 5, documents, rng) for piece in pieces]
        tokens = tokens_of(before + rest)
        assert len(tokens) == len(set(tokens))
        assert not skipped & {at for at, *_ in rest}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["concat", "best_fit"])
def test_changed_document_length_loses_no_token_silently(method: str) -> None:
    """Other documents may be drawn after the change. The state's record of used documents must not apply to them."""
    refused, packing = 0, Packing(20, method, THREE_TO_ONE)
    for number in range(150):
        rng, documents = random.Random(number), some_documents(number, 2)
        before, state = first_batches(packing, 3 * 5 + number % 3, documents, rng)
        used = {at for at, *_ in before}
        next_ones = [min(set(range(3 * 2 * 40)[row * 2 + k :: 6]) - used) for row in range(3) for k in (0, 1)]
        gone = {rng.choice(next_ones)}
        (then,) = ranks_of(1, packing, 3, state)
        try:
            after = then.take(3 * 20, lambda at, gone=gone, all_=documents: [] if at in gone else all_(at), rng)
        except StateMismatchError:
            refused += 1
            continue
        tokens = tokens_of(before + [piece for _, pieces in after for piece in pieces])
        assert len(tokens) == len(set(tokens)), "some are repeated"
        for row_and_input in range(6):  # all documents before those partly used in the state were received
            there = {at for at, *_ in tokens if at % 6 == row_and_input}
            known = [at for at in range(row_and_input, max(there & used, default=0), 6) if at not in gone]
            assert all((at, k, 0) in set(tokens) for at in known for k, n in enumerate(documents(at)) if n), "lost"
    assert 0 < refused < 150


@given(sizes=st.lists(st.integers(0, 20), max_size=8), room=st.integers(0, 40))
def test_best_choice_fills_the_room_with_the_oldest(sizes: list[int], room: int) -> None:
    choices = [[k for k in range(len(sizes)) if number >> k & 1] for number in range(1 << len(sizes))]
    fitting = [one for one in choices if sum(sizes[k] for k in one) <= room]
    best = max(fitting, key=lambda one: (sum(sizes[k] for k in one), [k in one for k in range(len(sizes))]))
    assert fullest(sizes, room) == best


def lognormal(documents: int, seed: int = 0, median: int = 600) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 1.0, documents)
    lengths: list[int] = np.maximum(1, drawn.astype(np.int64)).tolist()
    return lengths


def test_web_documents_leave_little_room_in_rows() -> None:
    row, used, sequences = BestFitRow(4096, RowCursor()), 0, 0
    for number, tokens in enumerate(lognormal(20_000)):
        row.add(Document(number, number, number, 0, tokens))
        while pieces := row.take():
            used, sequences = used + sum(piece.stop - piece.start for piece in pieces), sequences + 1
    assert 1 - used / (4096 * sequences) < 0.004


def read(run: PackedRows, count: int, at_once: int, tokens: Callable[[int], int]) -> tuple[int, int]:
    """Read documents, `at_once` at a time, until rows have given `count` sequences or more.

    Returns:
        Number of sequences, and the largest number of waiting tokens.
    """
    asked = taken = waiting = most = 0
    while taken < count:
        for name, position in enumerate(run.positions(asked, asked + at_once).tolist(), asked):
            run.arrive(name, [tokens(position)], [False])
            waiting += tokens(position)
        asked += at_once
        while (sequence := run.take()) is not None:
            waiting -= sum(piece.stop - piece.start for piece in sequence.pieces)
            taken += 1
        most = max(most, waiting)
        assert asked < 1000 * count, "an input whose turn it is is not read"
    return taken, most


@pytest.mark.slow
@pytest.mark.parametrize(("method", "shares", "medians", "tokens", "most"), [
    ("concat", [], [600], 12 * 1024 * 4096, 4_096),
    ("best_fit", [], [600], 12 * 1024 * 4096, 6_144),
    ("best_fit", [70, 30], [600, 200], 16_000_000, 10_240),
    ("best_fit", [50, 30, 15, 5], [600, 200, 3000, 1000], 16_000_000, 16_384),
])  # fmt: skip
def test_state_of_rows_is_short(method: str, shares: list[int], medians: list[int], tokens: int, most: int) -> None:
    """The requirement is 16 KB."""
    documents = [lognormal(65536, seed, median) for seed, median in enumerate(medians)]
    mixing = TokenMixing(tuple("abcd"[: len(shares)]), ConstantShares(shares, 2**20)) if shares else None
    run, width = PackedRows(Packing(4096, method, mixing), range(1024), 1024, ENDLESS), len(documents)
    length = lambda position: documents[position % width][position // width % 65536]
    progress = run.after(read(run, tokens // 4096, 512, length)[0])
    packed = json.dumps(progress.to_json())
    assert len(packed) < most
    assert RowProgress.from_json(json.loads(packed)) == progress
    assert shares or max(cursor.round for cursor in progress.cursors) > 40


@pytest.mark.slow
@pytest.mark.parametrize(("mixing", "tokens", "most"), [
    (None, lambda position: 30 if position % 4 else 900, 4 * 3 * 1000),  # rows use up documents at different speeds
    (TokenMixing(("a", "b"), ConstantShares([99, 1], 2**20)), lambda at: 900 if at % 2 else 30, 4 * 4 * 1000),
], ids=["rows of different speeds", "unequal inputs"])  # fmt: skip
def test_waiting_tokens_are_bounded(mixing: TokenMixing | None, tokens: Callable[[int], int], most: int) -> None:
    run = PackedRows(Packing(1000, "concat", mixing), range(4), 4, ENDLESS)
    assert read(run, 4000, 8, tokens)[1] < most


def test_input_of_the_current_step_is_read_when_documents_become_shorter() -> None:
    """The step then lasts longer than expected, although more of the later input was expected to be due."""
    mixing = mixing_of(lambda step: [1, 0] if step % 2 == 0 else [0, 1], 2, 1000)
    run = PackedRows(Packing(50, "concat", mixing), range(2), 2, ENDLESS)
    read(run, 400, 16, lambda position: 200 if position % 32 < 16 else 2)


MANY = [Document(k, k, k, 0, tokens) for k, tokens in enumerate([6, 9, 4, *[9] * CHOICE])]


@pytest.mark.parametrize(("row", "documents"), [
    (lambda: ConcatRow(10, RowCursor(3, 0, offset=4)), [Document(0, 7, 4, 0, 20)]),
    (lambda: ConcatRow(10, RowCursor(3, 0, offset=4)), [Document(0, 3, 3, 0, 4)]),
    # A position that had failed gives several documents now. Each of them would count as the one after it.
    (lambda: BestFitRow(10, after_a_sequence(MANY)), [Document(1, 1, 1, 0, 9), Document(2, 1, 1, 1, 9)]),
    (lambda: BestFitRow(10, RowCursor(3, 1, check=1)), [Document(0, 3, 3, 0, 5, input=1), Document(1, 4, 4, 0, 5)]),
    (lambda: BestFitRow(10, RowCursor(3, 1, check=1)), [Document(1, 4, 4, 0, 5)]),
])  # fmt: skip
def test_other_documents_are_refused(row: Callable[[], ConcatRow | BestFitRow], documents: list[Document]) -> None:
    resumed, (*known, other) = row(), documents
    for document in known:
        resumed.add(document)
    with pytest.raises(StateMismatchError, match="not those that the state was in the middle of"):
        resumed.add(other)


def after_a_sequence(documents: list[Document]) -> RowCursor:
    row = BestFitRow(10, RowCursor())
    for document in documents:
        row.add(document)
    assert [piece.document.name for piece in row.take() or ()] == [0, 2]
    assert row.cursor.taken == 1
    return row.cursor


PLAIN = RowProgress(4, (RowCursor(3, 1, 2, 5), RowCursor(9, 0, 70_000, 1 << 70)))
MIXED = RowProgress(4, (RowCursor(3, 1, 2, 5, (InputCursor(1, 70), InputCursor(2, 70_000))),) * 2, (80, 70_000))


@pytest.mark.parametrize(("progress", "change"), [
    (PLAIN, {"count": 0}),
    (PLAIN, {"count": 9}),
    (PLAIN, {"turn": -1}),
    (PLAIN, {"cursors": "AAAA"}),
    (PLAIN, {"cursors": "not base85"}),
    (PLAIN, {"cursors": base64.b85encode(zlib.compress(b"\x09" + bytes(90))).decode()}),
    (PLAIN, {"cursors": RowProgress(0, (RowCursor(),) * 5).to_json()["cursors"]}),
    (MIXED, {"tokens": [1]}),
    (MIXED, {"tokens": [-1, 3]}),
    (MIXED, {"inputs": [[0, 0]]}),
    (MIXED, {"inputs": None}),
])  # fmt: skip
def test_damaged_state_of_rows_is_refused(progress: RowProgress, change: dict[str, object]) -> None:
    packed = progress.to_json()
    assert RowProgress.from_json(packed) == progress
    with pytest.raises((ValueError, TypeError)):
        RowProgress.from_json({**packed, **change})


@pytest.mark.parametrize("ranks", [
    [RowProgress(2, (RowCursor(),) * 2), None],
    [RowProgress(2, (RowCursor(),) * 2), RowProgress(4, (RowCursor(),) * 2)],
    [RowProgress(3, (RowCursor(),) * 2), RowProgress(3, (RowCursor(),) * 2)],
])  # fmt: skip
def test_states_of_ranks_after_different_steps_are_not_joined(ranks: Sequence[RowProgress | None]) -> None:
    with pytest.raises(ValueError, match="different steps"):
        RowProgress.joined(ranks)
