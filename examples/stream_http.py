"""Read tar shards from a plain web server, by range requests of some MiB; nothing is written to disk.

    python examples/stream_http.py
    python examples/stream_http.py --url 'https://host/path/train-{0000..0006}.tar'

Without an address of yours, a small web server is started in a thread.
"""

import argparse
from contextlib import ExitStack

import torch

import digits
import headrace as hr


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="shards of yours with the fields png and cls, 8 by 8 pixels")
    parser.add_argument("--quick", action="store_true", help="one epoch")
    options = parser.parse_args()

    with ExitStack() as servers:
        url = options.url or f"{servers.enter_context(digits.http_server(digits.make_shards()))}/{digits.TRAIN}"
        data = hr.stream(url).shuffle(seed=17).decode("l8").to_tuple("png", "cls", "__key__")
        loader = hr.DataLoader(data, batch_size=100, num_workers=2)
        for epoch in range(1 if options.quick else 3):
            counts = torch.zeros(10, dtype=torch.int64)
            first_keys = None
            for images, labels, keys in loader:
                assert images.shape[1:] == (8, 8)
                first_keys = first_keys or keys[:4]
                counts += torch.bincount(labels, minlength=10)
            print(f"epoch {epoch}: {counts.sum()} scans, the first of them {first_keys}")
        print("scans of each digit:", counts.tolist())
        print(loader.report())
        loader.close()


if __name__ == "__main__":
    main()
