"""Skipped samples depend on the order of failures and on the policy alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.open_readers import TrainerCalls
from headrace.engine.scheduler.skip_rules import Skips
from headrace.errors import FormatError, OptionError
from headrace.observe import LoaderMeters
from headrace.options import Skip
from headrace.torch_compat.serialize import pack_error, unpack_error
from headrace.workers.failures import NOWHERE, Origin, PackedError


class Bench:
    """The rulings of one epoch."""

    def __init__(
        self,
        in_all: int | None = None,
        in_a_row: int | None = None,
        decide: Callable[[BaseException], Any] | None = None,
    ) -> None:
        self.meters = LoaderMeters()
        self.skips = Skips(
            Skip(when=decide, max_in_epoch=in_all, max_in_row=in_a_row), 3, self.meters, unpack_error, pack_error
        )

    def rule(self, position: int, count: int, *bad: int) -> bool:
        errors = {slot: pack_error(ValueError(f"sample {position + slot}")) for slot in bad}
        return self.skips.rule(lambda: range(position, position + count), count, errors) is not None


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    bad=st.sets(st.integers(0, 71)),
    in_all=st.none() | st.integers(0, 20),
    in_a_row=st.none() | st.integers(0, 6),
)
def test_limits_raise_batches(sizes: list[int], bad: set[int], in_all: int | None, in_a_row: int | None) -> None:
    bench, start, total, row = Bench(in_all, in_a_row), 0, 0, 0
    for size in sizes:
        slots = [slot for slot in range(size) if start + slot in bad]
        is_raised = False
        for slot in range(size):
            if slot not in slots:
                row = 0
            elif (in_all is not None and total >= in_all) or (in_a_row is not None and row >= in_a_row):
                is_raised = True
                break
            else:
                total, row = total + 1, row + 1
        assert bench.rule(start, size, *slots) == is_raised
        start += size
    assert bench.meters.skipped == total


def test_error_without_a_sample_is_raised() -> None:
    bench = Bench()
    packed = pack_error(ValueError("the source"))
    assert bench.skips.rule(lambda: range(2), 2, {0: packed}) is None
    raised = bench.skips.rule(lambda: range(2), 2, {0: packed.widened()})
    assert raised is not None
    assert raised.error.blob == packed.blob
    assert bench.meters.skipped == 1


NO_PICKLE = PackedError(b"no pickle")


@pytest.mark.parametrize("packed", [pack_error(OptionError("nosuch://")), pack_error(OptionError("")), NO_PICKLE])
def test_option_errors_and_damaged_pickles_are_raised(packed: PackedError) -> None:
    raised = Bench().skips.rule(lambda: range(1), 1, {0: packed})
    assert raised is not None
    assert raised.error.blob == packed.blob


def test_no_sample_is_skipped_after_the_loader_is_collected() -> None:
    policy: Skip | None = Skip(when=lambda _: True, max_in_row=None)
    calls = TrainerCalls(policy, None)
    assert calls.decide(ValueError()) is True
    policy = None
    assert calls.decide(ValueError()) is False
    assert Bench(decide=calls.decide).rule(0, 1, 0)


def noted(note: str) -> Exception:
    error = KeyError(1)
    error.add_note(note)
    return error


@pytest.mark.parametrize(("error", "origin", "name"), [
    (FormatError("bad", url="memory://a/0.tar", key="7"), NOWHERE, "'7'"),
    (FormatError("bad", url="memory://a/0.tar"), NOWHERE, "memory://a/0.tar"),
    (KeyError(1), Origin("map(f)", 5, "'a; b'", "memory://a", 1), "'a; b'"),
    (KeyError(1), Origin("fetch", 5, "(1, 'x')"), "(1, 'x')"),
    (KeyError(1), Origin("map(f)", 5, url="memory://a", worker=1), "memory://a"),
    (KeyError(1), Origin("map(f)", 5, worker=1), ""),
    (noted("what users note; key 'of their own'"), NOWHERE, ""),
    (noted("what users note; key 'of their own'"), Origin("map(f)", 5, "7"), "7"),
])  # fmt: skip
def test_skipped_sample_is_named_by_its_errors_origin(error: Exception, origin: Origin, name: str) -> None:
    bench = Bench()
    assert bench.skips.rule(lambda: range(8, 10), 2, {1: pack_error(error, origin)}) is None
    (skipped,) = bench.meters.skipped_samples
    assert (skipped.epoch, skipped.position, skipped.name) == (3, 9, name)
    assert skipped.error == f"{type(error).__name__}: {error}"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(("error", "text"), [
    (Mute(), "Mute"),
    (ValueError("x" * 10**6), f"ValueError: {'x' * 988}"),
])  # fmt: skip
def test_text_of_a_skipped_samples_error_is_short(error: Exception, text: str) -> None:
    bench = Bench()
    assert bench.skips.rule(lambda: range(2), 2, {1: pack_error(error)}) is None
    (skipped,) = bench.meters.skipped_samples
    assert (skipped.position, skipped.error) == (1, text)


@pytest.mark.parametrize(("answer", "is_raised"), [(np.True_, False), (np.False_, True), (1, True), (None, True)])
def test_only_a_true_value_skips_a_sample(answer: Any, is_raised: bool) -> None:
    assert Bench(decide=lambda _: answer).rule(0, 1, 0) == is_raised


def test_one_failed_read_counts_once_towards_the_limits() -> None:
    bench, blob = Bench(in_all=2, in_a_row=2), pack_error(OSError("the shard is missing"))
    for start in range(0, 40, 4):
        assert bench.skips.rule(lambda at=start: range(at, at + 4), 4, dict.fromkeys(range(4), blob)) is None
    assert bench.meters.skipped == 40
    assert bench.skips.counts == (1, 1)
    assert not bench.rule(40, 4, 0)
    assert bench.rule(44, 4, 0)
