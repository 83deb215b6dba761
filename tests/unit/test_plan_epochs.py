"""Epochs of a pipeline: how long they are, what came before them, what their data are, and what cannot be one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.dataset.stream import Stream
from headrace.pipeline.epoch_orders import Planning

TEN = hr.from_map(range(10))


def planning_of(stream: Stream) -> Planning:
    return Planning(stream.pipeline(), 3)


PIPELINES = {
    "plain": TEN.shuffle(),
    "take": TEN.take(7),
    "take more": TEN.take(70),
    "repeat": TEN.repeat(3),
    "endless": TEN.repeat(),
    "repeat, take": TEN.shuffle().repeat(2).take(13),
    "endless, take": TEN.repeat().take(13),
    "epoch": TEN.epoch(samples=13),
    "epoch, take": TEN.epoch(samples=13).take(11),
    "take, epoch": TEN.take(4).shuffle().epoch(samples=13),
    "drawn": TEN.sample(count=23),
    "drawn by weight": TEN.sample(weights=np.arange(10.0), count=6, replacement=False),
    "as many drawn": TEN.sample(weights=np.arange(10.0)).take(8),
    "picked": TEN.sample([3, 1, 1]).repeat(2),
    "nothing": hr.from_map([]).repeat(),
    "mixture": hr.mix({"a": TEN, "b": hr.from_map(range(30))}).repeat(2).take(70),
    "endless mixture": hr.mix({"a": TEN, "b": TEN}, until="forever"),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_count_of_an_epoch_equals_that_of_its_order(name: str) -> None:
    planning = planning_of(PIPELINES[name])
    count = planning.count()
    assert type(count) is int
    assert count == planning.order(0).count == planning.order(4).count


def test_counting_an_epoch_does_not_iterate_the_sampler() -> None:
    class Sampler(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("the sampler was asked")

    assert planning_of(TEN.sample(Sampler(range(5))).repeat(2)).count() == 10


def test_an_epoch_of_no_samples_is_refused_when_it_is_counted() -> None:
    with pytest.raises(hr.OptionError, match="no samples to make one of"):
        planning_of(hr.from_map([]).epoch(samples=5)).count()


CARRIED = ("plain", "take", "repeat", "repeat, take", "endless, take", "epoch", "epoch, take", "take, epoch", "mixture")


@pytest.mark.parametrize("name", CARRIED)
def test_negative_positions_are_the_end_of_the_previous_epoch(name: str) -> None:
    planning = planning_of(PIPELINES[name])
    count = planning.count()
    before = [planning.numbers(planning.order(epoch), np.arange(count)).tolist() for epoch in (3, 4)]
    order = planning.order(5)
    assert planning.numbers(order, np.arange(-3, 0)).tolist() == before[1][-3:]
    assert planning.numbers(order, np.arange(-count - 3, 1 - count)).tolist() == [*before[0][-3:], before[1][0]]
    for position in range(-count - 3, 0):
        assert position < order.window_end(position) <= (position // count + 1) * count


@pytest.mark.parametrize("stream", [
    TEN.take(7), hr.from_map(range(7)).epoch(samples=11), hr.from_map(range(7)).shuffle().repeat(2).take(11),
], ids=["take", "epoch", "repeat"])  # fmt: skip
def test_samples_that_are_carried_come_first_when_epochs_are_no_whole_passes(stream: Stream) -> None:
    planning = planning_of(stream)
    count = planning.count()
    wanted = [n for epoch in range(4) for n in planning.numbers(planning.order(epoch), np.arange(count)).tolist()]
    with hr.DataLoader(stream, batch_size=4, ranks=hr.Ranks(last_batch="carry"), seed=3) as loader:
        received = [int(n) for _ in range(4) for batch in loader for n in batch]
    assert received == wanted[: len(received)]
    assert len(wanted) - len(received) == 4 * count % 4


def test_names_of_files_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    urls = [str(tmp_path / f"{k}.txt") for k in range(3)]
    names = urls, urls[::-1], [*urls[:2], str(tmp_path / "x.txt")]
    data = {planning_of(hr.files(some)).fingerprint for some in names}
    assert len(data) == 3
    elsewhere = [url.replace(str(tmp_path), "/other/place") for url in urls]
    assert planning_of(hr.files(elsewhere)).fingerprint in data


def test_weight_too_small_for_any_epoch_is_named() -> None:
    sources = {"a": TEN, "b": hr.from_map(range(10))}
    mixture = hr.mix(sources, {"a": 1, "b": 1e-30}, until="all")
    with pytest.raises(hr.OptionError, match="weight of source 1 is 1e-30"):
        len(mixture)
    assert len(hr.mix(sources, {"a": 1, "b": 1e-6}, until="all")) == pytest.approx(10**7, rel=0.1)
