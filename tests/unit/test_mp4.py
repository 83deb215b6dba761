"""Tables of MP4 files, fragmented or not, are what FFmpeg reads; clips give the pixels that the whole file gives."""

from __future__ import annotations

import asyncio
import io
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from builders import videos
from builders.videos import URL, One, clip, places_of_boxes, table
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr
from headrace.errors import DecodeError, FormatError, LimitError, OptionError
from headrace.formats.index import pack_arrays
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.mp4.format import MP4, read_tables, table_of, unpack_tables
from headrace.formats.mp4.tables import box


@pytest.fixture(params=["pyav", "torchcodec"])
def decoder(request: pytest.FixtureRequest) -> str:
    if request.param == "torchcodec":
        videos.torchcodec()
    return str(request.param)


def late(name: str) -> float:
    return 1 / videos.RATE if name == "fragments-cmaf" else 0


@pytest.mark.slow
@pytest.mark.parametrize("name", videos.HOW)
def test_table_equals_the_packets_of_ffmpeg(name: str) -> None:
    data = videos.named(name)
    with av.open(io.BytesIO(data)) as container:
        video: Any = container.streams.video[0]
        packets = [packet for packet in container.demux(video) if packet.size]
        scale = float(video.time_base)
    found = table(data)
    assert found.size.tolist() == [packet.size for packet in packets]
    assert found.offset.tolist() == [packet.pos for packet in packets]
    assert found.is_key.tolist() == [packet.is_keyframe for packet in packets]
    times = found.pts / found.track.timescale + found.begin_s + late(name)
    np.testing.assert_allclose(times, [packet.pts * scale for packet in packets], atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", videos.HOW)
def test_clips_equal_frames_of_the_whole_file(name: str, decoder: str) -> None:
    data = videos.named(name)
    found = table(data)
    times, whole = videos.decoded(data) if decoder == "pyav" else videos.by_torchcodec(data)
    assert len(found) == len(whole)
    np.testing.assert_allclose(found.seconds(np.arange(len(whole))) + late(name), times, atol=1e-6)
    draw = np.random.default_rng(0)
    step = 1 if "b_frames" in videos.HOW[name] else 5
    chosen = [[k] for k in range(0, len(whole), step)]
    chosen += [np.sort(draw.choice(len(whole), 5, replace=False)).tolist() for _ in range(4)]
    chosen += [[20, 21, 21, 22], [40, 3, 17], list(range(5, 30))]
    for some in chosen:
        pixels, _ = clip(data, found, some, decoder)
        np.testing.assert_array_equal(pixels, whole[some], err_msg=str(some))


def test_clip_reads_the_bytes_of_its_groups_of_pictures_alone() -> None:
    data = videos.named("h264-plain")
    found = table(data)
    ends = np.append(found.keys[1:], len(found.offset))
    for k in (3, 14, 30):
        group = int(np.searchsorted(found.keys, k, side="right")) - 1
        whole = found.size[found.keys[group] : ends[group]].sum()
        assert clip(data, found, [k], "pyav")[1] <= whole, "frames after the last wanted one are not read"


def test_tables_are_found_anywhere_in_the_file(tmp_path: Path) -> None:
    at_end = videos.named("h264")
    in_front = videos.written(mux={"movflags": "+faststart"}, path=str(tmp_path / "front.mp4"))
    for data in (at_end, in_front, _with_wide_mdat(at_end)):
        assert len(table(data)) == 50
    object_ = One(box(b"free", bytes(200_000)) + box(b"free", bytes(300_000)) + at_end)
    asyncio.run(read_tables(object_, DEFAULTS))
    assert len(object_.reads) == 3, "the head of each long box, and the tables"


def _with_wide_mdat(data: bytes) -> bytes:
    at = data.index(b"mdat") - 4
    (size,) = struct.unpack_from(">I", data, at)
    assert data[at - 8 : at] == box(b"free"), "which FFmpeg leaves room for"
    return data[: at - 8] + struct.pack(">I4sQ", 1, b"mdat", size + 8) + data[at + 8 :]


@pytest.mark.parametrize(("media_time", "duration"), [(1024 + 512 * 5, 5000), (1024, 1000), (1024 + 512 * 14, 500)])
def test_edit_list_shows_what_ffmpeg_shows(media_time: int, duration: int) -> None:
    data = videos.with_edit(videos.named("h264"), media_time, duration)
    found = table(data)
    times, whole = videos.decoded(data)
    assert len(found) == len(whole)
    np.testing.assert_allclose(found.seconds(np.arange(len(whole))), times, atol=1e-6)
    for k in (0, 1, len(whole) - 1):
        np.testing.assert_array_equal(clip(data, found, [k], "pyav")[0], whole[[k]])


def test_index_of_a_video_has_its_tables_alone() -> None:
    data = videos.named("audio")
    object_ = One(data)
    entry, block = asyncio.run(MP4.own_index(object_, DEFAULTS))
    tables = unpack_tables(block, "the index")
    assert (entry.samples, entry.size, entry.length) == (50, len(data), len(block))
    assert entry.nbytes < len(data) - len(tables.moov), "without the tables of its sound"
    assert table_of(tables, URL, len(data), DEFAULTS).offset.tolist() == table(data).offset.tolist()


def test_file_that_is_cut_off_anywhere_is_an_error(tmp_path: Path) -> None:
    in_front = videos.written(mux={"movflags": "+faststart"}, path=str(tmp_path / "front.mp4"))
    for data in (videos.named("h264"), in_front):
        for end in sorted(set(places_of_boxes(data))):
            if not end > data.index(b"udta") > data.index(b"mdat"):  # what follows the tables is not read
                with pytest.raises(FormatError):
                    table(data[:end])


def test_only_the_frame_that_does_not_decode_is_an_error(decoder: str) -> None:
    data = bytearray(videos.named("h264"))
    found = table(bytes(data))
    first, last = int(found.offset[0]), int((found.offset + found.size).max())
    data[first:last] = bytes(last - first)
    with pytest.raises(DecodeError, match=f"clip '0' of {URL} does not decode by {decoder}"):
        clip(bytes(data), found, [3, 4], decoder)


def test_frames_of_a_field_are_spread_over_it_or_those_at_times(decoder: str) -> None:
    data = videos.named("h264-open")
    whole = clip(data, table(data), list(range(50)), decoder)[0]
    np.testing.assert_array_equal(hr.VideoFrames(5, decoder=decoder)(data), whole[[5, 15, 25, 35, 45]])
    np.testing.assert_array_equal(hr.VideoFrames(100, decoder=decoder)(data)[::2], whole)
    at = hr.VideoFrames(times=[1.0, 0, 0.1, 1.66], decoder=decoder)(data)
    np.testing.assert_array_equal(at, whole[[30, 0, 3, 49]])
    for late in (1.67, -0.01):
        with pytest.raises(DecodeError, match=r"from 0\.000 to 1\.667 s"):
            hr.VideoFrames(times=[late], decoder=decoder)(data)


def test_field_that_is_no_video_is_a_decode_error() -> None:
    decode = hr.VideoFrames(1, decoder="pyav")
    for damaged in (b"", b"no video", videos.named("h264")[:3000]):
        with pytest.raises(DecodeError, match=r"box|header"):
            decode(damaged)
    with pytest.raises(OptionError, match="either a number of frames"):
        hr.VideoFrames()
    with pytest.raises(OptionError, match="1 or more"):
        hr.VideoFrames(0)


def test_rotated_video_is_rotated_or_refused(decoder: str) -> None:
    data = videos.named("h264-plain")
    at = data.index(b"tkhd") + 4 + 40
    turned = data[:at] + struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 48 << 16, 0, 1 << 30) + data[at + 36 :]
    found = table(turned)
    if decoder == "pyav":
        with pytest.raises(DecodeError, match="turned or mirrored, which decoder='torchcodec' does"):
            clip(turned, found, [3], decoder)
        return
    whole = videos.torchcodec().VideoDecoder(turned, seek_mode="exact").get_frames_at([3, 40]).data.numpy()
    assert whole.shape[2:] == (64, 48)
    np.testing.assert_array_equal(clip(turned, found, [3, 40], decoder)[0], whole)


