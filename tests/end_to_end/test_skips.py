"""Failed samples are skipped with hr.Skip and logged, and excluded ones are not read."""

import asyncio
import gc
import itertools
import json
import logging
import os
import signal
import weakref
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from builders.loops import assert_refused, loaded, outcomes, outcomes_later, outcomes_of, words
from builders.numbers import Made, Numbers, streamed
from builders.ranks import ran, steps_of, whole
from builders.tars import numbered_samples, put_shards, tar
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.fetch.stores import memory
from headrace.testing.decoders import same

pytestmark = pytest.mark.usefixtures("warm_server")
WORKERS = pytest.mark.parametrize("num_workers", [0, 1, 2])
QUICK = hr.Fetch(attempts=1, backoff_s=0.0)


class BadError(Exception):
    """The error of failed samples."""


def sample_of(key: int) -> dict[str, Any]:
    return {"x": torch.full((3, 2), float(key)), "n": key, "name": f"number {key}"}


def batch_of(keys: Sequence[int]) -> dict[str, Any]:
    return {
        "x": torch.stack([torch.full((3, 2), float(key)) for key in keys]),
        "n": torch.tensor(keys),
        "name": [f"number {key}" for key in keys],
    }


def model(order: Sequence[int], bad: Collection[int], size: int, drop_last: bool = False) -> list[list[int]]:
    cut = [order[start : start + size] for start in range(0, len(order), size)]
    kept = [[key for key in keys if key not in bad] for keys in cut if len(keys) == size or not drop_last]
    return [keys for keys in kept if keys]


def run(data: Any, **options: Any) -> list[Any]:
    return outcomes(data, **{"errors": hr.Skip(), "fetch": QUICK, "timeout": 30, **options})


def run_later(data: Any, **options: Any) -> list[Any]:
    return outcomes_later(data, **{"errors": hr.Skip(), "fetch": QUICK, "timeout": 30, **options})


def keys_of(got: list[Any]) -> list[Any]:
    return [type(g) if isinstance(g, Exception) else g["n"].tolist() for g in got]


