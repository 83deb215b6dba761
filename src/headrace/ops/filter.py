"""`.filter()`: samples for which a function is true. An index answers filters by key without reading samples."""

from __future__ import annotations

from typing import Any

from headrace._util import check
from headrace._util.functions import is_async, name_of
from headrace.ops.operator import EachSample, SampleFunction, field_of
from headrace.workers.tasks import Step


def filter_samples(fn: SampleFunction, field: str | int | None, *, random: bool) -> EachSample:
    keeps_key = None
    check.function(".filter(): fn", fn)
    if field is not None:
        keeps_key = fn if field == "__key__" and not is_async(fn) else None
        fn = AsyncFieldFilter(fn, field) if is_async(fn) else FieldFilter(fn, field)
    return EachSample(Step(f"filter({name_of(fn)})", "filter", fn, random), keeps_key=keeps_key)


class FieldFilter:
    def __init__(self, function: SampleFunction, field: str | int) -> None:
        self.function, self.field = function, field
        self.__qualname__ = f"{name_of(function)}, field={field!r}"

    def __call__(self, sample: Any) -> object:
        return self.function(field_of(sample, self.field))


class AsyncFieldFilter(FieldFilter):
    async def __call__(self, sample: Any) -> object:
        return await self.function(field_of(sample, self.field))
