"""Decodes audio in memory.

soundfile decodes WAV, FLAC, Ogg (Vorbis, Opus), MP3, AIFF and others; torchcodec decodes what FFmpeg supports, such as
AAC. For lossy formats their values differ, for some files also their lengths. The decoder is therefore an explicit
option, without a fallback.
"""

from __future__ import annotations

import importlib
import io
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from headrace.errors import OptionError, reason_of
from headrace.formats.decoders import BY_TORCHCODEC
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.optional import needed
from headrace.types import Buffer


def torchcodec_decoders(instead: str) -> Any:
    """Import `torchcodec.decoders`. An OptionError names the alternative `instead`."""
    try:
        return importlib.import_module("torchcodec.decoders")
    except (ImportError, OSError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0][:200]
        raise OptionError(
            f"torchcodec does not load ({first}): it needs FFmpeg's shared libraries, and a build for the torch that "
            f"is here, which of PyPI's for a torch without CUDA is torchcodec==0.13.*; {instead}"
        ) from error


_SAMPLE_BYTES = 4
_MORE_S = 1.0  # decoded beyond the limit, to detect audio that is too long
_HEAD_BYTES = 4096
_SHORTER_S = 0.1  # tolerated difference to the stated length: encoders pad
_NO_LENGTH = (0, 2**32 - 1)  # sizes in the header of a WAV that was written to a pipe


class Sound(TypedDict):
    """Decoded audio.

    Attributes:
        array: `[channels, time] float32`, from -1 to 1, as torchaudio's waveforms.
        rate: Samples per second.
    """

    array: NDArray[np.float32]
    rate: int


def decode_audio(data: Buffer, limits: Limits = DEFAULTS) -> Sound:
    """Decode audio with soundfile. The kind is detected from the bytes."""
    soundfile = needed("soundfile", "audio", kind=ValueError)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            frames, channels = int(file.frames), int(file.channels)
            nbytes = frames * channels * _SAMPLE_BYTES
            if not 0 <= nbytes <= limits.member_bytes:
                raise ValueError(
                    f"its {frames} samples in {channels} channels take {nbytes} bytes, over the limit of "
                    f"{limits.member_bytes}"
                )
            heard: NDArray[np.float32] = file.read(frames, dtype="float32", always_2d=True)
            if len(heard) < frames:
                raise ValueError(f"it claims {frames} samples, and has {len(heard)}: it is cut off")
            return {"array": np.ascontiguousarray(heard.T), "rate": int(file.samplerate)}
    except soundfile.LibsndfileError as error:
        why = reason_of(error).rstrip(".")
        more = f"; {BY_TORCHCODEC!r} knows more kinds" if "not recognised" in why else ""
        raise ValueError(why + more) from error


def decode_audio_by_torchcodec(data: Buffer, limits: Limits = DEFAULTS) -> Sound:
    """Decode audio with torchcodec, also that of a video.

    FFmpeg conceals much damage. Audio that is shorter than stated in a WAV, FLAC, AIFF, MP4 or MP3 raises a ValueError.
    """
    decoders = torchcodec_decoders("'audio' is by soundfile")
    body = bytes(data)
    try:
        decoder = decoders.AudioDecoder(body)
        about = decoder.metadata
        rate, channels = about.sample_rate, about.num_channels
        if not rate or not channels:
            raise ValueError("it does not state its number of channels, or their rate")
        stop_s = limits.member_bytes / (_SAMPLE_BYTES * channels * rate) + (about.begin_stream_seconds_from_header or 0)
        played = decoder.get_samples_played_in_range(0, stop_s + _MORE_S)
    except RuntimeError as error:
        raise ValueError(reason_of(error)) from error
    heard: NDArray[np.float32] = np.ascontiguousarray(played.data.numpy())
    end_s = played.pts_seconds + heard.shape[1] / rate
    if heard.nbytes > limits.member_bytes or end_s >= stop_s + _MORE_S / 2:
        raise ValueError(f"its samples in {channels} channels take over {limits.member_bytes} bytes, the limit")
    said_s = _said_s(body, about.duration_seconds_from_header)
    if end_s < said_s - _SHORTER_S:
        raise ValueError(f"it claims {said_s:.3f} s, and has {end_s:.3f}: it is cut off")
    return {"array": heard, "rate": int(played.sample_rate)}


def _said_s(body: bytes, header_s: float | None) -> float:
    """Return the length stated in a file, in seconds. 0 if FFmpeg would only estimate it."""
    head = body[:_HEAD_BYTES]
    if head[:4] == b"RIFF":  # FFmpeg accepts truncated ones
        nbytes = int.from_bytes(head[4:8], "little")
        if nbytes not in _NO_LENGTH and nbytes + 8 > len(body):
            raise ValueError(f"it claims {nbytes + 8} bytes, and has {len(body)}: it is cut off")
    is_said = head[:4] in (b"RIFF", b"fLaC", b"FORM") or head[4:8] == b"ftyp" or b"Xing" in head or b"Info" in head
    return float(header_s or 0) if is_said else 0.0
