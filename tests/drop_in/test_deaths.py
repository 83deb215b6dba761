"""Deaths of workers: their batches are made again, or one error names the sample. Epochs and states after a death."""

import itertools
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from drop_in.acting import Acting, ActingStream, Made, batches_of, next_error, raising, read_all, text_of
from drop_in.stateful_data import Counted, EpochStream, Numbers, Stream, loader_of, resumed, through_text
from process.waiting import is_running, wait_until
from torch.utils.data import get_worker_info

import headrace as hr

pytestmark = pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")


def kill_self(index: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ENDINGS = {
    "SIGKILL": (kill_self, -signal.SIGKILL),
    "SIGSEGV": (lambda index: os.kill(os.getpid(), signal.SIGSEGV), -signal.SIGSEGV),
    "os._exit": (lambda index: os._exit(3), 3),
}


def once(act: Callable[[int], Any], flag: Path) -> Callable[[int], None]:
    """Acts the first time only, whichever process it is in."""

    def only_once(index: int) -> None:
        if not flag.exists():
            flag.touch()
            act(index)

    return only_once


@contextmanager
def recorded_deaths() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        yield texts
    texts += [text for text in (str(w.message) for w in recorded) if "This DataLoader will create" not in text]


@pytest.mark.slow
@pytest.mark.parametrize("ending", list(ENDINGS))
def test_worker_death_loses_no_sample_and_warns(ending: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    act, _ = ENDINGS[ending]
    loader = hr.DataLoader(Acting(once(act, tmp_path / "died"), at=(9,)), batch_size=4, num_workers=2)
    with recorded_deaths() as deaths:
        assert read_all(iter(loader)) == batches_of(4)
    assert len(deaths) == 1, deaths
    assert re.search(r"worker.*\d+", deaths[0])
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent workers"])
def test_no_sample_is_lost_when_workers_are_killed_from_outside(persistent: bool) -> None:
    loader = hr.DataLoader(range(200), batch_size=4, num_workers=2, persistent_workers=persistent)
    with recorded_deaths() as deaths:
        for _ in range(2):
            iterator, got = iter(loader), []
            for number, batch in enumerate(iterator):
                got.append(batch.tolist())
                if number in (0, 20):
                    os.kill(iterator._workers[number // 20].pid, signal.SIGKILL)
            assert got == batches_of(4, count=200)
    assert 2 <= len(deaths) <= 4, deaths  # a worker that was idle when it died costs no batch


def test_fresh_worker_is_seeded_and_initialised_as_the_dead_one_was(tmp_path: Path) -> None:
    kill_once = once(kill_self, tmp_path / "died")

    def ask(index: int) -> Any:
        if index == 9:
            kill_once(index)
        worker = get_worker_info()
        return [index, worker.id, worker.seed, torch.initial_seed(), os.environ["INIT"]]

    def init(worker_id: int) -> None:
        os.environ["INIT"] = str(worker_id)

    loader = hr.DataLoader(Made(ask), None, num_workers=2, worker_init_fn=init)
    got = read_all(iter(loader))
    base = got[0][2]
    assert got == [[k, k % 2, base + k % 2, base + k % 2, str(k % 2)] for k in range(20)]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["sample", "collate"])
@pytest.mark.parametrize("ending", list(ENDINGS))
def test_sample_or_batch_killing_workers_is_named(ending: str, place: str, capfd: pytest.CaptureFixture[str]) -> None:
    act, code = ENDINGS[ending]

    def collate(samples: list[int]) -> list[int]:
        if place == "collate" and 9 in samples:
            act(9)
        return samples

    data = Acting(act, at=(9,) if place == "sample" else ())
    with recorded_deaths() as deaths:
        got = read_all(iter(hr.DataLoader(data, batch_size=4, num_workers=2, collate_fn=collate)))
    error = got[2]
    assert isinstance(error, hr.errors.WorkerDiedError) and isinstance(error, RuntimeError)
    assert str(error).startswith(f"DataLoader worker (pid(s) {error.pid}) exited unexpectedly")
    assert error.exitcode == code
    assert re.search(r"sample 9\b" if place == "sample" else r"\b(batch 2|8)\b", text_of(error)), text_of(error)
    assert got[:2] + got[3:] == batches_of(4, but=(2,))
    assert 2 <= len(deaths) <= 3, deaths  # the third death costs the batches that this worker had yet to make
    assert len(set(deaths)) == len(deaths), "one warning for each death"
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("ending", [*ENDINGS, "SystemExit"])
def test_death_ends_only_its_own_part_of_an_iterable_data_set(ending: str, tmp_path: Path) -> None:
    act, code = {**ENDINGS, "SystemExit": (raising(lambda: SystemExit(3)), 3)}[ending]
    iterator = iter(hr.DataLoader(ActingStream(once(act, tmp_path / "died")), batch_size=2, num_workers=2))
    assert next(iterator).tolist() == [0, 1]
    pid = iterator._workers[0].pid
    assert next(iterator).tolist() == [100, 101]
    error = next_error(iterator)
    assert isinstance(error, hr.errors.WorkerDiedError)
    assert str(error).startswith(f"DataLoader worker (pid(s) {pid}) exited unexpectedly")
    assert (error.pid, error.exitcode) == (pid, code)
    assert read_all(iterator) == [[102, 103], [104, 105], [106, 107]]


class Dies(Made):
    """Ends each process in which it begins, as long as a file is there."""

    def __init__(self, flag: Path) -> None:
        super().__init__(int, 16)
        self.flag = flag

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.flag.exists():
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("no_fork")
@pytest.mark.slow
def test_later_epochs_have_workers_when_they_died_before_their_first_batch(tmp_path: Path) -> None:
    flag = tmp_path / "dies"
    flag.touch()
    loader = hr.DataLoader(Dies(flag), batch_size=4, num_workers=2, persistent_workers=True)
    with pytest.raises(hr.errors.WorkerDiedError):
        list(loader)
    with pytest.raises(hr.errors.WorkerDiedError):  # the fault is still there
        list(loader)
    flag.unlink()
    for _ in range(2):
        assert read_all(iter(loader)) == batches_of(4, count=16)
    del loader


class SecondDiesThrice(Made):
    """Kills the second process that loads it, its replacement, and, once `end` exists, the replacement of that."""

    def __init__(self, folder: Path) -> None:
        super().__init__(int, 16)
        self.folder = folder

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        start = next(n for n in itertools.count(1) if self._is_first_at(n))
        if start == 4:
            wait_until((self.folder / "end").exists, "the second epoch runs")
        if 2 <= start <= 4:
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_first_at(self, start: int) -> bool:
        try:
            (self.folder / str(start)).mkdir()
        except FileExistsError:
            return False
        return True

    def __getitem__(self, index: int) -> int:
        wait_until((self.folder / "4").exists, "two processes have ended")
        return index


@pytest.mark.usefixtures("no_fork")
@pytest.mark.slow
def test_deaths_of_an_earlier_epoch_do_not_count(tmp_path: Path) -> None:
    loader = hr.DataLoader(
        SecondDiesThrice(tmp_path), batch_size=4, num_workers=2, persistent_workers=True, in_order=False
    )
    next(iter(loader))  # of the worker that lives; by then, two in the place of the other one have ended
    again = iter(loader)
    (tmp_path / "end").touch()
    assert sorted(read_all(again)) == batches_of(4, count=16)
    del again, loader


@pytest.mark.usefixtures("no_fork")
@pytest.mark.slow
@pytest.mark.parametrize("data", [range(16), Stream(16)], ids=["by index", "iterable"])
@pytest.mark.parametrize(("context", "killed"), [(None, "worker"), ("fork", "worker"), (None, "fork server")])
def test_later_epochs_have_workers_after_deaths_between_two(data: Any, context: str | None, killed: str) -> None:
    loader = hr.DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True, multiprocessing_context=context)
    for _ in range(3):
        iterator = iter(loader)
        assert read_all(iterator) == batches_of(4, count=16)
        pid = iterator._workers[0].pid
        if killed == "worker":
            os.kill(pid, signal.SIGKILL)
        else:
            iterator._pool._starter.fork_server.process.kill()
        wait_until(lambda pid=pid: not is_running(pid), "the worker has ended")
    del iterator, loader


@pytest.mark.slow
def test_next_epoch_is_whole_when_a_worker_died_in_one_that_was_left() -> None:
    loader = hr.DataLoader(range(64), batch_size=4, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    os.kill(iterator._workers[1].pid, signal.SIGKILL)
    assert read_all(iter(loader)) == batches_of(4, count=64)
    del iterator, loader


@pytest.mark.usefixtures("no_fork")
@pytest.mark.slow
def test_epoch_goes_on_with_another_fork_server_when_one_is_killed() -> None:
    iterator = iter(hr.DataLoader(range(400), batch_size=4, num_workers=2))
    got = [next(iterator).tolist()]
    iterator._pool._starter.fork_server.process.kill()
    assert got + read_all(iterator) == batches_of(4, count=400)
    del iterator


# States when workers have died, or were closed: right, or a clear error.


def two_workers(dataset: Any, **options: Any) -> hr.DataLoader[Any]:
    return loader_of(dataset, num_workers=2, **options)


def kill(iterator: Any, number: int) -> None:
    worker = iterator._workers[number]
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()


def dying_once(number: int, mark: Path) -> Callable[[int], None]:
    """Ends one of the workers as it begins, the first time."""

    def begin(worker: int) -> None:
        if worker == number and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return begin


@pytest.mark.parametrize("kind", [Counted, EpochStream])
def test_state_is_there_when_a_worker_dies_at_being_asked(kind: Callable[[int], Any], tmp_path: Path) -> None:
    loader = two_workers(kind(4), worker_init_fn=dying_once(1, tmp_path / "mark"), prefetch_factor=1)
    iterator = iter(loader)
    state = loader.state_dict()
    assert (tmp_path / "mark").exists()
    if kind is Counted:
        assert [known["states"] for known in state["copies"]] == [{"dataset": {"given": 0}}] * 2
        assert list(iterator) == [[(0, 1), (1, 2), (2, 3), (3, 4)]]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_state_is_there_when_a_worker_has_died_in_the_epoch(number: int) -> None:
    expected = list(two_workers(Counted()))
    loader = two_workers(Counted())
    iterator = iter(loader)
    kill(iterator, number)
    assert next(iterator) == expected[0]
    assert list(resumed(two_workers(Counted()), through_text(loader.state_dict()))) == expected[1:]


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("is_asked_before", [False, True])
def test_state_after_an_epoch_is_exact_when_a_persistent_worker_died(is_asked_before: bool, every: int) -> None:
    options: dict[str, Any] = {"persistent_workers": True, "snapshot_every_n_steps": every}
    loader = two_workers(Counted(), **options)
    list(loader)
    before = loader.state_dict() if is_asked_before else None
    kill(loader._iterator, 0)
    state = loader.state_dict()
    assert state["copies"] == (before or state)["copies"]
    assert list(loader) == list(resumed(two_workers(Counted(), **options), through_text(state)))


def test_state_after_an_epoch_is_there_when_a_persistent_worker_had_nothing_to_do() -> None:
    loader = two_workers(Counted(4), persistent_workers=True)
    list(loader)
    copies = loader.state_dict()["copies"]
    assert [known["states"] for known in copies] == [{"dataset": {"given": given}} for given in (4, 0)]


@pytest.mark.parametrize(("kind", "begins_another"), [(Counted, False), (Counted, True), (EpochStream, True)])
def test_state_after_close_is_refused_if_copies_were_not_asked(kind: Callable[[], Any], begins_another: bool) -> None:
    loader = two_workers(kind(), persistent_workers=True)
    list(loader)
    if begins_another:
        iter(loader)
    loader.close()
    with pytest.raises(hr.OptionError, match=r"workers have ended.*before close"):
        loader.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Numbers, Counted, EpochStream])
@pytest.mark.parametrize("batches", [0, 3, None])
def test_state_after_close_is_that_before_when_somebody_had_asked(kind: Callable[[], Any], batches: int | None) -> None:
    loader = two_workers(kind(), persistent_workers=True)
    loader.state_dict()
    iterator = iter(loader)
    for _ in range(batches or 0):
        next(iterator)
    if batches is None:
        list(iterator)
    state = loader.state_dict()
    loader.close()
    assert loader.state_dict() == state


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Numbers, Counted, EpochStream])
def test_state_after_close_begins_the_epoch_when_it_was_the_first(kind: Callable[[], Any]) -> None:
    loader = two_workers(kind())
    iter(loader)
    loader.close()
    assert list(resumed(two_workers(kind()), through_text(loader.state_dict()))) == list(two_workers(kind()))
