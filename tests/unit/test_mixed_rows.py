"""Documents that lanes draw from several inputs by tokens, by plan alone: as plain Python draws them, on any ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit import test_packed_rows
from unit.test_packed_rows import METHODS, RESUMES, Documents, by_hand, lognormal, most_waiting

from headrace.errors import StateMismatchError
from headrace.order.mixture import ChangingShares, ConstantShares, TokenMixing
from headrace.order.orders import ENDLESS
from headrace.order.packed_rows import PackedRows
from headrace.order.packing import Packing
from headrace.order.row_states import InputCursor, RowCursor, RowProgress
from headrace.order.steps import share


def some_documents(seed: int, width: int) -> Documents:
    def of(position: int) -> list[int]:
        rng, longer = random.Random(f"{seed} {position}"), 1 + 3 * (position % width)
        return [longer * rng.choice([0, 1, 2, 3, 5, 7]) for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))]

    return of


def some_weights(rng: random.Random, width: int) -> Callable[[int], Sequence[float]]:
    kinds = [[rng.choice([0, 1, 2, 5]) for _ in range(width)] for _ in range(rng.choice([1, 2]))]
    for weights in kinds:
        weights[rng.randrange(width)] = 3
    return lambda step: kinds[step // 2 % len(kinds)]


def mixing_of(weights: Callable[[int], Sequence[float]], width: int, step: int) -> TokenMixing:
    return TokenMixing(tuple("abcdef"[:width]), ChangingShares(weights, width, step))


def drawn_by_hand(mixing: TokenMixing, lane: int, lanes: int, documents: Documents) -> list[tuple[int, int, int]]:
    """A lane's documents in their order, some hundred of them: (position, number, tokens)."""
    width, found, shares = len(mixing.names), list[tuple[int, int, int]](), mixing.shares
    rounds, tokens, phases = [0] * width, [0] * width, mixing.phases(lane, lanes)
    while sum(tokens) < 2000 and sum(rounds) < 200:
        step = Fraction(sum(tokens) * lanes, shares.size)
        early, late = shares.due(int(step)), shares.due(int(step) + 1)
        waits: dict[int, Fraction] = {}
        for k in range(width):
            if late[k] > early[k]:
                rate = Fraction(late[k] - early[k], shares.unit * lanes)
                due = Fraction(early[k], shares.unit * lanes) + rate * (step - int(step))
                whole = sum(documents((rounds[k] * lanes + lane) * width + k))
                waits[k] = (tokens[k] + Fraction(phases[k], 2 * lanes) * whole - due) / rate
        source = min(waits, key=lambda k: (waits[k], k))
        position = (rounds[source] * lanes + lane) * width + source
        found += [(position, k, n) for k, n in enumerate(documents(position))]
        rounds[source] += 1
        tokens[source] += sum(documents(position))
    return found


class Run(test_packed_rows.Run):
    """One that knows which documents it has to hold."""

    def __init__(self, run: PackedRows) -> None:
        super().__init__(run)
        self.held: set[int] = set()

    def come(self, tokens: list[int]) -> None:
        self.held |= {self.named + k for k in range(len(tokens))}
        self.held -= set(self.run.arrive(self.named, tokens, [False] * len(tokens)))

    def use(self, pieces: Sequence[Any]) -> None:
        assert {one.document.name for one in pieces} <= self.held
        self.held -= {one.document.name for one in pieces if one.is_last}


def ranks_of(
    world: int, packing: Packing, size: int, begin: RowProgress | None, left_out: set[int] | None = None
) -> list[Run]:
    lanes = [range(*share(size, rank, world)) for rank in range(world)]
    named = (left_out or set()).__contains__
    return [Run(PackedRows(packing, own, size, ENDLESS, begin and begin.part(own), named)) for own in lanes]


