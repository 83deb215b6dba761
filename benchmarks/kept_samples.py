"""What `.cache()` costs in a first epoch and saves in later ones: JPEGs decoded and scaled, with and without.

Both sides run by turns, in one process: in each round a first epoch of a new stream, and two later ones, of which the
processor's time is counted (of this process and all of its workers, per sample).
"""

from __future__ import annotations

import argparse
import io
import shutil
import statistics
import tempfile
from pathlib import Path

import numpy as np
from cpu import cpu_s
from PIL import Image

import headrace as hr

HEIGHT, WIDTH, SCALED = 375, 500, (224, 224)


def main() -> None:
    """Measure, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="headrace-kept-"))
    try:
        urls = written(folder, options.samples)
        sides = {"without": None, "memory": "memory", "folder": str(folder / "kept")}
        took: dict[tuple[str, str], list[float]] = {}
        for _ in range(options.rounds):
            for side, place in sides.items():
                for epoch, seconds in epochs(urls, place, options.workers):
                    took.setdefault((side, epoch), []).append(seconds)
                shutil.rmtree(folder / "kept", ignore_errors=True)
    finally:
        shutil.rmtree(folder)
    print("| | first epoch, CPU ms per sample | later ones | of those without |\n|---|---|---|---|")
    plain = statistics.median(took["without", "later"])
    for side in sides:
        first, later = (1e3 * statistics.median(took[side, epoch]) for epoch in ("first", "later"))
        print(f"| {side} | {first:.2f} | {later:.3f} | {later / 1e3 / plain:.3f} |")


def written(folder: Path, count: int) -> list[str]:
    """The addresses of some pictures."""
    rng, urls = np.random.default_rng(0), []
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8)).resize((WIDTH, HEIGHT))
        data = io.BytesIO()
        coarse.save(data, "JPEG", quality=90)
        path = folder / f"{number:06}.jpg"
        path.write_bytes(data.getvalue())
        urls.append(str(path))
    return urls


def epochs(urls: list[str], place: str | None, workers: int) -> list[tuple[str, float]]:
    """(which epoch, processor's seconds per sample) of a loader of its own, checked."""
    data = hr.files(urls).decode("rgb8", size=SCALED).select("jpg")
    if place is not None:
        data = data.cache(None if place == "memory" else place)
    took, sums = [], set()
    with hr.DataLoader(data.shuffle(), batch_size=64, num_workers=workers) as loader:
        for epoch in ("first", "later", "later"):
            before = cpu_s()
            sums.add(sum(int(batch["jpg"][:, ::32, ::32].sum()) for batch in loader))
            took.append((epoch, (cpu_s() - before) / len(urls)))
    assert len(sums) == 1, "the epochs have other pixels"
    return took


if __name__ == "__main__":
    main()
