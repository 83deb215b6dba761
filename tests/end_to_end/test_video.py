"""Clips of videos as samples: frames, numbers, exact resume, and the bytes that are read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import videos
from builders.loops import assert_refused, loaded, state_after
from builders.tars import tar

import headrace as hr
from headrace.cli import main
from headrace.errors import FormatError, ObjectChangedError, OptionError
from headrace.fetch.stores import memory
from headrace.formats.media import scaled
from headrace.testing import FaultServer

pytestmark = pytest.mark.usefixtures("warm_server")

NAMES = ("h264-open", "audio", "mpeg4")
CLIPS = hr.Clips(frames=4, stride=2, every=9)
STARTS = [(name, start) for name in NAMES for start in range(0, 44, 9)]


def put_videos() -> list[str]:
    for name in NAMES:
        memory.put(f"memory://clips/{name}.mp4", videos.named(name))
    return [f"memory://clips/{name}.mp4" for name in NAMES]


def made(clips: hr.Clips = CLIPS, decoder: str = "pyav", **options: Any) -> hr.Stream:
    return hr.video(put_videos(), clips, decoder=decoder, **options)


def keys(data: Any, state: dict[str, Any] | None = None, **options: Any) -> list[str]:
    with hr.DataLoader(data, batch_size=4, collate_fn=list, **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return [sample["__key__"] for batch in loader for sample in batch]


WANTED = [f"{name}/{start}" for name, start in STARTS]


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["pyav", "torchcodec"])
@pytest.mark.parametrize("workers", [0, 2])
def test_clips_are_those_frames_of_their_videos(workers: int, decoder: str) -> None:
    decode = videos.decoded if decoder == "pyav" else videos.by_torchcodec
    whole = {name: decode(videos.named(name)) for name in NAMES}
    data = made(decoder=decoder)
    assert len(data) == len(STARTS)
    seen = []
    for batch in hr.DataLoader(data, batch_size=4, num_workers=workers):
        assert batch["frames"].shape[1:] == (4, 3, *videos.SIZE)
        for key, frames, times in zip(batch["__key__"], batch["frames"], batch["times"], strict=True):
            name, _, start = key.partition("/")
            chosen = int(start) + 2 * np.arange(4)
            np.testing.assert_array_equal(frames.numpy(), whole[name][1][chosen])
            np.testing.assert_allclose(times.numpy(), np.array(whole[name][0])[chosen], atol=1e-6)
            seen.append(key)
    assert seen == WANTED
    assert data[-1]["__key__"] == WANTED[-1]


LISTED = [
    ("memory://clips/audio.mp4", (0.0, 0.5, 1.0)),
    ("memory://clips/mpeg4.mp4", [0.2, 0.1]),
    ("memory://clips/audio.mp4", [1.1]),
]
OTHERS: list[tuple[Callable[[], hr.Stream], Callable[[], hr.Stream]]] = [
    *(
        (lambda clips=clips: made(clips), lambda: made(hr.Clips(frames=4, every=9)))
        for clips in (hr.Clips(frames=3, of_each=4), hr.Clips(frames=3, fps=12.5))
    ),
    (lambda: of_list(LISTED * 3), lambda: of_list([(url, [*times, 0.3]) for url, times in LISTED * 3])),
]


def of_list(clips: list[tuple[str, Any]]) -> hr.Stream:
    put_videos()
    return hr.video(clips, decoder="pyav")


@pytest.mark.slow
@pytest.mark.parametrize(("clips", "others"), OTHERS)
def test_clips_resume_exactly_and_others_are_refused(clips: Any, others: Any) -> None:
    data = clips().shuffle()
    state = state_after(hr.DataLoader(data, batch_size=4, collate_fn=list), 1)
    whole = keys(data)
    assert keys(data, state) == whole[4:]
    assert_refused(hr.DataLoader(others().shuffle(), batch_size=4), state, match="the data are others")


@pytest.mark.slow
def test_clips_at_random_places_are_others_in_each_epoch_and_the_same_for_any_workers() -> None:
    data = made(hr.Clips(frames=4, of_each=5))
    with hr.DataLoader(data, batch_size=4, collate_fn=list) as loader:
        epochs = [[sample["__key__"] for batch in loader for sample in batch] for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert [key.partition("/")[0] for key in epochs[0]] == [name for name in NAMES for _ in range(5)]
    assert keys(data, num_workers=2) == epochs[0]


def test_frames_of_a_rate_are_those_that_are_shown_at_its_times() -> None:
    data = made(hr.Clips(frames=5, fps=12.5))
    times = data[0]["times"]
    shown = np.arange(5) / 12.5
    assert (times <= shown + 1e-6).all()
    assert (shown < times + 1 / videos.RATE).all()
    assert len(data) == 3 * (21 // 5)
    twice = made(hr.Clips(frames=4, fps=60))[0]
    np.testing.assert_allclose(twice["times"], [0, 0, 1 / 30, 1 / 30], atol=1e-6)
    np.testing.assert_array_equal(twice["frames"][0], twice["frames"][1])


def test_video_shorter_than_a_clip_is_an_error_or_dropped() -> None:
    memory.put("memory://clips/short.mp4", videos.written(count=5))
    urls = [*put_videos(), "memory://clips/short.mp4"]
    with pytest.raises(FormatError, match=r"short\.mp4 has 5 frames, and a clip of 4 takes 7"):
        len(hr.video(urls, CLIPS, decoder="pyav"))
    assert keys(hr.video(urls, hr.Clips(frames=4, stride=2, every=9, short="drop"), decoder="pyav")) == WANTED
    with pytest.raises(FormatError, match="has 5 frames"):
        keys(hr.video(urls, hr.Clips(frames=6, of_each=1), decoder="pyav"))


def test_only_the_bytes_that_clips_take_are_read_and_tables_once(server: FaultServer) -> None:
    url = server.add("plain.mp4", data := videos.named("h264-plain"))
    clips = hr.video(url, hr.Clips(frames=2, every=12), decoder="pyav", storage_options={"allow_http": True})
    assert keys(clips) == [f"plain/{start}" for start in (0, 12, 24, 36, 48)]
    ranges = [request.range for request in server.requests_for("plain.mp4") if request.range]
    bounds = [text.removeprefix("bytes=").partition("-") for text in ranges]
    assert len(ranges) == 6, "the tables, which so short a file has in its first bytes, and each clip"
    assert sum(int(end) - int(start) + 1 for start, _, end in bounds[1:]) < len(data) / 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["build", "command"])
def test_indexed_tables_are_kept(
    server: FaultServer, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(tmp_path / "videos.hri")
    urls = [server.add(f"{how}/{name}.mp4", videos.named(name)) for name in NAMES]
    if how == "command":
        assert main(["index", *urls, "--output", place]) == 0
        assert "3 shards, 150 samples" in capsys.readouterr().out
    index, again = (place, place) if how == "command" else ("build", "auto")
    assert keys(hr.video(urls, CLIPS, decoder="pyav", index=index)) == WANTED
    server.log.clear()
    assert keys(hr.video(urls, CLIPS, decoder="pyav", index=again)) == WANTED
    starts = [request.headers["range"].split("-")[0] for request in server.log]
    assert len(starts) <= len(STARTS)
    assert "bytes=0" not in starts, "the tables are looked for there"
    server.add(f"{how}/audio.mp4", videos.named("audio") + bytes(8))
    with pytest.raises(ObjectChangedError) as caught:
        keys(hr.video(urls, CLIPS, decoder="pyav", index=index))
    assert any("make a new one" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("index", [None, "build"])
def test_video_that_changed_since_it_was_listed_is_an_error(index: str | None, tmp_path: Path) -> None:
    for name in ("audio", "mpeg4"):
        (tmp_path / f"{name}.mp4").write_bytes(videos.named(name))
    data = hr.video(tmp_path / "*.mp4", CLIPS, decoder="pyav", index=index)
    if index is not None:  # it is made now
        assert f"listed: 2 objects in {tmp_path}/*.mp4" in data.describe()
    (tmp_path / "mpeg4.mp4").write_bytes(videos.named("mpeg4") + bytes(8))
    with pytest.raises(ObjectChangedError, match=r"mpeg4\.mp4") as caught:
        keys(data)
    assert index is not None or "than was listed" in str(caught.value)


TWO_GIVEN = "needs videos and clips="
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: hr.Clips(frames=0), "frames=0"),
    (lambda: hr.Clips(frames=2, stride=0), "stride=0"),
    (lambda: hr.Clips(frames=2, fps=0), "fps=0"),
    (lambda: hr.Clips(frames=2, of_each=2, every=3), "of_each"),
    (lambda: hr.Clips(frames=2, short="pad"), "short='pad'"),  # type: ignore[arg-type]
    (lambda: made(decoder="opencv"), "decoder='opencv'"),
    *((lambda size=size: made(size=size), "size=") for size in ((0, 4), (3,), (2.0, 4))),
    (lambda: list(hr.stream(put_videos()[0])), r"hr.video\(\)"),
    (lambda: hr.video([("a.mp4", [])], decoder="pyav"), "clip 0, .*: one time or more"),
    (lambda: hr.video([("a.mp4", ["x"])], decoder="pyav"), "times are numbers"),
    (lambda: hr.video([("a.mp4", [0]), "b.mp4"], decoder="pyav"), "clip 1='b.mp4'"),
    (lambda: hr.video(["a.mp4"], decoder="pyav"), TWO_GIVEN),
    (lambda: hr.video([("a.mp4", [0])], CLIPS, decoder="pyav"), TWO_GIVEN),
]


@pytest.mark.parametrize(("use", "match"), REFUSED)
def test_wrong_use_is_an_option_error(use: Callable[[], Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        use()


def test_fields_of_shards_are_decoded_in_workers(put: Any) -> None:
    put("0.tar", tar([(name, {"mp4": videos.named(name)}) for name in NAMES]))
    put("1.tar", tar([("a", {"mp4": b"no video"})]))
    good, bad = (
        hr.stream(f"memory://place/{k}.tar", index=None).decode(mp4=hr.VideoFrames(4, decoder="pyav")) for k in range(2)
    )
    ((frames,),) = loaded(good.to_tuple("mp4"), batch_size=3, num_workers=1)
    assert frames.shape == (3, 4, 3, *videos.SIZE)
    with pytest.raises(hr.DecodeError, match="do not decode as a video by pyav"):
        list(bad)


def frames_at(name: str, times: Any) -> Any:
    shown, pixels = videos.decoded(videos.named(name))
    return pixels[[max(k for k, time in enumerate(shown) if time <= wanted + 1e-6) for wanted in times]]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_clips_of_a_list_have_the_frames_at_their_times(workers: int) -> None:
    put_videos()
    data = hr.video(LISTED, decoder="pyav")
    assert len(data) == 3
    got = loaded(data, batch_size=None, num_workers=workers)
    assert [sample["__key__"] for sample in got] == ["audio/0", "mpeg4/0.2", "audio/1.1"]
    for sample, (url, times) in zip(got, LISTED, strict=True):
        name = url.rpartition("/")[2].removesuffix(".mp4")
        assert np.array_equal(sample["frames"], frames_at(name, times))
        assert np.all(np.abs(sample["times"].numpy() - np.array(times)) < 1 / videos.RATE + 1e-6)
    assert np.array_equal(data[2]["frames"], frames_at("audio", [1.1]))
    assert "3 clips at times" in repr(data)


def test_time_at_which_nothing_is_shown_is_an_error_of_that_clip() -> None:
    put_videos()
    data = hr.video([LISTED[0], (LISTED[1][0], [0, 99])], decoder="pyav")
    with pytest.raises(FormatError, match=r"mpeg4.mp4: nothing is shown at 99.0 s: it is from 0.000 to"):
        data[1]
    assert data[0]["frames"].shape[0] == 3


def test_frames_are_scaled_as_images_are() -> None:
    whole, small = made(), made(size=(20, 31))
    for k in (0, 7):
        frames = small[k]["frames"]
        assert (frames.shape, frames.dtype) == ((4, 3, 20, 31), np.uint8)
        for frame, scaled_one in zip(whole[k]["frames"], frames, strict=True):
            wanted = scaled(np.ascontiguousarray(frame.transpose(1, 2, 0)), (20, 31))
            assert np.array_equal(scaled_one.transpose(1, 2, 0), wanted)


@pytest.mark.slow
def test_inspect_describes_the_tables_of_videos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("audio", "mpeg4"):
        (tmp_path / f"{name}.mp4").write_bytes(videos.named(name))
    assert main(["inspect", f"{tmp_path}/*.mp4", "--samples", "1", "--check"]) == 0
    out = capsys.readouterr().out
    assert "videos: 2, " in out
    assert "pictures: 64 x 48, 'avc1'" in out
    assert "frames: 50 in 1.667 s, 30 a second; 5 key frames" in out
    assert "mp4v" not in out, "one was asked for"
    assert "no damage in the tables of 2 videos with 100 frames" in out
    (tmp_path / "b.mp4").write_bytes(videos.named("mpeg4")[:1000])
    assert main(["inspect", f"{tmp_path}/*.mp4", "--check"]) == 1
    assert "damage: after 1 videos: " in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "mpeg4.mp4")]) == 0
    assert "'mp4v'" in capsys.readouterr().out
