"""Functions of single fields of samples, and what gives some fields alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from headrace.errors import FormatError, masked
from headrace.functions import is_async, name_of


def on_field(function: Callable[[Any], Any], field: str | int) -> Callable[[Any], Any]:
    """`function` for one field of a sample, the rest as it is."""
    return AsyncFieldMap(function, field) if is_async(function) else FieldMap(function, field)


class FieldMap:
    """Applies a function to one field of a dict or one position of a tuple."""

    def __init__(self, function: Callable[[Any], Any], field: str | int) -> None:
        self.function, self.field = function, field
        self.__qualname__ = f"{name_of(function)}, field={field!r}"

    def __call__(self, sample: Any) -> object:
        return _with(sample, self.field, self.function(_of(sample, self.field)))


class AsyncFieldMap(FieldMap):
    """The same for a coroutine function."""

    async def __call__(self, sample: Any) -> object:
        return _with(sample, self.field, await self.function(_of(sample, self.field)))


def _of(sample: Any, field: str | int) -> Any:
    return sample[find_field(sample, str(field))] if isinstance(sample, dict) else sample[field]


def _with(sample: Any, field: str | int, value: object) -> object:
    if isinstance(sample, dict):
        return {**sample, find_field(sample, str(field)): value}
    items = list(sample)
    items[int(field)] = value
    return type(sample)(*items) if hasattr(sample, "_fields") else type(sample)(items)


def find_field(sample: dict[str, Any], names: str) -> str:
    """The first of `names` (separated by ";") that the sample has.

    Raises:
        FormatError: it has none of them.
    """
    for name in names.split(";"):
        if name in sample:
            return name
    key, url = sample.get("__key__"), sample.get("__url__")
    have = ", ".join(sorted(str(name) for name in sample if not str(name).startswith("__"))) or "none"
    wanted = " or ".join(map(repr, names.split(";")))
    raise FormatError(
        f"sample {key!r} of {masked(str(url))} has no field {wanted}; its fields are: {have}",
        stage="to_tuple",
        key=key,
        url=url,
    )


class FieldFilter:
    """Asks a function of one field of a sample."""

    def __init__(self, function: Callable[[Any], Any], field: str | int) -> None:
        self.function, self.field = function, field
        self.__qualname__ = f"{name_of(function)}, field={field!r}"

    def __call__(self, sample: Any) -> object:
        return self.function(_of(sample, self.field))


class AsyncFieldFilter(FieldFilter):
    """The same for a coroutine function."""

    async def __call__(self, sample: Any) -> object:
        return await self.function(_of(sample, self.field))


class Selection:
    """What gives the named fields of a sample alone, and nothing of the others."""

    keeps_source: ClassVar[bool] = False  # what says where a sample is from stays, too

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    @property
    def wanted(self) -> tuple[frozenset[str], ...]:
        """For each name the fields that it may be, but for what says where a sample is from."""
        return tuple(frozenset(names.split(";")) for names in self.names if not names.startswith("__"))

    @property
    def names_source(self) -> bool:
        """Whether what follows may ask which source of a mixture a sample is of."""
        return self.keeps_source or any("__source__" in names.split(";") for names in self.names)


class Select(Selection):
    """Keeps the named fields of a sample, and what says where it is from."""

    keeps_source = True

    def __call__(self, sample: dict[str, object]) -> dict[str, object]:
        kept = {find_field(sample, names) for names in self.names}
        return {name: value for name, value in sample.items() if name in kept or name.startswith("__")}


class ToTuple(Selection):
    """Makes a tuple of the named fields of a sample."""

    def __call__(self, sample: dict[str, object]) -> tuple[object, ...]:
        return tuple(sample[find_field(sample, names)] for names in self.names)
