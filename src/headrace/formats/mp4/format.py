"""The MP4 format: the frames of a video by the tables of its file, and the index of videos."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headrace._util.reads import Reads, lasting
from headrace.errors import FormatError, OptionError, StageError, masked
from headrace.formats.compression import path_of
from headrace.formats.format import Format, ShardEntry
from headrace.formats.index import Arrays, Entry, ShardIndex, damage, pack_arrays
from headrace.formats.limits import Limits
from headrace.formats.mp4.tables import (
    HEAD_BYTES,
    REMUX,
    Box,
    Samples,
    Tables,
    find_tables,
    fragment_samples,
    joined,
    plain_samples,
    shown,
    track_of,
    video_track,
)
from headrace.formats.pinned_object import PinnedObject
from headrace.types import Buffer, Ints

_HELD_MOST = 16  # H.264's maximum


@dataclass(frozen=True, slots=True)
class Track:
    """Metadata of a video for decoders: boxes of its file.

    Attributes:
        codec: Kind of the first sample description, such as b"avc1".
        timescale: Ticks per second.
        width, height: Coded size in pixels.
        is_turned: True if the video is shown rotated or mirrored.
        boxes: (kind, body) of "tkhd", "hdlr", "vmhd" and "stsd".
    """

    codec: bytes
    timescale: int
    width: int
    height: int
    is_turned: bool
    boxes: tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class VideoTable(Samples):
    """The frames of a video, in decoding order.

    Attributes:
        shown: Numbers of the shown frames, in presentation order.
        begin_s: Time in seconds of a frame whose `pts` is 0.
    """

    track: Track
    shown: Ints
    begin_s: float

    def __len__(self) -> int:
        return len(self.shown)

    @property
    def nbytes(self) -> int:
        """Approximate memory use."""
        return 80 * len(self.offset) + 4096

    @cached_property
    def keys(self) -> Ints:
        return np.flatnonzero(self.is_key)

    @cached_property
    def given_by(self) -> Ints:
        """For each frame, the number of the input frame after which a decoder has returned it.

        A decoder returns frames in presentation order. Its delay is the maximum number of frames that are decoded
        before one that is shown before them.
        """
        order = np.argsort(self.pts, kind="stable")
        rank, numbers = np.empty(len(order), np.int64), np.arange(len(order))
        rank[order] = numbers
        held = min(int((numbers - rank).max()), _HELD_MOST)
        return np.asarray(np.maximum.accumulate(order)[rank] + held)

    @cached_property
    def shown_ticks(self) -> Ints:
        """Presentation times of the shown frames, in ticks, ascending."""
        return self.pts[self.shown]

    @property
    def end_ticks(self) -> int:
        """End of the last frame's presentation."""
        last = int(self.shown[-1])
        return int(self.pts[last]) + max(int(self.delta[last]), 1)

    def shown_at(self, times: Sequence[float]) -> Ints:
        """Return the frames at these times in seconds, as indices among the shown frames.

        Raises a ValueError if nothing is shown then.
        """
        # rounded, as decimal seconds are no whole ticks of the file's clock
        ticks = np.floor((np.array(times) - self.begin_s) * self.track.timescale + 1e-3)
        chosen: Ints = np.searchsorted(self.shown_ticks, ticks, side="right") - 1
        late = np.flatnonzero((chosen < 0) | (ticks >= self.end_ticks))
        if len(late):
            begin, end = self.seconds(np.array([0]))[0], self.end_ticks / self.track.timescale + self.begin_s
            raise ValueError(f"nothing is shown at {times[int(late[0])]} s: it is from {begin:.3f} to {end:.3f} s")
        return chosen

    def nearest(self, times: Sequence[float], most_s: float) -> Ints:
        """Return the frames that begin nearest to these times, as indices among the shown frames.

        Raises a ValueError if one begins more than `most_s` seconds away.
        """
        ticks = (np.array(times) - self.begin_s) * self.track.timescale
        behind = np.clip(np.searchsorted(self.shown_ticks, ticks), 1, max(len(self) - 1, 1))
        before = behind - 1
        behind = np.minimum(behind, len(self) - 1)
        is_before = ticks - self.shown_ticks[before] <= self.shown_ticks[behind] - ticks
        chosen: Ints = np.where(is_before, before, behind)
        off = np.flatnonzero(np.abs(self.shown_ticks[chosen] - ticks) > most_s * self.track.timescale)
        if len(off):
            at = int(off[0])
            near = self.seconds(chosen[[at]])[0]
            raise ValueError(f"no frame begins at {times[at]:.4f} s: the nearest one does at {near:.4f} s")
        return chosen

    def seconds(self, chosen: Ints) -> NDArray[np.float64]:
        """Return the times of frames, given as indices among the shown frames."""
        return self.shown_ticks[chosen] / self.track.timescale + self.begin_s


