"""Memory: leases and segments, never two for the same byte, and the limit of the machine or its control groups."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace._util.shared_memory import Arena, Lease, Segment, aligned, memory_bytes
from headrace.torch_regime.workers.pool import BatchMemory

MIB = 2**20


class SmallArena(Arena):
    SEGMENT_BYTES = 4096
    SPARE_SEGMENTS = 2


class ArenaModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.forgotten: list[int] = []
        self.arena = SmallArena(self.forgotten.append)
        self.segments = dict[int, int]()  # sizes of all that were ever made, by number
        self.alive: list[tuple[Lease, int, int]] = []  # with its number of holders and the byte it is filled with
        self.marks = 0

    @rule(size=st.one_of(st.integers(0, 300), st.integers(1000, 5000), st.just(50_000)))
    def lease(self, size: int) -> None:
        lease = self.arena.lease(size)
        assert lease.size == size
        assert len(lease.view) == size
        self.segments[lease.segment.number] = lease.segment.size
        self.marks = self.marks % 250 + 1
        np.frombuffer(lease.view, np.uint8)[:] = self.marks
        self.alive.append((lease, 1, self.marks))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        k = data.draw(st.integers(0, len(self.alive) - 1))
        lease, holders, mark = self.alive[k]
        assert lease.retain() is lease
        self.alive[k] = lease, holders + 1, mark

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        k = data.draw(st.integers(0, len(self.alive) - 1))
        lease, holders, mark = self.alive.pop(k)
        lease.release()
        if holders > 1:
            self.alive.append((lease, holders - 1, mark))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        lease, _, _ = data.draw(st.sampled_from(self.alive))
        self.arena.trim(lease, data.draw(st.integers(0, lease.size)))

    @invariant()
    def no_byte_is_leased_twice(self) -> None:
        for lease, _, mark in self.alive:
            assert (np.frombuffer(lease.view, np.uint8) == mark).all()
        places = sorted((a.segment.number, a.offset, a.offset + a.size) for a, _, _ in self.alive if a.size)
        for (number, _, stop), (following, start, _) in itertools.pairwise(places):
            assert number != following or stop <= start

    @invariant()
    def places_are_aligned_and_alive(self) -> None:
        for lease, _, _ in self.alive:
            assert lease.offset == aligned(lease.offset)
            assert lease.segment.fd >= 0
            assert lease.segment.number not in self.forgotten

    @invariant()
    def bytes_are_counted(self) -> None:
        assert self.arena.leased_bytes == sum(lease.size for lease, _, _ in self.alive)
        kept = self.segments.keys() - self.forgotten
        assert self.arena.segment_bytes == sum(self.segments[number] for number in kept)

    @invariant()
    def no_more_memory_is_kept_than_is_used_and_spared(self) -> None:
        used = {lease.segment.number: lease.segment.size for lease, _, _ in self.alive}
        spare = (SmallArena.SPARE_SEGMENTS + 1) * SmallArena.SEGMENT_BYTES
        assert self.arena.segment_bytes <= sum(used.values()) + spare

    def teardown(self) -> None:
        self.arena.close()
        assert self.arena.segment_bytes == 0
        self.no_byte_is_leased_twice()  # views outlive the arena
        for lease, holders, _ in self.alive:
            for _ in range(holders):
                lease.release()
        assert self.arena.leased_bytes == 0
        self.alive.clear()


TestArena = ArenaModel.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.fixture
def forgotten() -> list[int]:
    return []


@pytest.fixture
def arena(forgotten: list[int]) -> Iterator[SmallArena]:
    arena = SmallArena(forgotten.append)
    yield arena
    arena.close()


def test_memory_is_leased_again_after_release_and_trim(arena: SmallArena) -> None:
    for _ in range(200):
        first = arena.lease(3000)
        first.release()
        assert arena.segment_bytes == SmallArena.SEGMENT_BYTES
    first = arena.lease(4000)
    arena.trim(first, 100)
    second = arena.lease(3000)
    assert second.segment is first.segment
    assert second.offset == 128


def test_a_segment_cannot_shrink_under_a_reader() -> None:
    segment = Segment.create(8192)
    with pytest.raises(OSError):
        os.ftruncate(segment.fd, 10)
    segment.close()
    segment.close()


def test_arena_survives_a_memory_error(arena: SmallArena, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    first = arena.lease(4000)
    held = arena.leased_bytes, arena.segment_bytes
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(MemoryError, match="4096 bytes of shared memory"):
            arena.lease(4000)
    assert (arena.leased_bytes, arena.segment_bytes) == held
    assert arena.lease(4000).segment is not first.segment
    first.release()
    assert arena.leased_bytes == 4000


def test_new_segments_are_no_larger_than_the_room_but_hold_the_lease() -> None:
    room = 3 * SmallArena.SEGMENT_BYTES // 2
    arena = SmallArena(room=lambda: room - arena.segment_bytes)
    size = SmallArena.SEGMENT_BYTES // 4
    leases = [arena.lease(size) for _ in range(6)]
    assert arena.segment_bytes == room
    leases.append(arena.lease(size))  # over it, by what is leased and no more
    assert arena.segment_bytes == room + size
    arena.close()


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("files", [
    {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{64 * MIB}\n"},
    {
        "proc/self/cgroup": "0::/slurm/job/step\n",
        "sys/fs/cgroup/slurm/job/step/memory.max": "max\n",
        "sys/fs/cgroup/slurm/job/memory.max": f"{64 * MIB}\n",
        "sys/fs/cgroup/slurm/memory.max": f"{256 * MIB}\n",
    },
    {
        "proc/self/cgroup": "5:cpu,cpuacct:/other\n4:memory:/slurm/job\n0::/\n",
        "sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes": f"{64 * MIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    },
    {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{64 * MIB}\n"},
], ids=["root of a namespace", "a group above its own", "version 1", "no groups"])  # fmt: skip
def test_limit_is_that_of_the_narrowest_group_when_groups_are_nested(tmp_path: Path, files: dict[str, str]) -> None:
    assert memory_bytes(put(tmp_path, files)) == 64 * MIB


def test_limit_is_the_machines_memory_when_no_group_has_one(tmp_path: Path) -> None:
    assert memory_bytes(put(tmp_path, {"proc/self/cgroup": "0::/a\n"})) > 64 * MIB


WORKERS, LIMIT = 4, 8


@pytest.fixture
def places(forgotten: list[int]) -> Iterator[BatchMemory]:
    places = BatchMemory(WORKERS, LIMIT, forgotten.append)
    yield places
    places.close()


def added(places: BatchMemory) -> Segment:
    segment = Segment.create(4096)
    places.add(segment)
    return segment


def fill(places: BatchMemory, worker: int) -> int:
    """Fill a free or new segment with a batch of the worker. Returns the number of the segment."""
    segment = places.free_for(worker)
    if segment is None:
        places.settled()
        segment = added(places)
    places.filled(segment.number, worker)
    return segment.number


def test_segment_returns_to_its_worker(places: BatchMemory) -> None:
    number = fill(places, 2)
    places.give_back(number)
    assert fill(places, 1) != number
    assert fill(places, 2) == number


def test_segments_are_limited_to_batches_in_use(places: BatchMemory) -> None:
    held: list[int] = []
    for k in range(200):
        held.append(fill(places, k % WORKERS))
        if len(held) > LIMIT + 1:
            places.give_back(held.pop(0))
    assert len(places.segments) == LIMIT + 2


def test_segments_being_created_count_towards_the_limit(places: BatchMemory) -> None:
    given = [places.free_for(k % WORKERS) for k in range(LIMIT + 1)]
    assert given == [None] * (LIMIT + 1)
    for _ in given[1:]:
        places.settled()
    first = added(places)
    places.filled(first.number, 0)
    places.give_back(first.number)
    for _ in range(LIMIT):
        assert places.free_for(1) is None
    assert places.free_for(3) is first, "there are enough: another worker's is taken"


def test_segment_that_is_too_small_is_unlocked_and_removed(places: BatchMemory, forgotten: list[int]) -> None:
    unlocked: list[int] = []
    segment = added(places)
    places.unlock_pages = lambda number: unlocked.append(len(places.segments[number].view))
    places.unused(segment, 0, is_too_small=True)
    assert unlocked == [4096], "before the segment is closed"
    assert forgotten == [segment.number]
    assert not places.segments
