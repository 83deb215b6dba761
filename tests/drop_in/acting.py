"""Data sets that call a function for samples, and their batches and errors in a form that can be compared."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
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


def read_all(iterator: Iterator[Any], at_most: int = 100) -> list[Any]:
    """Each batch as Python lists, or the error that came in its place, until the iterator ends.

    An AssertionError where it has not ended after `at_most` of them.
    """
    got: list[Any] = []
    while len(got) < at_most:
        try:
            batch = next(iterator)
        except StopIteration:
            return got
        except Exception as error:
            got.append(error.with_traceback(None))  # else it is a cycle, and the iterator ends when that is collected
        else:
            got.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
    raise AssertionError(f"no end after {at_most} batches: {got}")


def next_error(iterator: Iterator[Any]) -> Exception:
    try:
        batch = next(iterator)
    except StopIteration as error:
        raise AssertionError("no error, and no batch either") from error
    except Exception as error:
        return error.with_traceback(None)
    raise AssertionError(f"no error but {batch}")


def text_of(error: BaseException) -> str:
    told = [str(error), *getattr(error, "__notes__", [])]
    cause = error.__cause__
    return "\n".join(told if cause is None else [*told, text_of(cause)])
