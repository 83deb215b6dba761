"""States after batches, golden states of version 2, origins of samples, and skipped samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.numbers import Counting, Numbers, is_odd
from builders.tars import put_shards

import headrace as hr
from headrace.delivery.progress import Progress
from headrace.delivery.slabs import Arrived
from headrace.engine.open_readers import TrainerCalls
from headrace.engine.scheduler.group_level import RowMap
from headrace.engine.scheduler.position_map import EvenBoundaries, Origins, PositionMap
from headrace.engine.scheduler.skip_rules import Skips
from headrace.errors import FormatError, OptionError
from headrace.observe import LoaderMeters
from headrace.options import Skip
from headrace.order.packed_rows import PackedRows
from headrace.order.packing import Packing
from headrace.order.row_states import RowCursor, RowProgress
from headrace.state.state import _DEFAULTS, ResumePoint, StagePoint, State, is_as_saved, whole_check
from headrace.torch_compat.serialize import pack_error, unpack_error
from headrace.workers.failures import NOWHERE, Origin, PackedError


def test_failed_batch_is_used_at_the_next_request_and_adds_no_samples() -> None:
    progress = Progress(ResumePoint(), lambda received: {})
    progress.fail(Arrived(lambda: None, 1, [ResumePoint(((0, 1),), 1)], 0))
    assert progress.received == ResumePoint()
    progress.ask()
    assert progress.received == ResumePoint(((0, 1),), 1, batches=1)


@pytest.mark.parametrize("marks", [True, False])
def test_progress_after_samples_together_is_that_after_one_at_a_time(marks: bool) -> None:
    asked = list[int]()

    def mark(position: int) -> Any:
        asked.append(position)
        return [position], position

    together, alone = (PositionMap(mark=mark if marks else None) for _ in range(2))
    boundaries = EvenBoundaries(1)
    for one in (together, alone):
        one.put(8)
    after = together.after_each(0, 5, 0, 1, (1, 0))
    assert after is not None
    each = list[ResumePoint]()
    for number in range(5):
        alone.cover(number, number, number + 1, boundaries)
        each.append(alone.after(boundaries, (1, 0)))
    assert [after[k] for k in range(5)] == each
    assert asked == [1, 2, 3, 4, 5] * 2 * marks, "a source forgets positions before its last mark"
    assert together.after_each(6, 1, 6, 1, (0, 0)) is None, "one before it was not delivered"
    assert (together.after_each(5, 4, 5, 1, (0, 0)) is None) == marks, "the source may end before"


def test_units_are_known_below_zero_after_a_resume_within_the_first() -> None:
    origins = Origins(StagePoint(skip=2))
    assert origins.needed(0) == (0, 2)
    origins.arrived([0, 0, 0, 0, 1])
    assert [origins.needed(number) for number in range(3)] == [(0, 2), (0, 3), (1, 0)]
    assert [origins.unit(number) for number in range(-1, 3)] == [-1, 0, 0, 1]
    origins.forget(2)
    assert origins.needed(3) == (2, 0)


def test_batch_ended_by_an_error_is_reported_once_its_samples_are_known() -> None:
    run = PackedRows(Packing(4, "concat"), range(2), 2, 4)
    positions = RowMap(100, run)
    assert positions.positions(0, 4) == range(4)
    for name in range(4):
        run.arrive(name, [6], [False])
    while run.take() is not None:
        pass
    boundaries = EvenBoundaries(2)
    positions.arrived(1, [0])
    positions.cover(0, 0, 2, boundaries)
    assert positions.after(boundaries, (0, 0)).rows == RowProgress(0, (RowCursor(), RowCursor()))
    assert positions.late(boundaries, (0, 0)) is None
    positions.arrived(1, [1])
    late = positions.late(boundaries, (0, 0))
    assert late is not None
    assert late.rows == RowProgress(2, (RowCursor(0, 0, 4, check=1), RowCursor(0, 0, 4, check=1)))


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def noted(note: str) -> Exception:
    error = KeyError(1)
    error.add_note(note)
    return error


def skips(**policy: Any) -> tuple[Skips, LoaderMeters]:
    meters = LoaderMeters()
    return Skips(Skip(**policy), 3, meters, unpack_error, pack_error), meters


DAMAGED = pack_error(ValueError("damaged"))


@pytest.mark.parametrize(("packed", "when", "is_raised"), [
    (DAMAGED, None, False),
    (DAMAGED.widened(), None, True),  # an error without a sample
    (pack_error(OptionError("nosuch://")), None, True),
    (PackedError(b"no pickle"), None, True),
    (DAMAGED, lambda _: np.True_, False),
    (DAMAGED, lambda _: np.False_, True),
    (DAMAGED, lambda _: 1, True),
    (DAMAGED, lambda _: None, True),
])  # fmt: skip
def test_error_is_skipped_if_it_is_a_samples_and_the_function_returns_true(
    packed: PackedError, when: Any, is_raised: bool
) -> None:
    rules, meters = skips(when=when)
    raised = rules.rule(lambda: range(2), 2, {0: packed})
    assert (raised is not None) == is_raised
    assert raised is None or raised.error.blob == packed.blob
    assert meters.skipped == (not is_raised)


def test_no_sample_is_skipped_after_the_loader_is_collected() -> None:
    policy: Skip | None = Skip(when=lambda _: True, max_in_row=None)
    calls = TrainerCalls(policy, None)
    assert calls.decide(ValueError()) is True
    policy = None
    assert calls.decide(ValueError()) is False


@pytest.mark.parametrize(("error", "origin", "name", "text"), [
    (FormatError("bad", url="memory://a/0.tar", key="7"), NOWHERE, "'7'", None),
    (FormatError("bad", url="memory://a/0.tar"), NOWHERE, "memory://a/0.tar", None),
    (KeyError(1), Origin("map(f)", 5, "'a; b'", "memory://a", 1), "'a; b'", None),
    (KeyError(1), Origin("fetch", 5, "(1, 'x')"), "(1, 'x')", None),
    (KeyError(1), Origin("map(f)", 5, url="memory://a", worker=1), "memory://a", None),
    (KeyError(1), Origin("map(f)", 5, worker=1), "", None),
    (noted("what users note; key 'of their own'"), NOWHERE, "", None),
    (noted("what users note; key 'of their own'"), Origin("map(f)", 5, "7"), "7", None),
    (Mute(), NOWHERE, "", "Mute"),
    (ValueError("x" * 10**6), NOWHERE, "", f"ValueError: {'x' * 988}"),
])  # fmt: skip
def test_skipped_sample_has_its_errors_origin_and_short_text(
    error: Exception, origin: Origin, name: str, text: str | None
) -> None:
    rules, meters = skips()
    assert rules.rule(lambda: range(8, 10), 2, {1: pack_error(error, origin)}) is None
    text = text or f"{type(error).__name__}: {error}"
    assert meters.skipped_samples == [(3, 9, name, text)]


def test_one_failed_read_counts_once_towards_the_limits() -> None:
    (rules, meters), blob = skips(max_in_epoch=2, max_in_row=2), pack_error(OSError("the shard is missing"))
    for start in range(0, 40, 4):
        assert rules.rule(lambda at=start: range(at, at + 4), 4, dict.fromkeys(range(4), blob)) is None
    assert (meters.skipped, rules.counts) == (40, (1, 1))
    assert rules.rule(lambda: range(40, 44), 4, {0: DAMAGED}) is None
    assert rules.rule(lambda: range(44, 48), 4, {0: pack_error(ValueError("another"))}) is not None


GOLDEN: dict[str, Any] = json.loads((Path(__file__).with_name("golden") / "state_2.json").read_text())


NEVER_SAVED_HERE = {"lanes", "resplit", "skipped", "skip_batches", "used"}


class Counter(Counting):
    """States have the name of this class."""


def shards() -> hr.Stream:
    return hr.stream(put_shards("golden", (9, 0, 14, 22), 20), index=None).map(number_of)


def number_of(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


def several(number: int) -> list[int]:
    return [number] * (number % 4)


def text(number: int) -> dict[str, list[int]]:
    return {"input_ids": [number] * (number % 11)}


def tokens_of(sequence: dict[str, Any]) -> Any:
    return sequence["input_ids"]


LOADERS: dict[str, Callable[[], hr.DataLoader[Any]]] = {
    "in order, of all ranks": lambda: hr.DataLoader(
        Numbers(60).shuffle(), batch_size=4, ranks=hr.Ranks(rank=1, world_size=3), seed=7
    ),
    "with holes": lambda: hr.DataLoader(Numbers(60).shuffle(), batch_size=7, ranks=hr.Ranks(last_batch="carry")),
    "of one rank": lambda: hr.DataLoader(
        Numbers(60), batch_size=4, ranks=hr.Ranks(rank=1, world_size=3), in_order=False
    ),
    "behind limits": lambda: hr.DataLoader(
        Numbers(60).shuffle().flat_map(several).take(40).batch(3).unbatch().filter(is_odd).take(30).flat_map(several),
        batch_size=4,
    ),
    "packed by rows": lambda: hr.DataLoader(
        Numbers(60).shuffle().filter(is_odd).map(text).pack(6, method="best_fit", pad_value=-1).map(tokens_of),
        batch_size=4,
    ),
    "behind a filter": lambda: hr.DataLoader(Numbers(60).shuffle().filter(is_odd), batch_size=4),
    "shards without an index": lambda: hr.DataLoader(shards().shuffle(window=8), batch_size=4),
    "an iterable data set": lambda: hr.DataLoader(Counter(40), batch_size=4),
}


@pytest.mark.parametrize(("name", "golden"), GOLDEN.items())
def test_state_of_version_2_loads_and_the_same_samples_follow(name: str, golden: dict[str, Any]) -> None:
    with LOADERS[name]() as loader:
        loader.load_state_dict(golden["state"])
        assert (loader.epoch, loader.position.batch) == (golden["state"]["epoch"], golden["state"]["batches"])
        assert [batch.tolist() for batch in loader] == golden["rest"]


@pytest.mark.parametrize("name", LOADERS)
def test_saved_state_equals_the_golden_one(name: str) -> None:
    """Another form of it would be another version."""
    golden = GOLDEN[name]
    with LOADERS[name]() as loader:
        loader.load_state_dict(golden["state"])
        iterator = iter(loader)
        assert iterator.state_dict() == golden["state"]
        next(iterator)
        assert json.loads(json.dumps(iterator.state_dict())) == golden["next"]


def names_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from names_in(part)


def test_states_of_version_2_have_all_fields() -> None:
    """A field that is in none of them could change unnoticed."""
    assert GOLDEN.keys() == LOADERS.keys()
    states = [golden["state"] for golden in GOLDEN.values()]
    assert {*names_in(states)} >= {*_DEFAULTS, "source_state", "check"} - NEVER_SAVED_HERE
    assert max(len(json.dumps(state)) for state in states) < 1000


@pytest.mark.parametrize("version", [1, 3])
def test_other_versions_are_refused(version: int) -> None:
    name = "an iterable data set"
    with LOADERS[name]() as loader, pytest.raises(hr.StateMismatchError, match="reads version 2 only") as caught:
        loader.load_state_dict({**GOLDEN[name]["state"], "version": version})
    assert caught.value.field == "version"


WRONG: list[dict[str, Any]] = [
    {"version": 2.0}, {"epoch": 1.5}, {"batches": 2**70}, {"skipped": [-1, 0]},
    {"fingerprint": {"seed": [1], "data": ""}},
    {"source": {"position": 0, "pending": [30, 5]}}, {"source": {"received": [-5, 3]}}, {"source": {"carried": [3, 5]}},
    {"ranks": {"global_batch_size": 4, "world_size": 3, "resplit": {"global_batch_size": 1}}},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_numbers_that_no_state_has_are_refused(wrong: dict[str, Any]) -> None:
    state: dict[str, Any] = {k: v for k, v in GOLDEN["an iterable data set"]["state"].items() if k != "check"}
    edited = {name: {**state[name], **value} if isinstance(value, dict) else value for name, value in wrong.items()}
    with pytest.raises(hr.StateMismatchError):
        State.from_json({**state, **edited})


PLAIN = {"batches": 3, "sampler": None, "copies": [{"p": 7}]}
ANY = {**PLAIN, "copies": [{"p": np.int64(7), "of": {1, 2}}]}


@pytest.mark.parametrize(("state", "default"), [
    (PLAIN, None),
    ({**PLAIN, "copies": [{"p": np.int64(7)}]}, int),
    (ANY, lambda value: sorted(value) if isinstance(value, set) else int(value)),
])  # fmt: skip
def test_state_that_was_edited_differs_from_one_stored_in_a_file(state: dict[str, Any], default: Any) -> None:
    saved = {**state, "check": whole_check(state)}
    assert is_as_saved(saved)
    assert is_as_saved(json.loads(json.dumps(saved, default=default)))
    assert not is_as_saved({**saved, "batches": 4})
    assert not is_as_saved({name: value for name, value in saved.items() if name != "batches"})
