"""The contract of decoders, as tests."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from headrace.errors import DecodeError
from headrace.formats.decoders import Decoder, decoder
from headrace.torch_compat import serialize


class DecoderContract:
    """Tests of a decoder. Inherit the class and define `decode`, `examples` and `damaged`.

        class TestHex(DecoderContract):
            extension = "hex"
            examples = [(b"ff", 255)]
            damaged = [b"", b"xyz"]

            def decode(self, data):
                return int(data, 16)

    Attributes:
        extension: Extension for which the decoder is registered.
        examples: (bytes, decoded value), of every kind.
        damaged: Bytes that are invalid.
        called: Argument of `.decode()` for a field. None: the extension determines the decoder.
        options: Other arguments of `.decode()`, such as `spec` for images.
    """

    extension: ClassVar[str]
    examples: ClassVar[Sequence[tuple[bytes, object]]]
    damaged: ClassVar[Sequence[bytes]] = ()
    called: ClassVar[Any] = None
    options: ClassVar[Mapping[str, Any]] = {}

    def decode(self, data: bytes) -> object:
        """Return the value, as the decoder does."""
        raise NotImplementedError

    def test_value_is_what_was_written(self) -> None:
        assert self.examples, "examples of the format are needed"
        for data, value in self.examples:
            assert same(self.decode(data), value), f"{data[:80]!r} is {self.decode(data)!r:.200}, not {value!r:.200}"

    def test_value_is_the_same_each_time(self) -> None:
        for data, _ in self.examples:
            assert same(self.decode(data), self.decode(bytes(bytearray(data))))

    def test_value_travels_between_processes(self) -> None:
        for data, _ in self.examples:
            value = self.decode(data)
            packed = serialize.pack(value)
            target = memoryview(bytearray(serialize.packed_size(packed)))
            assert same(serialize.unpack(target, serialize.write(packed, target), copy=True), value)

    def test_damage_raises(self) -> None:
        for data in self.damaged:
            assert _raised(self.decode, data) is not None, f"{data[:80]!r} is damaged, and a value was given for it"

    def test_stream_decodes_the_field_and_names_what_does_not(self) -> None:
        name = f"some.{self.extension}"
        decode = self._stream(name)
        for data, value in self.examples:
            assert same(decode({"__key__": "k", name: data})[name], value), f"register_decoder({self.extension!r}, …)"
        for data in self.damaged:
            error = _raised(decode, {"__key__": "k", "__url__": "u", name: data})
            assert isinstance(error, DecodeError), f"{data[:80]!r} is damaged, and no DecodeError reports it"
            assert (error.field, error.key) == (name, "k")

    def test_stream_decodes_the_field_in_gzip(self) -> None:
        name = f"some.{self.extension}.gz"
        decode = self._stream(name)
        for data, value in self.examples:
            assert same(decode({"__key__": "k", name: gzip.compress(data, 1)})[name], value)

    def test_value_keeps_nothing_of_the_bytes(self) -> None:
        """Their memory is reused."""
        name = f"some.{self.extension}"
        decode = self._stream(name)
        for data, value in self.examples:
            memory = bytearray(data)
            decoded = decode({"__key__": "k", name: memoryview(memory)})[name]
            memory[:] = bytes(len(memory))
            assert same(decoded, value)

    def _stream(self, name: str) -> Decoder:
        return decoder(**self.options, **({} if self.called is None else {name: self.called}))


def _raised(decode: Callable[[Any], object], data: object) -> Exception | None:
    try:
        decode(data)
    except Exception as error:
        return error
    return None


def same(one: Any, other: Any) -> bool:
    """True if two values are equal, with types and shapes of arrays and tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "untyped_storage"):  # numpy does not have all dtypes of tensors
        flat, others = (some.contiguous().reshape(-1).view(torch.uint8) for some in (one, other))
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(flat, others)
    if hasattr(one, "dtype"):
        a, b = np.asarray(one), np.asarray(other)
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    return bool(one == other) or (one != one and other != other)  # noqa: PLR0124 (not a number)
