"""Operators that group samples, and steps that give many samples for one."""

import io
import itertools
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import loops
from builders.loops import assert_refused, first_of, outcomes, rest_of, resumed_anywhere, state_after
from builders.numbers import Numbers, later, twice
from builders.tars import tar
from unit.batchers import Buckets, Budget

import headrace as hr
from headrace.fetch.stores import memory
from headrace.ops import registry as registered
from headrace.workers.queue import TaskQueue


@pytest.fixture(autouse=True)
def _operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "_registered", dict(registered._registered))

    def register(name: str, batcher: Callable[..., Any], **options: Any) -> None:
        hr.plugins.register_operator(
            name, lambda *settings, **more: hr.plugins.BatchOp(batcher=lambda: batcher(*settings), **options, **more)
        )

    register("budget", Budget, measure=weight)
    register("buckets", lambda size: Buckets(size, drop_last=False), measure=weight)
    register("pairs", lambda: Budget(2))
    register("strict", Strict, measure=weight)
    register("unmeasured", lambda: Budget(0), measure=lambda n: 1 // (n - 4))
    register("no_number", lambda: Budget(2), measure=str)


class Strict(Budget):
    def __init__(self) -> None:
        super().__init__(10)

    def offer(self, measure: int) -> Any:
        if measure == 9:
            raise ValueError("a sample of 9")
        return super().offer(measure)


def weight(n: Any) -> int:
    return int(n if isinstance(n, int) else sum(n))


def broken_at_7(n: int) -> int:
    if n == 7:
        raise ValueError("sample 7 is damaged")
    return n


def got(data: hr.Stream, **options: Any) -> list[Any]:
    came = outcomes(data, **{"batch_size": None, **options})
    return ["; ".join([str(one), *one.__notes__]) if isinstance(one, Exception) else one for one in came]


def test_groups_are_batched_and_collated_by_the_loader() -> None:
    data = hr.from_map([torch.arange(3) + k for k in range(6)]).apply_op("pairs")
    assert repr(data).endswith(".pairs()")
    assert data.describe().splitlines()[-1] == "  .pairs()  [workers]"
    with pytest.raises(TypeError, match=r"how many samples pairs\(\) gives is known only later"):
        len(data)
    assert [tuple(batch.shape) for batch in got(data.map(torch.stack), batch_size=2)] == [(2, 2, 3), (1, 2, 3)]
    batches = hr.from_map([[1], [2]]).bucket(len, [9], batch_size=2).map(repr)  # is not collated again
    assert list(hr.DataLoader(batches)) == ["tensor([[1],\n        [2]])"]


@pytest.mark.parametrize("workers", [0, 2])
def test_failed_samples_are_skipped_in_their_groups(workers: int) -> None:
    data = hr.from_map(range(11)).map(broken_at_7).apply_op("buckets", 3)
    with hr.DataLoader(data, batch_size=None, num_workers=workers, errors=hr.Skip()) as loader:
        assert list(loader) == [[0, 3, 6], [2, 5, 8], [1, 4, 10], [9]]
        assert loader.stats().skipped == 1


def test_errors_of_samples_measures_and_batchers_replace_their_groups() -> None:
    def never(samples: list[int]) -> Any:
        raise ValueError(f"not {samples}") if 3 in samples else KeyError(samples[0])

    data = hr.from_map(range(6))
    first, *others = got(data.map(lambda n: 7 * n).map(broken_at_7).apply_op("pairs"))
    assert "sample 7 is damaged" in first
    assert others == [[14, 21], [28, 35]]
    first = got(data.map(int).apply_op("unmeasured"))[0]
    assert "stage: unmeasured(); sample 4 of the epoch; operators: FromMap(…) → map(int) → unmeasured()" in first
    assert "'str' object cannot be interpreted as an integer" in got(data.apply_op("no_number"))[0]
    outcomes = got(data.apply_op("budget", 4, collate=never))
    assert len(outcomes) == 4
    assert "not [3]" in outcomes[1]
    outcomes = got(hr.from_map([4, 9, 4, 9, 4]).apply_op("strict"))
    assert outcomes[:2] == ["a sample of 9; stage: strict(), while samples were put together"] * 2
    assert outcomes[2:] == [[4, 4], [4]]


@pytest.mark.parametrize("edited", [[], [[1, 3], [1, 3]], [-5, 2], [0, 3], 3])
def test_state_with_edited_groups_is_refused(edited: Any) -> None:
    data = hr.from_map(range(30)).apply_op("buckets", 4)
    state = state_after(hr.DataLoader(data, batch_size=None), 1)
    assert state["stages"][1]["used"]
    assert_refused(hr.DataLoader(data, batch_size=None), {**state, "stages": [{}, {"used": edited}]})


@pytest.mark.slow
def test_sample_whose_measure_ends_workers_is_skipped_and_no_other() -> None:
    def deadly(n: int) -> int:
        if n == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

    data = hr.from_map(range(20)).bucket(deadly, [2], batch_size=3)
    with hr.DataLoader(data, num_workers=2, errors=hr.Skip(), timeout=60) as loader:
        assert sorted(n for batch in loader for n in batch.tolist()) == [n for n in range(20) if n != 7]
    with pytest.raises(hr.errors.WorkerDiedError, match="all on sample 7 of the epoch"):
        loaded(data, 1, timeout=60)


COUNT, SHARDS, BROKEN = 150, 2, 77
WORKERS = pytest.mark.parametrize("workers", [0, 1, 2, "thread"])


def values(n: int, *, even: bool) -> Any:
    return np.arange(n, n + (5 if even else 1 + n % 7), dtype=np.float32)


def shards(*, even: bool, is_broken: bool = False) -> list[str]:
    urls = [f"memory://{uuid.uuid4().hex}/{shard}.tar" for shard in range(SHARDS)]
    for shard, url in enumerate(urls):
        samples = []
        for n in range(shard * COUNT, (shard + 1) * COUNT):
            body = io.BytesIO()
            np.save(body, values(n, even=even))
            data = b"no array" if is_broken and n == BROKEN else body.getvalue()
            samples.append((f"{n:06d}", {"npy": data, "cls": str(n).encode()}))
        memory.put(url, tar(samples))
    return urls


def kind(sample: tuple[Any, int]) -> int:
    return sample[1] % 3


def padded(numbers: list[int], *, even: bool) -> torch.Tensor:
    arrays = [torch.from_numpy(values(n, even=even)) for n in numbers]
    return torch.nn.utils.rnn.pad_sequence(arrays, batch_first=True, padding_value=-1)


def loaded(data: hr.Stream, workers: int | str, **more: Any) -> list[Any]:
    options = {"num_workers": 2, "workers": "thread"} if workers == "thread" else {"num_workers": workers}
    return loops.loaded(data, **options, **more)


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("even", [True, False])
def test_padded_batches_do_not_depend_on_workers(workers: int | str, *, even: bool) -> None:
    data = hr.stream(shards(even=even), index=None).decode().to_tuple("npy", "cls")
    batches = loaded(data.padded_batch(64, pad_value={"0": -1}), workers)
    assert [n for _, numbers in batches for n in numbers.tolist()] == list(range(SHARDS * COUNT))
    for arrays, numbers in batches:
        assert numbers.dtype is torch.int64
        assert torch.equal(arrays, padded(numbers.tolist(), even=even))


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("made", ["padded_batch", "bucket"])
def test_broken_array_among_those_decoded_together_is_raised_or_skipped(workers: int | str, made: str) -> None:
    data = hr.stream(shards(even=True, is_broken=True), index=None).decode().to_tuple("npy", "cls")
    data = data.padded_batch(10) if made == "padded_batch" else data.bucket(kind, [0, 1], batch_size=10)
    numbers = [n for _, some in loaded(data, workers, errors=hr.Skip()) for n in some.tolist()]
    assert sorted(numbers) == [n for n in range(SHARDS * COUNT) if n != BROKEN]
    with pytest.raises(hr.DecodeError) as raised:
        loaded(data, workers)
    assert f"{BROKEN:06d}" in str(raised.value) + "".join(raised.value.__notes__)


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
    batches = loops.loaded(stream)
    assert [batch["n"].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert [batch["size"].tolist() for batch in batches] == [[4, 4, 4], [4, 4, 4], [4, 4, 2], [2]]


def test_full_batches_are_made_before_further_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, give = list[str](), TaskQueue._give
    kept = lambda queue, worker, entry: (given.append(entry.task.finish.name), give(queue, worker, entry))
    monkeypatch.setattr(TaskQueue, "_give", kept)
    (lines := tmp_path / "lines.jsonl").write_text('{"n": 1}\n' * 2000)
    for _ in hr.DataLoader(hr.stream(lines, index=None).batch(10).unbatch(), batch_size=20, prefetch_factor=100):
        pass
    assert 0 < max(len(list(some)) for name, some in itertools.groupby(given) if name == "GROUP") < 30


def test_samples_made_of_others_are_shuffled_within_windows() -> None:
    loader = hr.DataLoader(source(10).flat_map(lambda n: [2 * n, 2 * n + 1]).shuffle(window=6), batch_size=None)
    first, second = list(loader), list(loader)
    windows = [range(start, min(start + 6, 20)) for start in range(0, 20, 6)]
    for epoch in (first, second):
        assert [sorted(epoch[w.start : w.stop]) for w in windows] == [list(w) for w in windows]
    assert first != second


def test_parts_of_a_sample_have_random_numbers_of_their_own() -> None:
    parts = source(40).flat_map(lambda n: [{"n": n}] * 5).map(draws).batch(7).unbatch()
    (batch,) = loops.loaded(parts.map(lambda sample: {**sample, "more": draws(sample)["own"]}), batch_size=200)
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
    came = outcomes(stream, batch_size=2)
    got = [str(one) if isinstance(one, ValueError) else one["n"].tolist() for one in came]
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


ONE_OF_TWO = hr.Ranks(rank=0, world_size=2)
UNEVEN = {"a": torch.zeros(3), "b": torch.zeros(2)}
WRONG: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda data: data.flat_map(listed).shuffle("global"), hr.OptionError, "by='global' must be 'window' for"),
    (lambda data: data.flat_map(listed).sample([1]), hr.OptionError, r"numbers of the source"),
    (lambda data: hr.DataLoader(data.filter(bool).take(3).filter(bool), in_order=False), hr.OptionError, r"\.take"),
    (lambda data: hr.DataLoader(data.flat_map(listed), in_order=False), hr.OptionError, r"and \.flat_map\(listed\)"),
    (lambda data: hr.DataLoader(data.batch(2).batch(3), batch_size=4), hr.OptionError, r"size=4 and \.batch\(3\)"),
    (lambda data: data.flat_map(3), hr.OptionError, r"flat_map\(\): fn=3 must be a function"),
    *((lambda data, one=one: first_of(data.flat_map(lambda _: one)), TypeError, "a list of samples is needed")
      for one in ("text", 3, None, {"a": 1})),
    (lambda _: first_of(hr.from_map([UNEVEN]).unbatch()), ValueError, "these have 2 and 3"),
    (lambda data: hr.DataLoader(data.apply_op("pairs"), in_order=False), hr.OptionError, r"False and \.pairs\(\)"),
    (lambda data: first_of(data.apply_op("pairs"), ranks=ONE_OF_TWO), hr.OptionError, r"pairs\(\) changes"),
    (lambda _: hr.plugins.BatchOp(batcher=Strict, measure=later), hr.OptionError, "measure=later must be a plain fun"),
    (lambda _: hr.plugins.BatchOp(batcher=3), hr.OptionError, "batcher=3 must be a plain function"),
    (lambda _: hr.plugins.BatchOp(batcher=Strict, collate=None), hr.OptionError, "collate=None must be a plain fun"),
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
    got = loops.loaded(hr.from_map(samples).batch(2).unbatch(), batch_size=None)
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

    alone = loops.loaded(make(listed, sized), batch_size=4)
    with hr.DataLoader(make(dies_once, dies_once_over_a_batch), batch_size=4, num_workers=2) as loader:
        assert list(map(rows, loader)) == list(map(rows, alone))
        assert loader.stats().work.deaths == 2
