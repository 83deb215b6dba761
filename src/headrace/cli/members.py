"""Converts samples of any kind to members of a tar archive."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.errors import OptionError
from headrace.formats.decoders import WHAT_BY_EXTENSION

IMAGES = {  # the extension of an image by its first bytes
    b"\xff\xd8\xff": "jpg",
    b"\x89PNG": "png",
    b"GIF8": "gif",
    b"RIFF": "webp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
    b"BM": "bmp",
}


def key_of(sample: Mapping[str, Any], number: int, taken: set[str]) -> str:
    """Return the sample's key, if it is valid and unique in its shard; else its number."""
    given = sample.get("__key__")
    key = given if isinstance(given, str) else ""
    name = key.rpartition("/")[2]
    is_plain = name and "." not in name and key.isprintable() and not key.startswith("/") and "//" not in key
    if not is_plain or key in taken or any(part in (".", "..") for part in key.split("/")):
        key = f"{number:012d}"
        if key in taken:
            raise OptionError(f"sample {number} has no key, and its number is the key of another")
    taken.add(key)
    return key


def members_of(sample: Mapping[str, Any], number: int) -> dict[str, bytes]:
    """Return the bytes of a sample's fields, by extensions that identify their type.

    Bytes keep the field's name. Texts become .txt, arrays .npy, all else .json. If the name already has that extension,
    none is added. The field "image" gets the extension of its image format, which other readers need.

    Raises:
        OptionError: a field cannot be stored, or there is none.
    """
    members: dict[str, bytes] = {}
    for field, value in sample.items():
        if field.startswith("__"):
            continue
        extension, body = _told(field, value, number)
        name = (f"{field}.{extension}" if extension else field).lower()
        if name == "image":
            name = next((kind for start, kind in IMAGES.items() if body.startswith(start)), name)
        if not field or "/" in field or not field.isprintable() or name in members:
            raise OptionError(f"sample {number}: the field {field!r} cannot be a member's extension, or two are alike")
        members[name] = body
    if not members:
        raise OptionError(f"sample {number} has no fields: nothing of it would be written")
    return members


def _told(field: str, value: Any, number: int) -> tuple[str, bytes]:
    """Return (extension to add, bytes)."""
    what = WHAT_BY_EXTENSION.get(field.rpartition(".")[2])
    if isinstance(value, bytes | bytearray | memoryview):
        return "", bytes(value)
    if isinstance(value, str):
        return "" if what == "text" else "txt", value.encode("utf-8", "surrogatepass")
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        out = io.BytesIO()
        np.save(out, value, allow_pickle=False)
        return "" if what == "npy" else "npy", out.getvalue()
    if type(value) is int and what == "int":
        return "", str(value).encode()
    try:
        value = value.item() if isinstance(value, np.generic) else value
        return "" if what == "json" else "json", json.dumps(value, allow_nan=True, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        what = f"sample {number}: field {field!r} is a {type(value).__name__}"
        raise OptionError(f"{what}, which has no bytes: {error}") from error
