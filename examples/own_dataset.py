"""Data sets of your own: `aget` is a coroutine, and the loader awaits hundreds of them at once.

The plain function given to `.map` decodes in worker processes; nothing says so but its colour.

    python examples/own_dataset.py
"""

import argparse
import io
import json
import tempfile
import time
from pathlib import Path

import aiofiles
import numpy as np
from PIL import Image

import digits
import headrace as hr


class ScansOnTheWeb(hr.AsyncDataset):
    """One object for each scan on a web server; reads go through the loader, which bounds, times and retries them."""

    def __init__(self, address, count):
        self.address, self.count = address, count
        self.labels = None

    async def aopen(self):
        self.labels = json.loads(await hr.read(f"{self.address}/labels.json"))

    async def aclose(self):
        self.labels = None

    def __len__(self):
        return self.count

    async def aget(self, index):
        return await hr.read(f"{self.address}/{index:06}.png"), self.labels[index]


class ScansOnDisk(hr.AsyncDataset):
    """The same scans as files, read by a library that headrace knows nothing about."""

    def __init__(self, folder, count):
        self.folder, self.count = folder, count
        self.labels = None

    async def aopen(self):
        async with aiofiles.open(self.folder / "labels.json") as file:
            self.labels = json.loads(await file.read())

    async def aclose(self):
        self.labels = None

    def __len__(self):
        return self.count

    async def aget(self, index):
        async with aiofiles.open(self.folder / f"{index:06}.png", "rb") as file:
            return await file.read(), self.labels[index]


def decode(sample):
    """A plain function: it runs in a worker process."""
    data, label = sample
    return np.asarray(Image.open(io.BytesIO(data))), label


def show(name, dataset):
    loader = hr.DataLoader(dataset.map(decode), batch_size=64, shuffle=True, seed=17, num_workers=2)
    started = time.perf_counter()
    seen = [0] * 10
    for images, labels in loader:
        assert images.shape[1:] == (8, 8)
        for label in labels.tolist():
            seen[label] += 1
    print(f"{name}: {sum(seen)} scans in {time.perf_counter() - started:.2f} s, of each digit {seen}")
    loader.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="200 scans in place of 1,797")
    options = parser.parse_args()
    images, labels = digits.read_scans()
    count = 200 if options.quick else len(labels)
    objects = {f"{index:06}.png": digits.png(images[index]) for index in range(count)}
    objects["labels.json"] = json.dumps(labels[:count].tolist()).encode()

    with digits.http_server(objects) as address:
        show("over HTTP", ScansOnTheWeb(address, count))
    with tempfile.TemporaryDirectory() as folder:
        for name, data in objects.items():
            (Path(folder) / name).write_bytes(data)
        show("from files", ScansOnDisk(Path(folder), count))


if __name__ == "__main__":
    main()
