"""Workers that die: the work is done again, and a sample that kills every worker is an error with a name."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.numbers import Numbers
from drop_in.acting import batches_of
from drop_in.reading import read_all
from end_to_end.tars import tar
from process.waiting import run_script, wait_until, workers_of

import headrace as hr
from headrace._util.reads import Reads
from headrace._util.sample_ranges import Rows
from headrace.formats.format import Block, Format, ShardEntry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import Limits


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shards") / "numbers.tar"
    path.write_bytes(tar([(f"s{number:02d}", {"txt": str(number).encode()}) for number in range(40)]))
    return str(path)


def slow(x: int) -> int:
    time.sleep(0.002)
    return x


def to_sum(samples: list[int]) -> list[int]:
    time.sleep(0.002)
    return list(samples)


def is_even(x: int) -> bool:
    time.sleep(0.001)
    return x % 2 == 0


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ENDINGS: dict[str, tuple[Callable[[], Any], int, str]] = {
    "SIGKILL": (kill_self, -signal.SIGKILL, "killed by SIGKILL"),
    "SIGSEGV": (lambda: os.kill(os.getpid(), signal.SIGSEGV), -signal.SIGSEGV, "killed by SIGSEGV"),
    "os._exit": (lambda: os._exit(3), 3, "exit code 3"),
}


def at(number: int, act: Callable[[], Any]) -> Callable[[int], int]:
    def step(x: int) -> int:
        if x == number:
            act()
        return x

    return step


def check_death(error: Any, code: int | None = -signal.SIGKILL) -> str:
    assert isinstance(error, hr.errors.WorkerDiedError), repr(error)
    assert isinstance(error, RuntimeError)
    assert str(error).startswith("DataLoader worker (pid(s)")
    assert error.exitcode == code
    assert str(error.pid) in str(error)
    return str(error)


@pytest.mark.parametrize("mode", ["slots", "batch", "samples"])
def test_every_sample_comes_once_in_order_when_workers_are_killed(mode: str) -> None:
    data = {"slots": Numbers(400).map(slow), "batch": Numbers(400), "samples": Numbers(800).filter(is_even)}[mode]
    with hr.DataLoader(data, batch_size=8, num_workers=2, collate_fn=to_sum if mode == "batch" else None) as loader:
        got = []
        for number, batch in enumerate(loader):
            got += batch.tolist() if isinstance(batch, torch.Tensor) else batch
            if number in (0, 7, 20, 35):
                wait_until(lambda: len(workers_of(loader)) == 2, "both workers are there")
                os.kill(workers_of(loader)[number % 2], signal.SIGKILL)
        assert got == list(range(0, 800, 2) if mode == "samples" else range(400))
        assert loader.stats().work.deaths == 4
        assert [len(b) for b in loader] == [8] * 50, "the next epoch works"


def test_idle_worker_that_is_killed_between_epochs_is_replaced() -> None:
    with hr.DataLoader(Numbers(40), batch_size=4, num_workers=2) as loader:
        assert read_all(iter(loader)) == batches_of(4, count=40)
        for pid in workers_of(loader):
            os.kill(pid, signal.SIGKILL)
        assert read_all(iter(loader)) == batches_of(4, count=40)
        wait_until(lambda: loader.stats().work.deaths == 2, "both deaths are counted")


@pytest.mark.slow
@pytest.mark.parametrize("ending", list(ENDINGS))
def test_sample_that_kills_its_workers_is_an_error_at_its_place(ending: str, capfd: Any) -> None:
    act, code, words = ENDINGS[ending]
    with hr.DataLoader(Numbers(40).map(at(17, act)), batch_size=4, num_workers=2) as loader:
        got = read_all(iter(loader))
        assert loader.stats().work.deaths == 3
    text = check_death(got[4], code)
    assert words in text
    assert "sample 17 of the epoch" in text
    assert got[4].batch == 4
    assert got[:4] + got[5:] == batches_of(4, but=(4,), count=40)
    assert "Traceback" not in capfd.readouterr().err


def test_sample_of_a_shard_is_named_by_key_and_address(shard: str) -> None:
    def number(sample: dict[str, Any]) -> int:
        if sample["__key__"] == "s21":
            kill_self()
        return int(sample["txt"])

    with hr.DataLoader(hr.stream(shard).map(number), batch_size=5, num_workers=2) as loader:
        got = read_all(iter(loader))
    text = check_death(got[4])
    assert got[4].key == "s21"
    assert got[4].url == shard
    assert "'s21'" in text and shard in text and "sample 21" in text
    assert got[:4] + got[5:] == batches_of(5, but=(4,), count=40)


def test_death_in_the_very_first_batch_is_no_loss(tmp_path: Path) -> None:
    flag = tmp_path / "was here"

    def once(x: int) -> int:
        if x == 1 and not flag.exists():
            flag.touch()
            kill_self()
        return x

    with hr.DataLoader(Numbers(20).map(once), batch_size=4, num_workers=2) as loader:
        assert read_all(iter(loader)) == batches_of(4, count=20)
        assert loader.stats().work.deaths == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["slots", "batch"])
def test_death_while_a_result_is_held_is_no_loss(mode: str) -> None:
    """Without prefetch, and with large samples, a result has no slab until the trainer releases one."""
    shape = (60_000,)

    def grow(x: int) -> Any:
        return np.full(shape, x, np.float32)

    collate = (lambda samples: np.stack(samples)) if mode == "batch" else None
    with hr.DataLoader(
        Numbers(48).map(grow), batch_size=4, num_workers=2, collate_fn=collate, memory_budget="1MiB"
    ) as loader:
        seen = []
        for number, batch in enumerate(loader):
            array = np.asarray(batch)
            assert array.shape == (4, *shape)
            seen += array[:, 0].tolist()
            assert (array == array[:, :1]).all()
            if number % 3 == 0:
                wait_until(lambda: len(workers_of(loader)) == 2, "both workers are there")
                for pid in workers_of(loader):
                    os.kill(pid, signal.SIGKILL)
        assert seen == list(range(48))


def kill_at_9(samples: list[int]) -> list[int]:
    if 9 in samples:
        kill_self()
    return samples


NAMED: dict[str, tuple[Callable[[], Any], Callable[[list[int]], Any], int, str, list[list[int]]]] = {
    "after a filter": (
        lambda: Numbers(40).filter(lambda x: x % 2 == 0).map(at(22, kill_self)),
        *(list, 2, "sample 22"),
        [[0, 2, 4, 6], [8, 10, 12, 14], [24, 26, 28, 30], [32, 34, 36, 38]],
    ),
    "in a filter": (
        lambda: Numbers(24).filter(at(7, kill_self)),
        *(list, 1, "sample 7"),
        [[1, 2, 3, 4], [9, 10, 11, 12], [13, 14, 15, 16], [17, 18, 19, 20], [21, 22, 23]],  # 0 is false
    ),
    "in the collate function": (
        lambda: Numbers(24),
        kill_at_9,
        2,
        "batch 2",
        batches_of(4, but=(2,), count=24),
    ),
}


@pytest.mark.parametrize("place", NAMED)
def test_what_kills_its_workers_is_named_and_the_rest_comes(place: str) -> None:
    make, collate, number, name, rest = NAMED[place]
    with hr.DataLoader(make(), batch_size=4, num_workers=2, collate_fn=collate) as loader:
        got = read_all(iter(loader))
    error = got.pop(number)
    assert name in check_death(error)
    assert error.batch == number or place != "in the collate function"
    assert got == rest


@pytest.mark.slow
def test_worker_init_fn_that_kills_is_an_error_for_each_batch() -> None:
    with hr.DataLoader(Numbers(8), batch_size=4, num_workers=2, worker_init_fn=lambda _: kill_self()) as loader:
        for error in read_all(iter(loader)):
            check_death(error)


def test_worker_init_fn_runs_once_in_each_worker_and_in_its_replacement(tmp_path: Path) -> None:
    def note(number: int) -> None:
        with (tmp_path / f"{number}-{os.getpid()}").open("a") as file:
            file.write("x")

    with hr.DataLoader(
        Numbers(400).filter(is_even).map(slow), batch_size=4, num_workers=2, worker_init_fn=note
    ) as loader:
        for number, _ in enumerate(loader):
            if number == 5:
                os.kill(workers_of(loader)[0], signal.SIGKILL)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    assert [file.read_text() for file in files] == ["x"] * 3


class UsersEnd(BaseException):
    pass


ENDS = [SystemExit, KeyboardInterrupt, UsersEnd, asyncio.CancelledError, GeneratorExit]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "workers": "thread"}])
@pytest.mark.parametrize("where", ["map", "filter", "collate"])
@pytest.mark.parametrize("kind", ENDS)
def test_base_exception_of_a_function_keeps_its_type_and_ends_nobody(
    kind: type[BaseException], where: str, options: dict[str, Any]
) -> None:
    def collate(samples: list[int]) -> list[int]:
        return [step(x) for x in samples] if where == "collate" else samples

    def step(x: int) -> int:
        if x == 5:
            raise kind(3)
        return x

    def keep(x: int) -> bool:
        return step(x) >= 0

    data = {"map": Numbers(12).map(step), "filter": Numbers(12).filter(keep), "collate": Numbers(12)}[where]
    with hr.DataLoader(data, batch_size=4, collate_fn=collate, timeout=60, **options) as loader:
        for _ in range(2):
            iterator = iter(loader)
            assert next(iterator) == [0, 1, 2, 3]
            with pytest.raises(RuntimeError if kind in (asyncio.CancelledError, GeneratorExit) else kind) as raised:
                next(iterator)
            assert "timed out" not in str(raised.value), "a hang"
            assert "stage: " in str(raised.value.__notes__)
            rest = [x for batch in iterator for x in batch]
            assert rest == [8, 9, 10, 11]
        assert loader.stats().work.deaths == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_generator_exit_on_the_loop_is_an_error_and_ends_the_epoch_alone(workers: int) -> None:
    class Get(Numbers):
        fails = True

        async def aget(self, index: int) -> int:
            if index == 5 and self.fails:
                raise GeneratorExit
            return index

    data = Get(12)
    with hr.DataLoader(data, batch_size=4, num_workers=workers, timeout=60) as loader:
        with pytest.raises(RuntimeError, match="GeneratorExit was raised"):
            list(loader)
        data.fails = False
        assert [batch.tolist() for batch in loader] == batches_of(4, count=12), "the engine is there as before"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", ["aget", "map", "aiter"])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, UsersEnd, asyncio.CancelledError])
def test_base_exception_on_the_loop_is_raised_at_its_place(kind: type[BaseException], where: str, workers: int) -> None:
    async def checked(index: int) -> int:
        if index == 5:
            raise kind(3)
        return index

    class Get(Numbers):
        async def aget(self, index: int) -> int:
            return await checked(index)

    class Iterate(hr.AsyncIterableDataset):
        async def aiter(self) -> AsyncIterator[int]:
            for index in range(12):
                yield await checked(index)

    data = {"aget": Get(12), "map": Numbers(12).filter(lambda x: True).map(checked), "aiter": Iterate()}[where]
    with hr.DataLoader(data, batch_size=4, num_workers=workers, timeout=15) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1, 2, 3]
        with pytest.raises(RuntimeError if kind is asyncio.CancelledError else kind) as raised:
            next(iterator)
        assert "timed out" not in str(raised.value), "a hang"
        if where != "aiter":
            assert next(iterator).tolist() == [8, 9, 10, 11]


@pytest.mark.slow
def test_another_fork_server_and_its_workers_go_on_when_one_is_killed() -> None:
    code, out, err = run_script("""
        loader = hr.DataLoader(Numbers(400).map(lambda x: time.sleep(0.002) or x), batch_size=4, num_workers=2)
        it = iter(loader)
        got = next(it).tolist()
        os.kill(loader._behind._runtime._fork_server.process.pid, signal.SIGKILL)
        print(got + [x for batch in it for x in batch.tolist()] == list(range(400)))
        print([x for batch in loader for x in batch.tolist()] == list(range(400)))
        loader.close()
        with hr.DataLoader(Numbers(8), batch_size=4, num_workers=2) as another:
            print([b.tolist() for b in another])
        print(threading.active_count())
    """)
    assert (code, out) == (0, "True\nTrue\n[[0, 1, 2, 3], [4, 5, 6, 7]]\n1\n"), err
    assert "Traceback" not in err


@pytest.mark.slow
def test_fork_server_that_is_killed_before_the_first_iteration_is_an_error_and_no_hang() -> None:
    code, out, err = run_script("""
        loader = hr.DataLoader(Numbers(8), batch_size=4, num_workers=2)
        os.kill(loader._behind._runtime._fork_server.process.pid, signal.SIGKILL)
        try:
            print([b.tolist() for b in loader])
        except Exception as error:
            print(type(error).__name__, error, repr(error.__cause__))
        loader.close()
    """)
    assert "fork server" in out or out.strip() == "[[0, 1, 2, 3], [4, 5, 6, 7]]", out + err
    assert (code, err) == (0, "")


class _Kills(Format):
    """Blocks of four rows; opening the block of the byte 2 kills the process."""

    name, suffixes, fields_are_members = "kills", (".kills",), False

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        count, none = 16, np.zeros(4, np.int64)
        keys, blocks = np.arange(count).astype("S2"), np.arange(count) // 4
        rows = Rows(
            keys, np.arange(5), none.astype(np.int32), np.arange(4), none + 1, ("n",), blocks, np.arange(count) % 4
        )
        return ShardIndex(rows, None, 4, None)

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object]]:
        if bodies[0] == bytes([2]):
            kill_self()
        return [{"n": 4 * bodies[0][0] + row} for row in range(4)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")
def test_the_first_sample_of_a_block_is_blamed_that_ends_workers(tmp_path: Path) -> None:
    (tmp_path / "x.kills").write_bytes(bytes(range(4)))
    data = hr.stream(str(tmp_path / "x.kills"), format=_Kills()).map(itemgetter("n"))
    with (
        hr.DataLoader(data, batch_size=16, num_workers=1) as loader,
        pytest.raises(hr.errors.WorkerDiedError) as caught,
    ):
        next(iter(loader))
    assert "all on sample 8 of the epoch, key '8'" in check_death(caught.value)
