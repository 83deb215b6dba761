"""Loops that end early in every way: nothing leaks, and kept batches are never overwritten."""

import asyncio
import gc
import io
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import ours
import pytest
import torch
from builders.numbers import Numbers
from process.waiting import is_running, wait_until, workers_of

import headrace as hr
from headrace.delivery.iterator import BatchIterator
from headrace.delivery.slabs import HELD_SLABS

LARGE = 30_000  # float32 values in a sample: a batch of 4 is a slab, and no copy


def large(x: int) -> Any:
    return np.full(LARGE, x, np.float32)


def same(x: int) -> int:
    return x


uses_warm = pytest.mark.may_leave(
    descriptors="/memfd:headrace", mappings="/memfd:headrace", reason="memory of the loader that these tests share"
)


@pytest.fixture(scope="module")
def warm() -> Iterator[Any]:
    with hr.DataLoader(Numbers(4000).map(same), batch_size=4, num_workers=2) as loader:
        for _ in range(3):
            next(iter(loader))
        gc.collect()
        yield loader


def is_quiet(loader: Any) -> bool:
    gc.collect()
    runtime = loader._behind._runtime
    return (
        runtime._workers.is_idle
        and runtime._arena.leased_bytes == 0
        and len(runtime._slabs._free) == len(runtime._slabs.segments)
        and not runtime._slabs._waiting
        and not runtime.budget._waiting
    )


def proportional_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(
        int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
    )


def counts(loader: Any) -> dict[str, int]:
    slabs = loader._behind._runtime._slabs
    each = 2  # descriptors: its own, and the one of Python's mapping
    return {
        "threads": threading.active_count(),
        "descriptors without slabs": len(list(Path("/proc/self/fd").iterdir())) - each * len(slabs.segments),
        "slabs that are not kept": max(0, len(slabs.segments) - slabs.kept),  # how many are used depends on the moment
        "shm": len(ours.shared_names()),
        "iterators": sum(isinstance(o, BatchIterator) for o in gc.get_objects()),
    }


@pytest.mark.slow
def test_slabs_serve_the_next_epoch_when_they_come_back_after_the_end_of_theirs() -> None:
    with hr.DataLoader(Numbers(400).map(large), batch_size=4, num_workers=2) as loader:
        iterator = iter(loader)
        held = [next(iterator) for _ in range(HELD_SLABS)]
        slabs = loader._behind._runtime._slabs
        wait_until(lambda: len(slabs.segments) == slabs.limit, "the epoch has all that it may have")
        before = set(slabs.segments)
        for _ in range(5):
            del iterator
            wait_until(lambda: slabs.limit == 0, "the epoch ends")
            held.clear()
            wait_until(lambda: is_quiet(loader), "its batches come back")
            assert set(slabs.segments) == before
            iterator = iter(loader)
            held += [next(iterator) for _ in range(HELD_SLABS)]


@pytest.mark.slow
@uses_warm
@pytest.mark.timeout(300)  # half a minute on a busy machine
def test_five_hundred_early_breaks_leave_nothing(warm: Any) -> None:
    def break_early() -> None:
        for batch in warm:
            assert batch.tolist() == [0, 1, 2, 3]
            break

    for _ in range(200):  # the memory of the process settles
        break_early()
    wait_until(lambda: is_quiet(warm), "the epochs end")
    workers = workers_of(warm)
    before, memory = counts(warm), [proportional_bytes(pid) for pid in (os.getpid(), *workers)]
    for _ in range(500):
        break_early()
    wait_until(lambda: is_quiet(warm), "the epochs end")
    wait_until(
        lambda: all(now <= before[name] for name, now in counts(warm).items()), f"no more is there than {before}"
    )
    assert workers_of(warm) == workers
    after = [proportional_bytes(pid) for pid in (os.getpid(), *workers)]
    assert all(b - a < 8 * 2**20 for a, b in zip(memory, after, strict=True)), (memory, after)
    assert warm.stats().work.deaths == 0
    assert [x for batch in warm for x in batch.tolist()] == list(range(4000))


@uses_warm
@pytest.mark.parametrize("fails", [False, True])
def test_epoch_ends_when_its_iterator_is_deleted_or_its_loop_fails(warm: Any, fails: bool) -> None:
    with suppress(ZeroDivisionError):
        for batch in warm:
            if not fails:
                break
            batch.tolist()[0] / 0
    wait_until(lambda: is_quiet(warm), "the epoch ends")


@uses_warm
def test_task_that_is_cancelled_while_it_waits_leaves_nothing(warm: Any) -> None:
    async def run(iterator: Any, ticks: int) -> None:
        got: list[int] = []

        async def loop() -> None:
            async for batch in iterator:
                got.extend(batch.tolist())

        task = asyncio.ensure_future(loop())
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(20):  # nothing was lost: the next task gets what comes next
            assert (await anext(iterator)).tolist() == list(range(len(got), len(got) + 4))

    for ticks in (0, 1, 2, 3, 5, 8, 20, 100):
        asyncio.run(run(iter(warm), ticks))
    wait_until(lambda: is_quiet(warm), "the epochs end")


@uses_warm
def test_event_loop_that_ends_with_a_live_iterator_leaves_nothing(warm: Any) -> None:
    async def some() -> None:
        async for _ in warm:
            return

    async def waiting() -> Any:
        iterator = aiter(warm)
        task = asyncio.ensure_future(anext(iterator))  # the loop ends with it
        await asyncio.sleep(0)
        return task

    for _ in range(5):
        asyncio.run(some())
        asyncio.run(waiting())
    wait_until(lambda: is_quiet(warm), "the epochs end")


