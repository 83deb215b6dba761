"""Documents packed in lanes, by plan alone: as plain Python packs them, on any ranks, resumed anywhere."""

from __future__ import annotations

import base64
import json
import os
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import StateMismatchError
from headrace.order.packed_rows import CHOICE, BestFitRow, ConcatRow, Document, PackedRows, fullest
from headrace.order.packing import Packing
from headrace.order.row_states import RowCursor, RowProgress
from headrace.order.steps import share

RESUMES = int(os.environ.get("HEADRACE_RESUMES", "60"))
METHODS = st.sampled_from(["concat", "best_fit"])
FAR = 2**62
Piece = tuple[int, int, int, int]  # position, number of the document that came of it, tokens from .. to
Documents = Callable[[int], list[int]]


def some_documents(seed: int) -> Documents:
    def of(position: int) -> list[int]:
        rng = random.Random(f"{seed} {position}")
        return [rng.choice([0, 1, 2, 3, 5, 7, 12, 30]) for _ in range(rng.choice([0, 1, 1, 1, 2, 3]))]

    return of


def by_hand(method: str, length: int, documents: list[tuple[int, int, int]]) -> list[list[Piece]]:
    """The sequences of a lane that has these documents: (position, number, tokens)."""
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


def reference(method: str, length: int, lanes: int, end: int, documents: Documents) -> dict[int, list[list[Piece]]]:
    """The sequences of each lane, of documents before some position."""
    return {
        lane: by_hand(
            method,
            length,
            [(at, k, tokens) for at in range(lane, end, lanes) for k, tokens in enumerate(documents(at))],
        )
        for lane in range(lanes)
    }


class Run:
    """A rank that reads what its lanes ask for, some documents at a time.

    Args:
        run: asks for them.
        count: how many there are.
    """

    def __init__(self, run: Any, count: int = FAR) -> None:
        self.run, self.count = run, count
        self.asked = self.named = self.given = 0
        self.names: dict[int, tuple[int, int]] = {}

    def take(self, count: int, documents: Documents, rng: random.Random) -> list[tuple[int, list[Piece]]]:
        found: list[tuple[int, list[Piece]]] = []
        while len(found) < count:
            sequence = self.run.take()
            if sequence is not None:
                self.use(sequence.pieces)
                pieces = [(*self.names[one.document.name], one.start, one.stop) for one in sequence.pieces]
                found.append((sequence.position, pieces))
                continue
            if self.asked == self.count:
                break
            stop = min(self.count, self.asked + rng.randint(1, 6))
            for position in self.run.positions(self.asked, stop).tolist():
                tokens = documents(position)
                self.names |= {self.named + k: (position, k) for k in range(len(tokens))}
                self.come(tokens)
                self.named += len(tokens)
            self.asked = stop
        self.given += len(found)
        return found

    def come(self, tokens: list[int]) -> None:
        self.run.arrive(self.named, tokens, [False] * len(tokens))

    def use(self, pieces: Sequence[Any]) -> None:
        """Nothing else is to be done with what a sequence has."""

    def state(self) -> RowProgress:
        return RowProgress.from_json(json.loads(json.dumps(self.run.after(self.given).to_json())))


def ranks_of(world: int, packing: Packing, size: int, end: int, begin: RowProgress | None) -> list[Run]:
    lanes = [range(*share(size, rank, world)) for rank in range(world)]
    runs = [PackedRows(packing, own, size, end, begin and begin.part(own)) for own in lanes]
    return [Run(run, run.count) for run in runs]


@given(method=METHODS, length=st.integers(1, 20), lanes=st.integers(1, 9), seed=st.integers(0, 999))
def test_global_batches_are_those_of_lanes_by_hand_on_any_ranks_resumed_anywhere(
    method: str, length: int, lanes: int, seed: int
) -> None:
    rng, documents, packing, steps = random.Random(seed), some_documents(seed), Packing(length, method), 9
    expected = reference(method, length, lanes, 200 * lanes, documents)
    done, state = 0, None
    while done < steps:
        count, world = rng.randint(1, steps - done), rng.randint(1, min(8, lanes))
        ranks = ranks_of(world, packing, lanes, FAR, state)
        for rank, run in enumerate(ranks):
            low, high = share(lanes, rank, world)
            for position, pieces in run.take(count * (high - low), documents, rng):
                step, lane = divmod(position, lanes)
                assert done <= step < done + count
                assert pieces == expected[lane][step]
        state, done = RowProgress.joined([run.state() for run in ranks]), done + count


