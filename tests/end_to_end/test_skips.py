"""Failed samples are skipped with hr.Skip: a hole in their batch, reported and bounded."""

import asyncio
import gc
import itertools
import logging
import os
import signal
import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.loops import outcomes_later, outcomes_of, words
from builders.numbers import Made, streamed
from builders.tars import numbered_samples, put_shards, tar
from hypothesis import HealthCheck, given, settings
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
    with hr.DataLoader(data, **{"errors": hr.Skip(), "fetch": QUICK, "timeout": 30, **options}) as loader:
        return outcomes_of(loader)


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


async def stumble_later(sample: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(0)
    return stumble_at(*BAD)(sample)


STAGES: dict[str, Callable[[], Any]] = {
    "fetch": lambda: numbers(22, BAD),
    "map": lambda: numbers(22).map(stumble_at(*BAD)),
    "async map": lambda: numbers(22).map(lambda sample: sample).map(stumble_later),
    "filter": lambda: numbers(22).filter(lambda sample: bool(stumble_at(*BAD)(sample))),
    "step of an iterator": lambda: streamed([sample_of(key) for key in range(22)]).map(stumble_later),
}


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("stage", STAGES)
def test_failed_samples_of_any_stage_are_missing_in_their_batches(stage: str, num_workers: int) -> None:
    got = run(STAGES[stage](), batch_size=4, num_workers=num_workers)
    assert same(got, [batch_of(keys) for keys in WANTED])


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
@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(
    count=st.integers(1, 40),
    bad=st.sets(st.integers(0, 39)),
    is_fetch=st.booleans(),
    is_shuffled=st.booleans(),
    way=st.sampled_from([run, run_later]),
    collated=st.sampled_from(["by us", "by a function", "in several forms"]),
    options=st.fixed_dictionaries(OPTIONS),
)
def test_batches_are_those_of_a_plain_program_when_any_samples_fail(
    count: int, bad: set[int], is_fetch: bool, is_shuffled: bool, way: Callable[..., Any], collated: str, options: Any
) -> None:
    data: Any = numbers(count, list(bad)) if is_fetch else numbers(count)
    data = data.shuffle() if is_shuffled else data
    data = data if is_fetch else data.map(stumble_at(*bad))
    data = data.map(widen_nine) if collated == "in several forms" else data
    order = [sample["n"] for sample in numbers(count).shuffle()] if is_shuffled else range(count)
    wanted = model(order, bad, options["batch_size"], options["drop_last"])
    collate = (lambda samples: {"n": torch.tensor([s["n"] for s in samples])}) if collated == "by a function" else None
    got = way(data, collate_fn=collate, **options)
    assert same(got, [batch_of(keys) for keys in wanted]) if collated == "by us" else keys_of(got) == wanted


@pytest.mark.slow
@WORKERS
def test_single_samples_and_batches_of_the_stream_skip_failed_samples(num_workers: int) -> None:
    got = run(numbers(6, [0, 3, 5]), batch_size=None, num_workers=num_workers)
    assert [g["n"] for g in got] == [1, 2, 4]
    batched = numbers(9, [0, 1, 2, 4, 8]).batch(3).map(lambda batch: batch["n"].tolist())
    assert run(batched, batch_size=None, num_workers=num_workers) == [[3, 5], [6, 7]]


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

    got = run(STAGES["map"](), batch_size=4, num_workers=num_workers, errors=hr.Skip(when=decide))
    assert keys_of(got) == WANTED
    assert [int(said.split()[2]) for said in asked] == BAD
    assert "stage: map(stumble); sample 6 of the epoch" in asked[4]


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("answer", [False, None, 1, "yes"])
def test_error_is_raised_in_its_place_unless_the_function_says_true(answer: Any, num_workers: int) -> None:
    def decide(error: BaseException) -> Any:
        return True if "6" in str(error) else answer

    got = run(numbers(12, [1, 6]), batch_size=4, num_workers=num_workers, errors=hr.Skip(when=decide))
    assert keys_of(got) == [BadError, [4, 5, 7], [8, 9, 10, 11]]
    assert "key 1" in words(got[0])


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


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"when": "ignore"}, "when='ignore'"),
        ({"when": 3}, "when=3"),
        ({"when": decides_later}, "not an `async def`"),
        ({"max_in_epoch": -1}, "max_in_epoch=-1"),
        ({"max_in_epoch": True}, "max_in_epoch=True"),
        ({"max_in_epoch": 1.5}, r"max_in_epoch=1\.5"),
        ({"max_in_row": "2"}, "max_in_row='2'"),
        ({"log": 3}, "log=3"),
    ],
)
def test_options_of_skips_that_mean_nothing_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(hr.OptionError, match=match):
        hr.Skip(**options)


def test_torchs_data_sets_skip_no_samples() -> None:
    with pytest.raises(hr.OptionError, match=r"errors=Skip\(.*from_map"):
        hr.DataLoader([1, 2, 3], errors=hr.Skip())


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