def read_table(tables: Tables, size: int, limits: Limits) -> VideoTable:
    """Return the frames of the video in a file of `size` bytes. Damage raises a ValueError."""
    movie = Box(b"moov", memoryview(tables.moov))
    trak = video_track(movie)
    mdia = trak.need(b"mdia")
    timescale = _timescale(mdia.need(b"mdhd"))
    stbl = mdia.need(b"minf", b"stbl")
    movie_scale = _timescale(movie.need(b"mvhd"))
    mvex = movie.find(b"mvex")
    parts = [plain] if (plain := plain_samples(stbl, size)) is not None else []
    if mvex is not None:
        parts += fragment_samples(tables.fragments, mvex, track_of(trak), parts[0].end if parts else 0, size)
    if not parts:
        raise ValueError("its video has no frames" if mvex is None else "it is fragmented, and no fragment has frames")
    whole = joined(parts)
    if not whole.is_key[0]:
        raise ValueError("its first frame is none where one can begin to decode")
    pts = whole.pts
    media_time, duration, begin_s = _edit(trak, movie_scale, timescale, is_fragmented=mvex is not None)
    is_shown = pts >= media_time
    if duration is not None:
        is_shown &= pts < media_time + duration
        if mvex is not None and not is_shown[pts >= media_time].all():
            raise ValueError(
                f"its edit list ends before its fragments do, which players take for more or less; {REMUX}"
            )
    shown = np.flatnonzero(is_shown)
    shown = shown[np.argsort(pts[shown], kind="stable")]
    if not len(shown):
        raise ValueError("its edit list shows none of its frames")
    if (np.diff(pts[shown]) == 0).any():
        raise ValueError("two of its frames are shown at the same time")
    track = _track(trak, timescale, whole.description, limits)
    return VideoTable(**vars(whole), track=track, shown=shown, begin_s=begin_s - media_time / timescale)


def _timescale(box: Box) -> int:
    timescale = box.number(20 if box.version else 12)
    if not timescale:
        raise ValueError(f"its box {box} gives a second no ticks")
    return timescale