H264 = videos.named("h264")
KEY, OTHER = 0x02000000, 0x01010000
SCALE = 15360
WHOLE = videos.named("fragments")
INIT = WHOLE[: WHOLE.index(b"moof") - 4]
"""The boxes before the first fragment, of a video without sound."""


@dataclass(frozen=True)
class Frame:
    size: int
    duration: int
    flags: int
    later: int


@dataclass(frozen=True)
class How:
    """The form in which a fragment describes its frames."""

    base: str = "moof"  # where its place is counted from
    tfdt: int | None = 1
    version: int = 1
    columns: frozenset[int] = frozenset((0x100, 0x200, 0x400, 0x800))
    in_tfhd: bool = True  # what all frames of the fragment have in common; else it is in `trex`
    has_offsets: bool = True
    sound: int = 0  # bytes of another track before it
    gap: int = 0  # bytes between its runs, where these have offsets


FIELDS = {0x100: "duration", 0x200: "size", 0x400: "flags", 0x800: "later"}
DURATION, SIZE = 512, 40
DEFAULT_FRAME = Frame(SIZE, DURATION, OTHER, 0)


def init() -> bytes:
    at = INIT.index(b"trex")
    trexes = [struct.pack(">6I", 0, 2, 1, 1, 7, KEY), struct.pack(">6I", 0, 1, 1, DURATION, SIZE, OTHER)]
    mvex = box(b"mvex", *(box(b"trex", body) for body in trexes))
    before = INIT.index(b"moov") - 4
    begin = at - 12  # of the box `mvex`
    (length,) = struct.unpack_from(">I", INIT, begin)
    moov = INIT[before + 8 : begin] + mvex + INIT[begin + length :]
    return INIT[:before] + box(b"moov", moov)


