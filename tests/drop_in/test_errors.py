"""Errors in user code: type, time and text of the exception, and the iteration after it."""

import asyncio
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drop_in.acting import Acting, Made, batches_of, raising, read_all, split, text_of
from drop_in.classes import caught
from torch.utils.data import IterableDataset

import headrace as hr


class LockedError(Exception):
    """Neither built from one text nor pickled."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)
        self.lock = threading.Lock()


class DetailedError(ValueError):
    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class MissingError(KeyError):
    """A kind of KeyError."""


class SilentError(Exception):
    def __init__(self, path: str) -> None:
        super().__init__("the file is damaged")
        self.path = path

    def __str__(self) -> str:
        return "the file is damaged"


def local_error() -> Exception:
    class LocalError(Exception):
        """A class that one function alone knows."""

    return LocalError("label")


@pytest.mark.parametrize(
    "make",
    [
        lambda: MissingError("label"),
        lambda: SilentError("label"),
        lambda: DetailedError("label", 7),
        lambda: LockedError(3, "label"),
        local_error,
    ],
)
def test_error_keeps_type_attributes_and_traceback(our_class: type[Any], make: Callable[[], Exception]) -> None:
    batches, [error] = split(read_all(iter(our_class(Acting(raising(make)), batch_size=4, num_workers=2))))
    expected = make()
    assert batches == batches_of(4, but=(1,))
    told = "".join(traceback.format_exception(error))
    assert caught(our_class, type(expected).__name__, 1) in told
    assert "in __getitem__" in told, "where it was raised"
    if isinstance(expected, LockedError):  # neither built from a text nor sent
        assert isinstance(error, LockedError | RuntimeError) and "(3, 'label')" in str(error)
        return
    assert type(error).__name__ == type(expected).__name__ == type(error.__cause__).__name__
    assert isinstance(error, type(expected).__bases__)
    assert error.__cause__.args == expected.args
    assert vars(error.__cause__).items() >= vars(expected).items()
    if isinstance(expected, MissingError):
        assert str(error).startswith(caught(our_class, "MissingError", 1))
        assert "\\n" not in repr(error), "lines are lines"


class UsersEnd(BaseException):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sample", "collate", "economic mode"])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, UsersEnd])
def test_base_exception_is_an_error_of_its_batch(our_class: Any, kind: Any, stage: str, capfd: Any) -> None:
    """As with torch's, whose worker ends by it, and whose error may come in any line of the main thread."""

    def collate(samples: list[int]) -> list[int]:
        if stage == "collate" and 5 in samples:
            raise kind(3)
        return samples

    data = Acting(raising(lambda: kind(3)), at=() if stage == "collate" else (5,))
    economic = stage == "economic mode"
    with our_class(data, batch_size=4, num_workers=2, collate_fn=collate, economic=economic) as loader:
        batches, [error] = split(read_all(iter(loader)))
        assert loader.stats().work.deaths == 0
    assert isinstance(error, hr.errors.WorkerDiedError) and isinstance(error, RuntimeError)
    assert re.match(r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly", str(error))
    assert kind.__name__ in str(error)
    assert economic or error.exitcode == {SystemExit: 3, KeyboardInterrupt: 0}.get(kind, 1)
    assert batches == batches_of(4, but=(1,)), "the worker is there as before"
    assert "Traceback" not in capfd.readouterr().err
    with pytest.raises(kind):
        list(our_class(data, batch_size=4, collate_fn=collate))


def refuse_to_start(worker_id: int) -> None:
    raise PermissionError(f"worker {worker_id} may not")


def exit_at_once(_: int) -> None:
    raise SystemExit(5)


@pytest.mark.parametrize("economic", [False, True])
@pytest.mark.parametrize(
    ("begin", "error"), [(refuse_to_start, PermissionError), (exit_at_once, hr.errors.WorkerDiedError)]
)
def test_failing_init_is_an_error(
    our_class: type[Any], begin: Callable[[int], None], error: type[Exception], economic: bool
) -> None:
    with our_class(range(20), batch_size=4, num_workers=2, worker_init_fn=begin, economic=economic) as loader:
        got = read_all(iter(loader))
    assert [type(one) for one in got] == [error] * 5
    if begin is exit_at_once:
        assert [one.exitcode for one in got] == [5] * 5
    elif not economic:
        assert all(f"worker {number % 2} may not" in str(one) for number, one in enumerate(got))


@pytest.mark.parametrize("begin", [refuse_to_start, exit_at_once])
def test_batches_of_the_other_worker_come_when_the_init_function_of_one_fails(begin: Callable[[int], None]) -> None:
    def begin_second(worker_id: int) -> None:
        if worker_id == 1:
            begin(worker_id)

    got = read_all(iter(hr.DataLoader(range(20), batch_size=4, num_workers=2, worker_init_fn=begin_second)))
    assert [number for number, one in enumerate(got) if isinstance(one, Exception)] == [1, 3]
    assert split(got)[0] == batches_of(4, but=(1, 3))


def test_error_says_what_is_wrong_when_its_text_is_made_of_its_arguments(our_class: type[Any]) -> None:
    loader = our_class(Acting(lambda _: b"\xff".decode()), batch_size=4, num_workers=2)
    _, [error] = split(read_all(iter(loader)))
    assert type(error) is UnicodeDecodeError
    assert "can't decode byte 0xff" in str(error)
    assert (error.start, error.object) == (0, b"\xff")
    assert caught(our_class, "UnicodeDecodeError", 1) in text_of(error)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("size", "place"), [(4, "sample"), (4, "collate"), (None, "sample")])
