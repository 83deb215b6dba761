"""Train a detector on a data set in COCO's layout: a folder of photographs, and one JSON file with their boxes.

    train/000000000007.jpg
    annotations/instances_train.json    {"images": […], "annotations": […], "categories": […]}

The photographs are read one by one, in the order of a global shuffle. Boxes go with them to the worker processes, as a
few arrays: no object for each of a million boxes. A batch is what torchvision's detectors take: a list of images of any
size, and a list of dicts with `boxes`, `labels` and so on. There is no COCO here: the example paints its own.

    python examples/coco.py
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

import headrace as hr

COLOURS = {"red thing": (220, 40, 40), "green thing": (40, 190, 60), "blue thing": (50, 60, 220)}
SPLIT = "train"


def paint(folder, count):
    """A data set in COCO's layout: photographs of different sizes, with none to four things in each."""
    rng = np.random.default_rng(0)
    images, annotations = [], []
    (folder / SPLIT).mkdir()
    for number in range(1, count + 1):
        width, height = rng.integers(80, 160, 2).tolist()
        name = f"{number:012}.jpg"
        image = Image.new("RGB", (width, height), (230, 230, 230))
        for k in range(rng.integers(0, 5)):  # side by side
            w, h = rng.integers(10, 19), rng.integers(20, height - 10)
            x, y = 20 * k, rng.integers(0, height - h)
            kind = int(rng.integers(len(COLOURS)))
            ImageDraw.Draw(image).rectangle((x, y, x + w - 1, y + h - 1), list(COLOURS.values())[kind])
            annotations.append({
                "id": len(annotations) + 1, "image_id": number, "category_id": 10 * kind + 1, "iscrowd": 0,
                "bbox": [float(x), float(y), float(w), float(h)], "area": float(w * h),
            })  # fmt: skip
        image.save(folder / SPLIT / name, quality=95)
        images.append({"id": number, "file_name": name, "width": width, "height": height})
    categories = [{"id": 10 * k + 1, "name": name} for k, name in enumerate(COLOURS)]  # ids have gaps, as COCO's have
    (folder / "annotations").mkdir()
    said = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations" / f"instances_{SPLIT}.json").write_text(json.dumps(said))


class Boxes:
    """The boxes of all images, as arrays in the order of the images; called with a sample, it gives what to train on.

    Args:
        said: what an annotation file says.
        flips: how many of ten images are mirrored.
    """

    def __init__(self, said, flips=5):
        self.flips = flips
        self.names = [category["name"] for category in said["categories"]]
        label_of = {category["id"]: label for label, category in enumerate(said["categories"], 1)}  # 0: background
        self.row_of = {Path(image["file_name"]).stem: row for row, image in enumerate(said["images"])}
        self.ids = np.array([image["id"] for image in said["images"]])
        row_of_id = {number: row for row, number in enumerate(self.ids.tolist())}
        boxes = sorted(said["annotations"], key=lambda box: row_of_id[box["image_id"]])
        rows = [row_of_id[box["image_id"]] for box in boxes]
        self.starts = np.searchsorted(rows, np.arange(len(self.ids) + 1))
        xywh = np.array([box["bbox"] for box in boxes], np.float32).reshape(-1, 4)
        self.xyxy = np.concatenate([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]], 1)
        self.labels = np.array([label_of[box["category_id"]] for box in boxes], np.int64)
        self.area = np.array([box["area"] for box in boxes], np.float32)
        self.crowd = np.array([box["iscrowd"] for box in boxes], np.int64)

    def __call__(self, sample):
        """A plain function of a sample: it runs in a worker process."""
        row = self.row_of[Path(sample["__key__"]).stem]
        mine = slice(self.starts[row], self.starts[row + 1])
        image, boxes = sample["jpg"], self.xyxy[mine].copy()
        if hr.rng().integers(10) < self.flips:  # the same for this sample of this epoch, whoever works on it
            image = image[:, :, ::-1].copy()
            boxes[:, [0, 2]] = image.shape[2] - boxes[:, [2, 0]]
        return image, {
            "boxes": boxes, "labels": self.labels[mine], "area": self.area[mine], "iscrowd": self.crowd[mine],
            "image_id": self.ids[row],
        }  # fmt: skip


def as_lists(samples):
    """Images of different sizes make no one tensor: a list of `[3, H, W] float32`, and a list of targets."""
    images = [torch.from_numpy(image).float() / 255 for image, _ in samples]
    return images, [{name: torch.as_tensor(value) for name, value in target.items()} for _, target in samples]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="60 photographs in place of 600")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)  # or "s3://bucket/coco"
        paint(folder, 60 if options.quick else 600)
        said = hr.files(f"{folder}/annotations/instances_{SPLIT}.json").decode()[0]["json"]
        data = hr.files([f"{folder}/{SPLIT}/{image['file_name']}" for image in said["images"]])
        data = data.shuffle().decode("torch").map(Boxes(said))
        colours = torch.tensor(list(COLOURS.values())) / 255
        with hr.DataLoader(data, batch_size=8, num_workers=2, collate_fn=as_lists) as loader:
            for epoch in range(2):
                right = count = 0
                for images, targets in loader:  # model(images, targets) of torchvision's takes just these
                    for image, target in zip(images, targets, strict=True):
                        for box, label in zip(target["boxes"].int().tolist(), target["labels"].tolist(), strict=True):
                            inside = image[:, box[1] : box[3], box[0] : box[2]].mean((1, 2))
                            right += int((colours - inside).abs().sum(1).argmin()) == label - 1
                            count += 1
                print(
                    f"epoch {epoch}: {len(said['images'])} photographs, {right} of {count} boxes on a thing of theirs"
                )


if __name__ == "__main__":
    main()
