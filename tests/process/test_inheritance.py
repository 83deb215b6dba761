"""Settings that a worker of the fork server takes over from the trainer."""

from __future__ import annotations

import faulthandler
import json
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data._utils.collate import collate_str_fn, default_collate_fn_map

from headrace.errors import CannotCarryError
from headrace.workers.forkserver.inheritance import capture

# A small fork server: of each line it makes a fresh child, which applies what was captured, runs the probe, and
# answers with the probe's result and the texts on its standard streams.
HELPER = """
import json, os, sys, tempfile
import torch
from headrace.torch_compat import serialize
from headrace.workers.forkserver.inheritance import apply

answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    asked = json.loads(line)
    if os.fork() == 0:
        files = [tempfile.TemporaryFile("w+") for _ in range(2)]
        for fd, file in enumerate(files, 1):
            os.dup2(file.fileno(), fd)
        names = {}
        try:
            apply(asked["captured"])
            exec(asked["probe"], names)
        except BaseException as error:
            names["result"] = f"{type(error).__name__}: {error}"
        sys.stdout.flush()
        sys.stderr.flush()
        written = []
        for file in files:
            file.seek(0)
            written.append(file.read())
        answers.write(json.dumps([names["result"], *written]) + "\\n")
        answers.flush()
        os._exit(0)
    os.wait()
"""

Probe = Callable[[str], tuple[Any, str, str]]


@pytest.fixture(scope="module")
def fork_server() -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen([sys.executable, "-c", HELPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with started:
        yield started
        assert started.stdin is not None
        started.stdin.close()


@pytest.fixture
def probe(fork_server: subprocess.Popen[str]) -> Probe:
    def ask(code: str) -> tuple[Any, str, str]:
        assert fork_server.stdin is not None and fork_server.stdout is not None
        fork_server.stdin.write(json.dumps({"captured": capture(), "probe": code}) + "\n")
        fork_server.stdin.flush()
        result, out, err = json.loads(fork_server.stdout.readline())
        return result, out, err

    return ask


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


class Own(UserWarning):
    """A category that no worker can import."""


def test_warnings_filters_are_equal_in_order_patterns_and_lines(probe: Probe) -> None:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("ignore", Own)
        warnings.filterwarnings("once", "a(b|c)", FutureWarning, "d.*", 12)
        warnings.simplefilter("error", DeprecationWarning, append=True)
        warnings.filters.insert(0, ("ignore", None, ResourceWarning, "exactly", 0))  # type: ignore[attr-defined]
        warnings.filters.insert(0, ("ignore", object(), UserWarning, None, 0))  # type: ignore[attr-defined]
        result, _, _ = probe(
            "import warnings\n"
            "text = lambda pattern: getattr(pattern, 'pattern', pattern)\n"
            "result = [[a, text(m), c.__name__, text(p), n] for a, m, c, p, n in warnings.filters]"
        )
    assert result == [
        ["ignore", None, "ResourceWarning", "exactly", 0],
        ["once", "a(b|c)", "FutureWarning", "d.*", 12],
        ["error", None, "DeprecationWarning", None, 0],
    ]


def test_levels_of_loggers_hold_in_a_worker(probe: Probe) -> None:
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("headrace.test").setLevel(5)
    logging.disable(3)
    result, _, _ = probe(
        "import logging\n"
        "result = [logging.getLogger().level, logging.getLogger('headrace.test').level, logging.root.manager.disable]"
    )
    assert result == [logging.ERROR, 5, 3]


class Shouting(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).upper()


LOG = "import logging\nlogging.getLogger('a.b').info('quiet')\nlogging.getLogger('a.b').warning('loud')\nresult = None"


@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_handler_of_the_root_is_there_in_a_worker_when_it_writes_to_a_standard_stream(
    probe: Probe, stream: str
) -> None:
    logging.basicConfig(
        level=logging.INFO, format="{name}|{message}", style="{", stream=getattr(sys, stream), force=True
    )
    out, err = probe(LOG)[1:]
    assert {"stdout": out, "stderr": err} == {"stdout": "", "stderr": "", stream: "a.b|quiet\na.b|loud\n"}

    logging.getLogger().handlers[0].setLevel(logging.WARNING)
    logging.getLogger().handlers[0].setFormatter(Shouting("%(message)s"))
    out, err = probe(LOG)[1:]
    assert out + err == "LOUD\n"


def test_handler_has_plain_lines_in_a_worker_when_its_formatter_does_not_pickle(probe: Probe) -> None:
    logging.basicConfig(force=True)
    formatter = logging.Formatter("%(name)s|%(message)s")
    formatter.lock = threading.Lock()  # type: ignore[attr-defined]
    logging.getLogger().handlers[0].setFormatter(formatter)
    assert probe(LOG)[2] == "loud\n"


def test_handlers_stay_in_the_trainer_when_they_hold_more_than_a_standard_stream(probe: Probe, tmp_path: Path) -> None:
    root = logging.getLogger()
    root.handlers[:] = [logging.FileHandler(tmp_path / "log", delay=True), logging.NullHandler()]
    with (tmp_path / "other").open("w") as file:
        root.addHandler(logging.StreamHandler(file))
        result, _, _ = probe("import logging\nresult = len(logging.getLogger().handlers)")
    assert result == 0


COLLATE = """
from torch.utils.data import default_collate
from torch.utils.data._utils import collate
kinds = list(collate.default_collate_fn_map)
batch = [kinds[{position}](n) for n in range(3)]
result = [default_collate(batch), [str(kind) for kind in kinds], collate.default_collate_fn_map is kept]
"""


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def collate_points(batch: list[Point], *, collate_fn_map: Any = None) -> Any:
    return [point.x for point in batch]


def test_collate_map_holds_in_a_worker_with_types_of_the_script_and_in_its_order(probe: Probe) -> None:
    before = dict(default_collate_fn_map)
    default_collate_fn_map.clear()
    default_collate_fn_map.update({Point: collate_points, **before})
    del default_collate_fn_map[bytes]
    code = "from torch.utils.data._utils.collate import default_collate_fn_map as kept\n" + COLLATE.format(position=0)
    result, _, _ = probe(code)
    assert result == [[0, 1, 2], [str(kind) for kind in default_collate_fn_map], True]


def test_collate_map_holds_in_a_worker_when_a_function_was_exchanged(probe: Probe) -> None:
    default_collate_fn_map[int] = collate_str_fn
    default_collate_fn_map[float, complex] = lambda batch, **_: len(batch)
    result, _, _ = probe(
        "from torch.utils.data import default_collate\nresult = [default_collate([1, 2]), default_collate([1j, 2j])]"
    )
    assert result == [[1, 2], 2]


def test_collate_map_is_an_error_that_names_the_type_when_an_entry_does_not_pickle() -> None:
    lock = threading.Lock()
    default_collate_fn_map[Point] = lambda batch, **_: lock
    with pytest.raises(
        TypeError, match=r"default_collate_fn_map\[Point\]=.* cannot be sent to a worker: .*lock"
    ) as caught:
        capture()
    assert isinstance(caught.value, CannotCarryError)


def test_faulthandler_is_as_in_the_trainer(probe: Probe) -> None:
    code = "import faulthandler\nresult = faulthandler.is_enabled()"
    was_enabled = faulthandler.is_enabled()
    try:
        with Path("/dev/null").open("w") as nowhere:
            faulthandler.enable(nowhere)
            enabled = probe(code)[0]
            faulthandler.disable()
            disabled = probe(code)[0]
    finally:
        if was_enabled:
            faulthandler.enable(sys.__stderr__)
    assert (enabled, disabled) == (True, False)
