"""Access to single fields of samples."""

from __future__ import annotations

from typing import Any

from headrace.errors import FormatError, masked


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
    """Return the first of `names` (separated by ";") that the sample has."""
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


def with_source(sample: object, name: str) -> object:
    """Add the name of the source to a sample that is a dict."""
    return {**sample, "__source__": name} if isinstance(sample, dict) else sample
