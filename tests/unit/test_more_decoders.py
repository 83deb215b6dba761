"""Audio, MessagePack and tensors from bytes: what was written, within limits, and without running anything."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image, features

from headrace.errors import DecodeError, OptionError
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.values import decoder
from headrace.testing.decoders import same

soundfile = pytest.importorskip("soundfile")
msgpack = pytest.importorskip("msgpack")

TONE = np.sin(np.arange(2000, dtype=np.float32) / 9)[:, None] * np.array([[0.5, -0.25]], np.float32)


def heard(kind: str, subtype: str | None = None) -> bytes:
    soundfile.write(out := io.BytesIO(), TONE, 16000, format=kind, subtype=subtype)
    return out.getvalue()


def saved(value: Any) -> bytes:
    torch.save(value, out := io.BytesIO())
    return out.getvalue()


def decoded(what: str, data: bytes, limits: Limits = DEFAULTS) -> Any:
    return decoder(x=what, limits=limits)({"__key__": "k", "x": data})["x"]


@pytest.mark.parametrize(("kind", "subtype", "most"), [
    ("WAV", "FLOAT", 0), ("WAV", "PCM_16", 1e-4), ("FLAC", None, 1e-4), ("OGG", None, 0.1), ("MP3", None, 0.1),
])  # fmt: skip
def test_audio_is_channels_by_time_with_its_rate(kind: str, subtype: str | None, most: float) -> None:
    sound = decoded("audio", heard(kind, subtype))
    assert (sound["rate"], sound["array"].dtype, sound["array"].shape) == (16000, np.float32, (2, 2000))
    assert sound["array"].flags.c_contiguous
    assert np.abs(sound["array"] - TONE.T).max() <= most


DAMAGED: Sequence[tuple[str, bytes]] = [
    ("audio", b""),
    ("audio", b"RIFF" + bytes(40)),
    ("audio", heard("FLAC")[:600]),
    ("msgpack", b""),
    ("msgpack", b"\xdd\xff\xff\xff\xff"),
    ("msgpack", b"\x91" * 5000),
    ("msgpack", b"\x01\x02"),
    ("pt", b""),
    ("pt", saved(torch.zeros(9))[:200]),
]


@pytest.mark.parametrize(("what", "data"), DAMAGED)
def test_damage_is_an_error_of_the_field(what: str, data: bytes) -> None:
    with pytest.raises(DecodeError, match=f"field 'x' does not decode as {what}"):
        decoded(what, data)


def test_audio_is_not_decoded_over_the_limit() -> None:
    with pytest.raises(DecodeError, match="2000 samples in 2 channels take 16000 bytes, over the limit of 15999"):
        decoded("audio", heard("FLAC"), Limits(member_bytes=15999))


def test_msgpack_is_its_value() -> None:
    value = {"a": [1, None, "ü", b"\0"], 3: 1.5}
    assert same(decoded("msgpack", msgpack.packb(value)), value)


def test_tensors_are_loaded() -> None:
    value = {"t": torch.arange(4), "n": [1, "x"]}
    assert same(decoded("pt", saved(value)), value)


class Trap:
    ran: ClassVar[list[int]] = []

    def __reduce__(self) -> Any:
        return Trap.ran.append, (1,)


def test_what_would_run_code_is_refused() -> None:
    for data in (saved(Trap()), pickle.dumps(Trap())):
        with pytest.raises(DecodeError):
            decoded("pt", data)
    assert not Trap.ran


def test_extension_alone_leaves_them_bytes() -> None:
    sample = {"wav": b"1", "pt": b"2", "msgpack": b"3"}
    assert decoder()(dict(sample)) == sample
    with pytest.raises(OptionError):
        decoder(x="sound")


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
def test_avif_is_an_image() -> None:
    Image.new("RGB", (8, 6), (200, 10, 10)).save(out := io.BytesIO(), "AVIF")
    pixels = decoder("rgb8")({"avif": out.getvalue()})["avif"]
    assert isinstance(pixels, np.ndarray)
    assert pixels.shape == (6, 8, 3)
    assert abs(int(pixels[0, 0, 0]) - 200) < 20