@pytest.mark.slow
@given(method=METHODS, length=st.integers(1, 20), lanes=st.integers(1, 6), seed=st.integers(0, 999))
def test_epoch_with_an_end_has_each_token_once_wherever_it_is_resumed(
    method: str, length: int, lanes: int, seed: int
) -> None:
    rng, documents, end = random.Random(seed), some_documents(seed), random.Random(seed).randint(0, 60)
    found, state = list[tuple[int, list[Piece]]](), None
    while True:
        (run,) = ranks_of(1, Packing(length, method), lanes, end, state)
        some = run.take(rng.randint(1, 12), documents, rng)
        found, state = found + some, run.state()
        if not some:
            break
    lanes_found: dict[int, list[list[Piece]]] = {lane: [] for lane in range(lanes)}
    for position, pieces in found:
        lanes_found[position % lanes].append(pieces)
    assert lanes_found == reference(method, length, lanes, end, documents)
    assert [position for position, _ in found] == sorted(position for position, _ in found)
    come = Counter((at, k, token) for _, pieces in found for at, k, a, b in pieces for token in range(a, b))
    all_tokens = ((at, k, token) for at in range(end) for k, n in enumerate(documents(at)) for token in range(n))
    assert come == Counter(all_tokens)


@given(sizes=st.lists(st.integers(0, 20), max_size=8), room=st.integers(0, 40))
def test_no_other_choice_fills_a_room_up_further_or_has_older_ones(sizes: list[int], room: int) -> None:
    choices = [[k for k in range(len(sizes)) if number >> k & 1] for number in range(1 << len(sizes))]
    fitting = [one for one in choices if sum(sizes[k] for k in one) <= room]
    best = max(fitting, key=lambda one: (sum(sizes[k] for k in one), [k in one for k in range(len(sizes))]))
    assert fullest(sizes, room) == best


def lognormal(documents: int, seed: int = 0, median: int = 600) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(median), 1.0, documents)
    lengths: list[int] = np.maximum(1, drawn.astype(np.int64)).tolist()
    return lengths


def test_documents_as_on_the_web_leave_little_room_in_their_lane() -> None:
    lane, used, sequences = BestFitRow(4096, RowCursor()), 0, 0
    for number, tokens in enumerate(lognormal(20_000)):
        lane.add(Document(number, number, number, 0, tokens))
        while pieces := lane.take():
            used, sequences = used + sum(piece.stop - piece.start for piece in pieces), sequences + 1
    assert 1 - used / (4096 * sequences) < 0.004


@pytest.mark.slow
@pytest.mark.parametrize(("method", "most"), [("concat", 4_096), ("best_fit", 6_144)])
def test_state_of_1024_rows_is_short_however_far_they_are(method: str, most: int) -> None:
    """16 KB is what was asked for."""
    lengths, lanes = lognormal(2**20), 1024
    run = PackedRows(Packing(4096, method), range(lanes), lanes, FAR)
    asked, given = 0, 0
    while given < 12 * lanes:
        for name, position in enumerate(run.positions(asked, asked + 512).tolist(), asked):
            run.arrive(name, [lengths[position % len(lengths)]], [False])
        asked += 512
        while run.take() is not None:
            given += 1
    progress = run.after(given)
    packed = json.dumps(progress.to_json())
    assert len(packed) < most
    assert RowProgress.from_json(json.loads(packed)) == progress
    assert max(cursor.round for cursor in progress.cursors) > 40


@pytest.mark.slow
def test_what_waits_does_not_grow_where_lanes_use_up_documents_at_different_speeds() -> None:
    """To read them in the order of the epoch would have thousands of the long ones wait."""
    run = PackedRows(Packing(1000, "concat"), range(4), 4, FAR)
    assert most_waiting(run, lambda position: 30 if position % 4 else 900) < 4 * 3 * 1000


def most_waiting(run: PackedRows, tokens: Callable[[int], int]) -> int:
    """Tokens that wait at the most, until rows have 4,000 sequences, of documents read 8 at a time."""
    waiting = most = asked = taken = 0
    while taken < 4000:
        for name, position in enumerate(run.positions(asked, asked + 8).tolist(), asked):
            run.arrive(name, [tokens(position)], [False])
            waiting += tokens(position)
        asked += 8
        while (sequence := run.take()) is not None:
            waiting -= sum(piece.stop - piece.start for piece in sequence.pieces)
            taken += 1
        most = max(most, waiting)
    return most


