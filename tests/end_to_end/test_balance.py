"""Global batches dealt to ranks so that these have as much work: the batches stay what they were."""

import itertools
import json
import re
from typing import Any

import numpy as np
import pytest
from builders.loops import lists, words
from builders.numbers import Made
from builders.ranks import as_rank, steps_of

import headrace as hr

pytestmark = pytest.mark.usefixtures("warm_server")
LENGTHS = np.maximum(1, np.random.default_rng(3).lognormal(3.0, 1.0, 400).astype(np.int64))
SIZE = 128


def document(key: int) -> dict[str, Any]:
    return {"input_ids": np.full(LENGTHS[key], key, np.int32), "number": key}


def no_work(numbers: Any) -> Any:
    raise ZeroDivisionError


def rows(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [tuple(map(tuple, row)) for row in zip(*(batch[name].tolist() for name in sorted(batch)), strict=True)]


def loaders_of(
    data: Any, world: int, size: int = 16, balance: Any = None, *, in_order: bool = True
) -> list[hr.DataLoader[Any]]:
    ranks = hr.Ranks(global_batch_size=size, balance=balance, compare=False)
    return [
        hr.DataLoader(data, ranks=as_rank(rank, world, ranks), timeout=30, in_order=in_order) for rank in range(world)
    ]


def squares(row: tuple[Any, ...]) -> int:
    """The tokens of each of a sequence's documents, squared."""
    ids = np.array(row[0])
    return int((np.bincount(ids[ids >= 0]) ** 2).sum())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["concat", "best_fit"])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_packed_sequences_are_even_and_the_steps_are_the_same(method: Any, is_shuffled: bool) -> None:
    documents = Made(document, len(LENGTHS))
    data = (documents.shuffle() if is_shuffled else documents).pack(SIZE, lengths=LENGTHS, method=method)
    whole = [rows(batch) for batch in loaders_of(data, 1)[0]]
    steps = [list(map(rows, batches)) for batches in steps_of(loaders_of(data, 4, balance="tokens^2"))]
    assert [sorted(itertools.chain(*step)) for step in steps] == [sorted(step) for step in whole]
    assert all([len(mine) for mine in step] == [4] * 4 for step in steps[:-2])
    loads = np.array([[sum(map(squares, mine)) for mine in step] for step in steps[:-2]])
    assert (loads.max(axis=1) <= 1.15 * loads.mean(axis=1)).all()  # of four each
    in_turn = np.array([[sum(map(squares, step[k : k + 4])) for k in range(0, 16, 4)] for step in whole[:-2]])
    assert loads.max(axis=1).sum() < 0.9 * in_turn.max(axis=1).sum()


def test_function_gives_the_work_of_samples() -> None:
    (loader,) = loaders_of(hr.from_map(range(20)), 1, 10, np.sqrt)
    assert lists(loader) == [[*range(10)], [*range(10, 20)]]
    loaders = loaders_of(hr.from_map(range(64)), 2, 8, lambda numbers: numbers**2)
    for mine, others in steps_of(loaders):
        assert abs(int((mine**2).sum() - (others**2).sum())) <= 0.02 * int((mine**2).sum() + 100)


def test_states_do_not_depend_on_the_balance() -> None:
    data = hr.from_map(range(60)).shuffle()
    whole = [sorted(batch.tolist()) for (batch,) in steps_of(loaders_of(data, 1, 12))]
    loaders = loaders_of(data, 3, 12, lambda numbers: numbers)
    steps_of(loaders, 2)
    (state,) = {json.dumps(loader.state_dict()) for loader in loaders}
    for world, balance in ((2, None), (4, np.sqrt)):
        loaders = loaders_of(data, world, 12, balance)
        for loader in loaders:
            loader.load_state_dict(json.loads(state))
        assert [sorted(itertools.chain(*(one.tolist() for one in step))) for step in steps_of(loaders)] == whole[2:]


@pytest.mark.parametrize(
    ("data", "options", "why"),
    [
        (hr.from_map(range(60)), {"balance": "tokens"}, "only once they are read"),
        (hr.from_map(range(60)), {"balance": lambda _: [1]}, "result of balance"),
        (hr.from_map(range(60)), {"balance": lambda numbers: -numbers}, "0 or more"),
        (hr.from_map(range(60)), {"balance": np.sqrt, "in_order": False}, "in order"),
        (hr.from_map(range(60)).filter(bool).epoch(samples=9), {"balance": np.sqrt}, "balance"),
        (hr.from_map(range(60)), {"balance": no_work}, "no_work. was asked for the work of 8 samples"),
    ],
)
def test_what_cannot_be_balanced_is_an_error(data: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises((hr.OptionError, ZeroDivisionError)) as caught:
        next(iter(loaders_of(data, 2, 8, **options)[0]))
    assert re.search(why, words(caught.value))
