"""Deaths of workers: their batches are made again, or one error names the sample."""

from __future__ import annotations

import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from drop_in.acting import Acting, ActingStream, batches_of, split
from drop_in.reading import next_error, read_all, text_of
from torch.utils.data import get_worker_info

import headrace as hr

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def kill_self(index: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault(index: int) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(index: int) -> None:
    os._exit(3)


def exit_with_3(index: int) -> None:
    raise SystemExit(3)


ENDINGS = {
    "SIGKILL": (kill_self, -signal.SIGKILL),
    "SIGSEGV": (segfault, -signal.SIGSEGV),
    "os._exit": (leave, 3),
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
def test_no_sample_is_lost_and_a_warning_tells_of_it_when_a_worker_dies(
    ending: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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
    act = once(kill_self, tmp_path / "died")

    class Seen(Acting):
        def __getitem__(self, index: int) -> Any:
            worker = get_worker_info()
            assert worker is not None
            return [super().__getitem__(index), worker.id, worker.seed, torch.initial_seed(), os.environ["INIT"]]

    def init(worker_id: int) -> None:
        os.environ["INIT"] = str(worker_id)

    loader = hr.DataLoader(
        Seen(act, at=(9,)), num_workers=2, worker_init_fn=init, collate_fn=lambda samples: samples[0]
    )
    with recorded_deaths():
        got = read_all(iter(loader))
    base = got[0][2]
    assert got == [[k, k % 2, base + k % 2, base + k % 2, str(k % 2)] for k in range(20)]


@pytest.mark.slow
@pytest.mark.parametrize("ending", list(ENDINGS))
def test_sample_that_kills_three_workers_is_named_and_iteration_goes_on(
    ending: str, capfd: pytest.CaptureFixture[str]
) -> None:
    act, code = ENDINGS[ending]
    loader = hr.DataLoader(Acting(act, at=(9,)), batch_size=4, num_workers=2)
    with recorded_deaths() as deaths:
        got = read_all(iter(loader))
    error = got[2]
    assert isinstance(error, hr.errors.WorkerDiedError) and isinstance(error, RuntimeError)
    assert str(error).startswith(f"DataLoader worker (pid(s) {error.pid}) exited unexpectedly")
    assert error.exitcode == code
    assert re.search(r"sample 9\b", str(error)), str(error)
    assert got[:2] + got[3:] == batches_of(4, but=(2,))
    assert 2 <= len(deaths) <= 3, deaths  # the third death costs the batches that this worker had yet to make
    assert len(set(deaths)) == len(deaths), "one warning for each death"
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("stage", ["sample", "collate", "init"])
def test_system_exit_in_a_worker_is_an_error_with_the_exit_code(stage: str, capfd: pytest.CaptureFixture[str]) -> None:
    def collate(samples: list[int]) -> list[int]:
        if stage == "collate" and 9 in samples:
            sys.exit(3)
        return samples

    def init(worker_id: int) -> None:
        if stage == "init" and worker_id == 1:
            sys.exit(3)

    data = Acting(exit_with_3, at=(9,)) if stage == "sample" else Acting(exit_with_3, at=())
    loader = hr.DataLoader(data, batch_size=4, num_workers=2, collate_fn=collate, worker_init_fn=init)
    with recorded_deaths():
        got = read_all(iter(loader))
    failed = (1, 3) if stage == "init" else (2,)
    assert [k for k, x in enumerate(got) if isinstance(x, hr.errors.WorkerDiedError)] == list(failed)
    for k in failed:
        assert re.match(r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly", str(got[k])), str(got[k])
        assert got[k].exitcode == 3
    assert split(got)[0] == batches_of(4, but=failed)
    assert "Traceback" not in capfd.readouterr().err


def test_collate_function_that_kills_three_workers_is_an_error_that_names_the_batch() -> None:
    def collate(samples: list[int]) -> list[int]:
        if 9 in samples:
            os._exit(3)
        return samples

    loader = hr.DataLoader(range(20), batch_size=4, num_workers=2, collate_fn=collate)
    with recorded_deaths():
        got = read_all(iter(loader))
    assert isinstance(got[2], hr.errors.WorkerDiedError)
    assert got[2].exitcode == 3
    assert re.search(r"\b(batch 2|8)\b", text_of(got[2])), text_of(got[2])
    assert got[:2] + got[3:] == batches_of(4, but=(2,))


@pytest.mark.parametrize("ending", [*ENDINGS, "SystemExit"])
def test_death_is_an_error_at_once_when_the_data_set_is_iterable(ending: str, tmp_path: Path) -> None:
    act, code = {**ENDINGS, "SystemExit": (exit_with_3, 3)}[ending]
    loader = hr.DataLoader(ActingStream(once(act, tmp_path / "died")), batch_size=2, num_workers=2)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    pid = iterator._workers[0].pid
    assert next(iterator).tolist() == [100, 101]
    error = next_error(iterator)
    assert isinstance(error, hr.errors.WorkerDiedError)
    assert str(error).startswith(f"DataLoader worker (pid(s) {pid}) exited unexpectedly")
    assert (error.pid, error.exitcode) == (pid, code)


def test_stream_of_the_other_worker_goes_on_after_a_death() -> None:
    iterator = iter(hr.DataLoader(ActingStream(kill_self), batch_size=2, num_workers=2))
    batches, errors = split(read_all(iterator))
    assert batches == [[0, 1], [100, 101], [102, 103], [104, 105], [106, 107]]
    assert [type(error) for error in errors] == [hr.errors.WorkerDiedError]
