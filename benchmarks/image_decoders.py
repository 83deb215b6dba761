"""CPU time of ways from a JPEG in memory to pixels, and how far their pixels are from a scaling of all the image's own.

    headrace            headrace.formats.media, with simplejpeg and torch's scaling
    headrace, Pillow    the same as where simplejpeg is not installed
    Pillow              what the benchmarks' contestants do: decode, by 1/2, 1/4 or 1/8 where that is enough; resize
    Pillow, gap         `reducing_gap=`: first by whole factors, then the rest
    simplejpeg + …      decoded by simplejpeg, then resized by Pillow or torch; "eighths" scales by any number of them
                        while decoding, "fast" takes the fast DCT and upsampling

The images are the benchmarks' own, and 2000 x 1500 ones made of them. One thread, all ways in turns; each run gives the
mean of its images. "off" is the mean difference of 0 to 255 from Pillow's scaling of the whole image.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import tables
import torch
from data import DATA, ensure
from numpy.typing import NDArray
from PIL import Image

from headrace.formats.limits import DEFAULTS
from headrace.formats.media import ImageDecoder, by_pillow, by_torch, pillow_image, scaled

Pixels = NDArray[np.uint8]
Size = tuple[int, int] | None
Way = Callable[[bytes, Size], Pixels]
CASES: dict[str, list[tuple[str, Size]]] = {
    "450 x 340": [("rgb8", None), ("l8", None), ("rgb8", (224, 224)), ("l8", (224, 224)), ("rgb8", (96, 96))],
    "2000 x 1500": [("rgb8", (512, 512)), ("rgb8", (224, 224))],
}


def without_simplejpeg(data: bytes, size: Size, mode: str = "RGB") -> Pixels:
    pixels = np.array(pillow_image(data, mode, size, DEFAULTS))
    return scaled(pixels, size) if size else pixels


def pillow(data: bytes, size: Size, mode: str = "RGB") -> Pixels:
    image: Image.Image = Image.open(io.BytesIO(data))
    if size:
        image.draft(mode, size[::-1])
    image = image.convert(mode)
    return np.array(image.resize(size[::-1], Image.Resampling.BILINEAR) if size else image)


def pillow_gap(data: bytes, size: Size) -> Pixels:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return np.array(image.resize(size[::-1], Image.Resampling.BILINEAR, reducing_gap=1.0) if size else image)


def whole(data: bytes, size: Size, resize: Callable[[Pixels, tuple[int, int]], Pixels], **options: Any) -> Pixels:
    pixels: Pixels = simplejpeg.decode_jpeg(data, "RGB", **options)
    return resize(pixels, size) if size else pixels


def eighths(data: bytes, size: Size) -> Pixels:
    return whole(data, size, by_torch, **({"min_height": size[0], "min_width": size[1]} if size else {}))


WAYS: dict[str, dict[str, Way]] = {
    "rgb8": {
        "headrace": lambda data, size: ImageDecoder("rgb8", size)(data),
        "headrace, Pillow": without_simplejpeg,
        "Pillow": pillow,
        "Pillow, gap": pillow_gap,
        "simplejpeg + Pillow": lambda data, size: whole(data, size, by_pillow),
        "simplejpeg + torch": lambda data, size: whole(data, size, by_torch),
        "simplejpeg eighths + torch": eighths,
        "simplejpeg fast + torch": lambda data, size: whole(data, size, by_torch, fastdct=True, fastupsample=True),
    },
    "l8": {
        "headrace": lambda data, size: ImageDecoder("l8", size)(data),
        "headrace, Pillow": lambda data, size: without_simplejpeg(data, size, "L"),
        "Pillow": lambda data, size: pillow(data, size, "L"),
    },
}


def main() -> None:
    """Measure, then print a table for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--images", type=int, default=100, help="how many are decoded in each run")
    parser.add_argument("--folder", type=Path, help="JPEG files to decode, instead of the benchmarks' own")
    parser.add_argument("--json", type=Path, help="add a JSON line for each run to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.folder is None:
        ensure("images")
    files = sorted((options.folder or DATA / "images").glob("*.jp*g"))[: options.images]
    small = [file.read_bytes() for file in files]
    images = {"450 x 340": small, "2000 x 1500": [large(small[k : k + 4]) for k in range(0, min(len(small), 40), 4)]}
    for kind, cases in CASES.items():
        for spec, size in cases:
            print(f"\n{kind} to {spec}" + (f", {size[0]} x {size[1]}" if size else ""), end="\n\n", flush=True)
            print(table(WAYS[spec], images[kind], size, {"images": kind, "spec": spec, "size": size}, options))


def table(ways: dict[str, Way], images: list[bytes], size: Size, case: tables.Row, options: argparse.Namespace) -> str:
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(options.runs):
        for name, way in ways.items():
            way(images[0], size)
            begin = time.process_time()
            for data in images:
                way(data, size)
            costs[name].append((time.process_time() - begin) / len(images) * 1e3)
            tables.append(options.json, case | {"way": name, "run": run, "cpu_ms": costs[name][-1]})
    rows = [[name, tables.spread(costs[name], 2), f"{off(way, images, size):.2f}"] for name, way in ways.items()]
    return tables.markdown(["way", "CPU ms per image", "off"], rows)


def off(way: Way, images: list[bytes], size: Size) -> float:
    """The mean difference of `way`'s pixels from those that Pillow makes of all the image's, some images long."""
    differences = []
    for data in images[:20]:
        pixels = way(data, size)
        image = Image.open(io.BytesIO(data)).convert("L" if pixels.ndim == 2 else "RGB")
        right = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR) if size else image)
        differences.append(float(np.abs(pixels.astype(int) - right).mean()))
    return sum(differences) / len(differences)


def large(four: list[bytes]) -> bytes:
    """A JPEG of 2000 x 1500 pixels, of four smaller ones beside each other."""
    canvas = Image.new("RGB", (2000, 1500))
    for k, data in enumerate(four):
        part = Image.open(io.BytesIO(data)).convert("RGB").resize((1000, 750), Image.Resampling.LANCZOS)
        canvas.paste(part, (k % 2 * 1000, k // 2 * 750))
    out = io.BytesIO()
    canvas.save(out, "JPEG", quality=90)
    return out.getvalue()


if __name__ == "__main__":
    main()