def test_state_is_refused_where_other_documents_come() -> None:
    for other in (Document(0, 7, 4, 0, 20), Document(0, 3, 3, 0, 4)):
        with pytest.raises(StateMismatchError, match="not those that the state was in the middle of"):
            ConcatRow(10, RowCursor(3, 0, offset=4)).add(other)


def test_state_is_refused_where_other_documents_come_than_those_that_it_says_are_used_up() -> None:
    """A position that had failed, and gives several documents now: each of these had counted as the one after it."""
    lane = BestFitRow(10, RowCursor())
    for k, tokens in enumerate([6, 9, 4, *[9] * CHOICE]):
        lane.add(Document(k, k, k, 0, tokens))
    assert [piece.document.name for piece in lane.take() or ()] == [0, 2]
    assert lane.cursor.taken == 1
    again = BestFitRow(10, lane.cursor)
    again.add(Document(1, 1, 1, 0, 9))
    with pytest.raises(StateMismatchError, match="not those that the state was in the middle of"):
        again.add(Document(2, 1, 1, 1, 9))

    behind = RowCursor(3, 1, check=1)
    for parts in ([0], []):
        lane = BestFitRow(10, behind)
        for part in parts:
            lane.add(Document(0, 3, 3, part, 5, input=1))
        with pytest.raises(StateMismatchError, match="not those that the state was in the middle of"):
            lane.add(Document(1, 4, 4, 0, 5))


@pytest.mark.parametrize(
    "change",
    [
        {"lanes": 0},
        {"lanes": 9},
        {"turn": -1},
        {"cursors": "AAAA"},
        {"cursors": "not base85"},
        {"cursors": base64.b85encode(zlib.compress(b"\x09" + bytes(90))).decode()},
        {"cursors": RowProgress(0, (RowCursor(),) * 5).to_json()["cursors"]},
    ],
)
def test_lanes_of_a_damaged_state_are_refused(change: dict[str, object]) -> None:
    packed = RowProgress(4, (RowCursor(3, 1, 2, 5), RowCursor(9, 0, 70_000, 1 << 70))).to_json()
    assert RowProgress.from_json(packed).cursors[1] == RowCursor(9, 0, 70_000, 1 << 70)
    with pytest.raises(ValueError):
        RowProgress.from_json({**packed, **change})


@pytest.mark.parametrize(
    "ranks",
    [
        [RowProgress(2, (RowCursor(),) * 2), None],
        [RowProgress(2, (RowCursor(),) * 2), RowProgress(4, (RowCursor(),) * 2)],
        [RowProgress(3, (RowCursor(),) * 2), RowProgress(3, (RowCursor(),) * 2)],
    ],
)
def test_lanes_of_ranks_behind_different_steps_are_not_joined(ranks: Sequence[RowProgress | None]) -> None:
    with pytest.raises(ValueError, match="behind different steps"):
        RowProgress.joined(ranks)


def test_no_token_differs_in_runs_that_are_interrupted_anywhere_and_go_on_with_other_ranks() -> None:
    """As many as `HEADRACE_RESUMES` says, on 1 to 64 ranks, each of which reads in another order."""
    resumes = number = 0
    while resumes < RESUMES:
        rng, documents = random.Random(number), some_documents(number)
        lanes = rng.choice([1, 4, 16, 64])
        packing, steps = Packing(rng.choice([5, 16]), rng.choice(["concat", "best_fit"])), rng.randint(2, 6)
        (whole,) = ranks_of(1, packing, lanes, FAR, None)
        expected = [pieces for _, pieces in whole.take(steps * lanes, documents, rng)]
        done, state = 0, None
        while done < steps:
            count, world = rng.randint(1, steps - done), rng.randint(1, lanes)
            ranks = ranks_of(world, packing, lanes, FAR, state)
            found = [run.take(count * run.run.batch, documents, rng) for run in ranks]
            for position, pieces in (one for some in found for one in some):
                assert pieces == expected[position], f"{number}: {packing}, {lanes} lanes"
            assert sorted(at for some in found for at, _ in some) == [*range(done * lanes, (done + count) * lanes)]
            state, done, resumes = RowProgress.joined([run.state() for run in ranks]), done + count, resumes + 1
        number += 1
