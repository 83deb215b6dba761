"""Makes the benchmarks' data, the same with the same versions of numpy and Pillow: `data.py [images|wds|small|tokens]`.

    images/00000.jpg …   2,048 JPEG files of about 60 to 110 KB
    wds/00000.tar …      the same as 8 shards of 256 samples (KEY.jpg, KEY.cls)
    small/00000.tar …    80,000 samples KEY.npy (float32[384], 1,664 bytes) and KEY.cls, 10,000 to a shard
    tokens/tokens.u16    2^28 numbers below 50,257, two bytes each

They take 1.2 GB under `benchmarks/.data`, or under $HEADRACE_BENCH_DATA. What is missing is made when a benchmark
needs it.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

DATA = Path(os.environ.get("HEADRACE_BENCH_DATA", Path(__file__).parent / ".data")).absolute()
IMAGES, IMAGES_PER_SHARD = 2048, 256
ARRAYS, ARRAYS_PER_SHARD = 80_000, 10_000
LARGE_SAMPLE_BYTES = 10**6
TOKENS = 2**28


def label(index: int) -> int:
    """The label of sample `index`, of all data here."""
    return index * 7919 % 1000


def ensure(*buckets: str) -> None:
    """Make those of the buckets in `MAKERS` that are missing; a folder is there completely or not at all."""
    for bucket in buckets:
        if not (DATA / bucket).is_dir():
            print(f"making {DATA / bucket} (once, up to some minutes)", flush=True)
            MAKERS[bucket](_building(bucket))
            (DATA / f"{bucket}.tmp").rename(DATA / bucket)


def ensure_large(samples: int) -> str:
    """The name, below DATA, of a tar shard of `samples` times 1 MB (KEY.bin, all zeros; KEY.cls); sparse on disk."""
    name = f"large/{samples:05d}.tar"
    target = DATA / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        building = target.with_suffix(".tmp")
        with building.open("wb") as file:
            for index in range(samples):
                _write_hole(file, f"{index:05d}.bin", LARGE_SAMPLE_BYTES)
                _write_member(file, f"{index:05d}.cls", str(label(index)).encode())
            file.truncate(file.tell() + 2 * tarfile.BLOCKSIZE)
        building.rename(target)
    return name


def ensure_sparse(count: int, size: int) -> str:
    """The name, below DATA, of a folder of `count` objects of `size` zeros (00000.bin …); sparse on disk."""
    name = f"sparse/{size}"
    for index in range(count):
        target = DATA / name / f"{index:05d}.bin"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                file.truncate(size)
    return name


def make_images(folder: Path) -> None:
    """The JPEG files, made by all cores."""
    with multiprocessing.Pool() as pool:
        pool.starmap(_write_image, ((folder, index) for index in range(IMAGES)), chunksize=32)


def make_wds(folder: Path) -> None:
    """The JPEG files as tar shards."""
    ensure("images")
    for shard in range(IMAGES // IMAGES_PER_SHARD):
        chosen = range(shard * IMAGES_PER_SHARD, (shard + 1) * IMAGES_PER_SHARD)
        bodies = ((f"{i:05d}.jpg", (DATA / f"images/{i:05d}.jpg").read_bytes(), f"{i:05d}.cls", i) for i in chosen)
        _write_shard(folder / f"{shard:05d}.tar", bodies)


def make_small(folder: Path) -> None:
    """Small arrays as tar shards."""
    for shard in range(ARRAYS // ARRAYS_PER_SHARD):
        values = np.random.default_rng(10**6 + shard).normal(size=(ARRAYS_PER_SHARD, 384)).astype(np.float32)
        first = shard * ARRAYS_PER_SHARD
        bodies = ((f"{i:06d}.npy", _npy(value), f"{i:06d}.cls", i) for i, value in enumerate(values, start=first))
        _write_shard(folder / f"{shard:05d}.tar", bodies)


def make_tokens(folder: Path) -> None:
    """The token file, in 16 steps."""
    random = np.random.default_rng(7)
    with (folder / "tokens.u16").open("wb") as file:
        for _ in range(16):
            file.write(random.integers(0, 50257, TOKENS // 16, dtype=np.uint16).tobytes())


MAKERS = {"images": make_images, "wds": make_wds, "small": make_small, "tokens": make_tokens}


def photo(index: int) -> bytes:
    """A photo-like JPEG: noise with a 1/f spectrum, a few shapes, fine grain; the quality is searched for the size."""
    random = np.random.default_rng(index)
    width, height = int(random.integers(400, 501)), int(random.integers(300, 376))
    pixels = np.full((height, width, 3), 128.0, np.float32)
    for octave in range(7):
        shape = (max(2, 3 * 2**octave), max(2, 4 * 2**octave), 3)
        coarse = random.normal(0, 60 / 1.55**octave, shape).astype(np.float32)
        for channel in range(3):
            layer = Image.fromarray(coarse[..., channel]).resize((width, height), Image.Resampling.BICUBIC)
            pixels[..., channel] += np.asarray(layer)
    picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    canvas = ImageDraw.Draw(picture)
    for _ in range(12):
        x, y, side = random.integers(0, width), random.integers(0, height), random.integers(10, 120)
        draw = canvas.ellipse if random.random() < 0.5 else canvas.rectangle
        corners = [int(x), int(y), int(x + side), int(y + side * random.random() + 1)]
        draw(corners, fill=tuple(int(v) for v in random.integers(0, 256, 3)))
    grain = np.asarray(picture) + random.normal(0, 6, (height, width, 1))
    picture = Image.fromarray(np.clip(grain, 0, 255).astype(np.uint8))
    return _jpeg_of_size(picture, int(random.integers(60_000, 110_000)))


def _jpeg_of_size(picture: Image.Image, wanted: int, tolerance: int = 6000) -> bytes:
    quality, body = 88, io.BytesIO()
    for _ in range(5):
        body.seek(0)
        body.truncate()
        picture.save(body, "JPEG", quality=quality)
        excess = body.tell() - wanted
        if abs(excess) < tolerance:
            break
        step = max(1, abs(excess) // tolerance)
        quality = min(97, max(60, quality - step if excess >= 0 else quality + step))
    return body.getvalue()


def _write_image(folder: Path, index: int) -> None:
    (folder / f"{index:05d}.jpg").write_bytes(photo(index))


def _npy(value: NDArray[np.float32]) -> bytes:
    body = io.BytesIO()
    np.save(body, value)
    return body.getvalue()


def _write_shard(path: Path, samples: Iterable[tuple[str, bytes, str, int]]) -> None:
    with path.open("wb") as file:
        for name, body, label_name, index in samples:
            _write_member(file, name, body)
            _write_member(file, label_name, str(label(index)).encode())
        file.truncate(file.tell() + 2 * tarfile.BLOCKSIZE)


def _write_member(file: io.BufferedWriter, name: str, body: bytes) -> None:
    file.write(_header(name, len(body)))
    file.write(body + bytes(-len(body) % tarfile.BLOCKSIZE))


def _write_hole(file: io.BufferedWriter, name: str, size: int) -> None:
    file.write(_header(name, size))
    file.seek(size + -size % tarfile.BLOCKSIZE, os.SEEK_CUR)


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.USTAR_FORMAT)


def _building(bucket: str) -> Path:
    folder = DATA / f"{bucket}.tmp"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def main() -> None:
    """Make the folders that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bucket", nargs="*", choices=MAKERS, default=list(MAKERS))
    ensure(*parser.parse_args().bucket)


if __name__ == "__main__":
    main()
