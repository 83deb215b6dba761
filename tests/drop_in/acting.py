"""Data sets that call a function for samples, and the batches that are expected of them."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Made(Dataset[Any]):
    """Samples that a function makes of their numbers."""

    def __init__(self, make: Callable[[int], Any], count: int = 20) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Acting(Made):
    """The numbers 0 to 19; `act` is called before those in `at`."""

    def __init__(self, act: Callable[[int], Any], at: tuple[int, ...] = (5,)) -> None:
        super().__init__(int)
        self.act, self.at = act, at

    def __getitem__(self, index: int) -> int:
        if index in self.at:
            self.act(index)
        return index


class ActingStream(IterableDataset[int]):
    """The numbers of each worker from 100 times its id; `act` is called before the fourth."""

    def __init__(self, act: Callable[[int], Any], workers: tuple[int, ...] = (0,)) -> None:
        self.act, self.workers = act, workers

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        number = worker.id if worker else 0
        for value in range(8):
            if value == 3 and number in self.workers:
                self.act(value)
            yield 100 * number + value


def raising(error: Callable[[], BaseException]) -> Callable[[int], None]:
    def act(index: int) -> None:
        raise error()

    return act


def batches_of(size: int, but: tuple[int, ...] = (), count: int = 20) -> list[list[int]]:
    """The batches of 0 to `count`, without those with the numbers in `but`."""
    return [list(range(k, k + size)) for n, k in enumerate(range(0, count, size)) if n not in but]


def split(got: list[Any]) -> tuple[list[Any], list[Exception]]:
    return [x for x in got if not isinstance(x, Exception)], [x for x in got if isinstance(x, Exception)]