def test_stop_iteration_names_its_samples(our_class: type[Any], size: int | None, place: str, num_workers: int) -> None:
    def collate(samples: Any) -> Any:
        if place == "collate" and 9 in samples:
            raise StopIteration
        return samples

    data = Acting(raising(StopIteration), at=(9,) if place == "sample" else ())
    batches, [error] = split(read_all(iter(our_class(data, size, num_workers=num_workers, collate_fn=collate))))
    assert isinstance(error, RuntimeError)
    assert "StopIteration" in text_of(error)
    assert re.search(r"\b[89]\b" if place == "collate" else r"\b9\b", text_of(error)), text_of(error)
    assert batches == (batches_of(4, but=(2,)) if size else [*range(9), *range(10, 20)])


UNSENDABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "lock": (threading.Lock, "lock"),
    "generator": (lambda: (x for x in ()), "generator"),
    "file": (lambda: Path("/dev/null").open(), "file"),  # noqa: SIM115
}


@pytest.mark.slow
@pytest.mark.parametrize("what", list(UNSENDABLE))
@pytest.mark.parametrize("place", ["sample", "collate"])
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_result_that_cannot_be_sent_is_an_error_naming_stage_type_and_sample(what: str, place: str) -> None:
    make, name = UNSENDABLE[what]
    data = Made(lambda index: make() if place == "sample" and index == 3 else index, 6)

    def collate(samples: list[Any]) -> Any:
        return {"made": make()} if place == "collate" and 3 in samples else samples

    got = read_all(iter(hr.DataLoader(data, batch_size=2, num_workers=2, collate_fn=collate)))
    assert [x for k, x in enumerate(got) if k != 1] == [[0, 1], [4, 5]]
    assert isinstance(got[1], Exception)
    told = text_of(got[1])
    assert name in told
    assert "collate" in told
    assert re.search(r"\b[23]\b", told), told


class Late(IterableDataset[int]):
    tries = 0

    def __iter__(self) -> Iterator[int]:
        self.tries += 1
        if self.tries == 1:
            raise OSError("not yet")
        return iter(range(3))


def test_data_set_that_failed_at_iter_serves_the_next_epoch() -> None:
    loader = hr.DataLoader(Late(), None, num_workers=1, persistent_workers=True)
    with pytest.raises(OSError, match="not yet"):
        list(loader)
    assert list(loader) == [0, 1, 2]


def test_lambda_in_a_batch_arrives_and_can_be_called(our_class: type[Any]) -> None:
    loader = our_class(range(4), batch_size=2, num_workers=1, collate_fn=lambda samples: lambda: sum(samples))
    assert [batch() for batch in loader] == [1, 5]