def fragment(at: int, runs: list[list[Frame]], begin: int, how: How) -> tuple[bytes, list[int]]:
    """(a fragment for byte `at` of a file, where its frames are)."""
    common = {flag: _common(runs, name) for flag, name in FIELDS.items()}
    columns = {flag for flag in FIELDS if flag in how.columns or common[flag] is None}
    columns |= set() if common[0x800] == 0 else {0x800}  # there is no default of it
    if not how.in_tfhd:
        columns |= {flag for flag, name in FIELDS.items() if common[flag] != getattr(DEFAULT_FRAME, name)}
    defaults = {0x8: 0x100, 0x10: 0x200, 0x20: 0x400} if how.in_tfhd else {}
    used = {bit: common[flag] for bit, flag in defaults.items() if flag not in columns}

    def moof(first: int) -> tuple[bytes, list[int]]:
        """The box whose fragment has its media from byte `first` on."""
        where, places = at + first + how.sound, list[int]()
        base = {"base": at + 3, "moof": at, "behind": where if how.sound else at}[how.base]
        head = {"base": 0x1, "moof": 0x20000, "behind": 0}[how.base]
        body = struct.pack(">II", head | sum(used), 1) + (struct.pack(">Q", base) if how.base == "base" else b"")
        traf = [box(b"tfhd", body + b"".join(struct.pack(">I", value) for value in used.values()))]
        if how.tfdt is not None:
            traf.append(box(b"tfdt", struct.pack(">BxxxQ" if how.tfdt else ">BxxxI", how.tfdt, begin)))
        for number, run in enumerate(runs):
            has_offset = how.has_offsets or (not number and base != where)
            where += how.gap if has_offset and number else 0
            offset = struct.pack(">i", where - base) if has_offset else b""
            rows = b"".join(
                struct.pack(">i" if flag == 0x800 else ">I", getattr(frame, FIELDS[flag]))
                for frame in run
                for flag in sorted(columns)
            )
            flags = sum(columns) | int(has_offset)
            traf.append(box(b"trun", struct.pack(">BBHI", how.version, 0, flags, len(run)), offset, rows))
            for frame in run:
                places.append(where)
                where += frame.size
        sound = struct.pack(">BxHIII", 0, 0x201, 1, first, how.sound)
        of_sound = box(b"traf", box(b"tfhd", struct.pack(">II", 0, 2)), box(b"trun", sound)) if how.sound else b""
        return box(b"moof", box(b"mfhd", bytes(8)), of_sound, box(b"traf", *traf)), places

    whole, places = moof(len(moof(1)[0]) + 8)
    return whole + box(b"mdat", b"\5" * how.sound, b"\xaa" * (places[-1] + runs[-1][-1].size - places[0])), places


def _common(runs: list[list[Frame]], name: str) -> int | None:
    values = {getattr(frame, name) for run in runs for frame in run}
    return values.pop() if len(values) == 1 else None


frames = st.builds(
    Frame,
    st.sampled_from([1, SIZE, 33]),
    st.sampled_from([DURATION, 100, 3000]),
    st.sampled_from([KEY, OTHER]),
    st.sampled_from([0, 0, -40, 40]),
)
hows = st.builds(
    How,
    st.sampled_from(["base", "moof", "behind"]),
    st.sampled_from([None, 0, 1]),
    st.sampled_from([0, 1]),
    st.frozensets(st.sampled_from(sorted(FIELDS))),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 9]),
    st.sampled_from([0, 5]),
)
runs_of = st.lists(
    st.one_of(st.lists(frames, min_size=1, max_size=4), st.just([DEFAULT_FRAME] * 3)), min_size=1, max_size=3
)