@pytest.mark.slow
@given(
    method=METHODS,
    length=st.integers(1, 20),
    lanes=st.integers(1, 7),
    width=st.integers(1, 4),
    step=st.integers(1, 300),
    seed=st.integers(0, 999),
)
def test_global_batches_are_those_of_lanes_by_hand_on_any_ranks_resumed_anywhere(
    method: str, length: int, lanes: int, width: int, step: int, seed: int
) -> None:
    rng, documents, steps = random.Random(seed), some_documents(seed, width), 5
    mixing = mixing_of(some_weights(rng, width), width, step)
    packing = Packing(length, method, mixing)
    drawn = [drawn_by_hand(mixing, lane, lanes, documents) for lane in range(lanes)]
    expected = [by_hand(method, length, some) for some in drawn]
    done, state = 0, None
    given = [0] * width
    while done < steps:
        count, world = rng.randint(1, steps - done), rng.randint(1, lanes)
        ranks = ranks_of(world, packing, lanes, state)
        for rank, run in enumerate(ranks):
            low, high = share(lanes, rank, world)
            for position, pieces in run.take(count * (high - low), documents, rng):
                at, lane = divmod(position, lanes)
                assert done <= at < done + count
                assert pieces == expected[lane][at]
                for where, _, start, stop in pieces:
                    given[where % width] += stop - start
        state, done = RowProgress.joined([run.state() for run in ranks]), done + count
        assert state is not None
        assert state.tokens == tuple(given)


def test_no_token_differs_in_runs_that_are_interrupted_anywhere_and_go_on_with_other_ranks() -> None:
    """As many as `HEADRACE_RESUMES` says, on 1 to 64 ranks, with documents that are left out."""
    resumes = number = 0
    while resumes < RESUMES:
        rng, width = random.Random(number), number % 4 + 1
        documents, lanes = some_documents(number, width), rng.choice([1, 4, 16, 64])
        mixing = mixing_of(some_weights(rng, width), width, rng.choice([50, 3000]))
        packing = Packing(rng.choice([5, 16]), rng.choice(["concat", "best_fit"]), mixing)
        left_out, steps = {rng.randrange(20 * lanes) for _ in range(lanes)}, rng.randint(2, 6)
        (whole,) = ranks_of(1, packing, lanes, None, left_out)
        expected = [pieces for _, pieces in whole.take(steps * lanes, documents, rng)]
        done, state = 0, None
        while done < steps:
            count, world = rng.randint(1, steps - done), rng.randint(1, lanes)
            ranks = ranks_of(world, packing, lanes, state, left_out)
            found = [run.take(count * run.run.batch, documents, rng) for run in ranks]
            for position, pieces in (one for some in found for one in some):
                assert pieces == expected[position], f"{number}: {packing}, {lanes} lanes"
                assert not left_out & {where for where, *_ in pieces}
            assert sorted(at for some in found for at, _ in some) == [*range(done * lanes, (done + count) * lanes)]
            state, done, resumes = RowProgress.joined([run.state() for run in ranks]), done + count, resumes + 1
        number += 1


def test_what_is_left_out_from_now_on_changes_nothing_else_of_what_is_drawn() -> None:
    """A document that has been begun, or was chosen before, comes neither twice nor not at all."""
    for number in range(20):
        rng, documents = random.Random(number), some_documents(number, 2)
        mixing = TokenMixing(("a", "b"), ConstantShares([3, 1], 1000))
        packing = Packing(20, "best_fit", mixing)
        (first,) = ranks_of(1, packing, 3, None)
        begin = [piece for _, pieces in first.take(3 * 5, documents, rng) for piece in pieces]
        used = {(at, k) for at, k, *_ in begin}
        left_out = {at for at, _ in rng.sample(sorted(used), 3)} | {rng.randrange(120)}
        (then,) = ranks_of(1, packing, 3, first.state(), left_out)
        rest = [piece for _, pieces in then.take(3 * 5, documents, rng) for piece in pieces]
        tokens = [(at, k, token) for at, k, start, stop in begin + rest for token in range(start, stop)]
        assert len(tokens) == len(set(tokens))
        assert not left_out & {at for at, *_ in rest}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["concat", "best_fit"])
