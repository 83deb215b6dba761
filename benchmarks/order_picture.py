"""Draws where in an epoch the samples of a few shards come, for four ways to shuffle: `order_picture.py FILE.svg`.

Needs nothing but headrace. The same file comes each time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from headrace.order.orders import Order, ShardOrder, ShuffledOrder, Windows

SHARDS, SAMPLES = 64, 256
SHOWN = {5: "#2e6f95", 40: "#d1495b", 50: "#3a9d5d"}
WINDOWS = Windows(8, 128)
LEFT, WIDTH, ROW, STRIP = 10, 700, 62, 30


def main() -> None:
    """Draw."""
    key, sizes = (1, 0), np.full(SHARDS, SAMPLES)
    plain = ShardOrder(sizes, "none", ())
    orders: dict[str, Order] = {
        "no shuffle": plain,
        "shards: whole shards in another order": ShardOrder(sizes, "shards", key),
        f"windows: {WINDOWS.lanes} lanes at once, each shuffled by blocks of {WINDOWS.block}": ShardOrder(
            sizes, "windows", key, WINDOWS
        ),
        "global": ShuffledOrder(plain, key),
    }
    rows = [strip(name, order, 12 + ROW * k) for k, (name, order) in enumerate(orders.items())]
    height = 12 + ROW * len(orders) + 24
    axis = (
        f'<text x="{LEFT}" y="{height - 14}">first sample of the epoch</text>'
        f'<text x="{LEFT + WIDTH}" y="{height - 14}" text-anchor="end">last one</text>'
    )
    Path(sys.argv[1]).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 2 * LEFT} {height}" '
        f'font-family="sans-serif" font-size="12" fill="#333333">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(rows) + f"\n{axis}\n</svg>\n"
    )


def strip(name: str, order: Order, top: int) -> str:
    """One epoch: a mark wherever a sample of the shown shards comes."""
    shards = order.locate(np.arange(order.count)).shards
    marks = [f'<text x="{LEFT}" y="{top + 10}">{name}</text>']
    marks.append(f'<rect x="{LEFT}" y="{top + 16}" width="{WIDTH}" height="{STRIP}" fill="#eef1f4"/>')
    for shard, colour in SHOWN.items():
        columns = np.unique(np.flatnonzero(shards == shard) * WIDTH * 2 // order.count) / 2
        lines = "".join(f"M{LEFT + x:g} {top + 16}v{STRIP}" for x in columns)
        marks.append(f'<path d="{lines}" stroke="{colour}" stroke-width="0.6"/>')
    return "\n".join(marks)


if __name__ == "__main__":
    main()
