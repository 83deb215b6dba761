"""What stands in the place of samples: errors on their way, and samples that are made already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

_SHOWN_MOST = 200  # characters of a key


class Scope(Enum):
    """Whose failure an error is."""

    SAMPLE = "sample"  # a single one's: it may be left out
    MORE = "more"  # no single sample's, such as a source's end before its time: it is always raised


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an error was raised, as far as that is known.

    Attributes:
        stage: what failed, such as "map(augment)".
        position: of the sample in the epoch.
        key: of the sample, as it is shown.
        url: of its shard, without secrets.
        worker: the number of the worker process.
        caught: what torch's loader says of an exception that came of a user's function in a worker.
        passed: the operators that the sample had passed, from its source to what failed.
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
        """What its sample is called: by its key, or else by the address of its shard."""
        return self.key or self.url

    @property
    def note(self) -> str:
        """The same in words, for the exception itself."""
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
    """A key as `Origin` has it."""
    return f"{key!r:.{_SHOWN_MOST}}"


class CaughtError:
    """An exception in the process that raised it, for whoever asks first.

    It may stand for several samples. Its traceback, once it is raised, refers to the loop that caught it and so to the
    iterator. If failures that wait for this iterator referred to it, too, neither would ever be freed.
    """

    __slots__ = ("_error",)

    def __init__(self, error: BaseException) -> None:
        self._error: BaseException | None = error

    def take(self) -> BaseException | None:
        """Return the exception, or None if it was taken before."""
        error, self._error = self._error, None
        return error

    def put_back(self, error: BaseException) -> None:
        """Let the next one take an exception that was only looked at."""
        self._error = error


@dataclass(frozen=True, slots=True)
class PackedError:
    """An exception on its way to the trainer: as bytes, and in the process that raised it also as it is.

    Attributes:
        blob: what `headrace.torch_compat.errors.unpack_error` makes it of in other processes.
        origin: where it was raised.
        scope: whose failure it is.
        original: the exception itself, for the first that unpacks it; other processes do not get it.
    """

    blob: bytes
    origin: Origin = NOWHERE
    scope: Scope = Scope.SAMPLE
    original: CaughtError | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        return PackedError, (self.blob, self.origin, self.scope)

    def widened(self) -> PackedError:
        """The same as no single sample's."""
        return replace(self, scope=Scope.MORE)


class ErrorPacker(Protocol):
    """Packs exceptions."""

    def __call__(self, error: BaseException, origin: Origin = ..., /) -> PackedError: ...


class Placeholder:
    """Stands in the place of a sample.

    Attributes:
        is_final: nothing is left to be done to what it stands for.
    """

    __slots__ = ()

    is_final = True

    def take(self) -> tuple[object, object]:
        """(what it stands for, and what the note of an error needs of it); once."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Failure(Placeholder):
    """Stands in the place of a sample that could not be made."""

    error: PackedError

    def take(self) -> tuple[object, object]:
        return self, None


@dataclass(slots=True, eq=False)
class Made(Placeholder):
    """Stands in the place of a sample that went through its chain already, and may have been changed in place by it."""

    value: object

    def take(self) -> tuple[object, object]:
        return self.value, None


def first_of(error: BaseException) -> BaseException:
    """The error itself, or the first of a group: the trainer sees one exception, never a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class AllMade(Sequence[Any]):
    """Samples in the place of none of which a failure stands, or anything else: they need not be looked through."""


def failures_among(samples: Sequence[object]) -> list[tuple[int, Failure]]:
    """(where it stands, the failure) of each that stands among samples."""
    if _are_made(samples) or Failure not in map(type, samples):  # which is known in no time
        return []
    return [(k, sample) for k, sample in enumerate(samples) if type(sample) is Failure]


def without_failures(samples: Sequence[T]) -> Sequence[T]:
    """The samples in the places of which no failure stands."""
    return samples if _are_made(samples) else [sample for sample in samples if type(sample) is not Failure]


def _are_made(samples: Sequence[object]) -> bool:
    return isinstance(samples, AllMade)
