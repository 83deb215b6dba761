"""Train images and texts to know each other, where they lie apart: two streams, side by side.

Scans of handwritten digits lie in tar shards, and what they show in a file of JSON lines, in the same order. `.zip()`
makes pairs of them; what is shuffled are the pairs.

    python examples/image_text_pairs.py
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import digits
import headrace as hr

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
LONGEST = max(map(len, NAMES))


def write_captions(folder):
    """A line for each scan of the training shards, in their order."""
    with (
        hr.DataLoader(hr.stream(folder / digits.TRAIN), batch_size=None) as scans,
        (folder / "texts.jsonl").open("w") as file,
    ):
        for scan in scans:
            file.write(json.dumps({"text": NAMES[int(scan["cls"])]}) + "\n")


def pair(both):
    """(the scan: [64] float32 from 0 to 1, the letters of its text: [LONGEST] int64, 0 behind them)."""
    scan, said = both
    letters = np.zeros(LONGEST, np.int64)
    letters[: len(said["text"])] = [ord(letter) - 96 for letter in said["text"]]
    return scan["png"].astype(np.float32).ravel() / 255, letters


class Model(nn.Module):
    """Scans and texts as directions: those of a pair are to be alike."""

    def __init__(self, width=32):
        super().__init__()
        self.scans = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, width))
        self.letters, self.texts = nn.Embedding(27, width), nn.Linear(width * LONGEST, width)

    def forward(self, scans, letters):
        """[batch, batch]: how alike each scan and each text are."""
        of_scans = nn.functional.normalize(self.scans(scans), dim=1)
        of_texts = nn.functional.normalize(self.texts(self.letters(letters).flatten(1)), dim=1)
        return 10 * of_scans @ of_texts.T


def named(model, scans, letters):
    """The share of scans to which the right name is most alike."""
    names = torch.unique(letters, dim=0)
    right = (letters[:, None] == names[None]).all(2).float().argmax(1)
    return (model(scans, names).argmax(1) == right).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 epochs in place of 10")
    epochs = 2 if parser.parse_args().quick else 10
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)  # or two buckets
        digits.write_shards(folder)
        write_captions(folder)
        scans = hr.stream(folder / digits.TRAIN, index="build").decode("l8")
        texts = hr.stream(folder / "texts.jsonl", index="build")
        pairs = scans.zip(texts).shuffle().map(pair)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with hr.DataLoader(pairs, batch_size=32, num_workers=1, drop_last=True) as loader:
            for epoch in range(epochs):
                for of_scans, of_texts in loader:
                    alike = model(of_scans, of_texts)
                    same = (of_texts[:, None] == of_texts[None]).all(2).float()
                    loss = nn.functional.cross_entropy(alike, same / same.sum(1, keepdim=True))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                share = named(model, of_scans, of_texts)
                print(f"epoch {epoch}: {len(loader)} batches, {share:.0%} of the last named right")


if __name__ == "__main__":
    main()
