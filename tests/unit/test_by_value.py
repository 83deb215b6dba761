"""Functions and classes sent by value."""

from __future__ import annotations

import importlib.util
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import cloudpickle
import pytest

from headrace._util.shared_memory import close_all
from headrace.torch_compat import serialize


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[ModuleType]:
    """A module that was loaded from a place that is not on the path: no worker could import it."""
    path = tmp_path / "plugin_of_a_user.py"
    path.write_text("def twice(x):\n    return 2 * x\n\n\nclass Pair(tuple):\n    pass\n")
    spec = importlib.util.spec_from_file_location("plugin_of_a_user", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["plugin_of_a_user"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    if "plugin_of_a_user" in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["plugin_of_a_user"]


def sent(value: object) -> bytes:
    descriptors: list[int] = []
    try:
        return b"".join(bytes(part) for part in serialize.pack_for_workers(value, descriptors))
    finally:
        close_all(descriptors)


def test_module_that_workers_cannot_import_is_registered_in_cloudpickle(plugin: ModuleType) -> None:
    before = cloudpickle.dumps(plugin.twice)
    assert len(sent(plugin.twice)) > len(before), "it goes by value"
    assert "plugin_of_a_user" in cloudpickle.list_registry_pickle_by_value()
    assert len(serialize.pack_bytes(plugin.Pair)) > 100, "so do samples, once that is known"


CELL = """\
def double(x):
    # a comment, which only the source has
    def inner():
        return x["number"]
    return 2 * inner()
"""


def reduced_as_by(file: str | None) -> Callable[[CodeType], Any]:
    reduce = cloudpickle.Pickler.dispatch_table[CodeType]

    def reduced(code: CodeType) -> Any:
        make, arguments = reduce(code)
        return make, tuple(file or code.co_filename if k == 10 else value for k, value in enumerate(arguments))

    return reduced


@pytest.mark.parametrize("file", [None, "<dynamic-code>"])
def test_lines_of_a_cell_travel_with_its_functions(monkeypatch: pytest.MonkeyPatch, file: str | None) -> None:
    """The lines of a notebook's cell are in the trainer's `linecache` only."""
    monkeypatch.setitem(cloudpickle.Pickler.dispatch_table, CodeType, reduced_as_by(file))
    cell = "<ipython-input-7-8a1b>"
    monkeypatch.setitem(linecache.cache, cell, (len(CELL), None, CELL.splitlines(keepends=True), cell))
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, cell, "exec"), scope)
    descriptors: list[int] = []
    parts = serialize.pack_for_workers(scope["double"], descriptors)
    del linecache.cache[cell]  # as in a worker
    target = memoryview(bytearray(serialize.packed_size(parts)))
    double = serialize.unpack_in_worker(target, serialize.write(parts, target), descriptors)
    assert inspect.getsource(double) == CELL
    with pytest.raises(KeyError) as caught:
        double({})
    assert 'return x["number"]' in "".join(traceback.format_exception(caught.value))


def test_code_sent_by_value_keeps_its_file_name(plugin: ModuleType) -> None:
    def outer() -> object:
        return lambda: None

    sent(plugin.twice)
    for function in (plugin.twice, outer):
        came = serialize.unpack_bytes(serialize.pack_bytes(function))
        assert came is not function
        assert came.__code__ == function.__code__
        assert came.__code__.co_filename == function.__code__.co_filename
    assert came().__code__.co_filename == __file__
