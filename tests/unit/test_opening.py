"""Samples of blocks opened together equal those opened singly. Windows of tokens have the tokens they should have."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace._util.sample_ranges import LeasedBodies, Rows
from headrace.formats.format import Block, Format, RowsOfBlock
from headrace.formats.limits import DEFAULTS
from headrace.formats.opening import BLOCK, ROW, BlockRows, MemberRows, Opener, SharedBlock, is_kept
from headrace.formats.tokens import TokenOpener
from headrace.torch_compat.spec import Slots, Spec


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


class _ByColumn(_Squares):
    """Rows that give their values field by field."""

    def columns(self, numbers: Sequence[int]) -> Mapping[str, Sequence[object]] | None:
        rows = self.some(numbers)
        return {name: [row[name] for row in rows] for name in {name: 0 for row in rows for name in row}}


class _Numbers(Format):
    name, suffixes = "numbers", ()
    rows: type[_Squares] = _Squares

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object]]:
        if block.members == ("single",):
            return [{"single": len(bodies[0])}]
        if not bodies[0]:
            raise hr.errors.LimitError("it is empty")
        return self.rows(bodies[0])


class _Columns(_Numbers):
    rows = _ByColumn


def _body(data: bytes) -> list[tuple[str, bytes]]:
    return [("body", data)]


def block_rows(blocks: Sequence[bytes], rows: Sequence[tuple[int, int]]) -> BlockRows:
    """A sample for each (block, row); the last block is opened for one row alone."""
    shared = [SharedBlock(k + 1, partial(_body, data)) for k, data in enumerate(blocks)]
    shared.append(SharedBlock(0, lambda: [("single", b"123")]))
    block, row = np.array(rows, np.int64).reshape(-1, 2).T
    urls = [f"memory://{block}" for block, _ in rows]
    return BlockRows([str(k) for k in range(len(rows))], urls, shared, block, row)


def opened_together(opener: Opener, rows: BlockRows, start: int = 0) -> list[object]:
    samples, _ = opener.open_rows(rows, start, len(rows.keys))
    return [
        opened(opener, [rows.sample(k)])[0] if sample is None else sample for k, sample in enumerate(samples, start)
    ]


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
def test_rows_opened_together_equal_rows_opened_singly(blocks: list[bytes], data: st.DataObject):
    places = [(k, row) for k, block in enumerate(blocks) for row in range(max(1, len(block)))] + [(len(blocks), 0)]
    rows = data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=20))
    start = data.draw(st.integers(0, len(rows) - 1))
    form = data.draw(st.sampled_from([_Numbers(), _Columns()]))
    samples = block_rows(blocks, rows)
    together = opened_together(Opener(form, DEFAULTS), samples, start)
    assert together == opened(Opener(_Numbers(), DEFAULTS), [samples.sample(k) for k in range(start, len(rows))])


class _Lines(Format):
    """Texts: "bad" is damaged, "__n__" has a name that is taken; many at once, but for those from "end" on."""

    name, suffixes = "lines", ()

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object]]:
        if bodies[0] == b"bad":
            raise ValueError("it is bad")
        return [{"__n__" if bodies[0] == b"__n__" else bodies[0].decode(): len(bodies[0])}]

    def open_many(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object] | None]:
        some = bodies[: bodies.index(b"end")] if b"end" in bodies else bodies
        return [None if body == b"bad" else self.open_block(block, [body])[0] for body in some]


@given(st.lists(st.sampled_from([b"a", b"bb", b"a", b"bad", b"__n__", b"end"]), min_size=1, max_size=8), st.data())
def test_samples_opened_together_equal_samples_opened_singly(bodies: list[bytes], data: st.DataObject) -> None:
    opener, keys = Opener(_Lines(), DEFAULTS), [str(k) for k in range(len(bodies))]
    samples = MemberRows(keys, ["memory://a"] * len(keys), "line", lambda start, stop: bodies[start:stop])
    start = data.draw(st.integers(0, len(bodies) - 1))
    made, nbytes = opener.open_many(samples, start, len(bodies))
    assert nbytes == sum(map(len, bodies[start:]))
    assert [sample is None for sample in made] == [
        body in (b"bad", b"__n__") or b"end" in bodies[start : k + 1] for k, body in enumerate(bodies[start:], start)
    ]
    one_by_one = [opened(opener, [samples.sample(k)])[0] for k in range(start, len(bodies))]
    assert [one if sample is None else sample for one, sample in zip(one_by_one, made, strict=True)] == one_by_one


@pytest.mark.slow
def test_many_large_rows_are_not_opened_together() -> None:
    block = bytes(2**22)
    rows = block_rows([block], [(0, row) for row in range(2**21 + 1)])
    opener = Opener(_Numbers(), DEFAULTS)
    some, nbytes = opener.open_rows(rows, 0, 10)
    assert nbytes == len(some) == 10  # as many bytes as they have
    assert None not in some
    all_of_them, nbytes = opener.open_rows(rows, 0, 2**21 + 1)
    assert nbytes == 2**21 + 1
    assert all_of_them.count(None) == 2**21 + 1


@pytest.mark.parametrize("at", [0, -1, slice(1, 3), slice(None, None, -2)])
def test_rows_of_a_block_are_a_sequence(at: int | slice) -> None:
    rows = _Squares(b"\1\2\3\4")
    assert rows[at] == [{"n": 1}, {"n": 4}, {"n": 9}, {"n": 16}][at]
    with pytest.raises(IndexError):
        rows[4]


class _Counted(_Numbers):
    """A format that records the blocks opened. Its rows are even numbers only, if that is asked for."""

    def __init__(self, *, even: bool = False) -> None:
        self.opened: list[bytes] = []
        self._even = even

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Any]:
        self.opened.append(bodies[0])
        if self._even:
            return [None if value % 2 else {"n": value} for value in bodies[0]]
        return super().open_block(block, bodies)


def assert_opened(form: _Counted, opener: Opener, times: int = 1) -> None:
    assert len(form.opened) == times
    assert not opener._opened
    assert opener._held_bytes == 0


@pytest.mark.parametrize("together", [False, True])
def test_block_is_opened_once_and_released_with_its_last_wanted_row(together: bool) -> None:
    opener = Opener(form := _Counted(), DEFAULTS)
    rows = block_rows([b"\1\2\3\4"], [(0, row) for row in (2, 0, 3, 1)])
    rows.blocks[0].wanted = 4
    for number, row in enumerate((2, 0, 3, 1)):
        assert len(opener._opened) == (number > 0)
        sample: Any = opener.open_rows(rows, number, number + 1)[0][0] if together else opener(rows.sample(number))
        assert sample["n"] == (row + 1) ** 2
    assert_opened(form, opener)


def test_block_without_a_count_is_released_with_its_last_row() -> None:
    opener = Opener(form := _Counted(), DEFAULTS)
    for some in ((2, 0), (3, 1)):  # by tasks of two windows
        assert len(opener._opened) == (some != (2, 0))
        opened, _ = opener.open_rows(block_rows([b"\1\2\3\4"], [(0, row) for row in some]), 0, 2)
        assert [one["n"] for one in opened if one is not None] == [(row + 1) ** 2 for row in some]
    assert_opened(form, opener)


def test_skipped_and_refused_rows_count_once() -> None:
    """Otherwise a block would be released too early, and opened again for the rest of it."""
    opener = Opener(form := _Counted(even=True), DEFAULTS)
    rows = block_rows([bytes(range(6))], [(0, row) for row in range(6)])
    rows.blocks[0].wanted = 6
    for start in (0, 3):
        samples, _ = opener.open_rows(rows, start, start + 3)
        assert [is_kept(one) for one in samples if one is not None] == [start % 2 == k % 2 for k in range(3)]
    assert_opened(form, opener)


def test_threads_open_different_blocks_at_the_same_time_and_one_block_once() -> None:
    both = threading.Barrier(2, timeout=30)

    class Together(_Counted):
        def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object]]:
            both.wait()
            return super().open_block(block, bodies)

    opener = Opener(form := Together(), DEFAULTS)
    blocks = [SharedBlock(k + 1, partial(_body, bytes([k, k])), wanted=2) for k in range(2)]

    def make(block: int, row: int) -> object:
        return opener({"__key__": "0", "__url__": "memory://0", BLOCK: blocks[block], ROW: row})["n"]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(make, (0, 1, 0, 1), (0, 0, 1, 1))) == [0, 1, 0, 1]
    assert_opened(form, opener, 2)


@pytest.mark.parametrize("dtype", ["<u2", ">i4", "|u1"])
def test_opened_tokens_own_their_memory(dtype: str) -> None:
    body = np.arange(9, dtype=dtype).tobytes()
    sample = {"__key__": "3", "__url__": "u", dtype: body}
    made = TokenOpener(None, has_ids=False)(sample)
    assert made["tokens"].flags.writeable
    assert made["tokens"].flags.owndata
    assert made["tokens"].dtype.isnative
    assert made["tokens"].tolist() == list(range(9))
    assert sample[dtype] == body


@given(
    st.sampled_from(["uint16", "int32", ">u2", "uint8"]),
    st.integers(1, 700),
    st.lists(st.integers(0, 40), min_size=1, max_size=20),
    st.sampled_from([None, 3]),
    st.lists(st.integers(1, 3000), max_size=5),
)
def test_windows_made_together_equal_single_windows(
    dtype: str, window: int, starts: list[int], eos: int | None, cuts: list[int]
) -> None:
    count, itemsize = window + 40, np.dtype(dtype).itemsize
    data = np.random.default_rng(window).integers(0, 9, count).astype(dtype).tobytes()
    first = [0, *sorted({cut for cut in cuts if cut < len(data)})]
    bodies = LeasedBodies([memoryview(data)[a:b] for a, b in pairwise([*first, len(data)])], first)
    offset, size = np.array(starts) * itemsize, np.full(len(starts), window * itemsize)
    keys = np.array([b"%d" % start for start in starts])
    rows = Rows(keys, np.arange(len(starts) + 1), np.zeros(len(starts), np.int32), offset, size, (dtype,))
    urls, opener = [f"memory://{start}" for start in starts], TokenOpener(eos, has_ids=False)
    samples = [
        opener({"__key__": str(start), "__url__": url, dtype: data[start * itemsize : (start + window) * itemsize]})
        for start, url in zip(starts, urls, strict=True)
    ]
    spec = Spec.of(samples[0])
    columns = opener.columns(rows, bodies, urls)
    assert spec is not None
    assert columns is not None
    slots = Slots(spec, memoryview(bytearray(spec.nbytes(len(samples)))), 0, len(samples))
    assert slots.fill_columns(columns, bodies, len(samples))
    for found, sample in zip(slots.written(), samples, strict=True):
        assert isinstance(found, dict)
        assert list(found) == list(sample)
        assert all(np.array_equal(found[name], value) for name, value in sample.items())


def test_windows_of_several_sizes_or_pieces_are_made_one_by_one() -> None:
    keys, zeros = np.array([b"0", b"1"]), np.zeros(2, np.int32)
    bodies = LeasedBodies([memoryview(bytes(64))], [0])
    rows = Rows(keys, np.arange(3), zeros, np.array([0, 8]), np.array([8, 4]), ("uint16",))
    assert TokenOpener(None, has_ids=False).columns(rows, bodies, ["", ""]) is None
    rows = Rows(keys[:1], np.array([0, 2]), zeros, np.array([0, 8]), np.array([8, 8]), ("uint16",))
    assert TokenOpener(None, has_ids=False).columns(rows, bodies, [""]) is None
    assert TokenOpener(None, has_ids=True).columns(rows.empty(), bodies, []) is None
