"""A decoder of another package: registered by a call or an entry point, it keeps the contract."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from builders.loops import flat, given
from full.contributed.documented import decode_point

import headrace as hr
from headrace.formats import decoders
from headrace.testing import DecoderContract

PLACE = "full.contributed.documented:decode_point"
POINT = struct.pack("<3f", 1, 2, 3.5)
Install = Callable[..., None]


class TestPoints(DecoderContract):
    extension = "point"
    examples = [(POINT, (1.0, 2.0, 3.5))]
    damaged = [b"", bytes(11), bytes(13)]
    decode = staticmethod(decode_point)

    @pytest.fixture(autouse=True, params=["call", "entry point"])
    def registered(self, install: Install, request: pytest.FixtureRequest) -> None:
        if request.param == "call":
            hr.plugins.register_decoder("point", decode_point)
        else:
            install(decoders, ("point", PLACE))


@pytest.mark.parametrize("way", ["call", "entry point", "lambda"])
@pytest.mark.parametrize("workers", [0, 1])
def test_registered_decoder_is_there_in_the_workers(workers: int, way: str, install: Install) -> None:
    if way == "entry point":
        install(decoders, ("point", PLACE))
    else:
        hr.plugins.register_decoder("point", decode_point if way == "call" else lambda data: decode_point(data))
    samples = [{"x.point": struct.pack("<3f", n, 0, 0), "y": POINT} for n in range(9)]
    data = hr.from_map(samples).decode(y="point").to_tuple("x.point", "y")
    assert flat(given(data, batch_size=3, num_workers=workers)) == [((n, 0, 0), (1, 2, 3.5)) for n in range(9)]


def test_registered_decoder_applies_to_later_streams() -> None:
    before = hr.from_map([{"point": POINT}]).decode()
    hr.plugins.register_decoder("point", decode_point)
    assert before[0]["point"] == POINT
    assert hr.from_map([{"point": POINT}]).decode()[0]["point"] == (1, 2, 3.5)


REFUSED = [(extension, decode_point, "extension=") for extension in
           ("json", "jpg", "gz", "rgb8", "bytes", "", "A", "a.b", "a b", None)]  # fmt: skip


@pytest.mark.parametrize(("extension", "decode", "text"), [*REFUSED, ("point", b"", "decode=")])
def test_built_in_extension_or_invalid_function_is_refused(extension: str, decode: Any, text: str) -> None:
    with pytest.raises(hr.OptionError, match=text):
        hr.plugins.register_decoder(extension, decode)


def test_entry_point_of_an_extension_that_is_ours_is_ignored(install: Install) -> None:
    install(decoders, ("json", PLACE))
    assert hr.from_map([{"json": b"[1]"}]).decode()[0]["json"] == [1]
