"""`.decode()`: decoding of fields by their names."""

from __future__ import annotations

from typing import Any

from headrace.formats.decoders import decoder
from headrace.formats.limits import Limits
from headrace.ops.operator import EachSample
from headrace.workers.tasks import Step


def decode(
    spec: str | None, by_field: dict[str, Any], *, size: tuple[int, int] | None, limits: Limits, allow_pickle: bool
) -> EachSample:
    decodes = decoder(spec, size=size, limits=limits, allow_pickle=allow_pickle, **by_field)
    may_draw = any(callable(how) and not isinstance(how, type) for how in by_field.values())
    name = f"decode({spec})" if spec else "decode"
    return EachSample(Step(name, "map", decodes, may_draw or None), decoder=decodes)
