"""MosaicML Streaming: StreamingDataset and StreamingDataLoader over its own shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import streaming
from resume_test.contestants import SEED, SHARDS, Contestant, Reads, Setting

BYTES_OF_A_SAMPLE = 20  # as its writer counts them


class Numbers(streaming.StreamingDataset):
    """Sample n is the number n."""

    def __init__(self, count: Reads, **options: Any) -> None:
        super().__init__(**options)
        self.count_read = count

    def __getitem__(self, at: Any) -> Any:
        return self.count_read(super().__getitem__(at)["number"])


class Streaming(Contestant):
    """Shuffled by the default algorithm."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        data = Numbers(self.count, local=setting.folder, shuffle=True, shuffle_seed=SEED, batch_size=setting.batch_size)
        self.loader = streaming.StreamingDataLoader(
            data, batch_size=setting.batch_size, num_workers=setting.num_workers
        )

    @staticmethod
    def write(folder: Path, samples: int) -> None:
        size = BYTES_OF_A_SAMPLE * -(-samples // SHARDS)
        with streaming.MDSWriter(out=str(folder), columns={"number": "int"}, size_limit=size) as out:
            for number in range(samples):
                out.write({"number": number})