def test_document_that_has_another_length_when_it_is_read_again_loses_nothing_in_silence(method: str) -> None:
    """Others may be drawn then: what a state says of those used up must not be taken for what it says of these."""
    refused = 0
    for number in range(150):
        rng, documents = random.Random(number), some_documents(number, 2)
        mixing = TokenMixing(("a", "b"), ConstantShares([3, 1], 1000))
        packing = Packing(20, method, mixing)
        (first,) = ranks_of(1, packing, 3, None)
        begin = [piece for _, pieces in first.take(3 * 5 + number % 3, documents, rng) for piece in pieces]
        state, used = first.state(), {at for at, *_ in begin}
        next_ones = [min(set(range(3 * 2 * 40)[lane * 2 + k :: 6]) - used) for lane in range(3) for k in (0, 1)]
        gone = {rng.choice(next_ones)}
        (then,) = ranks_of(1, packing, 3, state)
        try:
            after = then.take(3 * 20, lambda at, gone=gone, all_=documents: [] if at in gone else all_(at), rng)
        except StateMismatchError:
            refused += 1
            continue
        rest = [piece for _, pieces in after for piece in pieces]
        tokens = [(at, k, token) for at, k, start, stop in begin + rest for token in range(start, stop)]
        assert len(tokens) == len(set(tokens)), "some came twice"
        for lane_and_input in range(6):  # all that lie before what the state was in the middle of have come
            there = {at for at, *_ in tokens if at % 6 == lane_and_input}
            known = [at for at in range(lane_and_input, max(there & used, default=0), 6) if at not in gone]
            assert all((at, k, 0) in set(tokens) for at in known for k, n in enumerate(documents(at)) if n), "lost"
    assert 0 < refused < 150


def mixed(method: str, lanes: int, weights: Sequence[float], medians: Sequence[int], tokens: int) -> RowProgress:
    width = len(weights)
    documents = [lognormal(65536, seed, median) for seed, median in enumerate(medians)]
    packing = Packing(4096, method, TokenMixing(tuple("abcd"[:width]), ConstantShares(weights, 2**20)))
    run = PackedRows(packing, range(lanes), lanes, ENDLESS)
    asked = given = 0
    once = max(64, lanes // 2)
    while given * 4096 < tokens:
        for name, position in enumerate(run.positions(asked, asked + once).tolist(), asked):
            some = documents[position % width]
            run.arrive(name, [some[position // width % len(some)]], [False])
        asked += once
        while run.take() is not None:
            given += 1
    return run.after(given)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["concat", "best_fit"])
def test_shares_of_tokens_are_within_a_thousandth_after_ten_million(method: str) -> None:
    progress = mixed(method, 8, [0.7, 0.3], [600, 200], 10_000_000)
    assert sum(progress.tokens) > 9_900_000
    assert abs(progress.tokens[0] / sum(progress.tokens) - 0.7) < 0.001


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shares", "medians", "most"), [([70, 30], [600, 200], 10_240), ([50, 30, 15, 5], [600, 200, 3000, 1000], 16_384)]
)
def test_state_of_1024_rows_of_several_inputs_is_short(shares: list[int], medians: list[int], most: int) -> None:
    """16 KB is what was asked for."""
    progress = mixed("best_fit", 1024, shares, medians, 16_000_000)
    packed = json.dumps(progress.to_json())
    assert len(packed) < most
    assert RowProgress.from_json(json.loads(packed)) == progress


@pytest.mark.slow
def test_what_lies_ready_does_not_grow_where_inputs_are_unlike() -> None:
    packing = Packing(1000, "concat", TokenMixing(("a", "b"), ConstantShares([99, 1], 2**20)))
    run = PackedRows(packing, range(4), 4, ENDLESS)
    assert most_waiting(run, lambda position: 900 if position % 2 else 30) < 4 * 4 * 1000


def test_an_input_that_comes_now_is_read_though_more_of_a_later_one_was_expected_to_come() -> None:
    """Documents turn out to be shorter than those before: the step goes on longer than it seemed."""

    def by_turns(step: int) -> Sequence[float]:
        return [1, 0] if step % 2 == 0 else [0, 1]

    run = PackedRows(Packing(50, "concat", mixing_of(by_turns, 2, 1000)), range(2), 2, ENDLESS)
    asked = taken = 0
    while taken < 400:
        for name, position in enumerate(run.positions(asked, asked + 16).tolist(), asked):
            run.arrive(name, [200 if position % 32 < 16 else 2], [False])
        asked += 16
        while run.take() is not None:
            taken += 1
        assert asked < 40_000, "an input that must come is not asked for"


@pytest.mark.parametrize("change", [{"tokens": [1]}, {"tokens": [-1, 3]}, {"inputs": [[0, 0]]}, {"inputs": None}])
def test_inputs_of_a_damaged_state_are_refused(change: dict[str, object]) -> None:
    cursor = RowCursor(3, 1, 2, 5, (InputCursor(1, 70), InputCursor(2, 70_000)))
    progress = RowProgress(4, (cursor, cursor), (80, 70_000))
    packed = progress.to_json()
    assert RowProgress.from_json(packed) == progress
    with pytest.raises((ValueError, TypeError)):
        RowProgress.from_json({**packed, **change})
