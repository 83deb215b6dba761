"""Audio in memory to arrays, by soundfile: WAV, FLAC, Ogg (Vorbis, Opus), MP3, AIFF and whatever else it knows."""

from __future__ import annotations

import io
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from headrace.formats.limits import DEFAULTS, Limits
from headrace.types import Buffer

_SAMPLE_BYTES = 4


class Sound(TypedDict):
    """What is heard.

    Attributes:
        array: `[channels, time] float32`, from -1 to 1, as torchaudio's waveforms.
        rate: samples in a second.
    """

    array: NDArray[np.float32]
    rate: int


def decode_audio(data: Buffer, limits: Limits = DEFAULTS) -> Sound:
    """The audio in a file's bytes; what they are is seen in them, not in a name.

    Raises:
        ValueError: it is damaged, of no known kind, or longer than `limits.member_bytes` when it is decoded.
    """
    try:
        import soundfile
    except ImportError:
        raise ValueError("it needs soundfile, which is not installed; try: pip install 'headrace[audio]'") from None
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
                raise ValueError(f"it says {frames} samples, and has {len(heard)}: it is cut off")
            return {"array": np.ascontiguousarray(heard.T), "rate": int(file.samplerate)}
    except soundfile.LibsndfileError as error:
        raise ValueError(str(error)[:300]) from error
