"""Data sets in LeRobot's layout: each row has the frames of its cameras at its time."""

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from builders import mds, parquet, videos
from builders.loops import flat, given, loaded, rest_of, state_after

import headrace as hr
from headrace.errors import FormatError, ObjectChangedError, OptionError
from headrace.fetch.stores import memory
from headrace.testing import FaultServer

pytestmark = pytest.mark.usefixtures("warm_server")

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


@pytest.mark.slow
def test_state_is_exact_and_ranks_share_the_rows() -> None:
    data = hr.lerobot(put(version_3()), cameras=CAMERAS[1:], decoder="pyav").shuffle("global", seed=3)

    def loader(**options: Any) -> hr.DataLoader[Any]:
        return hr.DataLoader(data, batch_size=8, num_workers=1, collate_fn=list, **options)

    def indexes(batches: Iterable[Any]) -> list[int]:
        return [sample["index"] for sample in flat(batches)]

    assert indexes(rest_of(loader(), state_after(loader(), 1))) == indexes(given(data, 8))[8:]
    ranks = [indexes(given(data, 8, ranks=hr.Ranks(rank=rank, world_size=2))) for rank in range(2)]
    assert sorted(flat(ranks)) == list(range(len(ROWS)))


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
    assert not [request for request in server.log if ".mp4" in request.target]


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


def test_video_that_changed_since_it_was_listed_is_an_error() -> None:
    place = put(version_2(), "changes")
    data = hr.lerobot(place, cameras=CAMERAS[:1], decoder="pyav")
    memory.put(f"{place}/{TOP}/episode_000000.mp4", video(FILES[0], 7))
    with pytest.raises(ObjectChangedError, match="listed"):
        data[0]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"cameras": ["wrist"]}, r"cameras='wrist' must be one of 'observation\.images\.top'"),
        *(({"offsets": some}, "must be one number of seconds or more") for some in ([], [np.nan], 0.5, "ab", [[0.0]])),
        ({"decoder": "opencv"}, "decoder='opencv'"),
        ({"size": (0, 1)}, "size="),
    ],
)
def test_wrong_use_is_an_option_error(options: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        hr.lerobot(put(version_2()), **{"decoder": "pyav", **options})
