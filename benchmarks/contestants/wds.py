"""WebDataset with its WebLoader: batches are made in the workers; a curl process per shard reads, its default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import webdataset
from workloads import Work, collate

from contestants import Batches

VARIANTS = {"nw2": {"num_workers": 2}, "nw8": {"num_workers": 8}}
WORKLOADS = {"W2": ["nw2"], "W4": ["nw2"]}
PACKAGES = ["webdataset", "torch"]


def run(work: Work, parameters: Mapping[str, Any]) -> Batches:
    """One epoch in the shards' order."""
    urls = [work.url(shard) for shard in work.shards()]
    dataset = webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
    pairs = dataset.to_tuple(work.field, "cls").map_tuple(work.apply, int)
    batches: Batches = webdataset.WebLoader(
        pairs.batched(work.batch, collation_fn=collate, partial=True), batch_size=None, **parameters
    )
    return batches