def _edit(trak: Box, movie_scale: int, scale: int, *, is_fragmented: bool) -> tuple[int, int | None, float]:
    """Return the shown part of a track: (first tick, ticks or None for all, start in seconds)."""
    elst = trak.find(b"edts", b"elst")
    if elst is None:
        return 0, None, 0.0
    wide = 8 if elst.version else 4
    count, row = elst.number(4), 2 * wide + 4
    begin, found = 0, list[tuple[int, int]]()
    for k in range(min(count, 64)):
        at = 8 + k * row
        duration, media_time = elst.number(at, wide), elst.number(at + wide, wide)
        rate = elst.number(at + 2 * wide)
        if media_time >> (8 * wide - 1):
            if media_time != 2 ** (8 * wide) - 1 or found:
                raise ValueError("its edit list pauses within the video")
            begin += duration
        elif rate != 2**16:
            raise ValueError("its edit list changes the video's speed")
        else:
            found.append((media_time, duration))
    if len(found) != 1 or count > 64:
        raise ValueError(f"its edit list has {count} parts: it must be cut and rewritten to be read")
    media_time, duration = found[0]
    if not duration and is_fragmented:  # the duration is not known yet when a fragmented file is written
        return media_time, None, begin / movie_scale
    if not duration:
        raise ValueError("its edit list shows it for no time")
    return media_time, (duration * scale + movie_scale // 2) // movie_scale, begin / movie_scale


def _track(trak: Box, timescale: int, description: Ints, limits: Limits) -> Track:
    tkhd, minf = trak.need(b"tkhd"), trak.need(b"mdia", b"minf")
    stsd = minf.need(b"stbl", b"stsd")
    entries = list(Box(b"stsd", stsd.body[8:]))
    if int(description.min()) < 1 or int(description.max()) > len(entries):
        raise ValueError(
            f"its frames have descriptions {description.min()} to {description.max()}, and there are {len(entries)}"
        )
    if any(entry.kind == b"encv" for entry in entries):
        raise ValueError("its video is encrypted")
    dref = minf.find(b"dinf", b"dref")
    if dref is not None and any(
        not entry.number(0) & 1 for entry in Box(b"dref", dref.body[8:]) if entry.kind in (b"url ", b"urn ")
    ):
        raise ValueError("its frames are in another file")
    sizes = [(entry.number(24, 2), entry.number(26, 2)) for entry in entries]
    width, height = max(sizes, key=lambda size: size[0] * size[1])
    if not width * height:
        raise ValueError(f"its video, {shown(entries[0].kind)}, has {width} x {height} pixels")
    limits.check_pixels(width, height)
    matrix = 52 if tkhd.version else 40
    turned = [tkhd.number(matrix + 4 * k) for k in (0, 1, 3, 4)] != [2**16, 0, 0, 2**16]
    vmhd = minf.find(b"vmhd")
    boxes = {
        b"tkhd": bytes(tkhd.body),
        b"hdlr": bytes(trak.need(b"mdia", b"hdlr").body),
        b"vmhd": bytes(12) if vmhd is None else bytes(vmhd.body),
        b"stsd": bytes(stsd.body),
    }
    return Track(entries[0].kind, timescale, width, height, turned, tuple(boxes.items()))


class Mp4(Format):
    """MP4 videos, read as clips. The tables of each file locate its frames."""

    name = "mp4"
    suffixes = (".mp4", ".m4v", ".mov")

    def sniff(self, name: str, head: bytes) -> float:
        return 0.9 if head[4:8] == b"ftyp" else 0.0

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        raise OptionError.at(shard.url, "is a video: hr.video() gives clips of its frames, hr.files() its bytes")

    async def own_index(self, shard: PinnedObject, limits: Limits) -> tuple[Entry, bytes]:
        tables = await read_tables(shard, limits)
        table = table_of(tables, shard.url, shard.size, limits)
        block = pack_arrays({"size": shard.size, "etag": lasting(shard.etag)}, _arrays(tables))
        return Entry(
            name=shard.url,
            samples=len(table),
            members=len(table.offset),
            nbytes=int(table.size.sum()),
            size=shard.size,
            etag=lasting(shard.etag),
            length=len(block),
            check=zlib.crc32(block),
        ), block


MP4 = Mp4()


def is_video(url: str) -> bool:
    return path_of(url).lower().endswith(MP4.suffixes)


def _arrays(tables: Tables) -> dict[str, NDArray[np.generic]]:
    arrays: dict[str, NDArray[np.generic]] = {"moov": np.frombuffer(tables.moov, np.uint8)}
    if tables.fragments:
        places, bodies = zip(*tables.fragments, strict=True)
        arrays["moof"] = np.frombuffer(b"".join(bodies), np.uint8)
        arrays["moof_at"] = np.array(places, np.int64)
        arrays["moof_ends"] = np.cumsum([len(body) for body in bodies])
    return arrays


def unpack_tables(block: Buffer, what: str) -> Tables:
    """Parse tables from `Mp4.own_index`. A FormatError names `what`."""
    arrays = Arrays(block, what).arrays
    moov = arrays.get("moov")
    if moov is None or moov.dtype != np.uint8:
        raise damage(what, "it has no tables of a video; was it made of other shards?")
    moof = arrays.get("moof", np.zeros(0, np.uint8))
    places, ends = (arrays.get(name, moof[:0]).astype(np.int64) for name in ("moof_at", "moof_ends"))
    begins = np.concatenate([[0], ends])
    if moof.dtype != np.uint8 or len(places) != len(ends) or begins[-1] != len(moof) or (np.diff(begins) < 0).any():
        raise damage(what, "its fragments are not where its table has them")
    bodies = [moof[begin:end].tobytes() for begin, end in pairwise(begins.tolist())]
    return Tables(moov.tobytes(), tuple(zip(places.tolist(), bodies, strict=True)))


def table_of(tables: Tables, url: str, size: int, limits: Limits) -> VideoTable:
    """Return the frames of the video at `url`. A FormatError names the video."""
    try:
        return read_table(tables, size, limits)
    except (ValueError, OverflowError, IndexError) as error:
        raise FormatError(f"the video {masked(url)} cannot be read by its tables: {error}", url=url) from None


async def read_tables(shard: PinnedObject, limits: Limits) -> Tables:
    """Read the tables of a video, without other tracks. Plain files need two or three reads."""
    head = await shard.read(0, HEAD_BYTES)
    walk = find_tables(head, shard.size, shard.url, limits)
    try:
        ranges = next(walk)
        while True:
            ranges = walk.send(await shard.read_each(ranges))
    except StopIteration as end:
        found: Tables = end.value
        return found
    except StageError:
        raise
    except ValueError as error:
        raise FormatError.at(shard.url, f"is no MP4 that can be read: {error}") from None
