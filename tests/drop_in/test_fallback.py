"""What cannot be carried to workers is inherited by them, where torch's workers would inherit it, with one warning."""

from __future__ import annotations

import enum
import multiprocessing
import os
import signal
import socket
import sqlite3
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from process.waiting import run_script
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data._utils.collate import default_collate_fn_map

import headrace as hr

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of Python's, where there are threads


def numbers() -> Iterator[int]:
    yield from range(100)


class Handle:
    """As those of h5py: it knows by itself that it cannot be pickled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        raise TypeError("handles cannot be pickled")


class Lines(Dataset[Any]):
    """Opens its file when it is first used."""

    def __init__(self, path: Path) -> None:
        self.path, self.file, self.used = path, None, 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> str:
        self.used += 1
        if self.file is None:
            self.file = self.path.open("rb")  # type: ignore[assignment]
        return os.pread(self.file.fileno(), 1, index).decode()  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.used = state["used"]


class Asked(Dataset[Any]):
    def __init__(self, ask: Callable[[Any], Any], thing: Any) -> None:
        self.ask, self.thing = ask, thing

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.ask(self.thing)


def whole(sample: Any) -> Any:
    return sample


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Lines]:
    """A data set that has been used in the trainer."""
    (tmp_path / "lines").write_text("abcdef")
    data = Lines(tmp_path / "lines")
    assert data[0] == "a"
    yield data
    assert data.file is not None
    data.file.close()  # type: ignore[attr-defined]


def made(loader: Any) -> list[Any]:
    """All batches of an epoch, where nothing is warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", hr.CannotCarryWarning)
        return list(loader)


THINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "lock": (threading.Lock, lambda lock: lock.locked(), "_thread.lock"),
    "condition": (threading.Condition, lambda condition: condition.acquire(blocking=False), "_thread.RLock"),
    "local": (threading.local, lambda local: vars(local), "_thread._local"),
    "generator": (numbers, next, "generator"),
    "handle": (lambda: Handle("a"), lambda handle: handle.name, f"{__name__}.Handle"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", THINGS)
def test_data_set_is_inherited_with_one_warning_when_it_cannot_be_carried(name: str) -> None:
    make, ask, kind = THINGS[name]
    data = Asked(ask, make())
    theirs = list(torch.utils.data.DataLoader(data, None, num_workers=2, collate_fn=whole))
    loader = hr.DataLoader(data, None, num_workers=2, collate_fn=whole)
    with pytest.warns(hr.CannotCarryWarning) as warned:
        first = list(loader)
    assert first == theirs
    assert made(loader) == theirs, "and of a next epoch nothing is said"
    (warning,) = [one for one in warned if one.category is hr.CannotCarryWarning]
    text = str(warning.message)
    assert text.startswith("dataset.thing")
    assert f"(a {kind}) cannot be sent to a worker: " in text
    assert 'fallback="error"' in text
    assert warning.filename == __file__, "the line is the user's own"


@pytest.mark.slow
def test_sockets_and_databases_are_inherited(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, sqlite3.connect(tmp_path / "data") as database:
        database.execute("create table numbers (n)")
        database.execute("insert into numbers values (7)")
        database.commit()

        def ask(things: Any) -> Any:
            connection, base = things
            connection.send(b"x")
            return base.execute("select n from numbers").fetchall()

        with pytest.warns(hr.CannotCarryWarning, match=r"dataset\.thing\[0\] \(a socket\.socket\)"):
            assert (
                list(hr.DataLoader(Asked(ask, (ours, database)), None, num_workers=2, collate_fn=whole)) == [[(7,)]] * 4
            )
        assert theirs.recv(10) == b"xxxx"
    database.close()


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_data_set_that_was_used_in_the_trainer_is_inherited(lines: Lines, persistent: bool) -> None:
    loader = hr.DataLoader(lines, 2, num_workers=2, persistent_workers=persistent)
    with pytest.warns(hr.CannotCarryWarning, match=r"dataset\.file \(a _io\.BufferedReader\)"):
        assert list(loader) == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert made(loader) == [["a", "b"], ["c", "d"], ["e", "f"]]
    loader.close()


def test_functions_are_inherited_when_they_cannot_be_carried() -> None:
    lock, begun = threading.Lock(), []

    def begin(worker: int) -> None:
        with lock:
            begun.append(worker)

    def collate(samples: list[int]) -> Any:
        with lock:
            return samples, begun

    with pytest.warns(hr.CannotCarryWarning, match=r"collate_fn\.<variable lock>"):
        batches = list(hr.DataLoader([1, 2, 3, 4], 2, num_workers=2, collate_fn=collate, worker_init_fn=begin))
    assert batches == [([1, 2], [0]), ([3, 4], [1])]
    with pytest.warns(hr.CannotCarryWarning, match=r"worker_init_fn\.<variable lock>"):
        list(hr.DataLoader([1, 2], num_workers=1, worker_init_fn=begin))
    assert begun == []


def test_registered_collate_function_is_inherited_when_it_cannot_be_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = threading.Lock()

    class Point:
        pass

    def collate(points: list[Point], *, collate_fn_map: Any = None) -> Any:
        with lock:
            return len(points)

    monkeypatch.setitem(default_collate_fn_map, Point, collate)
    with pytest.warns(hr.CannotCarryWarning, match=r"default_collate_fn_map\[.*Point\]"):
        assert list(hr.DataLoader([Point()] * 3, 2, num_workers=1)) == [2, 1]


@pytest.mark.slow
def test_iterable_data_set_is_inherited_when_it_cannot_be_carried() -> None:
    class Stream(IterableDataset[int]):
        def __init__(self) -> None:
            self.lock, self.count = threading.Lock(), 0

        def __iter__(self) -> Iterator[int]:
            for number in range(self.count, 6):
                with self.lock:
                    self.count = number + 1
                    yield number

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    def loader() -> Any:
        return hr.DataLoader(Stream(), 2, num_workers=1, collate_fn=whole)

    first = loader()
    with pytest.warns(hr.CannotCarryWarning, match=r"dataset\.lock"):
        iterator = iter(first)
    assert next(iterator) == [0, 1]
    second = loader()
    second.load_state_dict(first.state_dict())
    with pytest.warns(hr.CannotCarryWarning):
        assert list(second) == [[2, 3], [4, 5]]
    del iterator


@pytest.mark.slow
def test_state_is_gone_on_from_when_workers_are_inherited(lines: Lines) -> None:
    first = hr.DataLoader(lines, 1, num_workers=2, collate_fn=whole)
    with pytest.warns(hr.CannotCarryWarning):
        iterator = iter(first)
    assert [next(iterator) for _ in range(3)] == [["a"], ["b"], ["c"]]
    state = first.state_dict()
    second = hr.DataLoader(lines, 1, num_workers=2, collate_fn=whole)
    second.load_state_dict(state)
    with pytest.warns(hr.CannotCarryWarning):
        assert list(second) == [["d"], ["e"], ["f"]]
    del iterator


def test_worker_that_has_died_is_forked_again(lines: Lines, tmp_path: Path) -> None:
    flag = tmp_path / "died"

    def collate(samples: list[str]) -> Any:
        if "c" in samples and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return samples

    loader = hr.DataLoader(lines, 2, num_workers=2, collate_fn=collate)
    with (
        pytest.warns(hr.CannotCarryWarning),
        pytest.warns(RuntimeWarning, match="another one makes its batches again"),
    ):
        assert list(loader) == [["a", "b"], ["c", "d"], ["e", "f"]]


def test_nothing_is_forked_when_that_is_not_wanted(lines: Lines) -> None:
    loader = hr.DataLoader(lines, 2, num_workers=1, fallback="error")
    with pytest.raises(hr.CannotCarryError, match=r"dataset\.file"):
        iter(loader)
    lines.file.close()  # type: ignore[attr-defined]
    lines.file = None
    assert list(loader) == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert lines[0] == "a"


def test_nothing_is_forked_in_economic_mode(lines: Lines) -> None:
    """Its engine is a thread of the trainer's process."""
    with hr.DataLoader(lines, 2, num_workers=1, economic=True) as loader:
        with pytest.raises(hr.CannotCarryError, match=r"dataset\.file"):
            iter(loader)


def test_nothing_is_warned_of_when_a_context_is_named_or_everything_can_be_carried(lines: Lines) -> None:
    context: Any = "fork"
    assert made(hr.DataLoader(lines, 3, num_workers=1, multiprocessing_context=context)) == [
        ["a", "b", "c"],
        ["d", "e", "f"],
    ]
    assert made(hr.DataLoader(["a"], num_workers=1)) == [["a"]]


def test_option_is_an_error_when_it_has_no_such_value_or_no_meaning() -> None:
    with pytest.raises(hr.OptionError, match=r"fallback='thread': one of 'fork', 'error' is meant"):
        hr.DataLoader([1], fallback="thread")  # type: ignore[arg-type]
    with pytest.raises(hr.OptionError, match=r"fallback='error' is for data sets of torch's"):
        hr.DataLoader(hr.from_map([1]), fallback="error")


SCRIPT = """
    import multiprocessing, threading
    import headrace as hr

    class Locked:
        lock = threading.Lock()
        def __len__(self):
            return 2
        def __getitem__(self, index):
            return index

    {before}
    try:
        print([batch.tolist() for batch in hr.DataLoader(Locked(), num_workers=1)])
    except hr.CannotCarryError as error:
        print(str(error).partition(" cannot")[0])
    print(multiprocessing.get_start_method(allow_none=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", [None, "fork", "spawn", "forkserver"])
def test_workers_are_forked_only_where_torchs_would_be(method: str | None) -> None:
    before = f"multiprocessing.set_start_method({method!r})" if method else ""
    code, out, err = run_script(SCRIPT.format(before=before))
    assert code == 0, err
    would_fork = (method or multiprocessing.get_all_start_methods()[0]) == "fork"
    assert out.split("\n")[:2] == [
        "[[0], [1]]" if would_fork else "type(dataset).lock (a _thread.lock)",
        str(method),
    ], "and the default is left open"
    assert ("CannotCarryWarning: type(dataset).lock (a _thread.lock)" in err) is would_fork


class Unready:
    """Is pickled, and cannot be made again."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return index

    def __setstate__(self, state: Any) -> None:
        raise LookupError("not here")

    def __getstate__(self) -> Any:
        return {"a": 1}


CLASSES = """
    import enum, threading, warnings
    warnings.simplefilter("ignore")

    class Color(enum.Enum):
        RED = 1

    class Sample:
        lock = threading.Lock()  # no process can be sent it

        def __init__(self, color):
            self.color = color

    class MyError(Exception):
        pass

    class Data:
        def __init__(self, lock=None):
            self.lock = lock

        def __len__(self):
            return 2

        def __getitem__(self, color):
            if color is not Color.RED:
                raise MyError(color, Color.RED)
            return Sample(color)

    def seen(data, **options):
        class Local(Sample):
            pass

        loader = hr.DataLoader(
            data, batch_size=None, sampler=[Color.RED, Color], num_workers=1,
            collate_fn=lambda sample: [sample, Local(sample.color)], **options
        )
        batches = iter(loader)
        sample, local = next(batches)
        assert type(sample) is Sample and type(local) is Local and isinstance(local, Sample)
        assert sample.color is Color.RED
        try:
            next(batches)
        except MyError as error:
            kind, member = error.__cause__.args
            assert kind is Color and member is Color.RED
        else:
            raise AssertionError
        del batches

    seen(Data(), multiprocessing_context="fork")
    seen(Data(threading.Lock()))
    print("the same")
"""


def test_forked_workers_have_the_classes_of_the_script_and_no_copies() -> None:
    code, out, err = run_script(CLASSES)
    assert (code, out.strip()) == (0, "the same"), err


def test_error_in_a_worker_says_what_to_do_when_a_data_set_cannot_be_made_again() -> None:
    with pytest.raises(LookupError, match="not here") as caught:
        list(hr.DataLoader(Unready(), num_workers=1))
    assert 'multiprocessing_context="fork"' in str(caught.value)


def test_enum_is_inherited_when_its_members_cannot_be_made_again() -> None:
    class Level(bytes, enum.Enum):
        def __new__(cls, number: int, told: str) -> Any:
            made = bytes.__new__(cls, [number])
            made._value_, made.told = number, told  # type: ignore[attr-defined]
            return made

        LOW = (1, "low")
        HIGH = (2, "high")

    data = Asked(lambda level: (bytes(level), level.value, level.told, level is type(level)(2)), Level.HIGH)
    with pytest.warns(hr.CannotCarryWarning, match="are made by a __new__ of their own"):
        assert list(hr.DataLoader(data, None, num_workers=1, collate_fn=whole)) == [(b"\x02", 2, "high", True)] * 4
