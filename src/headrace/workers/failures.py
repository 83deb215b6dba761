"""Errors on their way to the trainer, and placeholders for samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

_SHOWN_MOST = 200  # characters of a key


class Scope(Enum):
    """How much a failure affects."""

    SAMPLE = "sample"  # one sample, which may be skipped
    MORE = "more"  # no single sample, such as a source that ended early: always raised


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an error was raised, as far as known.

    Attributes:
        stage: The failed stage, such as "map(augment)".
        position: Position of the sample in the epoch.
        key: Key of the sample, shortened for display.
        url: Address of the shard, without secrets.
        caught: Text that torch's loader adds to an exception of a user's function in a worker.
        passed: Operators that the sample had passed, from its source to the failed one.
    """

    stage: str = ""
    position: int | None = None
    key: str = ""
    url: str = ""
    worker: int | None = None
    caught: str = ""
    passed: str = ""

    @property
    def name(self) -> str:
        """Display name of the sample: its key, or else the address of its shard."""
        return self.key or self.url

    @property
    def note(self) -> str:
        """Text of the note to add to the exception."""
        details = (
            ("stage:", self.stage or None),
            ("sample", None if self.position is None else f"{self.position} of the epoch"),
            ("key", self.key or None),
            ("url", self.url or None),
            ("worker", self.worker),
            ("operators:", self.passed or None),
        )
        return "; ".join(f"{what} {value}" for what, value in details if value is not None)


NOWHERE = Origin()


def shown(key: object) -> str:
    return f"{key!r:.{_SHOWN_MOST}}"


class CaughtError:
    """An exception in the process that raised it, for the first caller of `take`.

    It may stand for several samples. Once raised, its traceback refers to the loop that caught it, and so to the
    iterator. If failures waiting for the iterator referred to the exception too, neither would ever be freed.
    """

    __slots__ = ("_error",)

    def __init__(self, error: BaseException) -> None:
        self._error: BaseException | None = error

    def take(self) -> BaseException | None:
        """Return the exception, or None if it was taken before."""
        error, self._error = self._error, None
        return error

    def put_back(self, error: BaseException) -> None:
        """Undo `take`: the next caller gets the exception."""
        self._error = error


@dataclass(frozen=True, slots=True)
class PackedError:
    """A pickled exception on its way to the trainer.

    Attributes:
        original: The exception object, for the first that unpacks it. Not sent to other processes.
    """

    blob: bytes
    origin: Origin = NOWHERE
    scope: Scope = Scope.SAMPLE
    original: CaughtError | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        return PackedError, (self.blob, self.origin, self.scope)

    def widened(self) -> PackedError:
        """Return the error with the scope MORE."""
        return replace(self, scope=Scope.MORE)


class ErrorPacker(Protocol):
    def __call__(self, error: BaseException, origin: Origin = ..., /) -> PackedError: ...


class Placeholder:
    """An object in the place of a sample. `is_final`: nothing remains to be done to the sample."""

    __slots__ = ()

    is_final = True

    def take(self) -> tuple[object, object]:
        """Return (the sample, the details that an error's note needs). To be called once."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Failure(Placeholder):
    error: PackedError

    def take(self) -> tuple[object, object]:
        return self, None


@dataclass(slots=True, eq=False)
class Made(Placeholder):
    """A sample that has passed its chain, which may have changed it in place."""

    value: object

    def take(self) -> tuple[object, object]:
        return self.value, None


def first_of(error: BaseException) -> BaseException:
    """Return the error itself, or the first of an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class AllMade(Sequence[Any]): ...


def failures_among(samples: Sequence[object]) -> list[tuple[int, Failure]]:
    if _are_made(samples) or Failure not in map(type, samples):  # fast check
        return []
    return [(k, sample) for k, sample in enumerate(samples) if type(sample) is Failure]


def without_failures(samples: Sequence[T]) -> Sequence[T]:
    """Return the samples without the failures among them."""
    return samples if _are_made(samples) else [sample for sample in samples if type(sample) is not Failure]


def _are_made(samples: Sequence[object]) -> bool:
    return isinstance(samples, AllMade)
