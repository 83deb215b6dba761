"""Samples from the bytes of tf.train.Example and tf.train.SequenceExample."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.formats.limits import Limits
from headrace.formats.tfrecord.messages import bytes_of, fields_of, floats_of, integers_of, varint_bytes

_BYTES, _FLOATS, _INTEGERS = 1, 2, 3


def sample_of(data: bytes, lists: frozenset[str], limits: Limits) -> dict[str, object]:
    """The features of an example.

    Args:
        lists: the fields whose bytes are lists, also of one.

    Raises:
        ValueError: it is none; the message names the feature.
    """
    sample: dict[str, object] = {}
    sequences: dict[str, object] = {}
    for number, value in fields_of(data):
        if number == 1:
            sample.update(_features(bytes_of(value), lists, limits))
        elif number == 2:
            sequences.update(_sequences(bytes_of(value), limits))
        else:
            raise ValueError(
                f"it has a field {number}, so it is no tf.train.Example; TFRecord(raw=True) gives its bytes"
            )
    both = sample.keys() & sequences.keys()
    if both:
        raise ValueError(f"its feature {min(both)[:80]!r} is in its context and in its lists")
    if len(sample) + len(sequences) > limits.fields:
        raise ValueError(f"it has {len(sample) + len(sequences)} features, over the limit of {limits.fields}")
    return {**sample, **sequences}


def _entries(data: bytes, limits: Limits) -> Iterator[tuple[str, bytes]]:
    """Key and value of each entry of a message that is a map."""
    for count, (number, entry) in enumerate(fields_of(data)):
        if number != 1:
            raise ValueError(f"its features have a field {number}, which is not known")
        if count >= limits.fields:
            raise ValueError(f"it has more than {limits.fields} features, the limit")
        key = body = b""
        for part, value in fields_of(bytes_of(entry)):
            if part == 1:
                key = bytes_of(value)
            elif part == 2:
                body = bytes_of(value)
        yield str(key, "utf-8"), body


def _features(data: bytes, lists: frozenset[str], limits: Limits) -> Iterator[tuple[str, object]]:
    for name, body in _entries(data, limits):
        try:
            value = _values(body)
        except ValueError as error:
            raise ValueError(f"feature {name[:80]!r}: {error}") from None
        yield name, value[0] if isinstance(value, list) and len(value) == 1 and name not in lists else value


def _sequences(data: bytes, limits: Limits) -> Iterator[tuple[str, object]]:
    for name, body in _entries(data, limits):
        try:
            yield name, [_values(bytes_of(value)) for number, value in fields_of(body) if number == 1]
        except ValueError as error:
            raise ValueError(f"feature {name[:80]!r}: {error}") from None


def _values(feature: bytes) -> object:
    """A list of bytes, an array of floats or integers, or None, of which of them is not said."""
    kind = 0
    parts: list[bytes | int] = []
    for number, body in fields_of(feature):
        if number not in (_BYTES, _FLOATS, _INTEGERS):
            raise ValueError(f"it is of a kind {number}, which is not known")
        if number != kind:  # of several kinds the last one holds
            kind, parts = number, []
        parts += [value for part, value in fields_of(bytes_of(body)) if part == 1]
    if kind == _BYTES:
        return [bytes_of(value) for value in parts]
    if kind == _FLOATS:
        return floats_of(b"".join(map(bytes_of, parts)))
    if kind == _INTEGERS:
        packed = (varint_bytes(value) if isinstance(value, int) else value for value in parts)
        return integers_of(b"".join(packed)) if parts else np.zeros(0, np.int64)
    return None
