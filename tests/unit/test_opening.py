"""Samples of blocks, opened one by one and many together: the same values, and the same errors."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.formats.format import Block, Format
from headrace.formats.limits import DEFAULTS
from headrace.formats.opening import BLOCK, ROW, Opener, SharedBlock
from headrace.formats.rows_of_block import RowsOfBlock


class _Squares(RowsOfBlock):
    """Rows of a block of bytes; those of value 7 are damaged, and those of value 9 have a name that is taken."""

    def __init__(self, data: bytes) -> None:
        self.data, self.nbytes = data, len(data)

    def __len__(self) -> int:
        return len(self.data)

    def row(self, number: int) -> dict[str, object]:
        if self.data[number] == 7:
            raise ValueError("it is 7")
        return {"__n__" if self.data[number] == 9 else "n": self.data[number] ** 2}


class _Numbers(Format):
    name, suffixes = "numbers", ()

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object]]:
        if block.members == ("single",):
            return [{"single": len(bodies[0])}]
        if not bodies[0]:
            raise hr.LimitError("it is empty")
        return _Squares(bodies[0])


def samples_of(blocks: Sequence[bytes], rows: Sequence[tuple[int, int]]) -> list[dict[str, object]]:
    """A sample for each (block, row); of a block -1 one that is a member by itself."""
    shared = [SharedBlock(k + 1, partial(dict, body=data)) for k, data in enumerate(blocks)]
    samples: list[dict[str, object]] = []
    for k, (block, row) in enumerate(rows):
        source: dict[str, object] = {"single": bytes(row)} if block < 0 else {BLOCK: shared[block], ROW: row}
        samples.append({"__key__": str(k), "__url__": f"memory://{max(block, 0)}", **source})
    return samples


def opened(opener: Opener, samples: Sequence[dict[str, object]]) -> list[object]:
    made: list[object] = []
    for sample in samples:
        try:
            made.append(opener(sample))
        except hr.HeadraceError as error:
            made.append((type(error), str(error), getattr(error, "key", None), error.url))
    return made


BLOCKS = st.lists(st.binary(max_size=12), min_size=1, max_size=3)


@given(BLOCKS, st.data())
def test_rows_that_are_opened_together_are_those_that_are_opened_one_by_one(blocks: list[bytes], data: st.DataObject):
    places = [(k, row) for k, block in enumerate(blocks) for row in range(max(1, len(block)))] + [(-1, 3)]
    rows = data.draw(st.lists(st.sampled_from(places), max_size=20))
    together = samples_of(blocks, rows)
    opener = Opener(_Numbers(), DEFAULTS)
    opener.prepare(together)
    assert opened(opener, together) == opened(Opener(_Numbers(), DEFAULTS), samples_of(blocks, rows))


def test_many_large_rows_are_not_opened_together() -> None:
    block = bytes(2**22)
    samples = samples_of([block], [(0, row) for row in range(2**21 + 1, 2**22, 2**12)])
    opener = Opener(_Numbers(), DEFAULTS)
    assert opener.prepare(samples) == len(samples)  # as many bytes as they have
    assert BLOCK not in samples[0]
    huge = samples_of([block], [(0, row) for row in range(2**21 + 1)])
    assert opener.prepare(huge) == 2**21 + 1
    assert BLOCK in huge[0]


@pytest.mark.parametrize("at", [0, -1, slice(1, 3), slice(None, None, -2)])
def test_rows_of_a_block_are_a_sequence(at: int | slice) -> None:
    rows = _Squares(b"\1\2\3\4")
    assert rows[at] == [{"n": 1}, {"n": 4}, {"n": 9}, {"n": 16}][at]
    with pytest.raises(IndexError):
        rows[4]


class _Counted(_Numbers):
    """Says which blocks were opened."""

    def __init__(self) -> None:
        self.opened: list[bytes] = []

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object]]:
        self.opened.append(bodies[0])
        return super().open_block(block, bodies)


@pytest.mark.parametrize("together", [False, True])
def test_block_is_opened_once_and_let_go_of_with_the_last_row_that_is_wanted(together: bool) -> None:
    form = _Counted()
    opener = Opener(form, DEFAULTS)
    shared = SharedBlock(1, partial(dict, body=b"\1\2\3\4"), wanted=4)
    for number, row in enumerate((2, 0, 3, 1)):
        assert len(opener._opened) == (number > 0)
        sample: dict[str, object] = {"__key__": str(row), "__url__": "memory://0", BLOCK: shared, ROW: row}
        if together:
            opener.prepare([sample])
            assert BLOCK not in sample
        assert opener(sample)["n"] == (row + 1) ** 2
    assert len(form.opened) == 1
    assert not opener._opened
    assert opener._held_bytes == 0


def test_rows_that_are_left_out_and_refused_ones_count_as_given_once() -> None:
    """Else a block would be let go of too early, and opened again for what is left of it."""

    class Odd(_Counted):
        def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object]]:
            super().open_block(block, bodies)
            return [None if value % 2 else {"n": value} for value in bodies[0]]  # type: ignore[list-item]

    form = Odd()
    opener = Opener(form, DEFAULTS)
    shared = SharedBlock(1, partial(dict, body=bytes(range(6))), wanted=6)
    for start in (0, 3):
        samples = [
            {"__key__": str(row), "__url__": "memory://0", BLOCK: shared, ROW: row} for row in range(start, start + 3)
        ]
        opener.prepare(samples)
        for one in samples:
            opener(one)
    assert len(form.opened) == 1
    assert not opener._opened


def test_threads_open_different_blocks_at_the_same_time_and_one_block_once() -> None:
    both = threading.Barrier(2, timeout=30)

    class Together(_Counted):
        def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object]]:
            both.wait()
            return super().open_block(block, bodies)

    form = Together()
    opener = Opener(form, DEFAULTS)
    blocks = [SharedBlock(k + 1, partial(dict, body=bytes([k, k])), wanted=2) for k in range(2)]
    got: list[object] = []

    def make(block: int, row: int) -> None:
        got.append(opener({"__key__": "0", "__url__": "memory://0", BLOCK: blocks[block], ROW: row})["n"])

    threads = [threading.Thread(target=make, args=(k % 2, k // 2)) for k in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(map(str, got)) == ["0", "0", "1", "1"]
    assert len(form.opened) == 2
    assert not opener._opened