def test_loader_that_is_dropped_takes_everything_with_it() -> None:
    class Owner:
        """Holds the loader in a cycle, as trainers do, and is used by the loader's own function."""

        def __init__(self) -> None:
            self.loader = hr.DataLoader(Numbers(4000).map(same), batch_size=4, num_workers=2)
            self.me = self

    owner = Owner()
    iterator = iter(owner.loader)
    next(iterator)
    gone = weakref.ref(owner.loader)
    del owner
    wait_until(lambda: len(workers_of(gone())) == 2, "both workers run")
    workers = workers_of(gone())
    gc.collect()
    assert next(iterator).tolist() == [4, 5, 6, 7], "its iterator keeps it"
    del iterator
    gc.collect()
    assert gone() is None
    wait_until(lambda: not any(map(is_running, workers)), "its workers are gone")


def test_loader_that_was_never_used_takes_its_fork_server_with_it() -> None:
    for _ in range(20):
        hr.DataLoader(Numbers(8), num_workers=2)
    gc.collect()


@pytest.mark.parametrize("workers", [0, 2])
def test_close_in_another_thread_is_an_error_in_the_thread_that_waits(workers: int) -> None:
    release = threading.Event()

    class Stuck(Numbers):  # its samples from 4 on never come
        async def aget(self, index: int) -> int:
            if index >= 4:
                await asyncio.Event().wait()
            return index

    loader = hr.DataLoader(Stuck(100), batch_size=4, num_workers=workers)
    raised: list[BaseException] = []

    def loop() -> None:
        try:
            for _ in loader:
                release.set()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    assert release.wait(20)
    loader.close()
    thread.join(10)
    assert not thread.is_alive(), "it still waits"
    assert [type(error) for error in raised] == [hr.errors.LoaderClosedError]
    raised.clear()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_close_at_any_moment_of_a_loop_is_a_closed_error_and_nothing_else(workers: int) -> None:
    for ahead in range(12):
        loader = hr.DataLoader(Numbers(400).map(large), batch_size=4, num_workers=workers)
        iterator = iter(loader)
        for _ in range(ahead % 4):
            next(iterator)
        if ahead >= 4:
            wait_until(lambda loader=loader: len(loader._behind._runtime._slabs._out) >= 3, "batches are ready")
        if ahead >= 8:
            loader.close()
        else:
            closing = threading.Thread(target=loader.close)
            closing.start()
        with pytest.raises(hr.errors.LoaderClosedError):
            for batch in iterator:
                assert (batch == batch[:, :1]).all()
        if ahead < 8:
            closing.join()
        with pytest.raises(hr.errors.LoaderClosedError):
            iter(loader)
        assert loader.epoch <= 1  # 1 if the loop got a batch before it was ended


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["slots", "batch"])
def test_all_batches_of_an_epoch_can_be_kept_and_are_independent(mode: str) -> None:
    collate = (lambda samples: torch.from_numpy(np.stack(samples))) if mode == "batch" else None
    with hr.DataLoader(
        Numbers(200).map(large), batch_size=4, num_workers=2, collate_fn=collate, memory_budget="4MiB"
    ) as loader:
        first = list(loader)
        second = list(loader)
    # They stay whole when the loader is closed.
    for batches in (first, second):
        assert len(batches) == 50
        for number, batch in enumerate(batches):
            assert batch[:, 0].tolist() == list(range(4 * number, 4 * number + 4))
            assert torch.equal(batch, batch[:, :1].expand(4, LARGE))
    torch.save(first[7], file := io.BytesIO())
    assert first[7].untyped_storage().nbytes() == first[7].nbytes
    assert file.tell() < first[7].nbytes + 4096
    assert torch.equal(torch.load(io.BytesIO(file.getvalue())), first[7])
    first[7].fill_(-1)
    assert first[8][0, 0] == 32 and second[7][0, 0] == 28
    assert len({batch.data_ptr() for batch in first + second}) == 100


VIEWS = {
    "view": lambda batch: batch.view(-1)[100:],
    "row": lambda batch: batch[2],
    "transpose": lambda batch: batch.t(),
    "numpy": lambda batch: batch.numpy(),
    "numpy slice": lambda batch: batch.numpy()[1:3, ::7],
    "numpy of view": lambda batch: batch[1:].numpy().T,
    "detached": lambda batch: batch.detach(),
    "bytes": lambda batch: batch.view(torch.uint8),
    "memoryview": lambda batch: memoryview(batch.numpy()),
    "dlpack": lambda batch: torch.from_dlpack(batch),
    "numpy dlpack": lambda batch: np.from_dlpack(batch),
    "storage": lambda batch: batch.untyped_storage(),
}


def content(view: Any) -> bytes:
    if isinstance(view, torch.UntypedStorage):
        view = torch.empty(0, dtype=torch.uint8).set_(view)
    if isinstance(view, torch.Tensor):
        view = view.numpy()
    return bytes(view) if isinstance(view, memoryview) else view.tobytes()


@pytest.mark.slow
def test_views_of_batches_are_never_written_over() -> None:
    with hr.DataLoader(Numbers(80).map(large), batch_size=4, num_workers=2) as loader:
        for name, view_of in VIEWS.items():
            iterator = iter(loader)
            batch = next(iterator)
            view: Any = view_of(batch)
            before = content(view)
            del batch, iterator
            for _ in range(2):
                for other in loader:
                    del other
            assert content(view) == before, name
            del view
        wait_until(lambda: is_quiet(loader), "every slab has come back")
        assert len(loader._behind._runtime._slabs.segments) <= 4 + 2
