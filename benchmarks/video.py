"""Random clips of MP4 files by `hr.video`, beside torchcodec on the same files on this machine's disk: `video.py`.

    torchcodec    a data set of torch's that keeps a decoder for each file (seek_mode="exact"), in torch's DataLoader
    local         headrace, of the same files
    d0, d20       headrace, from the server, which waits so many milliseconds before each answer

Two workers each, one thread of FFmpeg in each. An epoch is run before the one that is timed; in both, clips begin
anywhere. "of the groups" is what the server was asked for, as a part of the bytes of the groups of pictures that the
clips' frames are of: from one key frame to the next.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import data
import numpy as np
import rounds
import tables
import torch
from fresh import Row
from server import Server, read_stats
from torchcodec.decoders import VideoDecoder

import headrace as hr
from headrace.fetch import Reader
from headrace.formats.limits import DEFAULTS
from headrace.sources.clips import Videos

FOLDER = data.DATA / "videos"
NAMES = [f"{n}.mp4" for n in range(4)]
SECONDS, RATE, HEIGHT, WIDTH = 20, 30, 360, 640
CLIPS = hr.Clips(frames=16, stride=2, every=1)
BATCH = 8


def main() -> None:
    """Measure, then print the table."""
    parser = rounds.parser(__doc__)
    parser.add_argument("--clips", type=int, default=160, help="of an epoch")
    options = rounds.parse(parser, one_epoch)
    jobs = [{"reader": reader, "clips": options.clips} for reader in ("torchcodec", "local", "d0", "d20")]
    print("\n" + report(rounds.rows_of(__file__, jobs, options, Server(data.DATA, make))))


def make() -> None:
    """Write the files, once: textures that move, some noise, a key frame every two seconds, and sound beside."""
    import av

    FOLDER.mkdir(parents=True, exist_ok=True)
    for n, name in enumerate(NAMES):
        if (FOLDER / name).exists():
            continue
        draw = np.random.default_rng(n)
        texture = (
            draw.integers(0, 255, (HEIGHT // 8 + 99, WIDTH // 8 + 99, 3)).repeat(8, 0).repeat(8, 1).astype(np.uint8)
        )
        with av.open(str(FOLDER / name) + ".tmp", "w", format="mp4") as file:
            video: Any = file.add_stream("libx264", rate=RATE, options={"preset": "veryfast", "crf": "26"})
            video.height, video.width, video.pix_fmt = HEIGHT, WIDTH, "yuv420p"
            video.codec_context.gop_size = 2 * RATE
            audio: Any = file.add_stream("aac", rate=48000)
            for k in range(SECONDS * RATE):
                picture = texture[k : k + HEIGHT, 2 * (k % 300) : 2 * (k % 300) + WIDTH].copy()
                picture[:, : WIDTH // 4] //= 2
                picture += draw.integers(0, 6, picture.shape).astype(np.uint8)
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                frame.pts, frame.time_base = k, Fraction(1, RATE)
                file.mux(video.encode(frame))
                sound = av.AudioFrame.from_ndarray(draw.normal(0, 0.1, (1, 1600)).astype(np.float32), "fltp", "mono")
                sound.sample_rate, sound.pts, sound.time_base = 48000, 1600 * k, Fraction(1, 48000)
                file.mux(audio.encode(sound))
            file.mux(video.encode(None))
            file.mux(audio.encode(None))
        Path(str(FOLDER / name) + ".tmp").rename(FOLDER / name)


class ByTorchcodec(torch.utils.data.Dataset[Any]):
    """Clips that begin anywhere."""

    def __init__(self, clips: int) -> None:
        self.clips = clips
        self.decoders: dict[int, Any] = {}

    def __len__(self) -> int:
        return self.clips

    def __getitem__(self, index: int) -> torch.Tensor:
        ordinal = int(torch.randint(len(NAMES), ()))
        if ordinal not in self.decoders:
            self.decoders[ordinal] = VideoDecoder(FOLDER / NAMES[ordinal], seek_mode="exact", num_ffmpeg_threads=1)
        decoder = self.decoders[ordinal]
        start = int(torch.randint(len(decoder) - CLIPS.span + 1, ()))
        frames: torch.Tensor = decoder.get_frames_at(list(range(start, start + CLIPS.span, CLIPS.stride))).data
        return frames


def one_epoch(job: Row) -> Iterator[Row]:
    """In the fresh process: an epoch that is not timed, and one that is."""
    if job["reader"] == "torchcodec":
        dataset = ByTorchcodec(job["clips"])
        loader: Any = torch.utils.data.DataLoader(dataset, BATCH, num_workers=2, persistent_workers=True)
        yield {}
        list(map(len, loader))
        start = time.perf_counter()
        count = sum(len(batch) for batch in loader)
        yield {"frames_s": count * CLIPS.frames / (time.perf_counter() - start)}
        return
    server = os.environ["HEADRACE_BENCH_SERVER"]
    place = str(FOLDER) if job["reader"] == "local" else f"{server}/{job['reader']}/videos"
    stream = hr.video([f"{place}/{name}" for name in NAMES], CLIPS, index=None).shuffle().take(job["clips"])
    with hr.DataLoader(stream, batch_size=BATCH, num_workers=2) as loader:
        yield {}
        list(map(len, loader))
        before = read_stats(server)
        keys: list[str] = []
        start = time.perf_counter()
        for batch in loader:
            keys += batch["__key__"]
        seconds = time.perf_counter() - start
        after = read_stats(server)
    assert len(keys) == job["clips"]
    row = {"frames_s": len(keys) * CLIPS.frames / seconds}
    if job["reader"] != "local":
        row["requests"] = (after["requests"] - before["requests"]) / len(keys)
        row["of_groups"] = (after["asked_bytes"] - before["asked_bytes"]) / asyncio.run(bytes_of_groups(keys))
    yield row


async def bytes_of_groups(keys: list[str]) -> int:
    """How many bytes the groups of pictures have that the frames of these clips are of, clip by clip."""
    videos, total = Videos([str(FOLDER / name) for name in NAMES], None, DEFAULTS), 0
    async with Reader(concurrency=4) as reader:
        found = [(await videos.video(reader, n))[0] for n in range(len(NAMES))]
    for key in keys:
        name, _, start = key.partition("/")
        table = found[int(name)]
        groups = np.searchsorted(table.keys, table.shown[CLIPS.chosen(table, int(start))], side="right") - 1
        ends = np.append(table.keys[1:], len(table.size))
        total += sum(int(table.size[table.keys[g] : ends[g]].sum()) for g in set(groups.tolist()))
    return total


def report(rows: list[Row]) -> str:
    """A line for each reader."""
    groups = rounds.group(rows, "reader")
    lines = []
    for (reader,), mine in groups.items():
        good = [row for row in mine if "frames_s" in row]
        cells = [reader, rounds.counted(mine), tables.spread(row["frames_s"] for row in good)]
        cells.append(tables.spread(rounds.ratios(good, groups.get(("torchcodec",), []), "frames_s"), 2))
        cells.append(tables.spread((row.get("of_groups") for row in good), 2))
        cells.append(tables.spread((row.get("requests") for row in good), 2))
        lines.append(cells)
    columns = ["reader", "runs", "frames/s", "of torchcodec", "bytes, of the groups", "requests for a clip"]
    return tables.markdown(columns, lines)


if __name__ == "__main__":
    main()
