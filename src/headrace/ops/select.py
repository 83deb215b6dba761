"""`.select()`, `.to_tuple()` and `.rename()`: the fields of samples. Fields that are not selected need no decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from headrace._util import check
from headrace.ops.operator import EachSample, find_field
from headrace.workers.tasks import Step


class Selection:
    """Base class of functions that keep only the named fields of a sample."""

    keeps_source: ClassVar[bool] = False  # True if the fields that name a sample's source are kept, too

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    @property
    def wanted(self) -> tuple[frozenset[str], ...]:
        """The alternative fields of each name, without those that name a sample's source."""
        return tuple(frozenset(names.split(";")) for names in self.names if not names.startswith("__"))

    @property
    def names_source(self) -> bool:
        """True if later steps may use the name of a sample's source in a mixture."""
        return self.keeps_source or any("__source__" in names.split(";") for names in self.names)


class Select(Selection):
    """Keeps the named fields of a sample, and those that name its source."""

    keeps_source = True

    def __call__(self, sample: dict[str, object]) -> dict[str, object]:
        kept = {find_field(sample, names) for names in self.names}
        return {name: value for name, value in sample.items() if name in kept or name.startswith("__")}


class ToTuple(Selection):
    def __call__(self, sample: dict[str, object]) -> tuple[object, ...]:
        return tuple(sample[find_field(sample, names)] for names in self.names)


class Rename:
    def __init__(self, new_by_old: dict[str, str]) -> None:
        self._new_by_old = new_by_old

    def __call__(self, sample: dict[str, object]) -> dict[str, object]:
        new_by_old = {find_field(sample, old, "rename"): new for old, new in self._new_by_old.items()}
        renamed = {new_by_old.get(name, name): value for name, value in sample.items()}
        if len(renamed) != len(sample):
            twice = [new for new in new_by_old.values() if new in sample and new not in new_by_old]
            raise ValueError(
                f"rename: the sample has a field {twice[0]!r} already: rename that, too, or .select() others"
            )
        return renamed


def select(names: tuple[str, ...]) -> EachSample:
    return _selecting("select", Select(names))


def to_tuple(names: tuple[str, ...]) -> EachSample:
    return _selecting("to_tuple", ToTuple(names))


def _selecting(name: str, selection: Select | ToTuple) -> EachSample:
    check.names(f".{name}(): names", {*selection.names})
    return EachSample(Step(f"{name}({', '.join(selection.names)})", "map", selection), selection=selection)


def rename(new_by_old: dict[str, str]) -> EachSample:
    check.names(".rename(): new names", [*new_by_old.values()])
    named = ", ".join(f"{old}={new}" for old, new in new_by_old.items())
    return EachSample(Step(f"rename({named})", "map", Rename(new_by_old)))
