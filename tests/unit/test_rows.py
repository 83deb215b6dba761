"""The table of samples: taking, joining and measuring rows gives the same as lists."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._util.sample_ranges import BlockNumbers, Rows

Plain = list[tuple[bytes, list[tuple[str, int, int]]]]

MEMBERS = st.lists(
    st.tuples(st.sampled_from(["jpg", "cls", "seg.png", "ünï"]), st.integers(0, 2**40), st.integers(0, 2**30)),
    max_size=4,
)
PLAIN = st.lists(
    st.tuples(st.binary(min_size=1, max_size=9).map(lambda key: key.replace(b"\0", b"k")), MEMBERS), max_size=8
)


def table(plain: Plain) -> Rows:
    members = [member for _, row in plain for member in row]
    fields = tuple(dict.fromkeys(name for name, _, _ in members))
    return Rows(
        np.array([key for key, _ in plain], np.bytes_) if plain else np.zeros(0, "S1"),
        np.cumsum([0] + [len(row) for _, row in plain]).astype(np.int64),
        np.array([fields.index(name) for name, _, _ in members], np.int32),
        np.array([offset for _, offset, _ in members], np.int64),
        np.array([size for _, _, size in members], np.int64),
        fields,
    )


def listed(rows: Rows) -> Plain:
    members = [
        (rows.fields[field], offset, size)
        for field, offset, size in zip(rows.field.tolist(), rows.offset.tolist(), rows.size.tolist(), strict=True)
    ]
    bounds = rows.starts.tolist()
    return [(key, members[bounds[k] : bounds[k + 1]]) for k, key in enumerate(rows.keys.tolist())]


@given(PLAIN, st.data())
def test_take_gives_the_chosen_rows_in_their_order_when_some_repeat(plain: Plain, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(plain) - 1), max_size=12)) if plain else []
    taken = table(plain).take(np.array(chosen, np.int64))
    assert listed(taken) == listed(pickle.loads(pickle.dumps(taken))) == [plain[k] for k in chosen]
    assert len(taken) == len(chosen)


@pytest.mark.slow
@given(st.lists(PLAIN, max_size=4))
def test_concat_gives_all_rows_when_tables_number_their_fields_differently(tables: list[Plain]) -> None:
    joined = Rows.concat([table(plain) for plain in tables])
    assert listed(joined) == [row for plain in tables for row in plain]
    assert (joined.starts.dtype, joined.field.dtype, joined.offset.dtype) == (np.int64, np.int32, np.int64)


@given(PLAIN)
def test_sizes_sum_the_members_of_each_row(plain: Plain) -> None:
    sizes = table(plain).sizes()
    assert sizes.tolist() == [sum(size for _, _, size in row) for _, row in plain]
    assert sizes.dtype == np.int64


@given(PLAIN, st.integers(0, 2**40))
def test_shifted_moves_offsets_and_nothing_else(plain: Plain, base: int) -> None:
    moved = [(key, [(field, offset + base, size) for field, offset, size in row]) for key, row in plain]
    assert listed(table(plain).shifted(base)) == moved


def in_blocks(blocks: list[int]) -> Rows:
    """A row for each number, in the block with that number; all blocks have a member."""
    count = max(blocks) + 1
    ends, own = np.arange(count + 1, dtype=np.int64), np.arange(count, dtype=np.int64)
    return Rows(
        np.array([b"k"] * len(blocks), np.bytes_),
        ends,
        np.zeros(count, np.int32),
        own * 10,
        own + 1,
        ("body",),
        np.array(blocks, np.int64),
        np.arange(len(blocks)),
    )


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.booleans(), st.data())
def test_cut_takes_consecutive_rows_of_any_blocks(blocks: list[int], in_order: bool, data: st.DataObject) -> None:
    rows = in_blocks(sorted(blocks) if in_order else blocks)
    rows = replace(rows, about=tuple(range(max(blocks) + 1))).as_read()
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(blocks))] * 2)))
    cut = rows.cut(start, stop)
    assert repr(cut) == repr(rows.take(np.arange(start, stop))) == repr(pickle.loads(pickle.dumps(cut)))


def test_blocks_that_were_read_keep_their_numbers_and_counts_wherever_their_rows_go() -> None:
    first, second = in_blocks([0, 0, 1, 2, 2, 2]).as_read(), in_blocks([0, 0]).as_read()
    assert first.reads is not None
    assert second.reads is not None
    wanted = dict(zip([*first.reads.tolist(), *second.reads.tolist()], [2, 1, 3, 2], strict=True))
    joined = Rows.concat([first, table([(b"a", [])]), second])
    for rows in (first, joined, joined.take(np.array([8, 0, 5, 3, 6])), joined.cut(2, 7)):
        again = pickle.loads(pickle.dumps(rows)).as_read()
        assert again.reads is not None
        assert again.wanted is not None
        assert again.wanted.tolist() == [wanted.get(number, 0) for number in again.reads.tolist()]


def test_a_block_that_is_read_again_has_its_number_again_where_the_same_is_read_of_it() -> None:
    numbers, other = BlockNumbers(), BlockNumbers()
    facts = object(), object(), object()
    rows = replace(in_blocks([0, 0, 1, 2]), about=facts)
    first = rows.as_read(numbers)
    assert first.reads is not None
    assert first.wanted is not None
    assert first.wanted.tolist() == [0, 0, 0]  # not known
    again = rows.take(np.array([3, 1])).as_read(numbers).reads
    assert again is not None
    assert again.tolist() == first.reads[[0, 2]].tolist()
    others = [
        rows.shifted(1).as_read(numbers),
        replace(rows, size=rows.size + 1).as_read(numbers),
        replace(rows, fields=("text",)).as_read(numbers),
        replace(rows, about=(object(), object(), object())).as_read(numbers),
        rows.as_read(other),
        rows.as_read(numbers, "another"),
        rows.as_read(),
    ]
    seen = [*first.reads.tolist(), *(number for one in others if one.reads is not None for number in one.reads)]
    assert len(set(seen)) == len(seen) == 3 * 8
