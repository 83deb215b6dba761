"""Streams are plain values: lazy, immutable, and strict about what does not go together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders.numbers import Counting, Numbers

import headrace as hr


def double(x: Any) -> Any:
    return x


async def adouble(x: Any) -> Any:
    return x


class Augment:
    def __call__(self, x: Any) -> Any:
        return x


class Remote:
    async def __call__(self, x: Any) -> Any:
        return x


def tars(count: int = 2) -> hr.Stream:
    return hr.stream([f"memory://never/{k}.tar" for k in range(count)])


def test_operators_leave_the_stream_as_it_was() -> None:
    data = tars()
    before = repr(data)
    others = [
        *(data.shuffle(), data.decode("rgb8"), data.map(double), data.filter(double), data.to_tuple("a")),
        *(data.take(3), data.batch(2)),
    ]
    for other in others:
        assert type(other) is hr.Stream
        assert other is not data
    assert repr(data) == before
    assert len(data.map(double).operators) == len(data.map(adouble).operators) == 1
    assert isinstance(Numbers(10).map(double), hr.Stream)
    assert isinstance(Counting().take(3), hr.Stream)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: tars().batch(0), "n=0 must be a whole number, 1 or more"),
    (lambda: tars().batch(2.0), "n=2.0 must be"),  # type: ignore[arg-type]
    (lambda: tars().padded_batch(2.5), "n=2.5 must be"),  # type: ignore[arg-type]
    (lambda: tars().bucket("a", "ab", batch_size=2), "edges="),  # type: ignore[arg-type]
    (lambda: tars().bucket("a", [1], batch_size=2.5), "batch_size=2.5"),  # type: ignore[arg-type]
    (lambda: tars().rename(a=1), "must be different names of fields"),  # type: ignore[arg-type]
    (lambda: tars().prefetch(1.5), "n=1.5 must be"),  # type: ignore[arg-type]
    (lambda: tars().fork("2"), "n='2' must be"),  # type: ignore[arg-type]
    (lambda: tars().fork(True), "n=True must be"),
    (lambda: Numbers(10).interleave(Numbers(10), block=1.5), "block=1.5"),  # type: ignore[arg-type]
    (lambda: tars().take(-1), "n=-1 must be a whole number, 0 or more"),
    (lambda: tars().to_tuple(), "must be different names of fields"),
    (lambda: tars().map(3), "fn=3 must be a function"),  # type: ignore[arg-type]
    (lambda: tars().filter(None), "fn=None must be a function"),  # type: ignore[arg-type]
    (lambda: tars().decode("rgb9"), "spec='rgb9'"),
    (lambda: hr.from_iterable([1, 2]).shuffle("global"), "'window' for samples that are made of others, have an order"),
    (lambda: hr.stream("memory://a/b.bin"), "b.bin has no format"),
    (lambda: hr.stream("memory://a/b.tar", format="rar"), "format='rar'"),
    (lambda: hr.stream([]), "must be an address, a pattern like"),
    (lambda: hr.DataLoader(tars().batch(4), batch_size=4), "give one of them"),
    (lambda: hr.Fetch(range_bytes=100), "range_bytes"),
    (lambda: hr.Fetch(range_bytes=0), "range_bytes"),
    (lambda: hr.Fetch(attempts=0), "attempts"),
    (lambda: hr.Fetch(stall_timeout_s=0), "stall_timeout_s"),
    (lambda: hr.Fetch(backoff_s=-1), "backoff_s"),
]


@pytest.mark.parametrize(("build", "text"), REFUSED)
def test_wrong_arguments_are_refused_while_building(build: Callable[[], Any], text: str) -> None:
    with pytest.raises(hr.OptionError, match=text):
        build()


@pytest.mark.parametrize("options", [
    {"fetch": 4},
    {"seed": 1.0},
    {"seed": "1"},
    {"memory_budget": 0},
    {"memory_budget": "lots"},
    {"memory_budget": -1},
    {"prefetch_factor": -1},
    {"num_workers": -1},
    {"timeout": -1},
    {"batch_size": 0},
    {"batch_size": None, "drop_last": True},
    {"sampler": [1, 2]},
    {"multiprocessing_context": "fork"},
])  # fmt: skip
def test_options_of_the_loader_out_of_bounds_are_value_errors(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        hr.DataLoader(tars(), **options)


def test_lengths_are_known_where_samples_are_counted() -> None:
    assert len(Numbers(10).map(double).shuffle()) == 10
    assert len(Numbers(10).take(3)) == 3
    assert len(Numbers(10).take(30)) == 10
    assert len(Numbers(10).batch(4)) == 3
    assert len(Numbers(10).batch(4, drop_last=True)) == 2
    assert len(Numbers(10).take(6).batch(4)) == 2
    assert len(hr.DataLoader(Numbers(10), batch_size=4)) == 3
    assert len(hr.DataLoader(Numbers(10), batch_size=4, drop_last=True)) == 2
    assert len(hr.DataLoader(Numbers(10), batch_size=None)) == 10
    assert len(hr.DataLoader(Numbers(10).batch(4))) == 3
    assert len(hr.files([f"memory://a/{k}.txt" for k in range(7)])) == 7


@pytest.mark.parametrize("data", [tars(), Numbers(10).filter(double), Counting().take(2)])
def test_unknown_length_is_a_type_error(data: hr.Stream) -> None:
    for one in (data, hr.DataLoader(data, batch_size=2)):
        with pytest.raises(TypeError, match="has no length"):
            len(one)


def test_repr_shows_source_and_operators_and_no_secrets() -> None:
    data = hr.stream("https://user:word@host/a-{0..2}.tar?X-Amz-Signature=abc", format="tar").shuffle().map(double)
    text = repr(data.filter(lambda x: x).decode("rgb8").to_tuple("jpg;png", "cls").take(5).batch(2))
    assert "word" not in text
    assert "abc" not in text
    assert "and 2 more" in text
    for word in ("shuffle(auto)", "map(double)", "decode(rgb8)", "to_tuple(jpg;png, cls)", "take(5)", "batch(2)"):
        assert word in text
    assert repr(Numbers(10).map(double)) == "Numbers(…).map(double)"


def test_describe_names_the_place_of_each_step() -> None:
    data = Numbers(10).shuffle().map(double).map(adouble).map(Augment()).map(Remote())
    lines = data.map(functools.partial(adouble)).map(adouble, field="x").batch(2).describe().splitlines()
    assert lines[:2] == ["Numbers(…)", "  samples: 10"]
    assert [line.rpartition("[")[2].rstrip("]") for line in lines[2:]] == [
        "plan", "workers", "event loop", "workers", "event loop", "event loop", "event loop", "workers",
    ]  # fmt: skip


def test_building_reads_nothing_and_draws_one_seed() -> None:
    loader = hr.DataLoader(tars(1000).shuffle().decode("rgb8").batch(4))
    assert loader.stats().fetch.requests == 0
    assert loader.regime == "headrace"
    assert loader.options["fetch"].concurrency >= 1
    seeds = [hr.DataLoader(tars(), generator=torch.Generator().manual_seed(5)).options["seed"] for _ in range(2)]
    assert seeds[0] == seeds[1]
    assert hr.DataLoader(tars()).options["seed"] == 0
    assert hr.DataLoader(tars(), seed=9).options["seed"] == 9


@pytest.mark.parametrize(("text", "size"), [
    ("2GiB", 2**31), ("1.5 MB", 1_500_000), ("64KiB", 65_536), ("64 kB", 64_000), ("100", 100), (77, 77),
    ("3mib", 3 * 2**20),
])  # fmt: skip
def test_budgets_are_read_with_their_units(text: int | str, size: int) -> None:
    assert hr.DataLoader(tars(), memory_budget=text).options["memory_budget"] == size
