"""What multiprocessing gives to the children that it starts, given to workers: its locks, queues and connections.

They pickle for nobody but a child that is being started, and hand on descriptors beside the pickle. So it is told that
one is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from multiprocessing import context, heap  # noqa: F401 (which tells how its memory travels)
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import SemLock
from typing import Any

from headrace.errors import CannotCarryError
from headrace.torch_compat.mappings import Mappings, address_of
from headrace.torch_compat.received import duplicate
from headrace.torch_compat.views import extent

_SEMAPHORE_BYTES = 32  # of glibc's sem_t
_OF_OURS = {"torch", "builtins", "functools", "socket"}
_CData = ctypes.c_char.__mro__[-2]
_own_forms: dict[type, Callable[[object], tuple[object, ...]]] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]


class _Child:
    """Stands for the child; the names are those that multiprocessing calls."""

    def __init__(self, descriptors: list[int]) -> None:
        self._descriptors = descriptors

    def duplicate_for_child(self, fd: int) -> int:
        self._descriptors.append(os.dup(fd))
        return len(self._descriptors) - 1

    def DupFd(self, number: int) -> _Descriptor:  # noqa: N802
        return _Descriptor(number)


class _Descriptor:
    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        return duplicate(self._number)


@contextlib.contextmanager
def spawning(descriptors: list[int]) -> Iterator[None]:
    """While this lasts, what multiprocessing keeps for its children pickles, in this thread."""
    before = context.get_spawning_popen()
    child: Any = _Child(descriptors)
    context.set_spawning_popen(child)
    try:
        yield
    finally:
        context.set_spawning_popen(before)


def form_of(value: object, mappings: Mappings | None) -> tuple[object, ...] | None:
    """How a value of multiprocessing's is pickled that needs more than `spawning`; None: it does not.

    Raises:
        CannotCarryError: it is a lock that only a fork can hand on.
    """
    if _has_own_form(type(value)):
        return _own_forms[type(value)](value)
    if isinstance(value, SemLock) and value._semlock.name is None and mappings is not None:  # type: ignore[attr-defined]
        return _form_of_nameless(value, mappings)
    return None


def _has_own_form(kind: type) -> bool:
    """Whether multiprocessing, or a library such as tensordict, has told how its children get one, by descriptors.

    Tensors and what lies in memory have forms of ours, and sockets are for one process.
    """
    return kind in _own_forms and kind.__module__.partition(".")[0] not in _OF_OURS and not issubclass(kind, _CData)


def _form_of_nameless(lock: Any, mappings: Mappings) -> tuple[object, ...]:
    """Of contexts that fork, multiprocessing removes the names of semaphores; their memory is still there."""
    made = lock._semlock
    try:
        is_mapped = mappings.find(made.handle, _SEMAPHORE_BYTES) is not None
    except CannotCarryError:
        is_mapped = False
    if not is_mapped:
        raise CannotCarryError(
            f"a {type(lock).__name__} of a multiprocessing context that forks is for its forks only; "
            'make it by multiprocessing.get_context("spawn")'
        )
    return _lock, (type(lock), extent(made.handle, _SEMAPHORE_BYTES, lock), made.kind, made.maxvalue)


def _lock(cls: type[SemLock], memory: memoryview, kind: int, most: int) -> SemLock:
    lock: Any = cls.__new__(cls)
    lock.__setstate__((address_of(memory), kind, most, None))
    lock._memory = memory  # it goes unmapped with it
    lock._is_fork_ctx = True
    made: SemLock = lock
    return made
