"""Audio, MessagePack and tensors from bytes: what was written, within limits, and without running anything."""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from end_to_end import videos
from PIL import Image, features

from headrace.errors import DecodeError, OptionError
from headrace.formats.decoders import decoder
from headrace.formats.limits import DEFAULTS, Limits

soundfile = pytest.importorskip("soundfile")
msgpack = pytest.importorskip("msgpack")

TONE = np.sin(np.arange(2000, dtype=np.float32) / 9)[:, None] * np.array([[0.5, -0.25]], np.float32)


def heard(kind: str, subtype: str | None = None, *, times: int = 1) -> bytes:
    soundfile.write(out := io.BytesIO(), np.tile(TONE, (times, 1)), 16000, format=kind, subtype=subtype)
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


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "subtype", "most"), [
    ("WAV", "FLOAT", 0),
    ("WAV", "PCM_16", 0),
    ("FLAC", None, 0),
    ("AIFF", None, 0),
    ("OGG", None, 1e-5),
    ("MP3", None, 1e-4),
])  # fmt: skip
def test_audio_by_torchcodec_is_that_of_soundfile(kind: str, subtype: str | None, most: float) -> None:
    videos.torchcodec()
    data = heard(kind, subtype)
    sound, wanted = decoded("audio:torchcodec", data), decoded("audio", data)
    assert (sound["rate"], sound["array"].dtype, sound["array"].shape[0]) == (16000, np.float32, 2)
    assert sound["array"].flags.c_contiguous
    assert abs(sound["array"].shape[1] - 2000) <= (300 if kind == "OGG" else 0), "it counts what the encoder padded"
    both = min(sound["array"].shape[1], 2000)
    assert np.abs(sound["array"][:, :both] - wanted["array"][:, :both]).max() <= most
    with pytest.raises(DecodeError, match=r"audio:torchcodec: its samples in 2 channels take over 9999 bytes"):
        decoded("audio:torchcodec", data, Limits(member_bytes=9999))


@pytest.mark.parametrize("container", ["mp4", "adts", "webm"])
def test_audio_that_soundfile_does_not_know_is_decoded_by_torchcodec(container: str) -> None:
    videos.torchcodec()
    data = packed_tone(container)
    sound = decoded("audio:torchcodec", data)
    assert sound["rate"] == 48000
    assert 0 <= sound["array"].shape[1] - 48000 < 4000, "encoders pad"
    loud = np.abs(np.fft.rfft(sound["array"][0][:48000]))
    assert abs(int(loud.argmax()) - 440) <= 1
    with pytest.raises(DecodeError, match="not recognised; 'audio:torchcodec' knows more kinds"):
        decoded("audio", data)


def packed_tone(container: str) -> bytes:
    av = videos.av
    samples = np.sin(np.arange(48000, dtype=np.float32) / 48000 * 440 * 2 * np.pi)[None] / 2
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream("libopus" if container == "webm" else "aac", rate=48000)
        stream.layout = "mono"
        for at in range(0, 48000, 960):
            frame = av.AudioFrame.from_ndarray(samples[:, at : at + 960], format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 48000, at
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "AIFF", "MP3", "mp4", "empty", "none"])
def test_audio_that_is_cut_off_is_an_error_by_torchcodec_too(kind: str) -> None:
    videos.torchcodec()
    data = {"empty": b"", "none": b"RIFF" + bytes(40)}.get(kind)
    if data is None:
        whole = packed_tone("mp4") if kind == "mp4" else heard(kind, times=20)
        decoded("audio:torchcodec", whole)
        data = whole[: len(whole) * 2 // 3]
    with pytest.raises(DecodeError, match="field 'x' does not decode as audio:torchcodec"):
        decoded("audio:torchcodec", data)


def test_missing_torchcodec_is_an_error_that_names_its_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    with pytest.raises(
        DecodeError, match=r"torchcodec does not load.*FFmpeg's shared libraries.*'audio' is by soundfile"
    ):
        decoded("audio:torchcodec", heard("WAV"))


@pytest.mark.parametrize(
    ("what", "data"),
    [("audio", heard("FLAC")[:600]), ("msgpack", b"\x91" * 5000), ("pt", saved(torch.zeros(9))[:200])],
)
def test_damage_is_an_error_of_the_field(what: str, data: bytes) -> None:
    with pytest.raises(DecodeError, match=f"field 'x' does not decode as {what}"):
        decoded(what, data)


def test_audio_is_not_decoded_over_the_limit() -> None:
    with pytest.raises(DecodeError, match="2000 samples in 2 channels take 16000 bytes, over the limit of 15999"):
        decoded("audio", heard("FLAC"), Limits(member_bytes=15999))


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
