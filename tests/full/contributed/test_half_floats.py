"""A decoder of another package: registered by a call or an entry point, it keeps the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from builders.loops import flat, given
from builders.tars import tar
from full.contributed import half_floats

import headrace as hr
from headrace.fetch.stores import memory
from headrace.formats import decoders
from headrace.testing import DecoderContract

VECTORS = [np.arange(n, dtype=np.float16) / 3 for n in (0, 1, 7)]


PLACE = "full.contributed.half_floats:decode"
Install = Callable[..., None]


class TestHalfFloats(DecoderContract):
    extension = "half"
    examples = [(half_floats.encode(vector), vector) for vector in VECTORS]
    whole = half_floats.encode(VECTORS[1])
    damaged = [b"", b"HALF", b"HALX\0\0\0\0", whole[:-1], whole + b"!"]

    @pytest.fixture(autouse=True, params=["call", "entry point"])
    def registered(self, install: Install, request: pytest.FixtureRequest) -> None:
        if request.param == "call":
            hr.plugins.register_decoder("half", half_floats.decode)
        else:
            install(decoders, ("half", PLACE))

    def decode(self, data: bytes) -> object:
        return half_floats.decode(data)


@pytest.mark.parametrize("way", ["call", "entry point", "lambda"])
@pytest.mark.parametrize("workers", [0, 1])
def test_registered_decoder_is_there_in_the_workers(workers: int, way: str, install: Install) -> None:
    if way == "entry point":
        install(decoders, ("half", PLACE))
    else:
        hr.plugins.register_decoder(
            "half", half_floats.decode if way == "call" else lambda data: half_floats.decode(data)
        )
    empty = half_floats.encode(VECTORS[0])
    samples = [(str(n), {"x.half": half_floats.encode(VECTORS[2] + n), "y": empty}) for n in range(9)]
    memory.put("memory://half/0.tar", tar(samples))
    data = hr.stream("memory://half/0.tar", index=None).decode(y="half").to_tuple("x.half", "y")
    got = flat(given(data, batch_size=3, num_workers=workers))
    assert all(np.array_equal(x, VECTORS[2] + n) and x.dtype == np.float16 for n, (x, _) in enumerate(got))
    assert [len(y) for _, y in got] == [0] * 9


def test_registered_decoder_applies_to_later_streams() -> None:
    before = hr.from_map([{"half": half_floats.encode(VECTORS[1])}]).decode()
    hr.plugins.register_decoder("half", half_floats.decode)
    assert isinstance(before[0]["half"], bytes)
    assert isinstance(hr.from_map([{"half": half_floats.encode(VECTORS[1])}]).decode()[0]["half"], np.ndarray)


REFUSED = [(extension, half_floats.decode, "extension=") for extension in
           ("json", "jpg", "gz", "rgb8", "bytes", "", "A", "a.b", "a b", None)]  # fmt: skip


@pytest.mark.parametrize(("extension", "decode", "text"), [*REFUSED, ("half", b"", "decode=")])
def test_built_in_extension_or_invalid_function_is_refused(extension: str, decode: Any, text: str) -> None:
    with pytest.raises(hr.OptionError, match=text):
        hr.plugins.register_decoder(extension, decode)


def test_entry_point_of_an_extension_that_is_ours_is_ignored(install: Install) -> None:
    install(decoders, ("json", PLACE))
    assert hr.from_map([{"json": b"[1]"}]).decode()[0]["json"] == [1]
