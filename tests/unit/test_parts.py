"""Parts find the bytes of their samples, whichever spans hold them."""

from __future__ import annotations

import contextlib
import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace._util.sample_ranges import Rows, member_pieces, spans_of, spans_of_each
from headrace._util.shared_memory import Arena, Lease
from headrace.torch_compat import serialize
from headrace.torch_compat.serialize import PackedEach
from headrace.workers.sample_chunks import ApartPart, ListPart, PackedPart, RawPart
from headrace.workers.task_inputs import Inputs
from headrace.workers.task_runner import open_part
from headrace.workers.tasks import Finish, Task
from headrace.workers.wire_chunks import SentKeys, SentObjects, offset_in


class SmallArena(Arena):
    SEGMENT_BYTES = 1024


class Shard:
    """Samples of `sizes` bytes, one member for each number, in one address space that spans divide."""

    def __init__(self, arena: Arena, base: int, url: str, samples: list[list[int]], range_bytes: int, gap: int) -> None:
        generator = np.random.default_rng(base)
        self.url, self.base = url, base
        keys, starts, fields, offsets, sizes, at = [], [0], [], [], [], 0
        for k, members in enumerate(samples):
            keys.append(f"{url}/{k}".encode())
            for m, size in enumerate(members):
                at += gap
                fields.append(m)
                offsets.append(at)
                sizes.append(size)
                at += size
            starts.append(len(offsets))
        self.size = at + gap
        self.data = generator.integers(0, 256, self.size, np.uint8).tobytes()
        most = max((len(members) for members in samples), default=0)
        self.rows = Rows(
            np.array(keys, np.bytes_),
            np.array(starts, np.int64),
            np.array(fields, np.int32),
            np.array(offsets, np.int64),
            np.array(sizes, np.int64),
            tuple(f"f{m}" for m in range(most)),
        )
        self.wanted = [
            {
                "__key__": key.decode(),
                "__url__": url,
                **{
                    f"f{m}": self.data[offsets[starts[k] + m] : offsets[starts[k] + m] + size]
                    for m, size in enumerate(samples[k])
                },
            }
            for k, key in enumerate(keys)
        ]
        self.leases: list[tuple[int, Lease]] = []
        for start in range(0, max(self.size, 1), range_bytes):
            piece = self.data[start : start + range_bytes]
            lease = arena.lease(len(piece))
            lease.view[:] = piece
            self.leases.append((base + start, lease))

    def part(self) -> RawPart:
        spans = [(address, lease.retain()) for address, lease in self.leases]
        return RawPart(
            self.rows.shifted(self.base), np.zeros(len(self.rows), np.int64), (self.url,), spans, (self.base,)
        )

    def close(self) -> None:
        for _, lease in self.leases:
            lease.release()


SAMPLES = st.lists(st.lists(st.integers(0, 90), min_size=1, max_size=3), min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    shards=st.lists(SAMPLES, min_size=1, max_size=3),
    range_bytes=st.sampled_from([16, 37, 64, 1000]),
    gap=st.sampled_from([1, 5, 40]),
    data=st.data(),
)
def test_every_sample_is_found_whatever_is_cut_taken_and_put_together(
    shards: list[list[list[int]]], range_bytes: int, gap: int, data: st.DataObject
) -> None:
    with contextlib.closing(SmallArena()) as arena:
        made: list[Shard] = []
        base = 0
        for k, samples in enumerate(shards):
            made.append(Shard(arena, base, f"memory://{k % 2}", samples, range_bytes, gap))
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


def test_a_part_holds_only_the_spans_that_it_needs() -> None:
    arena = SmallArena()
    shard = Shard(arena, 1000, "memory://a", [[64]] * 8, 64, 0)
    whole = shard.part()
    assert len(whole.spans) == 8
    assert [address for address, _ in whole.cut(2, 4).spans] == [1128, 1192]
    assert [address for address, _ in whole.take(np.array([7, 0])).spans] == [1000, 1448]
    arena.close()


