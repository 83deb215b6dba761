"""Tables of samples, and parts with their bytes: what is cut, taken and joined."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from builders.rows import Plain, listed, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace._util.sample_ranges import BlockNumbers, Rows, spans_of, spans_of_each
from headrace._util.shared_memory import Arena, Lease
from headrace.torch_compat.serialize import PackedEach
from headrace.workers.sample_chunks import ApartPart, ListPart, PickledKeys, RawPart, offset_in
from headrace.workers.task_inputs import Inputs
from headrace.workers.task_runner import open_part


class SmallArena(Arena):
    SEGMENT_BYTES = 1024


class Shard:
    """Samples whose members have `sizes` bytes, in one address space that spans divide."""

    def __init__(self, arena: Arena, base: int, url: str, sizes: list[list[int]], range_bytes: int, gap: int) -> None:
        self.url, self.base, self.wanted = url, base, list[dict[str, object]]()
        self.size = sum(gap + size for members in sizes for size in members) + gap
        data = np.random.default_rng(base).integers(0, 256, self.size, np.uint8).tobytes()
        plain, at = list[tuple[bytes, list[tuple[str, int, int]]]](), 0
        for k, members in enumerate(sizes):
            plain.append((f"{url}/{k}".encode(), []))
            self.wanted.append({"__key__": f"{url}/{k}", "__url__": url})
            for m, size in enumerate(members):
                plain[k][1].append((f"f{m}", at + gap, size))
                self.wanted[k][f"f{m}"] = data[at + gap : at + gap + size]
                at += gap + size
        self.rows = rows_of(plain)
        self.leases: list[tuple[int, Lease]] = []
        for start in range(0, self.size, range_bytes):
            piece = data[start : start + range_bytes]
            lease = arena.lease(len(piece))
            lease.view[:] = piece
            self.leases.append((base + start, lease))

    def part(self) -> RawPart:
        spans = [(address, lease.retain()) for address, lease in self.leases]
        rows = self.rows.shifted(self.base)
        return RawPart(rows, np.zeros(len(rows), np.int64), (self.url,), spans, (self.base,))

    def close(self) -> None:
        for _, lease in self.leases:
            lease.release()


@pytest.fixture
def arena() -> Iterator[Arena]:
    with contextlib.closing(SmallArena()) as arena:
        yield arena


SAMPLES = st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=3), min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    shards=st.lists(SAMPLES, min_size=1, max_size=3),
    range_bytes=st.sampled_from([16, 37, 64, 1000]),
    gap=st.sampled_from([1, 5, 40]),
    data=st.data(),
)
def test_samples_survive_any_cuts_and_joins_of_parts(
    shards: list[list[list[int]]], range_bytes: int, gap: int, data: st.DataObject
) -> None:
    with contextlib.closing(SmallArena()) as arena:
        made, base = list[Shard](), 0
        for k, sizes in enumerate(shards):
            made.append(Shard(arena, base, f"memory://{k % 2}", sizes, range_bytes, gap))
            base += made[-1].size
        whole = RawPart.concat([shard.part() for shard in made])
        wanted = [sample for shard in made for sample in shard.wanted]
        for shard in made:
            shard.close()
        assert open_part(whole) == wanted
        order = data.draw(st.permutations(range(len(wanted))))
        shuffled = whole.take(np.array(order))
        whole.release()
        assert open_part(shuffled) == [wanted[k] for k in order]
        start = data.draw(st.integers(0, len(order)))
        stop = data.draw(st.integers(start, len(order)))
        cut = shuffled.cut(start, stop)
        shuffled.release()
        assert cut.count == stop - start
        assert open_part(cut) == [wanted[k] for k in order[start:stop]]
        again = cut.take(np.arange(cut.count)[::-1])
        cut.release()
        assert open_part(again) == [wanted[k] for k in order[start:stop]][::-1]
        again.release()
        assert arena.leased_bytes == 0


def test_part_holds_only_the_spans_that_it_needs(arena: Arena) -> None:
    whole = Shard(arena, 1000, "memory://a", [[64]] * 8, 64, 0).part()
    assert len(whole.spans) == 8
    assert [address for address, _ in whole.cut(2, 4).spans] == [1128, 1192]
    assert [address for address, _ in whole.take(np.array([7, 0])).spans] == [1000, 1448]
    shard = Shard(arena, 0, "memory://a", [[10], [200], [10]], 64, 0)
    part = shard.part().cut(1, 2)  # a member over several spans
    assert [address for address, _ in part.spans] == [0, 64, 128, 192]
    assert open_part(part) == shard.wanted[1:2]


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 30)), min_size=1, max_size=6),
    st.lists(st.integers(0, 99), min_size=1, max_size=5, unique=True),
)
def test_spans_of_adjacent_members_are_those_of_each(members: list[tuple[int, int]], starts: list[int]) -> None:
    rows = rows_of([(b"k", [("body", offset, size)]) for offset, size in members])
    assert list(spans_of(rows, sorted(starts))) == spans_of_each(rows, sorted(starts))


def test_parts_know_the_offsets_of_their_samples(arena: Arena) -> None:
    shards = [Shard(arena, base, "memory://a", [[10, 3], [20], [5]], 64, 7) for base in (0, 500)]
    begins = [int(shards[0].rows.offset[k]) for k in shards[0].rows.starts[:-1]]
    whole = RawPart.concat([shard.part() for shard in shards])
    part = whole.take(np.array([5, 0, 4]))
    for sent in (part.sent()[0], part.carried()):
        assert [sent.offset_of(k) for k in range(3)] == [begins[2], begins[0], begins[1]]
    objects = ListPart([1, 2, 3], 0, 2)
    parts = [objects, whole.sent()[0], PickledKeys(b"", 3), objects]
    assert [offset_in(parts, k) for k in (1, 2, 5, 8)] == [None, begins[0], begins[0], None]
    for one in (whole, part):
        one.release()
    for shard in shards:
        shard.close()


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8), drawn=st.randoms(use_true_random=False))
def test_samples_packed_each_by_itself_are_taken_in_any_order(lengths: list[int], drawn: random.Random) -> None:
    arena = SmallArena()
    samples = [(str(k), np.arange(length), b"x" * length) for k, length in enumerate(lengths)]
    packed = PackedEach()
    for sample in samples:
        packed.add(sample)
    lease = arena.lease(packed.nbytes)
    packed.write(lease.view)
    failed = sorted(drawn.sample(range(len(samples)), drawn.randint(0, len(samples))))
    whole = ApartPart(lease, packed.pieces, failed)
    start = drawn.randint(0, len(samples) - 1)
    chosen = drawn.choices(range(len(samples) - start), k=drawn.randint(1, 9))
    part = whole.cut(start, len(samples)).take(chosen)
    expected = [start + index for index in chosen]
    assert list(part.failed) == [k for k, number in enumerate(expected) if number in failed]
    opened = [open_part(part), list(Inputs().samples([part.carried()], {}))]
    for given_back in opened:
        assert [name for name, _, _ in given_back] == [str(number) for number in expected]
        for (_, array, body), number in zip(given_back, expected, strict=True):
            assert array.tolist() == list(range(lengths[number]))
            assert array.flags.writeable
            assert body == b"x" * lengths[number]
    assert part.nbytes >= sum(8 * lengths[number] for number in expected)
    arena.close()


MEMBERS = st.lists(
    st.tuples(st.sampled_from(["jpg", "cls", "seg.png", "ünï"]), st.integers(0, 2**40), st.integers(0, 2**30)),
    max_size=4,
)
PLAIN = st.lists(
    st.tuples(st.binary(min_size=1, max_size=9).map(lambda key: key.replace(b"\0", b"k")), MEMBERS), max_size=8
)


@pytest.mark.slow
@given(st.lists(PLAIN, max_size=4))
def test_concat_gives_all_rows_when_tables_number_their_fields_differently(tables: list[Plain]) -> None:
    joined = Rows.concat([rows_of(plain) for plain in tables])
    assert listed(joined) == [row for plain in tables for row in plain]
    assert (joined.starts.dtype, joined.field.dtype, joined.offset.dtype) == (np.int64, np.int32, np.int64)


def in_blocks(blocks: list[int]) -> Rows:
    """A row for each number, in the block with that number; all blocks have a member."""
    rows = rows_of([(b"k", [("body", 10 * block, block + 1)]) for block in range(max(blocks) + 1)])
    keys = np.array([b"k"] * len(blocks), np.bytes_)
    return replace(rows, keys=keys, block=np.array(blocks, np.int64), row=np.arange(len(blocks)))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.booleans(), st.data())
def test_cut_takes_consecutive_rows_of_any_blocks(blocks: list[int], in_order: bool, data: st.DataObject) -> None:
    rows = in_blocks(sorted(blocks) if in_order else blocks)
    rows = replace(rows, about=tuple(range(max(blocks) + 1))).as_read()
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(blocks))] * 2)))
    cut = rows.cut(start, stop)
    assert repr(cut) == repr(rows.take(np.arange(start, stop))) == repr(pickle.loads(pickle.dumps(cut)))


def test_blocks_keep_their_numbers_and_counts() -> None:
    first, second = in_blocks([0, 0, 1, 2, 2, 2]).as_read(), in_blocks([0, 0]).as_read()
    assert first.reads is not None
    assert second.reads is not None
    wanted = dict(zip([*first.reads.tolist(), *second.reads.tolist()], [2, 1, 3, 2], strict=True))
    joined = Rows.concat([first, rows_of([(b"a", [])]), second])
    for rows in (first, joined, joined.take(np.array([8, 0, 5, 3, 6])), joined.cut(2, 7)):
        again = pickle.loads(pickle.dumps(rows)).as_read()
        assert again.reads is not None
        assert again.wanted is not None
        assert again.wanted.tolist() == [wanted.get(number, 0) for number in again.reads.tolist()]


def test_a_block_read_again_has_the_same_number() -> None:
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