@pytest.mark.slow
@given(st.lists(st.tuples(runs_of, hows, st.sampled_from([0, 0, 5000])), min_size=1, max_size=4), st.integers(0, 2**31))
def test_table_equals_the_frames_of_all_fragments(parts: list[tuple[list[list[Frame]], How, int]], start: int) -> None:
    data, places, times = init(), list[int](), list[tuple[int, Frame]]()
    parts[0][0][0][0] = Frame(9, DURATION, KEY, 0)
    begin = 0
    for runs, how, pause in parts:
        if how.tfdt is not None:
            begin += pause + (start if not times else 0)
        made, where = fragment(len(data), runs, begin, how)
        places += where
        for frame in (frame for run in runs for frame in run):
            times.append((begin, frame))
            begin += frame.duration
        data += made
    found = table(data)
    assert found.offset.tolist() == places
    assert found.size.tolist() == [frame.size for _, frame in times]
    assert found.is_key.tolist() == [frame.flags == KEY for _, frame in times]
    assert found.pts.tolist() == [at + frame.later for at, frame in times]
    assert found.end_ticks == max((at + frame.later, at + frame.later + frame.duration) for at, frame in times)[1]
    again = unpack_tables(asyncio.run(MP4.own_index(videos.One(data), DEFAULTS))[1], "the index")
    assert table_of(again, URL, len(data), DEFAULTS).offset.tolist() == places


def frames_of(count: int, size: int = SIZE) -> list[Frame]:
    """A key frame, and others after it."""
    return [Frame(size, DURATION, KEY, 0), *[Frame(size, DURATION, OTHER, 0)] * (count - 1)]


def file_of(runs: list[list[Frame]], begins: list[int]) -> bytes:
    """A file of a fragment for each run."""
    data = init()
    for run, begin in zip(runs, begins, strict=True):
        data += fragment(len(data), [run], begin, How())[0]
    return data


ONE, AT = file_of([frames_of(6)], [0]), len(init())
"""A file with one fragment, and where that begins."""


def changed(data: bytes, kind: bytes, at: int, number: int, *, size: int = 4) -> bytes:
    """The file with this number in its last box `kind`, at byte `at` of the body."""
    begin = data.rindex(kind) + 4 + at
    return data[:begin] + number.to_bytes(size, "big") + data[begin + size :]


@pytest.mark.parametrize(("data", "why"), [
    (changed(H264, b"stsz", 8, 2**32 - 1), "over the limit"),
    (changed(H264, b"stsz", 8, 51), "rows"),
    (changed(H264, b"stsz", 4, 10**6), "has .* bytes"),
    (changed(H264, b"stsz", 12, 0), "no bytes"),
    (changed(H264, b"stsz", 12, 2**31), "cut off"),
    (changed(H264, b"stts", 8, 49), "49"),
    (changed(H264, b"stts", 8, 2**32 - 1), "frames"),
    (changed(H264, b"stts", 4, 2**32 - 1), "rows"),
    (changed(H264, b"ctts", 8, 7), "frames"),
    (changed(H264, b"stsc", 8, 7), "chunks"),
    (changed(H264, b"stsc", 12, 2**31), "frames"),
    (changed(H264, b"stsc", 16, 2), "descriptions"),
    (changed(H264, b"stco", 8, 2**32 - 1), "cut off"),
    (changed(H264, b"stco", 4, 2**32 - 1), "rows"),
    (changed(H264, b"stss", 8, 2), "stss"),
    (changed(H264, b"stss", 12, 51), "stss"),
    (changed(H264, b"mdhd", 12, 0), "ticks"),
    (changed(H264, b"elst", 16, 2**15), "speed"),
    (changed(H264, b"elst", 4, 70), "cut off|parts"),
    (changed(H264, b"elst", 8, 0), "no time"),
    (changed(H264, b"elst", 12, 2**30), "none of its frames"),
    (changed(H264, b"stsd", 8 + 8 + 22, 0), "pixels"),
    (b"", "no box 'moov'"),
    (bytes(range(1, 256)) * 9, "cut off"),
    (bytes(4096), "fewer than its header|no box"),
    (H264[: H264.index(b"moov") - 4], "no box 'moov'"),
    (H264.replace(b"vide", b"soun"), "0 video tracks"),
    (H264.replace(b"avc1", b"encv"), "encrypted|ftyp"),
    (changed(ONE, b"trun", 4, 2**32 - 1), "over the limit"),
    (changed(ONE, b"trun", 4, 7), "7 rows"),
    (changed(ONE, b"trun", 16, 0), "frame 0 has no bytes"),
    (changed(ONE, b"trun", 16, 2**32 - 1), "cut off"),
    (changed(ONE, b"trun", 8, 2**32 - 2**20), "be at bytes -"),
    (changed(ONE, b"trun", 8, 2**31 - 1), "cut off"),
    (changed(ONE, b"trun", 20, OTHER), "first frame"),
    (changed(ONE, b"trex", 8, 9), "descriptions"),
    (changed(ONE, b"tfhd", 4, 9), "no fragment has frames"),
    (changed(ONE, b"tfdt", 4, 2**64 - 1, size=8), "time"),
    (changed(ONE, b"tfhd", 1, 0x00003B, size=3), "cut off"),
    (changed(ONE, b"trun", -8, 10), "trun|header|left"),
    (ONE[AT:], "begins with a fragment"),
    (ONE[:AT], "no fragment has frames"),
    (ONE[:AT] + ONE, "two boxes 'moov'"),
    (ONE + bytes(3), "fewer than a box's header"),
    (file_of([frames_of(2), frames_of(2)], [0, 100]), "frame 2 is decoded before"),
])  # fmt: skip
def test_damaged_file_is_an_error_with_its_reason(data: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=why) as caught:
        table(data)
    assert URL in str(caught.value)


