"""`.map()`: a function of each sample, or of one of its fields; and `.enumerate()`."""

from __future__ import annotations

from typing import Any

from headrace._util import check
from headrace._util.functions import as_it_is, is_async, name_of
from headrace.ops.operator import EachSample, SampleFunction, field_of, with_field
from headrace.workers.tasks import Step


def map_samples(fn: SampleFunction, field: str | int | None, *, random: bool) -> EachSample:
    check.function(".map(): fn", fn)
    if field is not None:
        fn = on_field(fn, field)
    return EachSample(Step(f"map({name_of(fn)})", "map", fn, random))


def number_samples() -> EachSample:
    """Return the operator of `.enumerate()`. Workers add the numbers."""
    return EachSample(Step("enumerate()", "map", as_it_is, is_numbered=True))


def on_field(function: SampleFunction, field: str | int) -> SampleFunction:
    return AsyncFieldMap(function, field) if is_async(function) else FieldMap(function, field)


class FieldMap:
    def __init__(self, function: SampleFunction, field: str | int) -> None:
        self.function, self.field = function, field
        self.__qualname__ = f"{name_of(function)}, field={field!r}"

    def __call__(self, sample: Any) -> object:
        return with_field(sample, self.field, self.function(field_of(sample, self.field)))


class AsyncFieldMap(FieldMap):
    async def __call__(self, sample: Any) -> object:
        return with_field(sample, self.field, await self.function(field_of(sample, self.field)))
