"""torch's DataPipe graphs, as they still ship: shared out among workers, shuffled with the seeds that torch draws."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from full.programs.watching import described
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import headrace as hr

pytestmark = [
    pytest.mark.filterwarnings("ignore:Local function is not supported by pickle:UserWarning"),
    pytest.mark.filterwarnings("ignore:Some child DataPipes are not exhausted:UserWarning"),
]
COUNT = 23


def negative(x: int) -> int:
    return -x


def is_even(x: int) -> bool:
    return x % 2 == 0


def with_noise(x: int) -> tuple[int, float]:
    return x, torch.rand(()).item()


class Squares(IterDataPipe[int]):
    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[int]:
        for x in self.source:
            yield x * x


def source() -> Any:
    return IterableWrapper(range(COUNT))


def numbers() -> Any:
    return SequenceWrapper(list(range(COUNT)))


def zipped() -> Any:
    one, other = shuffled().fork(2)
    return one.zip(other.map(negative))


def shuffled() -> Any:
    return source().shuffle().sharding_filter()


def init(worker_id: int) -> None:
    torch.manual_seed(worker_id)


# A graph, and options of the loader.
GRAPHS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "shuffle, shard": (lambda: source().shuffle(buffer_size=7).sharding_filter(), {}),
    "shard, shuffle": (lambda: source().sharding_filter().shuffle(), {}),
    "shuffle twice": (lambda: shuffled().map(negative).shuffle(buffer_size=5), {}),
    "filter, batch": (lambda: shuffled().filter(is_even).batch(2, drop_last=True), {}),
    "fork, zip": (zipped, {}),
    "demux": (lambda: shuffled().demux(2, is_even)[0], {"batch_size": None}),
    "noise": (lambda: shuffled().map(with_noise), {}),
    "no shard": (lambda: source().shuffle(), {"generator": "its own"}),
    "of ones own, with a lambda": (lambda: Squares(source().sharding_filter().map(lambda x: x + 1)), {}),
    "of maps alone": (lambda: numbers().map(negative).zip(numbers().map(with_noise)), {}),
    "of a map": (lambda: numbers().shuffle().sharding_filter(), {}),
    "not shuffled": (shuffled, {"shuffle": False}),
    "shuffled by the option": (shuffled, {"shuffle": True}),
    "init function": (lambda: source().sharding_filter().map(with_noise), {"worker_init_fn": init}),
}
WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {"num_workers": 0},
    "2 workers": {"num_workers": 2},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
}


def transcript(loader_class: type[Any], graph: str, **options: Any) -> list[Any]:
    """Batches and random states of three epochs, the second of them left early unless workers live on."""
    make, more = GRAPHS[graph]
    torch.manual_seed(71)
    generator = torch.Generator().manual_seed(72) if "generator" in more else None
    loader = loader_class(make(), **{"batch_size": 3, **options, **more, "generator": generator})
    seen: list[Any] = []
    for epoch in range(3):
        for number, batch in enumerate(loader):
            seen.append(described(batch))
            if epoch == 1 and number == 2 and not loader.persistent_workers:
                break
        seen.append((torch.get_rng_state().tolist(), generator and generator.get_state().tolist()))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("workers", list(WORKERS))
@pytest.mark.parametrize("graph", list(GRAPHS))
def test_samples_order_and_random_states_are_torchs(graph: str, workers: str) -> None:
    torchs = transcript(torch.utils.data.DataLoader, graph, **WORKERS[workers])
    assert transcript(hr.DataLoader, graph, **WORKERS[workers]) == torchs


def test_shuffle_option_adds_a_shuffler_with_torchs_warning_when_the_graph_has_none(loader_class: type[Any]) -> None:
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match="the datapipe does not contain a `Shuffler`. Adding one at the end"):
        loader = loader_class(source(), batch_size=None, shuffle=True)
    assert sorted(loader) == list(range(COUNT))
