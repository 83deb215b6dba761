"""Unknown loops of frameworks that take batches ahead: states warn that batches may be lost."""

from __future__ import annotations

import itertools
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from builders.numbers import Numbers

import headrace as hr

ONE_AHEAD = """
def one_ahead(loader):
    batches = iter(loader)
    ahead = next(batches)
    for batch in batches:
        yield ahead
        ahead = batch
    yield ahead
"""


def module_of(name: str, code: str) -> Any:
    module = types.ModuleType(name)
    exec(code, vars(module))
    return module


DATA = pytest.mark.parametrize("data", [lambda: Numbers(12), lambda: range(12)], ids=["async", "map"])


class Around:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def handed_on(loader: Any) -> Iterator[Any]:
    yield from loader


@pytest.mark.slow
@DATA
@pytest.mark.parametrize("name", ["lightning.pytorch.newer", "pytorch_lightning.newer", "accelerate.newer"])
@pytest.mark.parametrize("around", [lambda loader: loader, Around, handed_on])
def test_state_in_an_unknown_loop_of_a_framework_warns_of_lost_batches(data: Any, name: str, around: Any) -> None:
    with hr.DataLoader(data(), batch_size=4) as loader:
        loop = module_of(name, ONE_AHEAD).one_ahead(around(loader))
        assert next(loop).tolist() == [0, 1, 2, 3]
        with pytest.warns(RuntimeWarning, match=rf"{name.rpartition('.')[0]} iterates.*state_dict\(batches=n\)"):
            loader.state_dict()
        loader.state_dict()  # warned once
        state = loader.state_dict(batches=1)
        loop.close()
    with hr.DataLoader(data(), batch_size=4) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader)).tolist() == [4, 5, 6, 7]


@DATA
@pytest.mark.parametrize("around", [lambda loader: loader, Around, handed_on])
def test_state_in_a_loop_of_the_program_does_not_warn(data: Any, around: Any) -> None:
    module = module_of("lightning.pytorch.trainer", "def run(hook):\n    return hook()")
    with hr.DataLoader(data(), batch_size=4) as loader:

        def hook() -> list[Any]:
            return [loader.state_dict() for _ in itertools.islice(around(loader), 2)]

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(module.run(hook)) == 2
            loop = module_of("lightning.fabric.wrappers", ONE_AHEAD).one_ahead(loader)
            assert len([loader.state_dict() for _ in loop]) == 3


LIGHTNING = {
    "loops.fetchers": """
class _DataFetcher:
    batches, done, iterator = (), False, None

    def __init__(self, loaders):
        self.loaders = loaders

    def begin(self):
        self.iterator = self.loaders.begin()
""",
    "utilities.combined_loader": """
class _ModeIterator:
    def __init__(self, loader):
        self.loader = loader

    def begin(self):
        return iter(self.loader)
""",
    "loops.newer": """
class Inner:
    def run(self, fetcher):
        fetcher.begin()


class Outer:
    def __init__(self, epoch_progress):
        self.epoch_progress = epoch_progress

    def run(self, fetcher):
        Inner().run(fetcher)
""",
}


@DATA
def test_inner_loop_of_lightning_is_recognized(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {}
    for name, code in LIGHTNING.items():
        made[name] = module_of(f"lightning.pytorch.{name}", code)
        monkeypatch.setitem(sys.modules, f"lightning.pytorch.{name}", made[name])
    progress = types.SimpleNamespace(current=types.SimpleNamespace(processed=3))
    with hr.DataLoader(data(), batch_size=4) as loader:
        fetcher = made["loops.fetchers"]._DataFetcher(made["utilities.combined_loader"]._ModeIterator(loader))
        made["loops.newer"].Outer(progress).run(fetcher)
        assert next(fetcher.iterator).tolist() == [0, 1, 2, 3]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state = loader.state_dict()
        assert loader._loop.epoch == 3
    with hr.DataLoader(data(), batch_size=4) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader)).tolist() == [4, 5, 6, 7]
