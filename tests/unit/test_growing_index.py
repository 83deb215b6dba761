"""An index that is packed while it grows is the one that would be packed at once, and takes little memory."""

from __future__ import annotations

import io
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.test_index_format import PLAIN, Plain, index, listed

from headrace.errors import LimitError
from headrace.formats.compression.seekable import Frames
from headrace.formats.index.deflating import STORED, StreamOfParts, Way, best_way
from headrace.formats.index.file import Entry
from headrace.formats.index.growing import GrowingIndex
from headrace.formats.index.named_arrays import write_arrays
from headrace.formats.index.shard import ShardIndex
from headrace.rows import Rows

WAYS = [STORED, Way(6, 15, zlib.Z_HUFFMAN_ONLY), Way(6, 9, zlib.Z_DEFAULT_STRATEGY), Way(9, 15, zlib.Z_FILTERED)]


def grown(tables: list[Rows], crcs: list[Any], folder: Path, *about: Any) -> tuple[Entry, bytes]:
    with GrowingIndex(folder) as growing:
        for rows, crc in zip(tables, crcs, strict=True):
            growing.add(rows, crc)
        entry = growing.write(block := io.BytesIO(), "a", *about)
    return entry, block.getvalue()


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PLAIN, st.data())
def test_index_in_pieces_is_the_one_at_once(tmp_path: Path, plain: Plain, data: st.DataObject) -> None:
    whole = index(plain, etag='"e"')
    assert whole.crc is not None
    if data.draw(st.booleans()):  # lines: anywhere, one behind the other
        begins = np.cumsum(whole.rows.size) - whole.rows.size + 3
        whole = ShardIndex(
            Rows(*(getattr(whole.rows, name) for name in ("keys", "starts", "field")), begins, whole.rows.size,
                 whole.rows.fields), whole.crc, -1, None, Frames(np.array([0, 9]), np.array([0, 2**45])),
        )  # fmt: skip
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole.rows)), max_size=3)))
    ends = [*cuts, len(whole.rows)]
    tables = [whole.rows.cut(a, b) for a, b in zip([0, *cuts], ends, strict=True)]
    crcs = [whole.crc[whole.rows.starts[a] : whole.rows.starts[b]] for a, b in zip([0, *cuts], ends, strict=True)]
    entry, block = grown(tables, crcs, tmp_path, whole.size, whole.etag, whole.frames)
    assert listed(ShardIndex.unpack(block, "a")) == listed(ShardIndex.unpack(whole.pack(), "a"))
    assert entry == Entry.of("a", whole, block)


def test_shared_blocks_stay_blocks(tmp_path: Path) -> None:
    def table(at: int) -> Rows:
        return Rows(
            np.array([b"a", b"b", b"c"]), np.array([0, 1, 3]), np.array([0, 0, 1], np.int32),
            np.array([at, at + 5, at + 9]), np.array([5, 4, 1]), ("x", "y"), np.array([0, 1, 1]), np.array([0, 0, 1]),
        )  # fmt: skip

    tables, crc = [table(3), table(20)], np.arange(6, dtype=np.uint32)
    _, block = grown(tables, [crc[:3], crc[3:]], tmp_path, 99, None)
    rows, wanted = ShardIndex.unpack(block, "a").rows, Rows.concat(tables)
    assert rows.block is not None
    assert wanted.block is not None
    assert rows.block.tolist() == wanted.block.tolist() == [0, 1, 1, 2, 3, 3]
    assert (rows.row == wanted.row).all()
    assert rows.starts.tolist() == wanted.starts.tolist()
    assert rows.offset.tolist() == wanted.offset.tolist()


@pytest.mark.parametrize("offset", [[5, 4], [0, 3]])
def test_members_that_overlap_are_refused(offset: list[int], tmp_path: Path) -> None:
    with GrowingIndex(tmp_path) as growing, pytest.raises(ValueError, match="one behind the other"):
        for at in offset:
            rows = Rows(
                np.array([b"k"]), np.array([0, 1]), np.zeros(1, np.int32), np.array([at]), np.array([5]), ("x",)
            )
            growing.add(rows, np.zeros(1, np.uint32))


def test_one_long_key_among_very_many_is_refused(tmp_path: Path) -> None:
    count = 40_000
    keys, zeros = np.array([b"k" * 2000, *[b"k"] * (count - 1)]), np.zeros(0, np.int64)
    rows = Rows(keys, np.zeros(count + 1, np.int64), zeros.astype(np.int32), zeros, zeros, ())
    with GrowingIndex(tmp_path) as growing, pytest.raises(LimitError, match="40000 keys of up to 2000 bytes"):
        growing.add(rows, np.zeros(0, np.uint32))
        growing.write(io.BytesIO(), "a", -1, None)


def lines(count: int, tables: int, rng: np.random.Generator) -> Any:
    """The rows and checksums of lines of 40 to 80 bytes, some at a time."""
    end = 0
    for k in range(tables):
        numbers = np.arange(k * count, (k + 1) * count) + 1
        size = rng.integers(40, 80, count)
        offset = end + np.cumsum(size + 1) - size - 1
        end = int(offset[-1] + size[-1]) + 1
        keys = numbers.astype(f"S{len(str(numbers[-1]))}")
        rows = Rows(keys, np.arange(count + 1), np.zeros(count, np.int32), offset, size, ("line",))
        yield rows, rng.integers(0, 2**32, count, np.uint32)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_lines_and_a_line_takes_six_bytes(tmp_path: Path) -> None:
    peaks = []
    for tables in (6, 16):
        with GrowingIndex(tmp_path) as growing, (tmp_path / "block").open("w+b") as block:
            tracemalloc.start()
            try:
                for rows, crc in lines(20_000, tables, np.random.default_rng(0)):
                    growing.add(rows, crc)
                entry = growing.write(block, "a", -1, None)
                peaks.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
    assert entry.samples == 320_000
    assert entry.length < 6 * entry.samples
    assert peaks[1] < peaks[0] + 2**20, peaks
    data = (tmp_path / "block").read_bytes()
    assert zlib.crc32(data) == entry.check
    unpacked = ShardIndex.unpack(data, "a").rows
    assert unpacked.keys[[0, -1]].tolist() == [b"1", b"320000"]
    assert [path.name for path in tmp_path.iterdir()] == ["block"]


@given(st.lists(st.tuples(st.lists(st.binary(max_size=3000), max_size=3), st.sampled_from(WAYS)), max_size=4))
def test_parts_are_one_zlib_stream(parts: list[tuple[list[bytes], Way]]) -> None:
    out = io.BytesIO()
    stream = StreamOfParts(out.write)
    for pieces, way in parts:
        stream.part(pieces, way)
    stream.end()
    unpack = zlib.decompressobj()
    assert unpack.decompress(out.getvalue()) == b"".join(b"".join(pieces) for pieces, _ in parts)
    assert unpack.eof
    assert not unpack.unused_data
    assert stream.size == len(out.getvalue())


def test_noise_is_stored_and_numbers_are_looked_for_close_by() -> None:
    assert best_way(np.random.default_rng(0).bytes(5000)) == STORED
    assert best_way("".join(map(str, range(20_000, 30_000))).encode()).window_bits == 9


def test_body_over_what_its_length_can_say_is_refused() -> None:
    class Huge:
        dtype, count = "u8", 2**29

        def pieces(self) -> Any:
            raise AssertionError("nothing of it is read")

    with pytest.raises(LimitError, match="4294967"):
        write_arrays(io.BytesIO(), {}, {"x": Huge()})
