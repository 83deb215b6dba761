"""Which objects pickle is left alone with, and what becomes of weak references in a worker."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import io
import multiprocessing.synchronize
import os
import pathlib
import threading
import types
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from headrace.torch_compat import serialize
from headrace.torch_compat.reducers import is_ordinary


class Plain:
    pass


@dataclasses.dataclass
class Record:
    x: int = 0


class Pair(NamedTuple):
    x: int


class Level(enum.Enum):
    LOW = 1


class Passes:
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class PassesFirst:
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


def kind_of(*bases: type) -> type:
    return type("Kind", bases, {})


@pytest.mark.parametrize(
    "kind", [Plain, Record, Pair, Level, pathlib.PosixPath, collections.OrderedDict, kind_of(dict), kind_of(Plain)]
)
def test_pickle_is_left_alone_with_objects_of_which_nothing_can_be_shared(kind: type) -> None:
    assert is_ordinary(kind)


@pytest.mark.parametrize(
    "kind",
    [
        *(Passes, PassesFirst, kind_of(Passes), kind_of(ValueError), kind_of(torch.Tensor), kind_of(np.ndarray)),
        *(kind_of(functools.cached_property), kind_of(types.ModuleType), kind_of(threading.local), io.TextIOWrapper),
        *(
            type(os.environ),
            weakref.WeakSet,
            multiprocessing.synchronize.Lock,
            torch.UntypedStorage,
            type,
            kind_of(type),
        ),
        *(types.FunctionType, types.BuiltinFunctionType, functools._lru_cache_wrapper, torch.nn.Module),
    ],
)
def test_pickle_is_not_left_alone_with_objects_that_have_to_be_looked_at(kind: type) -> None:
    assert not is_ordinary(kind)


def test_all_objects_of_a_kind_travel_alike_whichever_comes_first() -> None:
    objects = [Plain(), Record(1), Pair(2), Level.LOW, pathlib.Path("a")]
    for k, first in enumerate(objects):
        first_in_all = [first, *objects, first]
        back = serialize.copied(first_in_all)
        assert [type(one) for one in back] == [type(one) for one in first_in_all]
        assert back[-1] is back[0] is back[1 + k]
        assert back[2:5] == objects[1:4]


def test_weak_reference_holds_nothing_in_a_worker_that_something_else_holds() -> None:
    target, held = Plain(), [Plain()]
    alone, with_others = serialize.copied((weakref.ref(target), (weakref.ref(held[0]), held)))
    assert alone() is not None, "as in the trainer, where somebody holds it"
    reference, holder = with_others
    assert reference() is holder[0]
    holder.clear()
    assert reference() is None