def stumble_at(*bad: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def stumble(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["n"] in bad:
            raise BadError(f"cannot map {sample['n']}")
        return sample

    return stumble


BAD = [0, 1, 2, 3, 6, 13, 14, 21]
WANTED = [[4, 5, 7], [8, 9, 10, 11], [12, 15], [16, 17, 18, 19], [20]]


def numbers(count: int, bad: Collection[int] = ()) -> Made:
    async def get(key: int) -> dict[str, Any]:
        await asyncio.sleep(0)
        if key in bad:
            raise BadError(f"cannot get {key}")
        return sample_of(key)

    return Made(get, count)


def stumble_later_at(*bad: int) -> Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]:
    async def stumble(sample: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        return stumble_at(*bad)(sample)

    return stumble


STAGES: dict[str, Callable[[Any, Collection[int]], Any]] = {
    "fetch": lambda data, bad: data,
    "map": lambda data, bad: data.map(stumble_at(*bad)),
    "async map": lambda data, bad: data.map(lambda sample: sample).map(stumble_later_at(*bad)),
    "filter": lambda data, bad: data.filter(lambda sample: bool(stumble_at(*bad)(sample))),
    "step of an iterator": lambda data, bad: data.map(stumble_later_at(*bad)),
}


def test_sample_that_fails_only_once_is_either_skipped_or_delivered(tmp_path: Path) -> None:
    """A batch that cannot be written into slots is made a second time."""

    def widen(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["n"] == 2 and not (tmp_path / "tried").exists():
            (tmp_path / "tried").touch()
            raise BadError("not yet")
        return {"n": torch.tensor(sample["n"]) if sample["n"] == 1 else sample["n"]}

    with hr.DataLoader(numbers(4).map(widen), batch_size=4, num_workers=1, errors=hr.Skip()) as loader:
        (keys,) = keys_of(outcomes_of(loader))
        assert len(keys) + loader.stats().skipped == 4


def widen_nine(sample: dict[str, Any]) -> dict[str, Any]:
    return {"n": float(sample["n"]) if sample["n"] == 9 else sample["n"]}


OPTIONS = {
    "batch_size": st.integers(1, 9),
    "drop_last": st.booleans(),
    "prefetch_factor": st.sampled_from([None, 0, 1]),
    "num_workers": st.sampled_from([0, 2]),
}


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    count=st.integers(1, 40),
    bad=st.sets(st.integers(0, 39)),
    stage=st.sampled_from(sorted(STAGES)),
    is_shuffled=st.booleans(),
    way=st.sampled_from([run, run_later]),
    collated=st.sampled_from(["by us", "by a function", "in several forms"]),
    options=st.fixed_dictionaries(OPTIONS),
)
def test_batches_are_those_of_a_plain_program_when_any_samples_fail(
    count: int, bad: set[int], stage: str, is_shuffled: bool, way: Callable[..., Any], collated: str, options: Any
) -> None:
    data: Any = numbers(count, list(bad) if stage == "fetch" else ())
    if stage == "step of an iterator":
        data, is_shuffled = streamed([sample_of(key) for key in range(count)]), False
    data = STAGES[stage](data.shuffle() if is_shuffled else data, bad)
    data = data.map(widen_nine) if collated == "in several forms" else data
    order = [sample["n"] for sample in numbers(count).shuffle()] if is_shuffled else range(count)
    wanted = model(order, bad, options["batch_size"], options["drop_last"])
    collate = (lambda samples: {"n": torch.tensor([s["n"] for s in samples])}) if collated == "by a function" else None
    got = way(data, collate_fn=collate, **options)
    assert same(got, [batch_of(keys) for keys in wanted]) if collated == "by us" else keys_of(got) == wanted


def test_take_after_a_filter_counts_failed_samples() -> None:
    data = numbers(20).filter(lambda sample: sample["n"] % 2 == 0).map(stumble_at(2, 4)).take(6)
    assert keys_of(run(data, batch_size=3)) == [[0], [6, 8, 10]]


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("is_missing", [True, False])
def test_damaged_shard_is_one_skip_and_later_shards_are_read(is_missing: bool, num_workers: int) -> None:
    urls = put_shards("skip-shard", [4, 4, 4])
    memory.remove(urls[1])
    if not is_missing:  # two samples are whole
        memory.put(urls[1], tar(numbered_samples(4, 4))[: 2 * 2560 + 600])
    data = hr.stream(urls).map(lambda sample: {"n": int(sample["cls"])})
    with hr.DataLoader(data, batch_size=2, num_workers=num_workers, errors=hr.Skip(), fetch=QUICK) as loader:
        got = [key for keys in keys_of(outcomes_of(loader)) for key in keys]
        stats = loader.stats()
    assert got == [0, 1, 2, 3, *([] if is_missing else [4, 5]), 8, 9, 10, 11]
    assert stats.skipped == 1
    assert urls[1] in stats.skipped_samples[0].error
    assert stats.skipped_samples[0].name == (urls[1] if is_missing else "'000006'")  # the member that it breaks off in


@WORKERS
def test_samples_that_lack_a_field_or_do_not_decode_are_skipped(num_workers: int) -> None:
    samples, seen = numbered_samples(0, 8), list[Any]()
    samples[3] = ("000003", {"bin": b"x"})
    samples[6] = ("000006", {"bin": b"x", "cls": b"six"})
    memory.put("memory://skip-field/0.tar", tar(samples))
    data = hr.stream("memory://skip-field/0.tar").decode().to_tuple("cls").map(lambda fields: {"n": fields[0]})

    def decide(error: hr.errors.StageError) -> bool:
        seen.append((error.key, error.url, error.stage))
        return True

    with hr.DataLoader(data, batch_size=4, num_workers=num_workers, errors=hr.Skip(when=decide)) as loader:
        assert keys_of(outcomes_of(loader)) == [[0, 1, 2], [4, 5, 7]]
        first, second = loader.stats().skipped_samples
    assert seen == [
        (key, "memory://skip-field/0.tar", at) for key, at in (("000003", "to_tuple"), ("000006", "decode"))
    ]
    assert (first.position, first.name, second.position, second.name) == (3, "'000003'", 6, "'000006'")
    assert first.error.startswith("FormatError: ")
    assert second.error.startswith("DecodeError: ")


def test_sample_that_ends_workers_is_skipped() -> None:
    def die(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["n"] == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    with hr.DataLoader(numbers(12).map(die), batch_size=4, num_workers=2, errors=hr.Skip(), timeout=60) as loader:
        assert same(outcomes_of(loader), [batch_of([0, 1, 2, 3]), batch_of([4, 6, 7]), batch_of([8, 9, 10, 11])])
        assert [s.position for s in loader.stats().skipped_samples] == [5]
        assert loader.stats().skipped_samples[0].error.startswith("WorkerDiedError")


# A function decides.


@pytest.mark.slow
@WORKERS
def test_function_is_asked_once_for_each_failed_sample_in_plan_order(num_workers: int) -> None:
    asked: list[str] = []

    def decide(error: BaseException) -> bool:
        asked.append(words(error))
        return True

    got = run(numbers(22).map(stumble_at(*BAD)), batch_size=4, num_workers=num_workers, errors=hr.Skip(when=decide))
    assert keys_of(got) == WANTED
    assert [int(said.split()[2]) for said in asked] == BAD
    assert "stage: map(stumble); sample 6 of the epoch" in asked[4]


def test_memory_of_batches_that_are_raised_is_free_again() -> None:
    data = numbers(400, range(0, 400, 4))
    with hr.DataLoader(data, batch_size=4, errors=hr.Skip(when=lambda error: False), timeout=30) as loader:
        assert keys_of(outcomes_of(loader)) == [BadError] * 100
        assert loader.stats().shared_bytes <= 20 * 4096


@pytest.mark.parametrize("kind", [KeyError, StopIteration, KeyboardInterrupt, asyncio.CancelledError])
def test_error_of_the_function_is_raised_in_the_place_of_the_batch(kind: type[BaseException]) -> None:
    def decide(error: BaseException) -> bool:
        raise kind("undecided")

    with hr.DataLoader(numbers(8, [5]), batch_size=4, errors=hr.Skip(when=decide), timeout=20) as loader:
        batches = iter(loader)
        assert next(batches)["n"].tolist() == [0, 1, 2, 3]
        with pytest.raises((kind, RuntimeError), match="undecided"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)


def test_loader_is_collected_though_the_function_refers_to_it_and_its_iterator() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.loader: Any = hr.DataLoader(numbers(100, [1]), batch_size=2, errors=hr.Skip(when=self.decide))
            self.batches = iter(self.loader)

        def decide(self, error: BaseException) -> bool:
            return True

    trainer = Trainer()
    assert next(trainer.batches)["n"].tolist() == [0]
    known = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert known() is None


# Limits.


@pytest.mark.slow
@WORKERS
def test_error_is_raised_when_more_are_skipped_in_all_or_in_a_row_than_allowed(num_workers: int) -> None:
    got = run(
        numbers(12, [1, 5, 8, 9]),
        batch_size=2,
        num_workers=num_workers,
        errors=hr.Skip(max_in_epoch=2, max_in_row=None),
    )
    assert keys_of(got) == [[0], [2, 3], [4], [6, 7], BadError, [10, 11]]
    for text in ("2 samples of this epoch were skipped before it", "hr.Skip(max_in_epoch=2, max_in_row=None)", "key 8"):
        assert text in words(got[4])
    assert keys_of(
        run(numbers(4, [1]), batch_size=2, num_workers=num_workers, errors=hr.Skip(max_in_epoch=0, max_in_row=None))
    ) == [BadError, [2, 3]]
    options: dict[str, Any] = {"batch_size": 4, "num_workers": num_workers, "errors": hr.Skip(max_in_row=3)}
    assert keys_of(run(numbers(12, [2, 3, 4, 6, 7, 8]), **options)) == [[0, 1], [5], [9, 10, 11]]
    got = run(numbers(12, [2, 3, 4, 5]), **options)
    assert keys_of(got) == [[0, 1], BadError, [8, 9, 10, 11]]
    assert "3 of them right before it" in words(got[1])


@pytest.mark.parametrize("in_order", [True, False])
def test_a_hundred_samples_in_a_row_are_skipped_by_default(in_order: bool) -> None:
    assert run(numbers(100, range(100)), batch_size=8, in_order=in_order) == []
    assert {type(g) for g in run(numbers(101, range(101)), batch_size=8, in_order=in_order)} == {BadError}
    assert run(numbers(101, range(101)), batch_size=8, errors=hr.Skip(max_in_row=None)) == []


# Reports.


def test_stats_report_and_log_name_skipped_samples_of_all_epochs(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "headrace"),
        hr.DataLoader(
            numbers(150, range(1, 150)), batch_size=8, errors=hr.Skip(max_in_epoch=149, max_in_row=None)
        ) as loader,
    ):
        assert "skipped" not in loader.report()
        got = outcomes_of(loader)
        stats, report = loader.stats(), loader.report()
        assert keys_of(outcomes_of(loader)) == [[0]], "each epoch may have as many"
        assert loader.stats().skipped == 2 * 149
        assert {s.epoch for s in loader.stats().skipped_samples} == {0}, "the first hundred"
    assert keys_of(got) == [[0]]
    assert (stats.skipped, len(stats.skipped_samples), stats.deliver.samples) == (149, 100, 1)
    assert stats.skipped_samples[0] == (0, 1, "1", "BadError: cannot get 1")
    assert "skipped  149 samples: 1 (BadError: cannot get 1), 2 (BadError: cannot get 2)" in report
    assert "and 146 more" in report
    messages = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert messages[0] == "skipped sample 1 (1) of epoch 0: BadError: cannot get 1"
    assert "only counted" in messages[9]
    assert len([message for message in messages if "epoch 0" in message]) <= 10


def test_a_read_that_fails_for_several_samples_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Pages(Made):
        async def aget_many(self, keys: Sequence[int]) -> list[dict[str, Any]]:
            reads.append(keys[0])
            raise BadError("page 7 is damaged")

    reads = list[int]()
    options: dict[str, Any] = {"batch_size": 8, "errors": hr.Skip(max_in_row=None)}
    with caplog.at_level(logging.WARNING, "headrace"), hr.DataLoader(Pages(sample_of), **options) as loader:
        assert list(loader) == []
        assert loader.stats().skipped == 8
    assert len(reads) < 8
    assert [record.getMessage() for record in caplog.records if "page 7" in record.getMessage()] == [
        f"skipped sample {first} of epoch 0: BadError: page 7 is damaged" for first in sorted(reads)
    ]


async def decides_later(error: BaseException) -> bool:
    return True


def test_options_have_the_policy_and_its_limits() -> None:
    for errors in (None, hr.Skip(), hr.Skip(when=bool, max_in_epoch=7, max_in_row=None)):
        with hr.DataLoader(numbers(1), errors=errors) as loader:
            assert loader.options["errors"] == loader.errors == errors


@pytest.mark.slow
def test_ranks_that_go_on_from_one_state_do_not_count_the_others_skips_again() -> None:
    data = hr.from_map(range(400)).map(_bad_sevenths).filter(lambda number: number >= 0).epoch(samples=400)
    state: dict[str, Any] = {}
    for _ in range(4):
        loaders = [
            hr.DataLoader(
                data,
                10,
                ranks=hr.Ranks(rank=rank, world_size=2, compare=False),
                errors=hr.Skip(max_in_epoch=40, max_in_row=None),
            )
            for rank in range(2)
        ]
        for loader in loaders:
            loader.load_state_dict(state)
            assert len([*itertools.islice(loader, 4)]) == 4
        state = hr.merge_states([loader.state_dict() for loader in loaders])
        for loader in loaders:
            loader.close()
    assert 20 <= state["skipped"][0] <= 30  # of 160 samples on each rank a seventh


def _bad_sevenths(number: int) -> int:
    if number % 7 == 3:
        raise BadError(f"number {number}")
    return number


ALL = range(40)


def loader_of(data: Any, size: int, rank: int = 0, world: int = 1, **options: Any) -> hr.DataLoader[Any]:
    options = {
        "ranks": hr.Ranks(global_batch_size=size, rank=rank, world_size=world, compare=False),
        "timeout": 30,
    } | options
    return hr.DataLoader(data, **options)


def numbers_of(loaders: Sequence[hr.DataLoader[Any]], most: int | None = None) -> list[list[int]]:
    return [[number for batch in batches for number in batch.tolist()] for batches in steps_of(loaders, most)]


def cut(numbers: Sequence[int], size: int) -> list[list[int]]:
    return [list(numbers[start : start + size]) for start in range(0, len(numbers), size)]


@pytest.mark.slow
@settings(max_examples=60, deadline=None, phases=[Phase.generate, Phase.reuse])
@given(data=st.data(), seed=st.integers(0, 99), size=st.integers(4, 9))
def test_any_ranks_skip_excluded_samples_and_steps(data: st.DataObject, seed: int, size: int) -> None:
    stream = hr.from_map(ALL).shuffle(seed=seed)
    (order,) = numbers_of([loader_of(stream, len(ALL))])
    samples = data.draw(st.lists(st.sampled_from(ALL), max_size=6))
    first = data.draw(st.integers(0, 8))
    last = data.draw(st.integers(first + 1, 12))
    skipped = {*samples, *order[first * size : last * size]}
    left = [number for number in order if number not in skipped]
    received, state = list[int](), dict[str, Any]()
    exclude = hr.Exclude(samples=samples, steps=[(first, last)])
    while len(received) < len(left):
        world = data.draw(st.integers(1, min(3, len(left) - len(received))))
        options: dict[str, Any] = {
            "ranks": hr.Ranks(global_batch_size=size, compare=False),
            "exclude": exclude,
            "collate_fn": list,
        }
        steps, (state, *others) = ran(world, lambda: stream, state, data.draw(st.integers(1, 4)), **options)
        received += itertools.chain(*whole(steps))
        assert all(other == state for other in others)
    assert received == left


@pytest.mark.parametrize("world", [1, 2, 4])
def test_steps_are_excluded_after_a_state_without_exclusions(world: int) -> None:
    stream = hr.from_map(ALL).shuffle()
    with loader_of(stream, 4) as before:
        numbers_of([before], 2)
        state = before.state_dict()
    with loader_of(stream, 4) as plain:
        whole = numbers_of([plain])
    loaders = [loader_of(stream, 4, rank, world, exclude=hr.Exclude(steps=[(3, 5), (7, 8)])) for rank in range(world)]
    for loader in loaders:
        loader.load_state_dict(state)
    assert numbers_of(loaders) == [whole[2], whole[5], whole[6], whole[8], whole[9]]
    assert all(len(loader) == 10 for loader in loaders)  # no step of the next epoch is excluded


def test_state_stores_the_exclusions_of_its_epoch() -> None:
    stream = hr.from_map(ALL)
    with loader_of(stream, 4, exclude=hr.Exclude(samples=[9], steps=[(5, 9)])) as loader:
        assert len(loader) == 6
        next(iter(loader))
        state = loader.state_dict()
    with loader_of(stream, 4) as loader:
        loader.load_state_dict(state)
        assert numbers_of([loader]) == [[4, 5, 6, 7], [8, 10, 11, 12], [13, 14, 15, 16], [17, 18, 19, 36], [37, 38, 39]]
        assert numbers_of([loader]) == cut(ALL, 4)


PART = [[0, 1], [2, 4], [5, 6], [7]]
OF_TEN = hr.from_map(range(10))
EPOCHS: dict[str, tuple[Any, int, hr.Exclude, list[list[list[int]]]]] = {
    "steps of one epoch, samples of all": (
        hr.from_map(range(8)), 2, hr.Exclude(samples=[3], steps=[(0, 2)], epoch=1), [PART, [[4, 5], [6, 7]], PART],
    ),
    "steps without end": (OF_TEN.repeat(), 5, hr.Exclude(steps=[(1, 2**40)]), [[[0, 1, 2, 3, 4]] * 2]),
    "all steps": (hr.from_map(ALL), 4, hr.Exclude(steps=[(0, 99)]), [[], cut(ALL, 4)]),
    "samples after a filter": (
        hr.from_map(ALL).filter(lambda number: number % 3 == 0), 4, hr.Exclude(samples=[6, 7, 8]),
        [cut([n for n in ALL if n % 3 == 0 and n != 6], 4)],
    ),
    "samples that are not taken": (OF_TEN.take(3), 1, hr.Exclude(samples=[4, 2]), [[[0], [1]]]),
}  # fmt: skip


def test_carried_samples_are_excluded_from_the_epoch_that_they_are_carried_into() -> None:
    carrying, exclude = hr.Ranks(last_batch="carry"), hr.Exclude(samples=[8, 1])
    with hr.DataLoader(OF_TEN, 4, ranks=carrying, collate_fn=list) as loader:
        assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        state = loader.state_dict()
    with hr.DataLoader(OF_TEN, 4, ranks=carrying, collate_fn=list, exclude=exclude) as loader:
        loader.load_state_dict(state)
        assert list(loader) == [[9, 0, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("case", EPOCHS)
def test_epochs_lack_what_is_excluded(case: str) -> None:
    data, size, exclude, epochs = EPOCHS[case]
    with loader_of(data, size, exclude=exclude) as loader:
        for steps in epochs:
            has_length = "filter" not in case and "without end" not in case
            assert not has_length or len(loader) == len(steps)
            assert numbers_of([loader], len(steps) if "without end" in case else None) == steps


def test_excluded_samples_are_not_read() -> None:
    data = Numbers(20)
    with loader_of(data, 4, exclude=hr.Exclude(samples=range(3, 9))) as loader:
        assert numbers_of([loader]) == cut([0, 1, 2, *range(9, 20)], 4)
    assert sorted(data.asked) == [0, 1, 2, *range(9, 20)]


def failing(number: int) -> int:
    if number % 7 == 3:
        raise ValueError(f"I don't like {number}")
    return number


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_quarantined_samples_are_excluded_from_the_next_run(tmp_path: Path, num_workers: int) -> None:
    path = tmp_path / "bad.jsonl"
    stream = hr.from_map(ALL).shuffle().map(failing)
    options: dict[str, Any] = {"errors": hr.Skip(log=path), "exclude": path, "num_workers": num_workers}
    with loader_of(stream, 8, **options) as loader:
        first = [number for step in numbers_of([loader]) for number in step]
        assert loader.stats().skipped == 6
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(line["number"] for line in lines) == [3, 10, 17, 24, 31, 38]
    assert {line["error"] for line in lines} == {f"ValueError: I don't like {line['number']}" for line in lines}
    with loader_of(stream, 8, **options) as loader:
        steps = numbers_of([loader])
        assert loader.stats().skipped == 0
    assert [number for step in steps for number in step] == first
    assert [len(step) for step in steps] == [8, 8, 8, 8, 2]  # filled up, where the first run's had holes


def test_samples_of_shards_are_named(tmp_path: Path) -> None:
    path, seen = tmp_path / "bad.jsonl", list[str]()
    urls = put_shards("exclude", [4, 4, 4])

    def failing(sample: dict[str, Any]) -> str:
        if sample["__key__"].endswith("5"):
            raise ValueError("no fives")
        return str(sample["__key__"])

    stream = hr.stream(urls, index="build").map(failing)
    with loader_of(stream, 4, errors=hr.Skip(log=path)) as loader:
        for batch in loader:
            seen += batch
    (line,) = (json.loads(line) for line in path.read_text().splitlines())
    assert line["number"] == 5
    assert "5" in line["name"]
    with loader_of(stream, 4, exclude=str(path)) as loader:
        assert [key for batch in loader for key in batch] == seen


SOME, SOME_MORE, STREAM = hr.Exclude(samples=[1]), hr.Exclude(samples=[1, 5]), hr.from_map(ALL)
STEPS = hr.Exclude(steps=[(1, 2)])


def excluding(exclude: Any, data: Any = STREAM, **options: Any) -> Any:
    with loader_of(data, 4, exclude=exclude, **options) as loader:
        next(iter(loader))


def quarantine(path: Path, data: Any = STREAM) -> Any:
    hr.DataLoader(data, errors=hr.Skip(log=path))


def written(path: Path, line: str) -> Path:
    (path / "bad.jsonl").write_text(line + "\n")
    return path / "bad.jsonl"


NO_NAMES: list[dict[str, Any]] = [
    *({"samples": samples} for samples in ([-1], ["a"], [False, True], [2**63], 3, iter([1, 2]))),
    *({"steps": steps} for steps in ([(2, 2)], [(1,)], (1, 2), iter([(1, 2)]))),
    *({"files": files} for files in ("a", [3], iter(["a"]))),
    {"epoch": -1},
]
NO_SKIPS: dict[str, dict[str, Any]] = {
    "when='ignore'": {"when": "ignore"},
    "when=3": {"when": 3},
    "not an `async def`": {"when": decides_later},
    "max_in_epoch=-1": {"max_in_epoch": -1},
    "max_in_epoch=True": {"max_in_epoch": True},
    r"max_in_epoch=1\.5": {"max_in_epoch": 1.5},
    "max_in_row='2'": {"max_in_row": "2"},
    "log=3": {"log": 3},
}
REFUSED: list[tuple[str, Callable[[Path], Any]]] = [
    *((text, lambda _, options=options: hr.Skip(**options)) for text, options in NO_SKIPS.items()),
    (r"errors= needs .*from_map", lambda _: hr.DataLoader([1, 2, 3], errors=hr.Skip())),
    ("=5 must be below 5, the number of samples of", lambda _: excluding(SOME_MORE, hr.from_map(range(5)))),
    ("'pad'", lambda _: excluding(SOME, ranks=hr.Ranks(last_batch="pad"))),
    ("have no numbers", lambda _: excluding(SOME, hr.from_iterable(ALL))),
    ("has no end", lambda _: excluding(SOME, STREAM.repeat())),
    (r"cannot follow \.filter\(int\): the number", lambda _: excluding(STEPS, STREAM.filter(int))),
    (r"cannot follow \.flat_map", lambda _: excluding(STEPS, STREAM.flat_map(lambda n: [n, n]))),
    (r"last_batch='carry'", lambda _: excluding(STEPS, ranks=hr.Ranks(last_batch="carry"))),
    (r"cannot follow \.skip\(2\)", lambda _: excluding(SOME, STREAM.epoch(samples=9).skip(2))),
    (r"cannot follow \.slice", lambda _: excluding(SOME, STREAM.repeat(2).slice(0, None, 2))),
    ("sampler", lambda _: excluding(SOME, STREAM.sample(torch.utils.data.RandomSampler(ALL)))),
    (r"exclude=\[1\] must be hr\.Exclude", lambda _: excluding([1])),
    ("cannot be read", lambda path: excluding(path / "none")),
    ("cannot be read: it is a pipe", lambda path: excluding(path / "fifo")),
    ("line 1: this is no line", lambda path: excluding(written(path, "nonsense"))),
    ("has no number", lambda path: excluding(written(path, '{"data": "x"}'))),
    ("other data", lambda path: excluding(written(path, '{"data": "x", "number": 1}'))),
    ("other data", lambda path: excluding(written(path, '{"data": "x", "number": true}'))),
    ("needs a data set of headrace", lambda _: hr.DataLoader(ALL, exclude=SOME)),  # type: ignore[arg-type]
    ("can be written", lambda path: quarantine(path / "no" / "bad.jsonl")),
    ("can be written", lambda path: quarantine(path / "fifo")),
    (r"\.bucket", lambda path: quarantine(path / "bad.jsonl", STREAM.bucket(int, [9], batch_size=2))),
    *(("must be a", lambda _, options=options: hr.Exclude(**options)) for options in NO_NAMES),
]


@pytest.mark.parametrize(("match", "use"), REFUSED)
def test_meaningless_skips_and_exclusions_are_refused(match: str, use: Callable[[Path], Any], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(hr.OptionError, match=match):
        use(tmp_path)


def test_numbers_of_interleaved_streams_continue_those_of_earlier_inputs(tmp_path: Path) -> None:
    def refuse_b(key: str) -> str:
        if key == "b":
            raise ValueError
        return key

    data, file = hr.from_map("abc").interleave(hr.from_map("de")).map(refuse_b), tmp_path / "left-out.jsonl"
    assert loaded(data, batch_size=None, errors=hr.Skip(log=file)) == ["a", "d", "e", "c"]
    assert json.loads(file.read_text())["number"] == 1
    for exclude in (file, hr.Exclude(samples=[1])):
        assert loaded(data, batch_size=None, exclude=exclude) == ["a", "d", "e", "c"]


def test_state_of_one_rank_keeps_its_share() -> None:
    stream, options = hr.from_map(ALL), {"global_batch_size": 4, "compare": False, "last_batch": "uneven"}
    _, states = ran(2, lambda: stream, most=2, ranks=hr.Ranks(**options), collate_fn=list)
    exclude, ranks = hr.Exclude(steps=[(5, 6)]), [hr.Ranks(rank=k, world_size=2, **options) for k in range(2)]
    assert_refused(loader_of(stream, 4, ranks=ranks[0], exclude=exclude), states[0], match="merge")
    loaders = [loader_of(stream, 4, ranks=own, exclude=exclude) for own in ranks]
    for loader in loaders:
        loader.load_state_dict(hr.merge_states(states))
    assert numbers_of(loaders, 4) == cut([*range(8, 20), *range(24, 28)], 4)
