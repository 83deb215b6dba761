"""A data set whose samples are what a function says of it, and what workers then say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

import headrace as hr


class Asked(Dataset[Any]):
    """What a function says of the data set, once for each sample."""

    def __init__(self, ask: Callable[[Any], Any], **things: Any) -> None:
        self.ask = ask
        vars(self).update(things)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.ask(self)


def told(dataset: Dataset[Any], **options: Any) -> list[Any]:
    return list(hr.DataLoader(dataset, None, num_workers=2, collate_fn=lambda sample: sample, **options))
