"""Settings that a worker of the fork server takes over from the trainer."""

import faulthandler
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drop_in.acting import Made
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate_str_fn, default_collate_fn_map

import headrace as hr


def in_worker(ask: Callable[[], Any]) -> Any:
    data = Made(lambda _: ask(), 1)
    with hr.DataLoader(data, None, num_workers=1, economic=True, collate_fn=lambda sample: sample) as loader:
        return next(iter(loader))


def written_by(act: Callable[[], Any]) -> list[str]:
    kept, files = [os.dup(fd) for fd in (1, 2)], [os.memfd_create("written") for _ in range(2)]
    for fd, file in enumerate(files, 1):
        os.dup2(file, fd)
    act()
    sys.stdout.flush()
    sys.stderr.flush()
    for fd, copy in enumerate(kept, 1):
        os.dup2(copy, fd)
    return [os.pread(file, 1000, 0).decode() for file in files]


def log() -> None:
    logging.getLogger("a.b").info("quiet")
    logging.getLogger("a.b").warning("loud")


@pytest.fixture(autouse=True)
def _trainer_is_restored() -> Iterator[None]:
    root, dtype, entries = logging.getLogger(), torch.get_default_dtype(), dict(default_collate_fn_map)
    level, disabled, handlers = root.level, root.manager.disable, root.handlers[:]
    yield
    torch.set_default_dtype(dtype)
    default_collate_fn_map.clear()
    default_collate_fn_map.update(entries)
    root.setLevel(level)
    logging.disable(disabled)
    root.handlers[:] = handlers
    logging.getLogger("headrace.test").setLevel(logging.NOTSET)


def text_of(pattern: Any) -> Any:
    return getattr(pattern, "pattern", pattern)


def test_warnings_filters_are_equal_in_order_patterns_and_lines() -> None:
    class Own(UserWarning):
        """A category that no worker can import."""

    unloadable = type("Unloadable", (str,), {"__reduce__": lambda _: (__import__, ("no_such_module",))})
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("ignore", Own)
        warnings.filters.insert(0, ("ignore", unloadable(), UserWarning, None, 0))  # type: ignore[attr-defined]
        warnings.filterwarnings("once", "a(b|c)", FutureWarning, "d.*", 12)
        warnings.simplefilter("error", DeprecationWarning, append=True)
        warnings.filters.insert(0, ("ignore", None, ResourceWarning, "exactly", 0))  # type: ignore[attr-defined]
        warnings.filters.insert(0, ("ignore", object(), UserWarning, None, 0))  # type: ignore[attr-defined]
        found = in_worker(lambda: [[a, text_of(m), c.__name__, text_of(p), n] for a, m, c, p, n in warnings.filters])
    assert found == [
        ["ignore", None, "ResourceWarning", "exactly", 0],
        ["once", "a(b|c)", "FutureWarning", "d.*", 12],
        ["error", None, "DeprecationWarning", None, 0],
    ]


def test_levels_of_loggers_hold_in_a_worker() -> None:
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("headrace.test").setLevel(5)
    logging.disable(3)
    names = "", "headrace.test"
    found = in_worker(lambda: [*(logging.getLogger(name).level for name in names), logging.root.manager.disable])
    assert found == [logging.ERROR, 5, 3]


class Shouting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).upper()


@pytest.mark.parametrize("number", [0, 1], ids=["stdout", "stderr"])
def test_handler_of_the_root_is_there_in_a_worker_when_it_writes_to_a_standard_stream(number: int) -> None:
    stream = [sys.__stdout__, sys.__stderr__][number]
    logging.basicConfig(level=logging.INFO, format="{name}|{message}", style="{", stream=stream, force=True)
    told = in_worker(lambda: written_by(log))
    assert (told[number], told[1 - number]) == ("a.b|quiet\na.b|loud\n", "")

    logging.getLogger().handlers[0].setLevel(logging.WARNING)
    logging.getLogger().handlers[0].setFormatter(Shouting("%(message)s"))
    assert "".join(in_worker(lambda: written_by(log))) == "LOUD\n"


def test_handler_has_plain_lines_in_a_worker_when_its_formatter_does_not_pickle() -> None:
    logging.basicConfig(stream=sys.__stderr__, force=True)
    formatter = logging.Formatter("%(name)s|%(message)s")
    formatter.lock = threading.Lock()  # type: ignore[attr-defined]
    logging.getLogger().handlers[0].setFormatter(formatter)
    assert in_worker(lambda: written_by(log)) == ["", "loud\n"]


def test_handlers_stay_in_the_trainer_when_they_hold_more_than_a_standard_stream(tmp_path: Path) -> None:
    root = logging.getLogger()
    root.handlers[:] = [logging.FileHandler(tmp_path / "log", delay=True), logging.NullHandler()]
    with (tmp_path / "other").open("w") as file:
        root.addHandler(logging.StreamHandler(file))
        assert in_worker(lambda: len(logging.getLogger().handlers)) == 0


def test_collate_map_holds_in_a_worker_with_its_types_functions_and_order() -> None:
    class Point(int):
        pass

    before = dict(default_collate_fn_map)
    default_collate_fn_map.clear()
    default_collate_fn_map.update({Point: lambda batch, **_: [-point for point in batch], **before})
    default_collate_fn_map.update({int: collate_str_fn, (float, complex): lambda batch, **_: len(batch)})
    del default_collate_fn_map[bytes]
    collated = in_worker(lambda: [default_collate(batch) for batch in ([Point(1), Point(2)], [1, 2], [1j, 2j])])
    assert collated == [[-1, -2], [1, 2], 2]
    assert in_worker(lambda: [*map(str, default_collate_fn_map)]) == [*map(str, default_collate_fn_map)]


def test_collate_map_is_an_error_that_names_the_type_when_an_entry_does_not_pickle() -> None:
    lock = threading.Lock()
    default_collate_fn_map[Path] = lambda batch, **_: lock
    with pytest.raises(
        hr.errors.CannotCarryError, match=r"default_collate_fn_map\['Path'\].*lock.* cannot be sent to a worker"
    ) as caught:
        in_worker(int)
    assert isinstance(caught.value, TypeError)


def test_faulthandler_is_as_in_the_trainer() -> None:
    was_enabled = faulthandler.is_enabled()
    try:
        with Path("/dev/null").open("w") as nowhere:
            faulthandler.enable(nowhere)
            enabled = in_worker(faulthandler.is_enabled)
            faulthandler.disable()
            disabled = in_worker(faulthandler.is_enabled)
    finally:
        if was_enabled:
            faulthandler.enable(sys.__stderr__)
    assert (enabled, disabled) == (True, False)
