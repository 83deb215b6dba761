"""Errors arrive as raised, with the user's frames and the operators that the sample had passed."""

import linecache
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.loops import given_later, loaded
from builders.numbers import Made, later

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


def async_loop(data: Any, **options: Any) -> list[Any]:
    return given_later(data, collate_fn=None, **options)


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


@pytest.mark.parametrize("read", [loaded, async_loop])
@pytest.mark.parametrize("name", DATA)
def test_error_of_this_process_is_the_very_object_with_the_users_frames(read: Callable[..., object], name: str) -> None:
    with pytest.raises(RefusedError) as caught:
        read(DATA[name](), batch_size=4)
    assert caught.value is RAISED[0]
    assert caught.value.__cause__ is None
    assert not [frame for frame in traceback.extract_tb(caught.tb) if frame.filename.startswith(PACKAGE)]
    assert caught.traceback[-1].name == "refuse"
    assert "refused with 503 over a connection" in "".join(traceback.format_exception(caught.value))


@pytest.mark.slow
@pytest.mark.parametrize("read", [loaded, async_loop])
@pytest.mark.parametrize(("name", "options"), [("map", {}), ("torch", {}), ("torch", {"economic": True})])
def test_error_of_a_worker_has_its_text_and_the_users_frames(read: Any, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as caught:
        read(DATA[name](), batch_size=4, num_workers=1, **options)
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

    with pytest.raises(OSError, match="of") as caught:
        loaded(Made(get, 2), errors=hr.Skip(when=lambda error: False))
    assert caught.value is raised


def fails(sample: Any) -> Any:
    raise ValueError(f"{sample!r} is refused")


async def fails_later(sample: Any) -> Any:
    return fails(sample)


def branched(data: hr.Stream) -> hr.Stream:
    first, second = data.fork(2)
    return first.zip(second.map(fails))


CASES: list[tuple[Callable[[hr.Stream], Any], str]] = [
    (lambda data: data.shuffle().map(abs).map(fails), "shuffle(auto) → map(abs) → map(fails)"),
    (lambda data: data.map(abs).map(fails_later), "map(abs) → map(fails_later)"),
    (lambda data: data.map(later).map(fails_later), "map(later) → map(fails_later)"),
    (lambda data: data.take(2).filter(fails), "take(2) → filter(fails)"),
    (lambda data: data.flat_map(fails), "flat_map(fails)"),
    (
        lambda data: data.flat_map(many).batch(2).unbatch().map(fails),
        "flat_map(many) → batch(2) → unbatch() → map(fails)",
    ),
    (lambda data: data.batch(2).map(fails), "batch(2) → map(fails)"),
    (lambda data: data.map(abs).zip(data.map(later).map(fails)), "map(later) → map(fails)"),
    (branched, "fork(2) → map(fails) of branch 1"),
]


def many(sample: Any) -> list[Any]:
    return [sample]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "passed"), CASES)
@pytest.mark.parametrize("workers", [0, 1])
def test_error_names_the_operators_that_the_sample_has_passed(make: Any, passed: str, workers: int) -> None:
    with pytest.raises(ValueError, match="is refused") as caught:
        loaded(make(hr.from_map([1, 2, 3])), batch_size=None, num_workers=workers)
    assert any(note.endswith(f"operators: FromMap(…) → {passed}") for note in caught.value.__notes__)
