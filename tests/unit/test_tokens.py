"""TokenWindows of tokens by arithmetic: each token is in the windows that it should be in, whatever is chosen."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace._util.sample_ranges import Rows
from headrace.formats.tokens import (
    TokenFile,
    TokenOpener,
    TokenWindows,
    WindowsOfDocuments,
    ids_by_eos,
    rows_of,
    rows_with_documents,
)
from headrace.torch_compat.spec import Slots, Spec
from headrace.workers.task_inputs import LeasedBodies

COUNTS = st.integers(0, 60)


def file(count: int, begin: int = 0) -> TokenFile:
    return TokenFile("u", begin, count, np.dtype("<u2"), begin + 2 * count, None)


def cut(tokens: list[int], length: int, stride: int, *, short: bool) -> list[list[int]]:
    windows, end = [], 0
    for k in range(0, len(tokens), stride):
        window = tokens[k : k + length]
        if len(window) == length or (short and (k + len(window) > end or not windows)):
            windows.append(window)
            end = k + len(window)
    return windows


@given(COUNTS, st.integers(1, 20), st.integers(1, 20), st.booleans())
@example(10, 5, 4, True)
def test_windows_equal_a_loop_over_the_tokens(count: int, length: int, stride: int, short: bool) -> None:
    tokens, windows = list(range(count)), TokenWindows(length, stride, short)
    numbers = np.arange(windows.count(count))
    places = zip(windows.begins(numbers).tolist(), windows.ends(numbers, count).tolist(), strict=True)
    found = [tokens[a:b] for a, b in places]
    assert found == cut(tokens, length, stride, short=short)
    if short and stride <= length:
        assert {token for window in found for token in window} == set(tokens)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_windows_of_documents_equal_those_of_each_document(
    sizes: list[int], length: int, stride: int, short: bool
) -> None:
    windows = WindowsOfDocuments.of(TokenWindows(length, stride, short), np.cumsum([0, *sizes]))
    ends = np.cumsum(sizes).tolist()
    documents = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    wanted = [window for document in documents for window in cut(document, length, stride, short=short)]
    assert windows.count == len(wanted)
    begins, stops = windows.places(np.arange(windows.count))
    assert [list(range(a, b)) for a, b in zip(begins.tolist(), stops.tolist(), strict=True)] == wanted
    counts = windows.windows.counts(np.array(sizes))
    assert counts.tolist() == [windows.windows.count(size) for size in sizes]


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 12), st.sets(st.integers(0, 60)), st.data())
def test_members_of_windows_are_the_tokens_of_their_documents(
    count: int, length: int, stride: int, documents: set[int], data: st.DataObject
) -> None:
    windows, starts = TokenWindows(length, stride, has_short=True), np.array(sorted(documents), np.int64)
    there = windows.count(count)
    chosen = np.array(sorted(data.draw(st.sets(st.integers(0, there - 1), min_size=1))), np.int64)
    begins, ends = windows.begins(chosen), windows.ends(chosen, count)
    rows = rows_with_documents(file(count, 100), chosen, begins, ends, starts)
    owner = np.searchsorted(starts, np.arange(count), side="right")
    for k, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        members = slice(int(rows.starts[k]), int(rows.starts[k + 1]))
        at = ((rows.offset[members] - 100) // 2).tolist()
        sizes = (rows.size[members] // 2).tolist()
        assert [token for a, n in zip(at, sizes, strict=True) for token in range(a, a + n)] == [*range(begin, end)]
        numbers = np.unique(owner[begin:end], return_inverse=True)[1]
        assert np.repeat(np.arange(len(sizes)), sizes).tolist() == numbers.tolist()
        assert rows.field[members].tolist() == list(range(len(sizes)))
        assert int(rows.keys[k]) == chosen[k]
    plain = rows_of(file(count, 100), chosen, begins, ends)
    assert plain.offset.tolist() == (100 + 2 * begins).tolist()
    assert plain.size.tolist() == (2 * (ends - begins)).tolist()


@given(st.lists(st.integers(0, 3), max_size=20))
def test_documents_begin_after_their_token(tokens: list[int]) -> None:
    number, wanted = 0, []
    for token in tokens:
        wanted.append(number)
        number += token == 0
    assert ids_by_eos(np.array(tokens, np.int64), 0).tolist() == wanted


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
