"""torch's default_collate for workers. Most write into slots and never call it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.errors import CollateError


def collate_by_torch(samples: list[object]) -> object:
    """Collate as torch's default_collate does. Imports torch at the first call.

    Raises:
        CollateError: the samples have different fields. torch would drop those that the first sample lacks.
    """
    from torch.utils.data import default_collate
    from torch.utils.data._utils.collate import default_collate_fn_map

    check_fields(samples, tuple(default_collate_fn_map))
    return default_collate(samples)


def check_fields(samples: Sequence[object], leaves: tuple[type | tuple[type, ...], ...] = ()) -> None:
    """Compare the fields of the samples of a batch, also in nested dicts, except in `leaves`.

    Raises:
        CollateError: a sample lacks a field that another has.
    """
    _check(samples, samples, "", leaves)


def _check(
    values: Sequence[Any], samples: Sequence[object], path: str, leaves: tuple[type | tuple[type, ...], ...]
) -> None:
    first = values[0]
    if isinstance(first, leaves):
        return
    if isinstance(first, Mapping):
        for number, value in enumerate(values):
            if not isinstance(value, Mapping):
                return  # collation raises for these
            if value.keys() != first.keys() and set(value) != set(first):  # keys() may not be a set
                raise _other_fields(first, value, number, samples, path)
        for name in first:
            _check([value[name] for value in values], samples, f"{path}{name}.", leaves)
    elif _is_row(first) and any(isinstance(part, Mapping | list | tuple) for part in first):
        sizes = {len(value) if _is_row(value) else None for value in values}
        for place, column in enumerate(zip(*values, strict=True) if sizes == {len(first)} else ()):
            _check(column, samples, f"{path}{place}.", leaves)


def _other_fields(
    first: Mapping[object, object], other: Mapping[object, object], number: int, samples: Sequence[object], path: str
) -> CollateError:
    more = [name for name in other if name not in first]
    name, has, lacks = (more[0], number, 0) if more else (next(name for name in first if name not in other), 0, number)
    return CollateError(
        f"{_named(samples, has)} has the field {f'{path}{name}'!r}, and {_named(samples, lacks)} lacks it: the samples "
        "of a batch need the same fields. Add the missing values by .map(), take the fields that all have by "
        ".select(), or give a collate_fn",
        stage="collate",
    )


def why_no_batch(samples: Sequence[object]) -> str | None:
    """Describe the None, or the list of another length, that made collation fail, if any."""
    return _why(samples, samples, "")


def _why(values: Sequence[Any], samples: Sequence[object], path: str) -> str | None:
    first = values[0]
    field = f"field {path[:-1]!r} of " if path else ""
    for number, value in enumerate(values):
        if value is None:
            return (
                f"{field}{_named(samples, number)} is None. Fill it by .map(), or leave such samples out by .filter()"
            )
    if all(isinstance(value, Mapping) for value in values):
        columns = [(name, [value.get(name) for value in values]) for name in first]
    elif all(map(_is_row, values)):
        for number, value in enumerate(values):
            if len(value) != len(first):
                return (
                    f"{field}{_named(samples, 0)} has {len(first)} values, and of {_named(samples, number)} "
                    f"{len(value)}. Pad them by .padded_batch(…), or make them of one length by .map()"
                )
        columns = [(str(place), list(column)) for place, column in enumerate(zip(*values, strict=True))]
    else:
        return None
    found = (_why(column, samples, f"{path}{name}.") for name, column in columns)
    return next((why for why in found if why is not None), None)


def _is_row(value: object) -> bool:
    return isinstance(value, list | tuple)


def _named(samples: Sequence[object], number: int) -> str:
    sample = samples[number]
    key = sample.get("__key__") if isinstance(sample, Mapping) else None
    return f"sample {number} of the batch" if key is None else f"sample {number} of the batch (key {key!r:.80})"


def for_workers(collate: Callable[[list[Any]], object] | None) -> Callable[[list[Any]], object] | None:
    """Return an equivalent function that can be sent to a worker without torch."""
    from torch.utils.data import default_collate

    return collate_by_torch if collate is default_collate else collate