def test_a_member_over_several_spans_keeps_those_between() -> None:
    arena = SmallArena()
    shard = Shard(arena, 0, "memory://a", [[10], [200], [10]], 64, 0)
    part = shard.part().cut(1, 2)
    assert [address for address, _ in part.spans] == [0, 64, 128, 192]
    assert open_part(part) == shard.wanted[1:2]
    arena.close()


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 30)), min_size=1, max_size=6),
    st.lists(st.integers(0, 99), min_size=1, max_size=5, unique=True),
)
def test_spans_of_adjacent_members_are_those_of_each(members: list[tuple[int, int]], starts: list[int]) -> None:
    offset, size = (np.array(some, np.int64) for some in zip(*members, strict=True))
    count = len(members)
    keys, ends = np.zeros(count, "S1"), np.arange(count + 1)
    rows = Rows(keys, ends, np.zeros(count, np.int32), offset, size, ("body",))
    assert list(spans_of(rows, sorted(starts))) == spans_of_each(rows, sorted(starts))


def test_a_sample_is_known_by_its_place_in_its_shard() -> None:
    arena = SmallArena()
    shards = [Shard(arena, base, "memory://a", [[10, 3], [20], [5]], 64, 7) for base in (0, 500)]
    begins = [int(shards[0].rows.offset[k]) for k in shards[0].rows.starts[:-1]]
    whole = RawPart.concat([shard.part() for shard in shards])
    part = whole.take(np.array([5, 0, 4]))
    for sent in (part.sent()[0], part.carried()):
        assert [sent.offset_of(k) for k in range(3)] == [begins[2], begins[0], begins[1]]
    objects = SentObjects([1, 2, 3], 0, 2)
    parts = [objects, whole.sent()[0], SentKeys(b""), objects]
    assert [offset_in(parts, k) for k in (1, 2, 5, 8)] == [None, begins[0], begins[0], None]
    for one in (whole, part):
        one.release()
    for shard in shards:
        shard.close()
    arena.close()


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.data())
def test_pieces_of_a_member_are_its_bytes(sizes: list[int], data: st.DataObject) -> None:
    ends = np.cumsum(sizes).tolist()
    starts = [0, *ends[:-1]]
    offset = data.draw(st.integers(0, ends[-1]))
    size = data.draw(st.integers(0, ends[-1] - offset))
    whole = bytes(range(256))[: ends[-1]]
    spans = [whole[a:b] for a, b in zip(starts, ends, strict=True)]
    pieces = member_pieces(starts, ends, offset, size)
    assert b"".join(spans[k][a:b] for k, a, b in pieces) == whole[offset : offset + size]
    assert all(a < b for _, a, b in pieces)


def test_python_objects_are_cut_without_being_copied() -> None:
    samples = [object() for _ in range(10)]
    part = ListPart(samples)
    inner = part.cut(2, 9).cut(1, 4)
    assert inner.count == 3
    assert open_part(inner) == samples[3:6]
    assert open_part(part) == samples


def test_packed_samples_are_cut() -> None:
    arena = SmallArena()
    parts = serialize.pack(list(range(10)))
    lease = arena.lease(serialize.packed_size(parts))
    part = PackedPart(lease, serialize.write(parts, lease.view), 0, 10)
    inner = part.cut(2, 9).cut(1, 4)
    part.release()
    assert open_part(inner) == [3, 4, 5]
    assert arena.leased_bytes
    inner.release()
    arena.close()


@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8), drawn=st.randoms(use_true_random=False))
def test_samples_packed_each_by_itself_are_taken_in_any_order(lengths: list[int], drawn: random.Random) -> None:
    arena = SmallArena()
    samples = [(str(k), np.arange(length), b"x" * length) for k, length in enumerate(lengths)]
    packed = PackedEach()
    for sample in samples:
        packed.add(sample)
    lease = arena.lease(serialize.packed_size(packed.parts))
    serialize.write(packed.parts, lease.view)
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


def test_equal_tasks_are_distinct() -> None:
    task = Task(1, 2, 3, Finish.SLOTS, [])
    assert task != dataclasses.replace(task)
    assert len({task, dataclasses.replace(task)}) == 2
