"""Audio fields: what was written, by soundfile and by torchcodec, within limits."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
import pytest
from builders import videos
from unit import decoding

from headrace.formats.limits import DEFAULTS, Limits

soundfile = pytest.importorskip("soundfile")

TONE = np.sin(np.arange(2000, dtype=np.float32) / 9)[:, None] * np.array([[0.5, -0.25]], np.float32)


def tone(kind: str, subtype: str | None = None, *, times: int = 1) -> bytes:
    soundfile.write(out := io.BytesIO(), np.tile(TONE, (times, 1)), 16000, format=kind, subtype=subtype)
    return out.getvalue()


def packed_tone(container: str) -> bytes:
    """One second of 440 Hz."""
    av = videos.av
    samples = np.sin(np.arange(48000, dtype=np.float32) / 48000 * 440 * 2 * np.pi)[None] / 2
    with av.open(out := io.BytesIO(), "w", format=container) as file:
        stream = file.add_stream("libopus" if container == "webm" else "aac", rate=48000)
        stream.layout = "mono"
        for at in range(0, 48000, 960):
            frame = av.AudioFrame.from_ndarray(samples[:, at : at + 960], format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 48000, at
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


def decoded(what: str, data: bytes) -> Any:
    sound = decoding.decoded("x", data, x=what)
    assert sound["array"].dtype == np.float32
    assert sound["array"].flags.c_contiguous
    return sound


def failure(what: str, data: bytes, limits: Limits = DEFAULTS) -> str:
    return str(decoding.failure("x", data, x=what, limits=limits))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "subtype", "most"), [
    ("WAV", "FLOAT", 0), ("WAV", "PCM_16", 0), ("FLAC", None, 0), ("AIFF", None, 0), ("OGG", None, 1e-5),
    ("MP3", None, 1e-4),
])  # fmt: skip
def test_torchcodec_and_soundfile_decode_the_same(kind: str, subtype: str | None, most: float) -> None:
    videos.torchcodec()
    data = tone(kind, subtype)
    sound, wanted = decoded("audio:torchcodec", data), decoded("audio", data)
    assert (sound["rate"], sound["array"].shape[0]) == (16000, 2)
    assert abs(sound["array"].shape[1] - 2000) <= (300 if kind == "OGG" else 0), "it counts what the encoder padded"
    both = min(sound["array"].shape[1], 2000)
    assert np.abs(sound["array"][:, :both] - wanted["array"][:, :both]).max() <= most
    why = "audio:torchcodec: its samples in 2 channels take over 9999 bytes"
    assert why in failure("audio:torchcodec", data, Limits(member_bytes=9999))


@pytest.mark.parametrize("container", ["mp4", "adts", "webm"])
def test_torchcodec_decodes_containers_unknown_to_soundfile(container: str) -> None:
    videos.torchcodec()
    data = packed_tone(container)
    sound = decoded("audio:torchcodec", data)
    assert sound["rate"] == 48000
    assert 0 <= sound["array"].shape[1] - 48000 < 4000, "encoders pad"
    loud = np.abs(np.fft.rfft(sound["array"][0][:48000]))
    assert abs(int(loud.argmax()) - 440) <= 1
    assert "not recognised; 'audio:torchcodec' knows more kinds" in failure("audio", data)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "AIFF", "MP3", "mp4"])
def test_torchcodec_reports_truncated_audio(kind: str) -> None:
    videos.torchcodec()
    whole = packed_tone("mp4") if kind == "mp4" else tone(kind, times=20)
    decoded("audio:torchcodec", whole)
    assert "does not decode as audio:torchcodec" in failure("audio:torchcodec", whole[: len(whole) * 2 // 3])


def test_error_of_missing_torchcodec_names_its_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    error = failure("audio:torchcodec", tone("WAV"))
    for words in ("torchcodec does not load", "FFmpeg's shared libraries", "'audio' is by soundfile"):
        assert words in error


def test_audio_is_not_decoded_over_the_limit() -> None:
    error = failure("audio", tone("FLAC"), Limits(member_bytes=15999))
    assert "2000 samples in 2 channels take 16000 bytes, over the limit of 15999" in error
