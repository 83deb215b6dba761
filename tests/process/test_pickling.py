"""Samples, batches and exceptions that workers send to the trainer."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from builders.numbers import Numbers

import headrace as hr


class TwoArgumentsError(Exception):
    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code, self.detail = code, detail


class KeywordError(ValueError):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class FileError(OSError):
    def __init__(self, name: str, size: int) -> None:
        super().__init__(5, f"{name} has {size} bytes")
        self.size = size


class HoldsALockError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text, threading.Lock())
        self.lock, self.number = threading.Lock(), 7


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def error_of(loader: Any, before: int = 0) -> BaseException:
    with loader:
        iterator = iter(loader)
        for _ in range(before):
            next(iterator)
        with pytest.raises(BaseException) as raised:
            next(iterator)
        assert not isinstance(raised.value, StopIteration)
        return raised.value


def raising(make: Any) -> Any:
    def fail(x: int) -> int:
        if x == 5:
            raise make()
        return x

    return fail


def notes_of(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


@pytest.mark.parametrize("workers_before", ["nothing", "filter"])
def test_sample_that_cannot_be_pickled_is_an_error_at_its_place(workers_before: str) -> None:
    class Locks(Numbers):
        async def aget(self, index: int) -> Any:
            return threading.Lock() if index == 5 else index

    data: Any = Locks(12)
    if workers_before == "filter":
        data = data.filter(lambda x: True)
    with hr.DataLoader(data, batch_size=4, num_workers=2, timeout=10) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1, 2, 3]
        with pytest.raises(TypeError, match="lock") as raised:
            next(iterator)
        assert next(iterator).tolist() == [8, 9, 10, 11]
    assert "stage: fetch" in notes_of(raised.value)
    assert "type lock" in notes_of(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["collate", "samples", "batch"])
def test_result_that_cannot_be_pickled_is_an_error_that_names_stage_and_type(mode: str) -> None:
    def with_lock(x: Any) -> Any:
        return threading.Lock() if x == 5 else x

    data: Any = Numbers(12).map(with_lock)
    options: dict[str, Any] = {"timeout": 10}
    if mode == "samples":
        data = data.filter(lambda x: True)

        async def following(x: Any) -> Any:
            return x

        data = data.map(following)
    elif mode == "collate":
        options["collate_fn"] = lambda samples: samples
    error = error_of(hr.DataLoader(data, batch_size=4, num_workers=2, **options), before=1)
    told = f"{error}\n{notes_of(error)}"
    assert "lock" in told
    if mode == "collate":
        assert "stage: collate" in told and "batch 1" in told and "type list" in told
    elif mode == "samples":
        assert "with_lock" in told and "type lock" in told
    else:
        assert isinstance(error, hr.errors.CollateError)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["slots", "batch", "samples", "loop"])
def test_exception_keeps_its_type_and_says_where_it_was_raised(mode: str) -> None:
    fail = raising(lambda: TwoArgumentsError(3, "three"))

    async def fail_on_the_loop(x: int) -> int:
        return fail(x)

    data: Any = Numbers(12).map(fail_on_the_loop if mode == "loop" else fail)
    if mode == "samples":
        data = data.filter(lambda x: True)
    collate = (lambda samples: samples) if mode == "batch" else None
    error = error_of(hr.DataLoader(data, batch_size=4, num_workers=2, collate_fn=collate), before=1)
    assert type(error) is TwoArgumentsError
    assert (str(error), error.code, error.detail) == ("3: three", 3, "three")
    assert "sample 5 of the epoch" in notes_of(error)
    assert "stage: " in notes_of(error)
    told = "".join(traceback.format_exception(error))
    assert "in fail" in told and "test_pickling.py" in told, "the traceback of the worker is its cause"
    if mode != "loop":
        assert "map(" in notes_of(error) and "worker " in notes_of(error)


def local_error() -> Exception:
    lock = threading.Lock()

    class Local(Exception):
        def __reduce__(self) -> Any:
            return lock.acquire, ()

        held = lock

    return Local("a text")


WHOLE: list[Callable[[], Any]] = [
    lambda: TwoArgumentsError(3, "three"),
    lambda: KeywordError(code=4),
    lambda: FileError("name", 8),
    lambda: KeyError("k"),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    lambda: FileNotFoundError(2, "No such file", "name.txt"),
    lambda: ValueError(np.arange(3).tolist(), {"a": 1}),
]
IN_PART: list[Callable[[], Any]] = [lambda: HoldsALockError("held"), NoTextError, local_error]


@pytest.mark.parametrize("workers", [0, 2])
def test_exceptions_of_all_kinds_come_as_they_are_or_say_the_rest(workers: int) -> None:
    makers = [*WHOLE, *(IN_PART if workers else [])]

    def fail(x: int) -> None:
        error = makers[x]()
        raise error

    data = hr.from_map(range(len(makers))).map(fail)
    with hr.DataLoader(data, batch_size=1, num_workers=workers, timeout=20) as loader:
        got: list[Any] = []
        iterator = iter(loader)
        for _ in makers:
            with pytest.raises(BaseException) as raised:
                next(iterator)
            got.append(raised.value)
    for error, make in zip(got, WHOLE, strict=False):
        expected = make()
        assert (type(error), error.args, str(error)) == (type(expected), expected.args, str(expected))
        assert {k: v for k, v in vars(error).items() if k != "__notes__"} == vars(expected)
    if workers:
        locked, silent, local = got[len(WHOLE) :]
        assert type(locked) is HoldsALockError
        assert (locked.args[0], "lock" in locked.args[1], locked.number) == ("held", True, 7)
        assert type(silent) is NoTextError
        assert type(local) is RuntimeError
        assert "Local: a text" in str(local)
        assert "in fail" in str(local.__cause__)


@pytest.mark.parametrize(
    ("place", "note"), [("collate_fn", "stage: collate; batch 0"), ("worker_init_fn", "")], ids=["collate", "init"]
)
def test_exception_of_other_functions_keeps_its_type(place: str, note: str) -> None:
    def fail(_: Any) -> Any:
        raise TwoArgumentsError(1, "one")

    got = error_of(hr.DataLoader(Numbers(8), batch_size=4, num_workers=2, **{place: fail}))
    assert type(got) is TwoArgumentsError
    assert note in notes_of(got)


def test_exception_is_raised_again_in_the_next_epoch_and_the_rest_still_comes() -> None:
    with hr.DataLoader(Numbers(12).map(raising(lambda: KeyError("k"))), batch_size=4, num_workers=2) as loader:
        for _ in range(2):
            got: list[Any] = []
            iterator = iter(loader)
            while True:
                try:
                    got.append(next(iterator).tolist())
                except KeyError:
                    got.append("error")
                except StopIteration:
                    break
            assert got == [[0, 1, 2, 3], "error", [8, 9, 10, 11]]
