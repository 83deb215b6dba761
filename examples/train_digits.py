"""Train from tar shards in S3; nothing is downloaded first.

    python examples/train_digits.py                          # an S3 in a thread, filled with the digits
    python examples/train_digits.py --bucket mine --upload   # Amazon's, after putting the shards there
    python examples/train_digits.py --bucket mine --endpoint https://storage.example.org

The keys to a bucket of yours come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION.
"""

import argparse
import asyncio
import math
from contextlib import ExitStack

import numpy as np
import torch
from PIL import Image
from torch import nn
from tqdm import tqdm

import digits
import headrace as hr


def augment(sample):
    """Turn, scale and shift the scan a little; runs in the workers, with random numbers that belong to the sample."""
    rng = hr.rng()
    angle, scale = math.radians(rng.uniform(-10, 10)), rng.uniform(0.9, 1.1)
    right, down = rng.uniform(-0.7, 0.7, size=2)
    c, s = scale * math.cos(angle), scale * math.sin(angle)
    around_the_middle = (c, s, 4 - 4 * c - 4 * s + right, -s, c, 4 + 4 * s - 4 * c + down)
    scan = Image.fromarray(sample["png"])
    moved = scan.transform(scan.size, Image.Transform.AFFINE, around_the_middle, Image.Resampling.BILINEAR)
    return as_input(sample | {"png": np.asarray(moved)})


def as_input(sample):
    """png: [1, 8, 8] float32 from 0 to 1."""
    return sample | {"png": sample["png"][None].astype(np.float32) / 255}


def train(net, loader, epochs):
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    net.train()
    with tqdm(unit=" samples") as progress:
        for epoch in range(epochs):
            for images, labels in loader:
                loss = nn.functional.cross_entropy(net(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress.update(len(labels))
                progress.set_postfix(epoch=epoch, loss=f"{loss.item():.3f}", refresh=False)
            schedule.step()


async def evaluate(net, loader):
    """The share of samples that `net` names right."""
    right = total = 0
    net.eval()
    async with loader:
        async for images, labels in loader:
            with torch.no_grad():
                right += (net(images).argmax(1) == labels).sum().item()
            total += len(labels)
    return right / total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket", help="a bucket of yours; without it, an S3 is started in a thread")
    parser.add_argument("--endpoint", help="the address of an S3 other than Amazon's")
    parser.add_argument("--upload", action="store_true", help="put the shards into your bucket first")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="two epochs")
    options = parser.parse_args()
    if options.endpoint and not options.bucket:
        parser.error("--endpoint needs --bucket")
    torch.manual_seed(17)
    torch.set_num_threads(1)

    with ExitStack() as servers:
        bucket = options.bucket or "digits"
        if options.bucket:
            storage_options = {"endpoint": options.endpoint} if options.endpoint else {}
        else:
            storage_options = servers.enter_context(digits.s3_server())
            digits.make_bucket(storage_options, bucket)
        if options.upload or not options.bucket:
            digits.upload(storage_options, bucket)

        training = (
            hr.stream(f"s3://{bucket}/{digits.TRAIN}", storage_options=storage_options)
            .shuffle(seed=17)
            .decode("l8")
            .map(augment)
            .to_tuple("png", "cls")
        )
        testing = (
            hr.stream(f"s3://{bucket}/{digits.TEST}", storage_options=storage_options)
            .decode("l8")
            .map(as_input)
            .to_tuple("png", "cls")
        )
        net = digits.make_net()
        loader = hr.DataLoader(training, batch_size=64, num_workers=2)
        train(net, loader, epochs=2 if options.quick else options.epochs)
        print(loader.report())
        loader.close()

        accuracy = asyncio.run(evaluate(net, hr.DataLoader(testing, batch_size=128)))
        print(f"accuracy on scans that were not trained on: {accuracy:.4f}")


if __name__ == "__main__":
    main()
