"""Functions of single fields of samples, and selections of fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from headrace._util.functions import is_async, name_of
from headrace.errors import FormatError, masked


def on_field(function: Callable[[Any], Any], field: str | int) -> Callable[[Any], Any]:
    return AsyncFieldMap(function, field) if is_async(function) else FieldMap(function, field)


class FieldMap:
    def __init__(self, function: Callable[[Any], Any], field: str | int) -> None:
        self.function, self.field = function, field
        self.__qualname__ = f"{name_of(function)}, field={field!r}"

    def __call__(self, sample: Any) -> object:
        return with_field(sample, self.field, self.function(field_of(sample, self.field)))


class AsyncFieldMap(FieldMap):
    async def __call__(self, sample: Any) -> object:
        return with_field(sample, self.field, await self.function(field_of(sample, self.field)))


def field_of(sample: Any, field: str | int) -> Any:
    """Return one field of a dict, or one position of a tuple."""
    if isinstance(sample, dict):
        return sample[find_field(sample, str(field))]
    try:
        return sample[field]
    except TypeError as error:
        error.add_note(
            f"field={field!r} of a sample that is a {type(sample).__name__}: tuples have them by their places"
        )
        raise


def with_field(sample: Any, field: str | int, value: object, into: str | None = None) -> object:
    """Return the sample with a field replaced and, if fields have names, renamed to `into`."""
    if not isinstance(sample, dict):
        items = list(sample)
        items[int(field)] = value
        return type(sample)(*items) if hasattr(sample, "_fields") else type(sample)(items)
    name = find_field(sample, str(field))
    if into in (None, name):
        return {**sample, name: value}
    if into in sample:
        raise ValueError(f"the sample has a field {into!r} already: give another name by into=")
    return {**{other: given for other, given in sample.items() if other != name}, into: value}


def find_field(sample: dict[str, Any], names: str, stage: str = "to_tuple") -> str:
    """Return the first of `names` (separated by ";") that the sample has.

    Raises:
        FormatError: The sample has none of them.
    """
    if not hasattr(sample, "keys"):
        raise TypeError(f"the sample is a {type(sample).__name__}, whose fields have no names: {names!r}")
    for name in names.split(";"):
        if name in sample:
            return name
    key, url = sample.get("__key__"), sample.get("__url__")
    have = ", ".join(sorted(str(name) for name in sample if not str(name).startswith("__"))) or "none"
    wanted = " or ".join(map(repr, names.split(";")))
    raise FormatError(
        f"sample {key!r} of {masked(str(url))} has no field {wanted}; its fields are: {have}",
        stage=stage,
        key=key,
        url=url,
    )


class FieldFilter:
    def __init__(self, function: Callable[[Any], Any], field: str | int) -> None:
        self.function, self.field = function, field
        self.__qualname__ = f"{name_of(function)}, field={field!r}"

    def __call__(self, sample: Any) -> object:
        return self.function(field_of(sample, self.field))


class AsyncFieldFilter(FieldFilter):
    async def __call__(self, sample: Any) -> object:
        return await self.function(field_of(sample, self.field))


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
