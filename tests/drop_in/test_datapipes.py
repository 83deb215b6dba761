"""torch's DataPipe graphs, as they still ship: shared out among workers, shuffled with the seeds that torch draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from drop_in.classes import in_processes
from drop_in.reading import plain
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import headrace as hr

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
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
    one, other = source().shuffle().sharding_filter().fork(2)
    return one.zip(other.map(negative))


GRAPHS: dict[str, Callable[[], Any]] = {
    "shuffle, shard": lambda: source().shuffle(buffer_size=7).sharding_filter(),
    "shard, shuffle": lambda: source().sharding_filter().shuffle(),
    "shuffle twice": lambda: source().shuffle().sharding_filter().map(negative).shuffle(buffer_size=5),
    "filter, batch": lambda: source().shuffle().sharding_filter().filter(is_even).batch(2, drop_last=True),
    "fork, zip": zipped,
    "demux": lambda: source().shuffle().sharding_filter().demux(2, is_even)[0],
    "noise": lambda: source().shuffle().sharding_filter().map(with_noise),
    "no shard": lambda: source().shuffle(),
    "of ones own, with a lambda": lambda: Squares(source().sharding_filter().map(lambda x: x + 1)),
    "of maps alone": lambda: numbers().map(negative).zip(numbers().map(with_noise)),
    "of a map": lambda: numbers().shuffle().sharding_filter(),
}
WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {"num_workers": 0},
    "2 workers": {"num_workers": 2},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
}


def transcript(loader_class: type[Any], graph: Any, with_generator: bool, **options: Any) -> list[Any]:
    """Batches and random states of three epochs, the second of them left early unless workers live on."""
    torch.manual_seed(71)
    generator = torch.Generator().manual_seed(72) if with_generator else None
    loader = loader_class(graph, generator=generator, **options)
    seen: list[Any] = []
    for epoch in range(3):
        for number, batch in enumerate(loader):
            seen.append(plain(batch))
            if epoch == 1 and number == 2 and not loader.persistent_workers:
                break
        seen.append((torch.get_rng_state().tolist(), generator and generator.get_state().tolist()))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("workers", list(WORKERS))
@pytest.mark.parametrize("graph", list(GRAPHS))
def test_samples_order_and_random_states_are_torchs(graph: str, workers: str) -> None:
    size = None if graph == "demux" else 3
    torchs, ours = (
        transcript(kind, GRAPHS[graph](), graph == "no shard", batch_size=size, **WORKERS[workers])
        for kind in (torch.utils.data.DataLoader, hr.DataLoader)
    )
    assert ours == torchs


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shuffle_option_switches_the_shufflers_of_the_graph(loader_class: type[Any], num_workers: int) -> None:
    torch.manual_seed(5)
    graph = source().shuffle().sharding_filter()
    assert list(loader_class(graph, None, shuffle=False, num_workers=num_workers)) == list(range(COUNT))
    shuffled = list(loader_class(graph, None, shuffle=True, num_workers=num_workers))
    assert shuffled != list(range(COUNT))
    assert sorted(shuffled) == list(range(COUNT))


def test_shuffle_option_adds_a_shuffler_with_torchs_warning_when_the_graph_has_none(loader_class: type[Any]) -> None:
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match="the datapipe does not contain a `Shuffler`. Adding one at the end"):
        loader = loader_class(source(), batch_size=None, shuffle=True)
    assert sorted(loader) == list(range(COUNT))


@pytest.mark.slow
@in_processes
@pytest.mark.parametrize("num_workers", [0, 2])
def test_init_function_is_called_as_well_as_the_graph_is_shared_out(loader_class: type[Any], num_workers: int) -> None:
    def init(worker_id: int) -> None:
        torch.manual_seed(worker_id)

    graph = source().sharding_filter().map(with_noise)
    got = list(loader_class(graph, batch_size=None, num_workers=num_workers, worker_init_fn=init))
    assert [x for x, _ in got] == list(range(COUNT))
    if num_workers:
        own = [torch.Generator().manual_seed(worker_id) for worker_id in range(2)]
        assert [noise for _, noise in got] == [torch.rand((), generator=own[x % 2]).item() for x in range(COUNT)]
