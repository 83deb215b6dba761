"""Clips of videos, and LeRobot's rows with the frames of their cameras: frames, exact resume, and the bytes read."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from builders import mds, parquet, videos
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
    assert_refused(hr.DataLoader(others().shuffle(), batch_size=4), state, match="the data differ")


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
    (lambda: rows_with("wrong", {}, cameras=["wrist"]), r"cameras='wrist' must be one of 'observation\.images\.top'"),
    (lambda: rows_with("wrong", {}, decoder="opencv"), "decoder='opencv'"),
    (lambda: rows_with("wrong", {}, size=(0, 1)), "size="),
    *(
        (lambda some=some: rows_with("wrong", {}, offsets=some), "must be one number of seconds or more")
        for some in ([], [np.nan], 0.5, "ab", [[0.0]])
    ),
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


LENGTHS = (20, 30, 50)
EPISODES = [(0, 0, 0.0), (1, 0, 20 / videos.RATE), (2, 1, 0.0)]
"""Of version 3: the number of each, of its video, and when it begins there."""
CAMERAS = ("observation.images.top", "observation.images.side")
FILES = ("h264-open", "fragments-edit")  # of the first camera, and of the second
ROWS = [(episode, k) for episode, length in enumerate(LENGTHS) for k in range(length)]


LAYOUT_3 = "chunk-{chunk_index:03d}", "file-{file_index:03d}"
LAYOUT_2 = "chunk-{episode_chunk:03d}", "episode_{episode_index:06d}"


def info(version: str, **changes: object) -> bytes:
    chunk, file = LAYOUT_2 if version == "v2.1" else LAYOUT_3
    video = f"{chunk}/{{video_key}}" if version == "v2.1" else f"{{video_key}}/{chunk}"
    features = {name: {"dtype": "video", "shape": [48, 64, 3]} for name in CAMERAS}
    said = {
        "codebase_version": version,
        "fps": videos.RATE,
        "total_episodes": len(LENGTHS),
        "total_frames": sum(LENGTHS),
        "chunks_size": 2,
        "video_path": f"videos/{video}/{file}.mp4",
        "data_path": f"data/{chunk}/{file}.parquet",
        "features": {**features, "action": {"dtype": "float32", "shape": [2]}},
    }
    return json.dumps({**said, **changes}).encode()


def rows_of(some: list[tuple[int, int]]) -> bytes:
    types = {"timestamp": pa.float32(), "episode_index": pa.int64(), "frame_index": pa.int64(), "index": pa.int64()}
    schema = pa.schema({**types, "task_index": pa.int64(), "action": pa.list_(pa.float32(), 2)})
    rows = [
        {
            "timestamp": k / videos.RATE,
            "episode_index": episode,
            "frame_index": k,
            "index": ROWS.index((episode, k)),
            "task_index": episode % 2,
            "action": [episode, k],
        }
        for episode, k in some
    ]
    return parquet.written(rows, schema, row_group_size=16)


def version_3() -> dict[str, bytes]:
    rows: list[dict[str, Any]] = []
    for (episode, file, begin), length in zip(EPISODES, LENGTHS, strict=True):
        place = {"data/chunk_index": 0, "data/file_index": int(episode == 2)}
        rows.append({"episode_index": episode, "length": length, "tasks": ["x"], **place})
        for camera in CAMERAS:
            at = {"chunk_index": 0, "file_index": file, "from_timestamp": begin}
            rows[-1] |= {f"videos/{camera}/{name}": value for name, value in at.items()}
    tasks = [{"task_index": 0, "__index_level_0__": "push"}, {"task_index": 1, "__index_level_0__": "pull"}]
    files = {
        "meta/info.json": info("v3.0"),
        "meta/tasks.parquet": parquet.written(tasks),
        "meta/episodes/chunk-000/file-000.parquet": parquet.written(rows),
        "data/chunk-000/file-000.parquet": rows_of(ROWS[:50]),
        "data/chunk-000/file-001.parquet": rows_of(ROWS[50:]),
        "README.md": b"# data",
    }
    for camera, name in zip(CAMERAS, FILES, strict=True):
        for number in (0, 1):
            files[f"videos/{camera}/chunk-000/file-{number:03}.mp4"] = video(name, number)
    return files


def json_lines(rows: Sequence[dict[str, Any]]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def episodes_of(lengths: Sequence[int]) -> bytes:
    return json_lines([{"episode_index": k, "tasks": ["x"], "length": length} for k, length in enumerate(lengths)])


def version_2() -> dict[str, bytes]:
    files = {
        "meta/info.json": info("v2.1"),
        "meta/tasks.jsonl": json_lines([{"task_index": 0, "task": "push"}, {"task_index": 1, "task": "pull"}]),
        "meta/episodes.jsonl": episodes_of(LENGTHS),
    }
    for episode, length in enumerate(LENGTHS):
        chunk = f"chunk-{episode // 2:03}"
        files[f"data/{chunk}/episode_{episode:06}.parquet"] = rows_of([(episode, k) for k in range(length)])
        for camera, name in zip(CAMERAS, FILES, strict=True):
            files[f"videos/{chunk}/{camera}/episode_{episode:06}.mp4"] = video(name, episode)
    return files


@functools.cache  # the encoder does not always write the same
def video(name: str, number: int) -> bytes:
    how = videos.HOW[name]
    return videos.written(**how, pictures=lambda k: videos.picture(k + 100 * number))


def put(files: dict[str, bytes], place: str = "") -> str:
    return mds.put(place or f"robot{len(files)}", files)  # of each version another place


def frame_of(camera: int, episode: int, k: int, version: str, decoder: str = "pyav") -> Any:
    """The frame of a row, by FFmpeg from the beginning of its file."""
    number, first = (episode, 0) if version == "v2.1" else (EPISODES[episode][1], 20 if episode == 1 else 0)
    return whole(camera, number, decoder)[first + k]


@functools.cache
def whole(camera: int, number: int, decoder: str) -> Any:
    decode = videos.decoded if decoder == "pyav" else videos.by_torchcodec
    return decode(video(FILES[camera], number))[1]


LAYOUTS = {"v3.0": version_3, "v2.1": version_2}


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["pyav", "torchcodec"])
@pytest.mark.parametrize("version", LAYOUTS)
def test_rows_have_the_frames_of_their_cameras_at_their_times(version: str, decoder: str) -> None:
    if decoder == "torchcodec":
        videos.torchcodec()
    data = hr.lerobot(put(LAYOUTS[version]()), decoder=decoder)
    assert len(data) == len(ROWS)
    assert f"layout: LeRobot's, {version}: 3 episodes, 30 rows a second" in data.describe()
    with hr.DataLoader(data.shuffle("global", seed=1), batch_size=10, num_workers=2) as loader:
        seen = []
        for batch in loader:
            for n, index in enumerate(batch["index"].tolist()):
                episode, k = ROWS[index]
                assert batch["action"][n].tolist() == [episode, k]
                assert batch["task"][n] == ("push", "pull")[episode % 2]
                for camera, name in enumerate(CAMERAS):
                    np.testing.assert_array_equal(
                        batch[name][n].numpy(), frame_of(camera, episode, k, version, decoder)
                    )
                seen.append(index)
    assert sorted(seen) == list(range(len(ROWS)))
    assert seen != sorted(seen)


@pytest.mark.slow
@pytest.mark.parametrize("version", LAYOUTS)
def test_frames_at_offsets_stay_within_the_episode(version: str) -> None:
    step = 1 / videos.RATE
    place = put(LAYOUTS[version]())
    offsets = [-2 * step, 0, 3 * step]
    data = hr.lerobot(place, cameras=CAMERAS[:1], offsets=offsets, size=(24, 32), decoder="pyav")
    plain = hr.lerobot(place, cameras=CAMERAS[:1], size=(24, 32), decoder="pyav")
    for index in (0, 1, 19, 20, 21, 48, 49, 50, 99):
        episode, k = ROWS[index]
        sample = data[index]
        assert sample[CAMERAS[0]].shape == (3, 3, 24, 32)
        assert CAMERAS[1] not in sample
        inside = [min(max(k + by, 0), LENGTHS[episode] - 1) for by in (-2, 0, 3)]
        for frame, there in zip(sample[CAMERAS[0]], inside, strict=True):
            np.testing.assert_array_equal(frame, plain[ROWS.index((episode, there))][CAMERAS[0]])


def versions(num_workers: int, combine: Any) -> list[dict[str, Any]]:
    data = [hr.lerobot(put(make()), cameras=CAMERAS[0], decoder="pyav").shuffle() for make in LAYOUTS.values()]
    return loaded(combine(*data), batch_size=None, num_workers=num_workers)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_several_data_sets_are_put_together(num_workers: int) -> None:
    mixed = versions(num_workers, lambda *data: hr.mix(dict(zip(LAYOUTS, data, strict=True))).take(20))
    assert {sample["__source__"] for sample in mixed} == {*LAYOUTS}
    pairs: Any = versions(num_workers, lambda one, other: one.take(5).zip(other.take(5)))
    both = versions(num_workers, lambda one, other: one.take(3).concat(other.take(3)))
    named = [(version, sample) for pair in pairs for version, sample in zip(LAYOUTS, pair, strict=True)]
    named += [(version, sample) for sample, version in zip(both, ["v3.0"] * 3 + ["v2.1"] * 3, strict=True)]
    for version, sample in [*((sample["__source__"], sample) for sample in mixed), *named]:
        episode, k = int(sample["episode_index"]), int(sample["frame_index"])
        assert sample["task"] == ("push", "pull")[episode % 2]
        np.testing.assert_array_equal(sample[CAMERAS[0]], frame_of(0, episode, k, version))


def test_rows_alone_read_no_video(server: FaultServer) -> None:
    for name, body in version_3().items():
        server.add(f"bucket/robot/{name}", body)
    options = {"endpoint": server.url, "skip_signature": True}
    data = hr.lerobot("s3://bucket/robot", cameras=(), storage_options=options)
    assert [sample["action"].tolist() for sample in data] == [[episode, k] for episode, k in ROWS]
    assert data[0]["task"] == "push"
    assert not [request for request in server.log if "robot" in request.target and ".mp4" in request.target]


def test_stream_of_lerobots_layout_names_the_function_that_reads_it() -> None:
    for files in (version_3(), version_2()):
        place = put(files)
        with pytest.raises(OptionError, match=r"LeRobot's layout.*hr\.lerobot\('memory://robot\d+'\).*hr\.video\("):
            hr.stream(place)


GAP = json_lines([{"episode_index": k, "length": (k and 40) or 20} for k in (0, 1, 3)])
TWICE = json_lines([{"task_index": 0, "task": "a"}] * 2)
PATH = "videos/{video_key.__class__}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "body", "error", "why"),
    [
        ("meta/info.json", None, OptionError, "no data set of LeRobot's layout"),
        ("meta/info.json", b"{", FormatError, "info.json is damaged"),
        ("meta/info.json", info("v1.6"), OptionError, "version 'v1.6'"),
        ("meta/info.json", info("v2.1", fps="x"), FormatError, "no fps"),
        ("meta/info.json", info("v2.1", total_episodes=4), FormatError, "3 episodes, and meta/info.json .* 4"),
        ("meta/info.json", info("v2.1", video_path=PATH), FormatError, "is not there"),
        ("meta/info.json", info("v2.1", total_frames=101), FormatError, "100 rows, and meta/info.json .* 101"),
        ("meta/episodes.jsonl", GAP, FormatError, "it has an episode 3, and meta/info.json .* 3"),
        ("meta/tasks.jsonl", TWICE, FormatError, "have one number"),
        ("data/chunk-000/episode_000001.parquet", None, FormatError, "file of rows .*000001.parquet is not there"),
        ("data/chunk-000/copy.parquet", rows_of(ROWS[:1]), FormatError, "copy.parquet is of none of its episodes"),
        ("meta/episodes.jsonl", None, FormatError, "0 episodes"),
        ("meta/episodes.jsonl", b'{"episode_index": 0}', FormatError, "lacks what is needed of it: 'length'"),
        ("meta/episodes.jsonl", b'{"episode_index": 0, "length": 0}', FormatError, "has 0 rows"),
        (f"videos/chunk-000/{CAMERAS[0]}/episode_000001.mp4", None, FormatError, "video of episode 1 .*000001.mp4"),
    ],
)
def test_layout_that_is_damaged_is_an_error_that_names_it(
    name: str, body: bytes | None, error: type[Exception], why: str, request: pytest.FixtureRequest
) -> None:
    files = {key: value for key, value in version_2().items() if key != name} | ({name: body} if body else {})
    with pytest.raises(error, match=why):
        hr.lerobot(put(files, f"damaged{abs(hash(request.node.name))}"), decoder="pyav")


TOP = f"videos/chunk-000/{CAMERAS[0]}"


def rows_with(place: str, changes: dict[str, bytes], **options: Any) -> hr.Stream:
    place = put({**version_2(), **changes}, place)
    return hr.lerobot(place, **{"cameras": CAMERAS[:1], "decoder": "pyav", **options})


def test_video_that_is_not_of_its_rows_is_an_error_and_no_other_frame() -> None:
    data = rows_with("short", {f"{TOP}/episode_000001.mp4": videos.written(10, **videos.HOW["mpeg4"])})
    assert data[20][CAMERAS[0]].shape == (3, *videos.SIZE)
    why = r"episode_000001\.mp4 has not the frames of row 10 .*no frame begins at 0\.3333"
    with pytest.raises(FormatError, match=why):
        data[30]
    with pytest.raises(FormatError, match="no frame begins at"):
        rows_with("off", {}, offsets=[0.01])[3]


def test_row_beyond_its_episode_or_of_an_unlisted_task_is_an_error() -> None:
    data = rows_with("beyond", {"meta/episodes.jsonl": episodes_of((5, 30, 65))})
    np.testing.assert_array_equal(data[4][CAMERAS[0]], frame_of(0, 0, 4, "v2.1"))
    with pytest.raises(FormatError, match=r"row 5 of .*_000000\.parquet, at 0\.1667 s, .* beyond its episode, 0"):
        data[5]
    data = rows_with("tasks", {"meta/tasks.jsonl": json_lines([{"task_index": 0, "task": "push"}])}, cameras=())
    assert data[0]["task"] == "push"
    with pytest.raises(FormatError, match=r"row 0 of .*_000001\.parquet is of task 1, which meta/tasks lacks"):
        data[20]


def test_video_of_rows_that_changed_since_it_was_listed_is_an_error() -> None:
    place = put(version_2(), "changes")
    data = hr.lerobot(place, cameras=CAMERAS[:1], decoder="pyav")
    memory.put(f"{place}/{TOP}/episode_000000.mp4", video(FILES[0], 7))
    with pytest.raises(ObjectChangedError, match="listed"):
        data[0]
