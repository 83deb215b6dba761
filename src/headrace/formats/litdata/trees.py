"""Builds samples from leaves, by the tree that torch's pytree has written."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from headrace.formats.json_values import as_list, as_object, as_text, as_texts
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.litdata.leaves import Decode, leaf_decoder
from headrace.formats.plain import decode_json

Build = Callable[[Iterator[object]], object]

_VERSION = 1
_DEPTH_MOST = 100
_DICTS = ("builtins.dict", "collections.OrderedDict")
_SEQUENCES: dict[str, Callable[[list[object]], object]] = {"builtins.list": list, "builtins.tuple": tuple}
ALONE = "value"


class Tree(NamedTuple):
    """The leaves of items, (name, decoder) each, and a builder of samples from their values."""

    leaves: tuple[tuple[str, Decode], ...]
    build: Build

    def sample(self, data: bytes) -> dict[str, object]:
        """Decode an item to a sample. A ValueError names the damaged leaf."""
        end = 4 * len(self.leaves)
        if end > len(data):
            raise ValueError(f"it has {len(data)} bytes, and the sizes of its leaves take {end}")
        values = []
        for (name, decode), size in zip(self.leaves, struct.unpack_from(f"<{end // 4}I", data), strict=True):
            if end + size > len(data):
                raise ValueError(f"leaf {name!r} has {size} bytes, and {len(data) - end} are left")
            try:
                values.append(decode(data[end : end + size]))
            except Exception as error:
                why = str(error)[:500] or type(error).__name__
                raise ValueError(f"leaf {name!r} does not decode: {why}") from error
            end += size
        if end != len(data):
            raise ValueError(f"its leaves end at byte {end} of {len(data)}")
        sample = self.build(iter(values))
        assert isinstance(sample, dict)
        return sample

    def end_at(self, data: bytes, at: int) -> int:
        begin = at + 4 * len(self.leaves)
        end = begin
        if begin <= len(data):
            end += sum(struct.unpack_from(f"<{len(self.leaves)}I", data, at))
        if end > len(data) or begin > len(data):
            raise ValueError("an item is cut off")
        return end


@lru_cache(maxsize=64)
def tree_of(formats: str, spec: str, unpickle: tuple[str, ...] = (), limits: Limits = DEFAULTS) -> Tree:
    """Return the tree of leaves. `formats` is JSON. Raises a ValueError if not supported."""
    names = as_texts(json.loads(formats))
    said = as_list(decode_json(spec.encode()))
    if names is None or said is None or len(said) != 2 or said[0] != _VERSION:
        raise ValueError("its data_format and data_spec are none that are known")
    if len(names) > limits.fields:
        raise ValueError(f"its items have {len(names)} leaves, over the limit of {limits.fields}")
    paths: list[str] = []
    build = _sample_builder(said[1], paths)
    if len(paths) != len(names):
        raise ValueError(f"its data_spec has {len(paths)} leaves, and its data_format {len(names)}")
    leaves = [
        (path, leaf_decoder(name, path, limits, is_unpickled=path.partition("/")[0] in unpickle))
        for path, name in zip(paths, names, strict=True)
    ]
    return Tree(tuple(leaves), build)


def _sample_builder(spec: object, paths: list[str]) -> Build:
    """Build a dict of any item: sequences by number, a single leaf under the name `ALONE`."""
    said = as_object(spec) or {}
    kind, children = said.get("type"), as_list(said.get("children_spec"))
    if kind is None and children == []:
        paths.append(ALONE)
        return lambda leaves: {ALONE: next(leaves)}
    keys = list(map(str, range(len(children or ())))) if kind in _SEQUENCES else [str(key) for key in _keys(said)]
    if len(set(keys)) < len(keys):
        raise ValueError("its items have two fields of one name")
    for key in keys:
        if key.startswith("__"):
            raise ValueError(f"its items have a field {key[:80]!r}; names that begin with '__' are taken")
    parts = [_builder(child, key, paths, 1) for key, child in zip(keys, children or (), strict=True)]
    return lambda leaves: {key: part(leaves) for key, part in zip(keys, parts, strict=True)}


def _builder(spec: object, path: str, paths: list[str], depth: int) -> Build:
    said = as_object(spec) or {}
    kind, children = said.get("type"), as_list(said.get("children_spec"))
    if children is None or depth > _DEPTH_MOST:
        raise ValueError("its data_spec is no tree")
    if kind is None:
        if children:
            raise ValueError("its data_spec has a leaf with children")
        paths.append(path)
        return next
    make = _SEQUENCES.get(as_text(kind) or "")
    keys = list(range(len(children))) if make is not None else _keys(said)
    parts = [_builder(child, f"{path}/{key}", paths, depth + 1) for key, child in zip(keys, children, strict=True)]
    if make is not None:
        return lambda leaves: make([part(leaves) for part in parts])
    return lambda leaves: {key: part(leaves) for key, part in zip(keys, parts, strict=True)}


def _keys(said: dict[str, object]) -> list[object]:
    kind, context = as_text(said.get("type")), as_text(said.get("context"))
    if kind not in _DICTS or context is None:
        raise ValueError(f"its items hold a {str(said.get('type'))[:80]!r}, which is not read")
    keys, children = as_list(decode_json(context.encode())), as_list(said.get("children_spec"))
    is_right = keys is not None and all(type(key) in (str, int, bool, float) for key in keys)
    if keys is None or not is_right or len(keys) != len(children or ()) or len(set(keys)) < len(keys):
        raise ValueError("the keys in its data_spec are none")
    return keys
