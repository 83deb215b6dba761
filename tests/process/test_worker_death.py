"""Workers that die: the work is done again, and a sample that kills every worker is an error with a name."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.numbers import Iterated, Made, Numbers, is_even
from builders.tars import tar
from drop_in.acting import batches_of, read_all
from process.waiting import output_of, run_script, wait_until, workers_of

import headrace as hr


def slow(x: int) -> int:
    time.sleep(0.002)
    return x


def to_sum(samples: list[int]) -> list[int]:
    time.sleep(0.002)
    return list(samples)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


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


def kill_both(loader: Any) -> None:
    wait_until(lambda: len(workers_of(loader)) == 2, "both workers are there")
    for pid in workers_of(loader):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_batch_that_ends_workers_is_an_error_after_those_that_its_task_made_before() -> None:
    def ends(samples: list[int]) -> torch.Tensor:
        if 403 in samples:
            time.sleep(0.3)  # the batches before are delivered by then
            os._exit(3)
        return torch.tensor(samples)

    came, error = list[int](), None
    with hr.DataLoader(hr.from_map(range(1000)).map(abs), batch_size=4, num_workers=1, collate_fn=ends) as loader:
        batches = iter(loader)
        while len(came) < 996:
            try:
                came += next(batches).tolist()
            except hr.errors.WorkerDiedError as died:
                assert error is None
                error = died
                assert came == list(range(400))
    assert error is not None
    assert came == [*range(400), *range(404, 1000)]


@pytest.mark.parametrize("mode", ["slots", "batch", "samples"])
def test_every_sample_comes_once_in_order_when_workers_are_killed(mode: str) -> None:
    data = {"slots": Numbers(400).map(slow), "batch": Numbers(400), "samples": Numbers(800).map(slow).filter(is_even)}[
        mode
    ]
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
        kill_both(loader)
        assert read_all(iter(loader)) == batches_of(4, count=40)
        wait_until(lambda: loader.stats().work.deaths == 2, "both deaths are counted")


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
                kill_both(loader)
        assert seen == list(range(48))


def kill_at_9(samples: list[int]) -> list[int]:
    if 9 in samples:
        kill_self()
    return samples


Rest = list[list[int]]
KILLED = -signal.SIGKILL
# What is read and how, the number of the batch that fails, exit code, texts of the error, and the other batches.
NAMED: dict[str, tuple[Callable[[], Any], Any, int, int, tuple[str, ...], Rest]] = {
    **{
        words: (
            *(lambda act=act: Numbers(40).map(at(17, act)), None, 4, code, (words, "sample 17 of the epoch")),
            batches_of(4, but=(4,), count=40),
        )
        for words, code, act in (
            ("killed by SIGKILL", KILLED, kill_self),
            ("killed by SIGSEGV", -signal.SIGSEGV, lambda: os.kill(os.getpid(), signal.SIGSEGV)),
            ("exit code 3", 3, lambda: os._exit(3)),
        )
    },
    "after a filter": (
        lambda: Numbers(40).filter(is_even).map(at(22, kill_self)),
        *(list, 2, KILLED, ("sample 22",)),
        [[0, 2, 4, 6], [8, 10, 12, 14], [24, 26, 28, 30], [32, 34, 36, 38]],
    ),
    "in a filter": (
        lambda: Numbers(24).filter(at(7, kill_self)),
        *(list, 1, KILLED, ("sample 7",)),
        [[1, 2, 3, 4], [9, 10, 11, 12], [13, 14, 15, 16], [17, 18, 19, 20], [21, 22, 23]],  # 0 is false
    ),
    "in the collate function": (
        lambda: Numbers(24),
        *(kill_at_9, 2, KILLED, ("batch 2",)),
        batches_of(4, but=(2,), count=24),
    ),
}


@pytest.mark.parametrize("place", NAMED)
def test_what_kills_its_workers_is_named_and_the_rest_comes(place: str, capfd: pytest.CaptureFixture[str]) -> None:
    make, collate, number, code, texts, rest = NAMED[place]
    with hr.DataLoader(make(), batch_size=4, num_workers=2, collate_fn=collate) as loader:
        got = read_all(iter(loader))
        assert loader.stats().work.deaths == 3 or number != 4
    error = got.pop(number)
    text = check_death(error, code)
    assert all(part in text for part in texts)
    assert error.batch == number or "filter" in place
    assert got == rest
    assert "Traceback" not in capfd.readouterr().err or number != 4


def test_sample_of_a_shard_is_named_by_key_and_address(tmp_path: Path) -> None:
    shard = str(tmp_path / "numbers.tar")
    Path(shard).write_bytes(tar([(f"s{number:02d}", {"txt": str(number).encode()}) for number in range(40)]))
    data = hr.stream(shard).map(lambda sample: int(sample["txt"])).map(at(21, kill_self))
    with hr.DataLoader(data, batch_size=5, num_workers=2) as loader:
        got = read_all(iter(loader))
    text = check_death(got[4])
    assert (got[4].key, got[4].url) == ("s21", shard)
    assert "'s21'" in text and shard in text and "sample 21" in text
    assert got[:4] + got[5:] == batches_of(5, but=(4,), count=40)


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
        Numbers(400).map(slow).filter(is_even), batch_size=4, num_workers=2, worker_init_fn=note
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
def test_base_exception_of_a_function_is_itself(kind: type[BaseException], where: str, options: dict[str, Any]) -> None:
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
    fails = [True]

    async def get(index: int) -> int:
        if index == 5 and fails:
            raise GeneratorExit
        return index

    with hr.DataLoader(Made(get, 12), batch_size=4, num_workers=workers, timeout=60) as loader:
        with pytest.raises(RuntimeError, match="GeneratorExit was raised"):
            list(loader)
        fails.clear()
        assert read_all(iter(loader)) == batches_of(4, count=12), "the engine is there as before"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", ["aget", "map", "aiter"])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, UsersEnd, asyncio.CancelledError])
def test_base_exception_on_the_loop_is_raised_at_its_place(kind: type[BaseException], where: str, workers: int) -> None:
    async def checked(index: int) -> int:
        if index == 5:
            raise kind(3)
        return index

    async def iterate() -> AsyncIterator[int]:
        for index in range(12):
            yield await checked(index)

    filtered = Numbers(12).filter(lambda x: True).map(checked)
    data = {"aget": Made(checked, 12), "map": filtered, "aiter": Iterated(iterate)}[where]
    with hr.DataLoader(data, batch_size=4, num_workers=workers, timeout=15) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1, 2, 3]
        with pytest.raises(RuntimeError if kind is asyncio.CancelledError else kind) as raised:
            next(iterator)
        assert "timed out" not in str(raised.value), "a hang"
        if where != "aiter":
            assert next(iterator).tolist() == [8, 9, 10, 11]


KILL_FORK_SERVER = "os.kill(loader._behind._runtime._fork_server.process.pid, signal.SIGKILL)\n"


@pytest.mark.slow
def test_another_fork_server_and_its_workers_go_on_when_one_is_killed() -> None:
    code, out, err = run_script(f"""
        loader = hr.DataLoader(Numbers(400).map(lambda x: time.sleep(0.002) or x), batch_size=4, num_workers=2)
        it = iter(loader)
        got = next(it).tolist()
        {KILL_FORK_SERVER}
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
    out = output_of(f"""
        loader = hr.DataLoader(Numbers(8), batch_size=4, num_workers=2)
        {KILL_FORK_SERVER}
        try:
            print([b.tolist() for b in loader])
        except Exception as error:
            print(type(error).__name__, error, repr(error.__cause__))
        loader.close()
    """)
    assert "fork server" in out or out.strip() == "[[0, 1, 2, 3], [4, 5, 6, 7]]", out