def test_frames_of_one_size_are_no_more_than_the_file_has_bytes() -> None:
    part, _ = fragment(AT, [[Frame(1, DURATION, KEY, 0)] * 3], 0, How(columns=frozenset()))
    at = part.index(b"trun") + 8
    for count in (10**5, 2**26, 2**32 - 1):
        with pytest.raises(FormatError, match="frames"):
            table(init() + part[:at] + struct.pack(">I", count) + part[at + 4 :])


def test_fragments_with_overlapping_frames_are_an_error() -> None:
    part, _ = fragment(AT, [[Frame(SIZE, DURATION, KEY, 0)] * 50], 0, How(tfdt=None, columns=frozenset()))
    moof, data = part[: part.index(b"mdat") - 4], init() + part
    at = moof.index(b"trun") + 12
    assert moof[at : at + 4] == struct.pack(">i", len(moof) + 8)
    for _ in range(40):  # of the same frames
        where = AT + len(moof) + 8 - len(data)
        data += moof[:at] + struct.pack(">i", where) + moof[at + 4 :]
    with pytest.raises(FormatError, match="with those before have"):
        table(data)


@pytest.mark.parametrize("name", ["fragments", "fragments-dash", "fragments-implicit"])
def test_fragmented_file_that_is_cut_off_is_an_error_or_has_fewer_whole_fragments(name: str) -> None:
    data = videos.named(name)
    whole = table(data)
    ends = []
    for end in sorted(set(places_of_boxes(data))):
        try:
            found = table(data[:end])
        except FormatError:
            continue
        assert found.offset.tolist() == whole.offset.tolist()[: len(found.offset)]
        assert (found.offset + found.size <= end).all()
        ends.append(end)
    begins = {at for at in range(len(data)) if data[at + 4 : at + 8] in (b"moof", b"mfra", b"mfro", b"sidx", b"styp")}
    assert set(ends) <= begins, "between boxes that the file is made of"
    assert len(ends) >= 4


def test_edit_list_of_fragments_is_applied() -> None:
    data = videos.named("fragments-edit")
    at = data.index(b"elst") + 4
    assert struct.unpack_from(">Ii", data, at + 8) == (0, 1024), "it has no end, and begins with the first frame"
    found = table(data[: at + 12] + struct.pack(">i", 1024 + 5 * 512) + data[at + 16 :])
    assert len(found) == 45
    assert found.seconds(np.array([0, 1])).tolist() == pytest.approx([0, 1 / 30])
    for short in (100, 1000):
        with pytest.raises(FormatError, match=r"ends before its fragments do.*ffmpeg -i"):
            table(data[: at + 8] + struct.pack(">I", short) + data[at + 12 :])
    assert len(table(data[: at + 8] + struct.pack(">I", 1700) + data[at + 12 :])) == 50


