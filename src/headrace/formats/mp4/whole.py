"""Frames of a video that lies whole in memory, such as a field of a sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.errors import DecodeError, OptionError
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.mp4.finding import tables_in
from headrace.formats.mp4.frames import WHY_MOST, Frames, check_decoder, decoded
from headrace.formats.mp4.pieces import pieces_of
from headrace.formats.mp4.table import VideoTable, read_table
from headrace.types import Ints


class VideoFrames:
    """A decoder of fields that are MP4 files: `.decode(mp4=hr.VideoFrames(8))` gives `[8, 3, H, W] uint8`, in RGB.

    Nothing is decoded but the frames that are wanted, and those that these take.

    Args:
        count: so many, of the middle of as many parts of the same length.
        times: instead, those that are shown at these times, in seconds, ascending or not.
        decoder: "torchcodec", or "pyav", which brings its own FFmpeg.
        limits: on the pixels of a frame, and the bytes of all of them.

    Raises:
        OptionError: neither `count` nor `times`, or a decoder that is not known, or not installed.

    Examples:
        >>> import headrace as hr
        >>> data = hr.stream("s3://bucket/clips-{000..099}.tar").decode(mp4=hr.VideoFrames(8, decoder="pyav"))
    """

    def __init__(
        self,
        count: int | None = None,
        *,
        times: Sequence[float] | None = None,
        decoder: str = "torchcodec",
        limits: Limits = DEFAULTS,
    ) -> None:
        if (count is None) == (times is None):
            raise OptionError("hr.VideoFrames takes either how many frames, or times=")
        if (count is not None and count < 1) or (times is not None and not len(times)):
            raise OptionError(f"count={count!r}, times={times!r}: one frame or more is needed")
        check_decoder(decoder)
        self.count, self.times = count, None if times is None else tuple(map(float, times))
        self.decoder, self.limits = decoder, limits

    def __call__(self, data: bytes) -> Frames:
        """The frames of the file `data`.

        Raises:
            DecodeError: it does not decode, or is shorter than that.
            OptionError: the decoder does not load.
        """
        try:
            table = read_table(tables_in(memoryview(data), self.limits), len(data), self.limits)
            pieces, spans = pieces_of(table, self._chosen(table))
            frames, _ = decoded(self.decoder, pieces, [memoryview(data)[a:b] for a, b in spans], self.limits)
        except OptionError:
            raise
        except Exception as error:
            why = str(error)[:WHY_MOST] or type(error).__name__
            raise DecodeError(f"its {len(data)} bytes do not decode as a video by {self.decoder}: {why}") from error
        return frames

    def _chosen(self, table: VideoTable) -> Ints:
        if self.times is None:
            count = self.count or 1
            return (np.arange(count) * 2 + 1) * len(table) // (2 * count)
        return table.shown_at(self.times)
