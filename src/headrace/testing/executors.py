"""The contract of executors, as tests."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace._util.sample_ranges import Rows
from headrace._util.shared_memory import Arena, Lease
from headrace.errors import WorkerDiedError
from headrace.observe import LoaderMeters
from headrace.torch_compat import serialize
from headrace.torch_compat.spec import Spec
from headrace.workers.executor import Executor, Loss, OnLost, OnReply, WorkerLink
from headrace.workers.failures import PackedError
from headrace.workers.queue import TaskQueue
from headrace.workers.sample_chunks import ListPart, PackedPart, Part, RawPart
from headrace.workers.tasks import Chain, Finish, Reply, Step, StreamChains, Task

_DEADLINE_S = 60.0
_CHAIN, _KEY = 1, 0x5EED


class ExecutorContract:
    """Tests of an `Executor` (workers/executor.py). Inherit the class and define `open_executor`.

        class TestPipes(ExecutorContract):
            def open_executor(self, count):
                return PipeExecutor()

    Attributes:
        can_die: True if a worker can die without the trainer; False for threads.
        large: Bytes of a sample that exceeds all buffers in between.
    """

    can_die: ClassVar[bool] = True
    large: ClassVar[int] = 3_000_000

    def open_executor(self, count: int) -> Executor:
        """Return a new executor that will start `count` workers."""
        raise NotImplementedError

    def test_samples_come_back_as_their_chain_makes_them(self) -> None:
        async def main(run: _Run) -> None:
            await run.teach(_twice)
            samples = [*range(5), {"a": np.arange(4.0)}, np.zeros(self.large // 8)]
            made = await asyncio.gather(*(run.made(samples, position) for position in range(4)))
            for some in made:
                assert _same(some, [_twice(sample) for sample in samples])

        self._run(2, main)

    def test_samples_that_lie_in_fetched_ranges_are_found(self) -> None:
        async def main(run: _Run) -> None:
            await run.teach(_body)
            parts = [run.raw([b"%d" % k * (k + 1) for k in range(start, start + 6)]) for start in range(0, 24, 6)]
            made = await asyncio.gather(*(run.made_of(part, 6 * k) for k, part in enumerate(parts)))
            assert [body for some in made for body in some] == [b"%d" % k * (k + 1) for k in range(24)]

        self._run(2, main)

    def test_samples_of_one_batch_are_written_beside_one_another(self) -> None:
        async def main(run: _Run) -> None:
            await run.teach(_as_pair)
            spec = Spec.of(_as_pair(0))
            assert spec is not None
            run.queue.learn_spec(_CHAIN, spec.dumps())
            slab = run.arena.lease(spec.nbytes(12))
            slab.view[:] = bytes(slab.size)
            replies = await asyncio.gather(*(run.filled(slab, start, 3, 12) for start in range(0, 12, 3)))
            assert [reply.kind for reply in replies] == ["written"] * 4
            columns: list[list[object]] = []
            got = spec.samples(slab.view, 12, 12, columns)
            assert _same([tuple(map(np.array, pair)) for pair in got], [_as_pair(k) for k in range(12)])
            slab.release()

        self._run(2, main)

    def test_what_is_searched_for_samples_comes_with_what_was_found(self) -> None:
        async def main(run: _Run) -> None:
            buffer = run.arena.lease(6)
            buffer.view[:] = b"abcabc"
            task = Task(0, 0, 0, Finish.SCAN, [], place=buffer, scan=(_Scanner(), 10, True))
            reply = await run.queue.run(task)
            rows, scanner = reply.value
            assert (rows, scanner.seen) == ([11, 14], [(10, 6, True)])

        self._run(1, main)

    def test_worker_knows_the_newest_chain_and_none_that_was_replaced(self) -> None:
        async def main(run: _Run) -> None:
            for factor in range(1, 5):
                await run.teach(partial(_times, factor))
                assert await run.made([1, 2], 0) == [factor, 2 * factor]

        self._run(1, main)

    def test_errors_come_back_with_the_sample_that_they_are_of(self) -> None:
        async def main(run: _Run) -> None:
            await run.teach(_bad_at_two)
            reply = await run.queue.run(run.task(run.part([1, 2, 3]), Finish.CHECK))
            ((slot, packed),) = reply.errors
            assert slot == 1
            assert isinstance(_unpacked(packed), ZeroDivisionError)
            assert await run.made([5], 0) == [5]

        self._run(1, main)

    def test_what_is_let_go_is_forgotten_and_its_worker_goes_on(self) -> None:
        async def main(run: _Run) -> None:
            await run.teach(_twice)
            for _ in range(3):
                task = run.task(run.part([1]), Finish.SAMPLES)
                assert (await run.queue.run(task)).kind == "held"
                run.queue.abandon(task)
            assert await run.made([4], 0) == [8]

        self._run(1, main)

    def test_worker_answers_each_message_once_and_in_order(self) -> None:
        async def main(run: _Run) -> None:
            await run.teach(_twice)
            replies = [asyncio.ensure_future(run.queue.run(run.task(run.part([k]), Finish.CHECK))) for k in range(40)]
            await asyncio.gather(*replies)
            assert run.watched.answered == sorted(run.watched.answered)
            assert len(set(run.watched.answered)) == 40

        self._run(1, main)

    def test_answers_that_come_twice_or_late_change_nothing(self) -> None:
        async def main(run: _Run) -> None:
            await run.teach(_twice)
            run.watched.repeats = True
            made = await asyncio.gather(*(run.made([k, k + 1], k) for k in range(12)))
            assert made == [[2 * k, 2 * k + 2] for k in range(12)]

        self._run(2, main)

    def test_answers_of_a_worker_that_was_given_up_change_nothing(self) -> None:
        async def main(run: _Run) -> None:
            await run.teach(_twice)
            making = [asyncio.ensure_future(run.made([k], k)) for k in range(8)]
            await _until(lambda: run.watched.has_started and not run.queue.is_idle)
            run.watched.lose_one()
            assert await asyncio.gather(*making) == [[2 * k] for k in range(8)]
            assert run.meters.deaths == 1

        self._run(2, main)

    def test_work_of_a_worker_that_dies_is_done_again(self) -> None:
        async def main(run: _Run) -> None:
            with tempfile.TemporaryDirectory() as folder:
                await run.teach(partial(_die_once, str(Path(folder) / "died")))
                made = await asyncio.gather(*(run.made([k], k) for k in range(6)))
            assert made == [[k] for k in range(6)]
            assert run.meters.deaths == 1

        if self.can_die:
            self._run(2, main)

    def test_sample_that_ends_every_worker_fails_and_the_others_do_not(self) -> None:
        async def main(run: _Run) -> None:
            await run.teach(_die_at_three)
            replies = [run.queue.run(run.task(run.part([k]), Finish.CHECK)) for k in range(5)]
            for number, reply in enumerate(await asyncio.gather(*replies)):
                errors = [_unpacked(packed) for _, packed in reply.errors]
                assert [type(error) for error in errors] == ([WorkerDiedError] if number == 3 else []), number

        if self.can_die:
            self._run(2, main)

    def test_worker_that_hangs_holds_up_neither_the_others_nor_the_end(self) -> None:
        async def main(run: _Run) -> None:
            await run.teach(_hang_at_zero)
            hanging = asyncio.ensure_future(run.queue.run(run.task(run.part([0]), Finish.CHECK)))
            await _until(lambda: run.watched.has_started and not run.queue.is_idle)
            made = await asyncio.gather(*(run.queue.run(run.task(run.part([k]), Finish.CHECK)) for k in range(1, 6)))
            assert len(made) == 5
            assert not hanging.done()
            await run.queue.close()
            before = list(run.watched.answered)
            hanging.cancel()
            await asyncio.gather(hanging, return_exceptions=True)
            assert run.watched.answered == before

        try:
            self._run(2, main, must_be_idle=False)
        finally:
            _gate.set()
            _gate.clear()

    def _run(self, count: int, main: Callable[[_Run], Awaitable[None]], *, must_be_idle: bool = True) -> None:
        async def whole() -> None:
            run = _Run(count, self.open_executor(count))
            try:
                await run.queue.open()
                await asyncio.wait_for(main(run), _DEADLINE_S)
                if must_be_idle:
                    await _until(lambda: run.queue.is_idle)
                    assert run.arena.leased_bytes == 0, "not all that was leased was given back"
            finally:
                await run.queue.close()
                run.arena.close()

        asyncio.run(whole())


class _Run:
    """An executor with a task queue, as a loader uses it."""

    def __init__(self, count: int, executor: Executor) -> None:
        self.watched = WatchedExecutor(executor)
        self.meters = LoaderMeters()
        self.queue = TaskQueue(count, self.watched, self.meters)
        self.arena = Arena()
        self._chains = StreamChains()

    async def teach(self, function: Callable[[Any], object]) -> None:
        chain = Chain((Step("map(function)", "map", function),))
        self._chains = StreamChains({_CHAIN: chain})  # held here, as threads do not hold them
        self.queue.chains.learn(self._chains.stream, self.queue.chains.pack(self._chains))

    def part(self, samples: list[object]) -> Part:
        if self.watched.shares_objects:
            return ListPart(list(samples))
        pieces = serialize.pack(samples)
        lease = self.arena.lease(serialize.packed_size(pieces))
        return PackedPart(lease, serialize.write(pieces, lease.view), 0, len(samples))

    def raw(self, bodies: list[bytes]) -> Part:
        """Return samples of one member each, in ranges of 7 bytes; some contain parts of two."""
        data = b"".join(bodies)
        sizes = np.array([len(body) for body in bodies], np.int64)
        keys = np.array([str(k).encode() for k in range(len(bodies))], np.bytes_)
        starts, field = np.arange(len(bodies) + 1, dtype=np.int64), np.zeros(len(bodies), np.int32)
        rows = Rows(keys, starts, field, np.cumsum(sizes) - sizes, sizes, ("body",))
        spans = []
        for at in range(0, len(data), 7):
            lease = self.arena.lease(len(data[at : at + 7]))
            lease.view[:] = data[at : at + 7]
            spans.append((at, lease))
        return RawPart(rows, np.zeros(len(bodies), np.int64), ("memory://shard",), spans, (0,))

    def task(self, part: Part, finish: Finish, position: int = 0) -> Task:
        return Task(_CHAIN, _KEY, position, finish, [part], position)

    async def made(self, samples: list[object], position: int) -> list[object]:
        return await self.made_of(self.part(samples), position)

    async def made_of(self, part: Part, position: int) -> list[object]:
        task = self.task(part, Finish.SAMPLES, position)
        reply = await self.queue.run(task)
        room: Lease | None = None
        while reply.kind == "held":
            if room is not None:
                room.release()
            room = self.arena.lease(reply.size)
            reply = await self.queue.place(task, room.retain())
        assert reply.kind == "written", reply
        assert room is not None
        made: list[object] = serialize.unpack(room.view, reply.lengths, copy=True)
        room.release()
        return made

    def filled(self, slab: Lease, start: int, count: int, capacity: int) -> Awaitable[Reply]:
        task = self.task(self.part(list(range(start, start + count))), Finish.SLOTS, start)
        task.slot, task.capacity, task.place = start, capacity, slab.retain()
        return self.queue.run(task)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (there is no event)
        await asyncio.sleep(0.001)


def _same(some: list[object], others: list[object]) -> bool:
    return serialize.pack_bytes(some) == serialize.pack_bytes(others)


def _unpacked(packed: PackedError) -> BaseException:
    return serialize.unpack_error(packed)


_gate = threading.Event()


@dataclass
class _Scanner:
    seen: list[tuple[int, int, bool]] | None = None
    url: str = "memory://shard"

    def feed(self, view: memoryview, offset: int, last: bool) -> list[int]:
        self.seen = [*(self.seen or []), (offset, len(view), last)]
        return [offset + k for k, byte in enumerate(bytes(view)) if byte == ord("b")]


def _twice(sample: Any) -> Any:
    return {key: 2 * value for key, value in sample.items()} if isinstance(sample, dict) else 2 * sample


def _times(factor: int, sample: int) -> int:
    return factor * sample


def _body(sample: dict[str, Any]) -> bytes:
    body: bytes = sample["body"]
    return body


def _as_pair(sample: int) -> tuple[object, object]:
    return np.full((3, 2), sample, np.float32), np.array([sample, -sample])


def _bad_at_two(sample: int) -> int:
    return sample if sample != 2 else 1 // 0


def _die_once(path: str, sample: int) -> int:
    if sample == 4:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return sample
        os._exit(3)
    return sample


def _die_at_three(sample: int) -> int:
    if sample == 3:
        os._exit(3)
    return sample


def _hang_at_zero(sample: int) -> int:
    if sample == 0:
        _gate.wait()
    return sample


class WatchedExecutor:
    """An executor that records answers, and can repeat answers or report false losses.

    Attributes:
        answered: Numbers of the answered tasks, in order.
        repeats: True: each answer comes three times, the last time after other answers.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.shares_memory, self.shares_objects = executor.shares_memory, executor.shares_objects
        self.answered: list[int] = []
        self.repeats = False
        self._late: list[Callable[[], None]] = []
        self._on_lost: list[OnLost] = []

    async def start(self, worker: int, on_reply: OnReply, on_lost: OnLost) -> WorkerLink:
        def answer(number: int, reply: Reply) -> None:
            self.answered.append(number)
            on_reply(number, reply)
            if self.repeats:
                on_reply(number, reply)
                late, self._late = self._late, [partial(on_reply, number, reply)]
                for again in late:
                    again()

        link = await self._executor.start(worker, answer, on_lost)
        self._on_lost.append(on_lost)
        return link

    @property
    def has_started(self) -> bool:
        return bool(self._on_lost)

    def lose_one(self) -> None:
        """Report a worker as lost that is still working."""
        self._on_lost[0](Loss())

    async def aclose(self) -> None:
        await self._executor.aclose()