def long_file(fragments: int, size: int) -> tuple[bytes, list[int]]:
    """(a file of so many fragments of a frame of so many bytes, where they begin)."""
    data = file_of([frames_of(1, size)] * fragments, [k * DURATION for k in range(fragments)])
    return data, [found.start() - 4 for found in re.finditer(b"moof", data)]


def mfra_of(begins: list[int]) -> bytes:
    rows = b"".join(struct.pack(">QQ3B", k, at, 1, 1, 1) for k, at in enumerate(begins))
    tfra = box(b"tfra", struct.pack(">B3xIII", 1, 1, 0, len(begins)), rows)
    return box(b"mfra", tfra, box(b"mfro", struct.pack(">II", 0, 8 + len(tfra) + 16)))


def with_sidx(data: bytes, at: int, begins: list[int]) -> bytes:
    """The file with a list before its first fragment, which is at byte `at`: of parts that begin there."""
    sizes = np.diff([*begins, len(data)]).tolist()
    rows = b"".join(struct.pack(">III", size, DURATION, 0) for size in sizes)
    sidx = box(b"sidx", struct.pack(">8xIIIHH", SCALE, 0, begins[0] - at, 0, len(sizes)), rows)
    return data[:at] + sidx + data[at:]


class InTurns(videos.One):
    """One object, and how many times somebody had to wait for parts of it."""

    waits, now = 0, 0

    async def read(self, start: int, length: int) -> memoryview:
        self.now += 1
        await asyncio.sleep(0)  # those that are asked for at once are all under way
        self.waits += self.now > 0
        self.now = 0
        return await super().read(start, length)


def test_listed_fragments_are_read_concurrently() -> None:
    data, begins = long_file(100, 30_000)
    wanted = table(data).size.tolist()
    found = {}
    for name, file in {
        "none": data,
        "mfra": data + mfra_of(begins),
        "sidx": with_sidx(data, begins[0], begins),
    }.items():
        object_ = InTurns(file)
        assert table_of(asyncio.run(read_tables(object_, DEFAULTS)), URL, len(file), DEFAULTS).size.tolist() == wanted
        found[name] = object_.waits
        assert sum(length for _, length in object_.reads) < len(file) / 2
    assert found["none"] > 90
    assert found["mfra"] <= 9
    assert found["sidx"] <= 7


@pytest.mark.parametrize("wrong", ["fewer", "elsewhere", "huge", "damaged"])
def test_wrong_list_of_fragments_loses_none(wrong: str) -> None:
    data, begins = long_file(60, 30_000)
    listed = {
        "fewer": begins[::7],
        "elsewhere": [at + 5 for at in begins],
        "huge": [2**63, *begins, 0, 2**64 - 1],
        "damaged": begins,
    }[wrong]
    mfra = mfra_of(listed)
    if wrong == "damaged":
        mfra = mfra.replace(struct.pack(">II", 0, len(listed)), struct.pack(">II", 0, 2**31), 1)
    for file in (data + mfra, *([] if wrong == "huge" else [with_sidx(data, begins[0], listed)])):
        assert len(table(file)) == 60


def test_index_of_fragments_that_is_damaged_is_an_error() -> None:
    data, _ = long_file(3, 100)
    tables = asyncio.run(read_tables(videos.One(data), DEFAULTS))
    moof = np.frombuffer(b"".join(body for _, body in tables.fragments), np.uint8)
    count = len(moof)
    for at, ends in (([1, 2], [10, 20]), ([1], [count + 1]), ([1, 2, 3], [count, 5, count]), ([], [])):
        places = {"moof_at": np.array(at, np.int64), "moof_ends": np.array(ends, np.int64)}
        block = pack_arrays({}, {"moov": np.frombuffer(tables.moov, np.uint8), "moof": moof, **places})
        with pytest.raises(FormatError, match="not where its table"):
            unpack_tables(block, "the index")


@pytest.mark.parametrize(("data", "limits", "error"), [
    (H264, Limits(pixels=100), FormatError),
    (H264, Limits(member_bytes=100), LimitError),
    (long_file(50, 10)[0], Limits(member_bytes=4000), LimitError),
])  # fmt: skip
def test_tables_over_the_limits_are_an_error(data: bytes, limits: Limits, error: type[Exception]) -> None:
    with pytest.raises(error, match="over the limit"):
        table(data, limits)
