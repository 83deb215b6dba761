"""`hr.video`: clips of the videos in MP4 files as samples."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from headrace._util import check
from headrace.dataset.stream import Stream, Urls
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.mp4.format import MP4
from headrace.formats.mp4.frames import ClipDecoder, check_decoder
from headrace.indexes.cache_path import cache_path, cached
from headrace.indexes.videos import Videos
from headrace.ops.operator import EachSample
from headrace.sources.clips import Clips, VideoClips
from headrace.sources.discovery.guessing import Names, names_at
from headrace.sources.listed_clips import Listed, ListedClips, listed_clips
from headrace.workers.tasks import Step


def video(
    urls: Urls | Listed,
    clips: Clips | None = None,
    *,
    size: tuple[int, int] | None = None,
    decoder: str = "torchcodec",
    index: str | os.PathLike[str] | None = "auto",
    limits: Limits = DEFAULTS,
    listing: Literal["new", "kept"] = "new",
    storage_options: Mapping[str, object] | None = None,
) -> Stream:
    """Read clips of MP4 videos as samples. Only the parts of a file that a clip needs are read.

    A sample has `__key__`, `__url__`, `frames`, `[T, 3, H, W] uint8` in RGB, and `times`, `[T] float64`, the display
    time of each frame in seconds. Clips have numbers, so `len(data)`, `data[i]`, `.shuffle()` over all of them,
    `.slice()`, ranks and exact resume work as usual.

    The tables of frames are at the beginning or the end of each file. They are read once, in two or three requests,
    before the first sample; with `Clips(of_each=…)`, when a video is first needed.

    Args:
        urls: A URL or path, a pattern such as "videos/{000..999}.mp4" or "videos/**/*.mp4", a folder, or a list of
            these. Or the clips themselves, a list of (URL, times): each has the frames displayed at these times, in
            seconds, in this order.
        clips: Frames of a clip, and choice of clips. None if `urls` lists the clips.
        size: (height, width) in pixels to which frames are scaled. The aspect ratio is not preserved.
        decoder: "torchcodec", or "pyav", which includes its own FFmpeg. Their pixels may differ by rounding.
        index: URL of an index file with the tables of all videos (`headrace index` makes it). "build": the index in
            this machine's cache, made first if missing, by one process for all. "auto": the index in the cache, if
            present. None: no index.
        limits: Limits on the pixels of a frame, and on the bytes of a clip, before and after decoding.
        listing: As in `hr.stream`.
        storage_options: Options of the store: credentials, endpoint, region.

    Raises:
        OptionError: There is no URL, the size is invalid, or the decoder is unknown, or not installed.

    Examples:
        >>> data = hr.video("s3://bucket/{000..999}.mp4", hr.Clips(frames=16, stride=2, every=8), decoder="pyav")
        >>> data = data.shuffle().select("frames")
    """
    check_decoder(decoder)
    check.size("size", size)
    listed = listed_clips(urls)
    if (listed is None) == (clips is None):
        raise check.lacking("hr.video", "videos and clips=hr.Clips(…), or a list of (address, times) alone")
    if listed is not None:
        names = Names(tuple(dict.fromkeys(url for url, _ in listed)))
    else:
        names = names_at(urls, storage_options, kept=listing == "kept", folders=MP4.suffixes)
    paths = names.urls
    if index == "build":
        videos = Videos(paths, str(cache_path(paths, storage_options, MP4)), limits, is_built=True)
    elif index == "auto":
        place = cached(paths, storage_options, MP4)
        videos = Videos(paths, None if place is None else str(place), limits)
    else:
        videos = Videos(paths, None if index is None else os.fspath(index), limits)
    decode = EachSample(Step("decode(clip)", "map", ClipDecoder(decoder, limits, size), is_implied=True), opens=True)
    if listed is not None:
        return Stream(ListedClips(videos, listed, storage_options), (decode,))
    assert clips is not None
    return Stream(VideoClips(videos, clips, storage_options, names.facts), (decode,))
