"""Steps that give many samples for one, and batches that are made on the way."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.loops import assert_refused, first_of, loaded, outcomes_of, rest_of, resumed_anywhere, state_after
from builders.numbers import Numbers, twice

import headrace as hr

pytestmark = pytest.mark.usefixtures("warm_server")


def listed(n: int) -> list[dict[str, int]]:
    return [{"n": n * 100 + k, "drawn": int(hr.rng().integers(1 << 30))} for k in range(n % 4)]


def draws(sample: dict[str, int]) -> dict[str, int]:
    return {**sample, "own": int(hr.rng().integers(1 << 30))}


def sized(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "size": torch.full((len(batch["n"]),), len(batch["n"]))}


def source(count: int = 23) -> hr.Stream:
    return hr.from_map(list(range(count)))


def rows(batch: Any) -> Any:
    if isinstance(batch, dict):
        return tuple(zip(*(batch[name].tolist() for name in sorted(batch)), strict=True))
    return batch


def test_batches_are_of_several_sizes_when_they_are_taken_apart() -> None:
    stream = source(10).map(lambda n: {"n": n}).batch(4).map(sized).unbatch().batch(3)
    batches = loaded(stream)
    assert [batch["n"].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert [batch["size"].tolist() for batch in batches] == [[4, 4, 4], [4, 4, 4], [4, 4, 2], [2]]


def test_samples_made_of_others_are_shuffled_within_windows() -> None:
    loader = hr.DataLoader(source(10).flat_map(lambda n: [2 * n, 2 * n + 1]).shuffle(window=6), batch_size=None)
    first, second = list(loader), list(loader)
    windows = [range(start, min(start + 6, 20)) for start in range(0, 20, 6)]
    for epoch in (first, second):
        assert [sorted(epoch[w.start : w.stop]) for w in windows] == [list(w) for w in windows]
    assert first != second


def test_parts_of_a_sample_have_random_numbers_of_their_own() -> None:
    parts = source(40).flat_map(lambda n: [{"n": n}] * 5).map(draws).batch(7).unbatch()
    (batch,) = loaded(parts.map(lambda sample: {**sample, "more": draws(sample)["own"]}), batch_size=200)
    for name in ("own", "more"):
        assert len(set(batch[name].tolist())) == 200
    assert not set(batch["own"].tolist()) & set(batch["more"].tolist())


def failing(n: int) -> Iterator[dict[str, int]]:
    yield {"n": n * 10}
    if n % 5 == 3:
        raise ValueError(f"sample {n} is damaged")
    yield {"n": n * 10 + 1}


@pytest.mark.parametrize("workers", [0, 2])
def test_sample_is_skipped_with_all_its_parts_when_one_fails(workers: int) -> None:
    stream = source(10).flat_map(failing)
    with hr.DataLoader(stream, batch_size=4, num_workers=workers, errors=hr.Skip()) as loader:
        got = [n for batch in loader for n in batch["n"].tolist()]
        assert loader.stats().skipped == 2
    assert got == [n * 10 + k for n in range(10) if n % 5 != 3 for k in range(2)]


def test_error_comes_in_its_place_when_a_group_has_a_sample_that_failed() -> None:
    stream = source(9).flat_map(failing).batch(4).unbatch()
    with hr.DataLoader(stream, batch_size=2) as loader:
        got = [str(one) if isinstance(one, ValueError) else one["n"].tolist() for one in outcomes_of(loader)]
    assert got[:3] == [[0, 1], [10, 11], "sample 3 is damaged"]
    assert got[3:5] == [[50, 51], [60, 61]] or got[3][0] == 50


def test_state_is_refused_when_a_sample_gives_fewer_than_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"each": 6}

    def many(n: int) -> list[int]:
        return [n] * counts["each"]

    state = state_after(hr.DataLoader(source(4).flat_map(many), batch_size=4), 1)
    assert state["stages"] == [{"skip": 4}]
    counts["each"] = 3
    with pytest.raises(hr.StateMismatchError, match="4 samples were received of those that one sample"):
        rest_of(hr.DataLoader(source(4).flat_map(many), batch_size=4), state)


UNEVEN = {"a": torch.zeros(3), "b": torch.zeros(2)}
WRONG: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda data: data.flat_map(listed).shuffle("global"), hr.OptionError, r"in windows only"),
    (lambda data: data.flat_map(listed).sample([1]), hr.OptionError, r"\.sample\(…\) selects samples of the source"),
    (lambda data: hr.DataLoader(data.filter(bool).take(3).filter(bool), in_order=False), hr.OptionError, r"\.take"),
    (lambda data: hr.DataLoader(data.flat_map(listed), in_order=False), hr.OptionError, r"and \.flat_map\(listed\)"),
    (lambda data: hr.DataLoader(data.batch(2).batch(3), batch_size=4), hr.OptionError, r"size=4 and \.batch\(3\)"),
    (lambda data: data.flat_map(3), hr.OptionError, r"flat_map\(\): fn=3 must be a function"),
    *((lambda data, one=one: first_of(data.flat_map(lambda _: one)), TypeError, "a list of samples is needed")
      for one in ("text", 3, None, {"a": 1})),
    (lambda _: first_of(hr.from_map([UNEVEN]).unbatch()), ValueError, "these have 2 and 3"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "match"), WRONG)
def test_wrong_use_of_operators_is_an_error(make: Callable[[Any], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make(source())


@pytest.mark.parametrize(
    "samples",
    [
        [torch.arange(3), torch.arange(3) + 3],
        [(torch.tensor(1), "a"), (torch.tensor(2), "b")],
        [{"x": torch.tensor([1.0]), "y": {"z": "a"}}, {"x": torch.tensor([2.0]), "y": {"z": "b"}}],
        ["one", "two"],
    ],
)
def test_unbatch_gives_the_samples_that_were_batched(samples: list[Any]) -> None:
    got = loaded(hr.from_map(samples).batch(2).unbatch(), batch_size=None)
    assert str(got) == str([list(sample) if isinstance(sample, tuple) else sample for sample in samples])  # as torch


def test_reads_without_prefetch_are_those_that_a_batch_needs() -> None:
    data = Numbers(50)
    stream = data.flat_map(lambda n: [n] * 30)
    with hr.DataLoader(stream, batch_size=4, prefetch_factor=0) as loader:
        batches = iter(loader)
        for _ in range(7):
            next(batches)
        assert sorted(data.asked) == [0, 1, 2, 3]  # one might have given one
        for _ in range(23):
            next(batches)
        assert sorted(data.asked) == [0, 1, 2, 3]
        next(batches)
        assert len(data.asked) <= 8


@pytest.mark.parametrize("prefetch_factor", [0, 2])
def test_reads_end_at_a_limit(prefetch_factor: int) -> None:
    made: list[int] = []

    def three(n: int) -> list[int]:
        made.append(n)
        return [n] * 3

    data = Numbers(1000)
    stream = data.flat_map(three).take(10).batch(2).unbatch().flat_map(twice)
    with hr.DataLoader(stream, batch_size=1, prefetch_factor=prefetch_factor, fetch=hr.Fetch(concurrency=4)) as loader:
        batches = iter(loader)
        first = [int(next(batches)) for _ in range(18)]
        asked, state = sorted(data.asked), loader.state_dict()
        assert first + [int(batch) for batch in batches] == [n for n in range(4) for _ in range(6 if n < 3 else 2)]
        assert sorted(data.asked) == asked, "more is read though all that is taken is there"
        assert len(asked) <= 16
        assert len(made) <= 16
    data.asked.clear()
    with hr.DataLoader(stream, batch_size=1, prefetch_factor=prefetch_factor, fetch=hr.Fetch(concurrency=4)) as loader:
        loader.load_state_dict(state)
        assert [int(batch) for batch in loader] == [3, 3]
        assert min(data.asked) == 2


def test_nothing_is_read_when_the_state_has_reached_the_limit() -> None:
    data = Numbers(1000)
    stream = data.flat_map(twice).take(4).batch(3).unbatch()
    with hr.DataLoader(stream, batch_size=2) as loader:
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(2)] == [[0, 0], [1, 1]]
        state = loader.state_dict()
    assert state["stages"][0]["emitted"] == 4
    data.asked.clear()
    with hr.DataLoader(stream, batch_size=2) as loader:
        loader.load_state_dict(state)
        assert list(loader) == []
        assert data.asked == []
        assert [batch.tolist() for batch in loader] == [[0, 0], [1, 1]]


@pytest.mark.slow
def test_ranks_share_samples_that_become_many_when_an_epoch_has_a_number() -> None:
    def make(rank: int, world: int = 2) -> hr.DataLoader[Any]:
        stream = source(40).shuffle(seed=1).flat_map(listed).batch(3).map(sized).unbatch().epoch(samples=37)
        return hr.DataLoader(stream, batch_size=4, ranks=hr.Ranks(rank=rank, world_size=world))

    lengths = []
    for rank in range(2):
        (whole,) = resumed_anywhere(lambda rank=rank: make(rank), rows)
        lengths.append([len(batch) for batch in whole])
        state = next(state for done in range(1, 5) if (state := state_after(make(rank), done)).get("stages"))
        assert_refused(make(0, 1), state)
    assert len(lengths[0]) == len(lengths[1])
    assert sum(map(sum, lengths)) == 37


def test_samples_are_made_again_when_their_worker_dies(tmp_path: Path) -> None:
    def die_once(name: str, is_time: bool) -> None:
        if is_time and not (tmp_path / name).exists():
            (tmp_path / name).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def dies_once(n: int) -> list[dict[str, int]]:
        die_once("sample", n == 7)
        return listed(n)

    def dies_once_over_a_batch(batch: dict[str, Any]) -> dict[str, Any]:
        die_once("batch", 900 in batch["n"])
        return sized(batch)

    def make(fn: Any, of_batches: Any) -> hr.Stream:
        return source().flat_map(fn).batch(3).map(of_batches).unbatch()

    alone = loaded(make(listed, sized), batch_size=4)
    with hr.DataLoader(make(dies_once, dies_once_over_a_batch), batch_size=4, num_workers=2) as loader:
        assert list(map(rows, loader)) == list(map(rows, alone))
        assert loader.stats().work.deaths == 2
