"""Errors arrive as raised, with the user's frames and the operators that the sample had passed."""

from __future__ import annotations

import asyncio
import linecache
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from builders.numbers import Made

import headrace as hr

PACKAGE = str(Path(hr.__file__).parent)
RAISED: list[BaseException] = []


class RefusedError(Exception):
    """Makes its text of what does not pickle."""

    def __init__(self, status: int) -> None:
        self.connection, self.status = threading.Lock(), status

    def __str__(self) -> str:
        return f"refused with {self.status} over {self.connection and 'a connection'}"


def refuse(status: int) -> None:
    error = RefusedError(status)
    RAISED.append(error)
    raise error


class Stored(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, key: int) -> int:
        if key == 3:
            refuse(503)
        return key


def refusing(number: int) -> int:
    if number == 3:
        refuse(503)
    return number


def loop(data: Any, **options: Any) -> None:
    with hr.DataLoader(data, batch_size=4, **options) as loader:
        for _ in loader:
            pass


def async_loop(data: Any, **options: Any) -> None:
    async def main() -> None:
        async with hr.DataLoader(data, batch_size=4, **options) as loader:
            async for _ in loader:
                pass

    asyncio.run(main())


def files(frames: TracebackType | None) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(frames)]


@pytest.fixture(autouse=True)
def _no_error_stays() -> Any:
    yield
    RAISED.clear()


async def read(key: int) -> bytes:
    return await hr.read(f"memory://tracebacks/{key}")


DATA: dict[str, Callable[[], Any]] = {
    "aget": lambda: Made(refusing),
    "map": lambda: hr.from_map([*range(8)]).map(refusing),
    "torch": Stored,
}


@pytest.mark.parametrize("read", [loop, async_loop])
@pytest.mark.parametrize("name", DATA)
def test_error_of_this_process_is_the_very_object_with_the_users_frames(read: Callable[..., None], name: str) -> None:
    with pytest.raises(RefusedError) as caught:
        read(DATA[name]())
    assert caught.value is RAISED[0]
    assert caught.value.__cause__ is None
    assert not [file for file in files(caught.tb) if file.startswith(PACKAGE)]
    assert caught.traceback[-1].name == "refuse"
    assert "refused with 503 over a connection" in "".join(traceback.format_exception(caught.value))


@pytest.mark.slow
@pytest.mark.parametrize("read", [loop, async_loop])
@pytest.mark.parametrize(("name", "options"), [("map", {}), ("torch", {}), ("torch", {"economic": True})])
def test_error_of_a_worker_has_its_text_and_the_users_frames(
    read: Callable[..., None], name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(RefusedError) as caught:
        read(DATA[name](), num_workers=1, **options)
    told = "".join(traceback.format_exception(caught.value))
    assert "RefusedError: refused with 503 over a connection" in told
    assert "in refuse\n    raise error" in told
    assert PACKAGE not in told


CELL = """\
import inspect

def double(number):
    if number == 3:
        raise ValueError("not this one")
    return inspect.getsource(double)
"""


def test_lines_of_a_notebooks_cell_are_known_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "<ipython-input-7-8a1b>"
    monkeypatch.setitem(linecache.cache, cell, (len(CELL), None, CELL.splitlines(keepends=True), cell))
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, cell, "exec"), scope)
    with hr.DataLoader(hr.from_map([1, 3]).map(scope["double"]), batch_size=None, num_workers=1) as loader:
        batches = iter(loader)
        assert next(batches) in CELL
        with pytest.raises(ValueError, match="not this one") as caught:
            next(batches)
    told = "".join(traceback.format_exception(caught.value))
    assert 'File "<ipython-input-7-8a1b>", line 5, in double\n    raise ValueError("not this one")\n' in told


def test_documented_error_has_no_frames_of_ours() -> None:
    for act, inner in (
        (lambda: list(hr.stream("memory://tracebacks/none.tar")), None),
        (lambda: Made(read, 1)[0], "read"),
        (lambda: list(Made(read, 1)), "read"),
    ):
        with pytest.raises(hr.errors.ObjectMissingError) as caught:
            act()
        assert PACKAGE not in "".join(traceback.format_exception(caught.value))
        assert inner is None or caught.traceback[-1].name == inner


def test_error_is_the_one_that_was_raised_when_on_error_keeps_it() -> None:
    raised = OSError("of the reader")
    raised.lock = threading.Lock()  # type: ignore[attr-defined]

    async def get(key: int) -> int:
        raise raised

    with (
        hr.DataLoader(Made(get, 2), on_error=lambda error: False) as loader,
        pytest.raises(OSError, match="of") as caught,
    ):
        list(loader)
    assert caught.value is raised


def fails(sample: Any) -> Any:
    raise ValueError(f"{sample!r} is refused")


async def fails_later(sample: Any) -> Any:
    return fails(sample)


async def later(sample: Any) -> Any:
    return sample


CASES: dict[str, tuple[Callable[[hr.Stream], Any], str]] = {
    "map": (lambda data: data.shuffle().map(abs).map(fails), "FromMap(…) → shuffle(auto) → map(abs) → map(fails)"),
    "async": (lambda data: data.map(abs).map(fails_later), "FromMap(…) → map(abs) → map(fails_later)"),
    "async, at the source": (
        lambda data: data.map(later).map(fails_later),
        "FromMap(…) → map(later) → map(fails_later)",
    ),
    "filter": (lambda data: data.take(2).filter(fails), "FromMap(…) → take(2) → filter(fails)"),
    "many": (lambda data: data.flat_map(fails), "FromMap(…) → flat_map(fails)"),
    "after many": (
        lambda data: data.flat_map(lambda n: [n]).batch(2).unbatch().map(fails),
        "FromMap(…) → flat_map(<lambda>) → batch(2) → unbatch() → map(fails)",
    ),
    "of a batch": (lambda data: data.batch(2).map(fails), "FromMap(…) → batch(2) → map(fails)"),
    "of one of several": (
        lambda data: data.map(abs).zip(data.map(later).map(fails)),
        "FromMap(…) → map(later) → map(fails)",
    ),
    "of a branch": (lambda data: _branches(*data.fork(2)), "FromMap(…) → fork(2) → map(fails) of branch 1"),
}


def _branches(first: hr.Stream, second: hr.Stream) -> hr.Stream:
    return first.zip(second.map(fails))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("workers", [0, 1])
def test_error_names_the_operators_that_the_sample_has_passed(case: str, workers: int) -> None:
    make, passed = CASES[case]
    with pytest.raises(ValueError, match="is refused") as caught:
        list(hr.DataLoader(make(hr.from_map([1, 2, 3])), batch_size=None, num_workers=workers))
    assert any(note.endswith(f"operators: {passed}") for note in caught.value.__notes__)
