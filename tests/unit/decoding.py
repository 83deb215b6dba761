"""One field of one sample through a decoder, and pictures to decode."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from headrace.errors import DecodeError
from headrace.formats.decoders import decoder

WHERE = {"__key__": "d/7", "__url__": "s3://bucket/a.tar"}
SMOOTH = np.stack([*np.meshgrid(np.arange(48), np.arange(36)), np.full((36, 48), 90)], -1).astype(np.uint8) * 2


def decoded(field: str, data: Any, *args: Any, **options: Any) -> Any:
    return decoder(*args, **options)({**WHERE, field: data})[field]


def failure(field: str, data: Any, *args: Any, **options: Any) -> DecodeError:
    """The error that decoding ends in, which names the field, the sample and the shard."""
    with pytest.raises(DecodeError) as caught:
        decoded(field, data, *args, **options)
    error = caught.value
    assert (error.field, error.key, error.url, error.stage) == (field, "d/7", "s3://bucket/a.tar", "decode")
    assert str(error).startswith(f"field '{field}' does not decode as ")
    assert error.__cause__ is not None
    return error


def picture(kind: str, array: NDArray[Any] = SMOOTH, mode: str | None = None, **options: Any) -> bytes:
    image = Image.fromarray(array)
    return saved_image(image.convert(mode) if mode else image, kind, **options)


def saved_image(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def mean_difference(one: NDArray[Any], other: NDArray[Any]) -> float:
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    return float(np.abs(one.astype(int) - other).mean())
