"""Tables of MP4 files are what FFmpeg reads of them; clips' bytes give the pixels that the whole file gives."""

from __future__ import annotations

import asyncio
import io
import struct
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from builders import videos
from builders.videos import URL, One, clip, places_of_boxes, table

import headrace as hr
from headrace.errors import DecodeError, FormatError, LimitError, OptionError
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


@pytest.mark.parametrize(("kind", "at", "number", "why"), [
    (b"stsz", 8, 2**32 - 1, "over the limit"),
    (b"stsz", 8, 51, "rows"),
    (b"stsz", 4, 10**6, "has .* bytes"),
    (b"stsz", 12, 0, "no bytes"),
    (b"stsz", 12, 2**31, "cut off"),
    (b"stts", 8, 49, "49"),
    (b"stts", 8, 2**32 - 1, "frames"),
    (b"stts", 4, 2**32 - 1, "rows"),
    (b"ctts", 8, 7, "frames"),
    (b"stsc", 8, 7, "chunks"),
    (b"stsc", 12, 2**31, "frames"),
    (b"stsc", 16, 2, "descriptions"),
    (b"stco", 8, 2**32 - 1, "cut off"),
    (b"stco", 4, 2**32 - 1, "rows"),
    (b"stss", 8, 2, "stss"),
    (b"stss", 12, 51, "stss"),
    (b"mdhd", 12, 0, "ticks"),
    (b"elst", 16, 2**15, "speed"),
    (b"elst", 4, 70, "cut off|parts"),
    (b"elst", 8, 0, "no time"),
    (b"elst", 12, 2**30, "none of its frames"),
    (b"stsd", 8 + 8 + 22, 0, "pixels"),
])  # fmt: skip
def test_hostile_table_is_an_error_with_its_reason(kind: bytes, at: int, number: int, why: str) -> None:
    """The number is in the video's box `kind`, at byte `at` of its body."""
    data = videos.named("h264")
    begin = data.index(kind, data.index(b"moov")) + 4 + at
    with pytest.raises(FormatError, match=why) as caught:
        table(data[:begin] + number.to_bytes(4, "big") + data[begin + 4 :])
    assert URL in str(caught.value)


def test_hostile_width_is_over_the_limit() -> None:
    with pytest.raises(FormatError, match="over the limit"):
        table(videos.named("h264"), Limits(pixels=100))
    with pytest.raises(LimitError, match="over the limit"):
        table(videos.named("h264"), Limits(member_bytes=100))


def test_file_that_is_cut_off_anywhere_is_an_error(tmp_path: Path) -> None:
    in_front = videos.written(mux={"movflags": "+faststart"}, path=str(tmp_path / "front.mp4"))
    for data in (videos.named("h264"), in_front):
        for end in sorted(set(places_of_boxes(data))):
            if not end > data.index(b"udta") > data.index(b"mdat"):  # what follows the tables is not read
                with pytest.raises(FormatError):
                    table(data[:end])


H264 = videos.named("h264")


@pytest.mark.parametrize(("data", "why"), [
    (b"", "no box 'moov'"),
    (bytes(range(1, 256)) * 9, "cut off"),
    (bytes(4096), "fewer than its header|no box"),
    (H264[: H264.index(b"moov") - 4], "no box 'moov'"),
    (H264.replace(b"vide", b"soun"), "0 video tracks"),
    (H264.replace(b"avc1", b"encv"), "encrypted|ftyp"),
])  # fmt: skip
def test_file_of_another_kind_is_an_error_with_a_reason(data: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        table(data)


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
