"""A killed run resumes exactly after any batch, with any workers and reads."""

import functools
import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import full.contributed.operators  # noqa: F401 (it registers operators)
import pytest
from end_to_end.state import sources
from end_to_end.state.runs import Case, assert_same, interrupted, uninterrupted
from end_to_end.state.sources import KEYS, KINDS, NUMBERED, Places, Seen, Written

import headrace as hr
from headrace.ops.registry import registered_operators

RESUMES = int(os.environ.get("HEADRACE_RESUMES", "60"))
WITH_WORKERS = RESUMES if "HEADRACE_RESUMES" in os.environ else 8  # each takes some tenths of a second


def shuffled(kind: str, rng: random.Random) -> tuple[str, Callable[[Any], Any]]:
    seed = rng.choice([None, 3])
    window = rng.choice([3, 8, 17])
    ways: dict[str, Callable[[Any], Any]] = {"in order": lambda data: data}
    if kind in NUMBERED:
        ways["shuffle()"] = lambda data: data.shuffle(seed=seed)
    if kind in sources.SHARDS:
        ways[f"window {window}"] = lambda data: data.shuffle("window", window=window, seed=seed)
        ways["shards"] = lambda data: data.shuffle("shards", seed=seed)
    if kind in sources.INDEXED_SHARDS:
        for by in ("within", "global"):
            ways[by] = lambda data, by=by: data.shuffle(by, seed=seed)
    name = rng.choice(list(ways))
    return name, ways[name]


def chosen(kind: str, total: int, rng: random.Random) -> tuple[str, Callable[[Any], Any]]:
    count = rng.randint(1, 2 * total)
    ways: dict[str, Callable[[Any], Any]] = {
        "": lambda data: data,
        f"take {count}": lambda data: data.take(count),
        f"epoch {count}": lambda data: data.epoch(samples=count),
    }
    if kind in (*NUMBERED, *sources.SHARDS):
        times = rng.choice([2, 3])
        ways[f"repeat {times}"] = lambda data: data.repeat(times)
        ways[f"repeat {times}, take {count}"] = lambda data: data.repeat(times).take(count)
    if kind in NUMBERED:
        numbers = sources.shuffled_numbers(total, rng)
        weights = [rng.random() for _ in range(total)]
        ways["these"] = lambda data: data.sample(numbers)
        ways["slice"] = lambda data: data.slice(1, None, 2)
        ways["skip"] = lambda data: data.skip(3)
        ways["shard"] = lambda data: data.shard(index=1, count=2)
        ways["drawn"] = lambda data: data.sample(weights=weights, count=count)
        for name, make in registered_operators().items():
            if isinstance(make(), hr.plugins.OrderOp):
                ways[name] = lambda data, name=name: data.apply_op(name)
    name = rng.choice(["", "", *ways])
    return name, ways[name]


def stepped(
    kind: str, rng: random.Random, bad: frozenset[int], with_torch: bool
) -> tuple[str, Callable[[Any], Any], bool]:
    """The name of a step, the step, and whether it draws the same random numbers in any order of batches."""
    seen = Seen(bad, with_torch=with_torch)
    name = rng.choice(
        ["map", "map", "map, async", "some", "some, async", "async, some", "most", "map after a filter", "keys"]
    )
    ways: dict[str, Callable[[Any], Any]] = {
        "map": lambda data: data.map(seen),
        "map, async": lambda data: data.map(seen).map(sources.as_it_is),
        "some": lambda data: data.map(seen).filter(sources.some),
        "some, async": lambda data: data.map(seen).filter(sources.some).filter(sources.most),
        "async, some": lambda data: data.map(sources.as_it_is).map(seen).filter(sources.some),
        "most": lambda data: data.map(seen).filter(sources.most),
        "map after a filter": lambda data: data.filter(lambda sample: int(sample["__key__"]) % 3 != 1).map(seen),
        "keys": lambda data: data.filter(sources.even_key, field="__key__").map(seen),
    }
    # A map after a filter of samples sees positions among the samples that are left.
    keeps_random = name != "map after a filter" and (name != "keys" or kind in (*sources.INDEXED_SHARDS, KEYS))
    return name, ways[name], keeps_random


def joined(kind: str, written: Written, rng: random.Random) -> tuple[str, Callable[[], Any] | None]:
    """A stream of several inputs, the first one of this kind; None: it is by itself."""
    if kind not in NUMBERED or rng.random() < 0.6:
        return "", None
    kinds = [kind, *(rng.choice(NUMBERED) for _ in range(rng.choice([1, 1, 2])))]
    ways = [_input(one, written, rng) for one in kinds]
    names = ", ".join(f"{one} {name}" for one, (name, _) in zip(kinds, ways, strict=True))
    block = rng.choice([1, 2, 5])
    weights = {str(k): 1 + 2 * k for k in range(len(kinds))}
    joins: dict[str, Callable[[Any, Any], Any]] = {
        "concat": lambda first, others: first.concat(*others),
        "zip": lambda first, others: first.zip(*others, strict=False).map(sources.of_all),
        f"interleave {block}": lambda first, others: first.interleave(*others, block=block),
        "mix": lambda first, others: hr.mix(_named(first, *others), weights, until="all"),
        "curriculum": lambda first, others: hr.mix(
            _named(first, *others), lambda step: weights | {"0": step}, until="forever", step=16
        ).take(3 * written.total),
        "tokens": lambda first, others: sources.mixed_by_tokens(kinds, [first, *others], written),
        "join": lambda first, _: first.join(sources.source(kind, written), on="__key__").map(sources.of_all),
    }
    if kind == sources.PACKED:
        del joins["join"]  # sequences have no keys
    how = rng.choice(sorted(joins))

    def made() -> Any:
        first, *others = (way(sources.source(one, written)) for one, (_, way) in zip(kinds, ways, strict=True))
        return joins[how](first, others)

    return f"{how} of {names}", made


def _named(*streams: Any) -> dict[str, Any]:
    return {str(k): stream for k, stream in enumerate(streams)}


def _input(kind: str, written: Written, rng: random.Random) -> tuple[str, Callable[[Any], Any]]:
    how, shuffle = shuffled(kind, rng)
    count, times = rng.randint(1, 2 * written.total), rng.choice([2, 3])
    as_it_is = (
        sources.as_it_is if kind in (sources.INDEXED, KEYS, sources.FILES, sources.MAP) else dict
    )  # others are opened first
    ways: dict[str, Callable[[Any], Any]] = {
        "": shuffle,
        f", take {count}": lambda data: shuffle(data).take(count),
        f", repeat {times}": lambda data: shuffle(data).repeat(times),
        f", epoch {count}": lambda data: shuffle(data).epoch(samples=count),
        ", as it is": lambda data: shuffle(data).map(as_it_is),
        ", slice": lambda data: data.slice(1, None, 2),
    }
    name = rng.choice(sorted(ways))
    return how + name, ways[name]


def regrouped(total: int, rng: random.Random, *, is_begun_again: bool) -> tuple[str, Callable[[Any], Any]]:
    """Random operators that make many samples of one, group samples, or take some.

    Args:
        is_begun_again: whether the data may be: there is something to give each time.
    """
    names, ways = [], []
    if is_begun_again and rng.random() < 0.3:
        names, most = ["flat_map, epoch"], rng.randint(1, 2 * total)
        ways = [lambda data, n=most: data.flat_map(sources.parts_of).epoch(samples=n)]
    size = lambda: rng.choice([1, 2, 3, 5, 9])
    for _ in range(rng.choice([1, 2, 3, 4])):
        first, second, last, most = size(), size(), rng.random() < 0.3, rng.randint(1, 2 * total)
        kinds: dict[str, Callable[[Any], Any]] = {
            "flat_map": lambda data: data.flat_map(sources.parts_of),
            "flat_map, async": lambda data: data.flat_map(sources.some_parts),
            f"flat_map, shuffle {first}": lambda data, n=first: data.flat_map(sources.parts_of).shuffle(window=n),
            f"batch {first}, {last}": lambda data, n=first, last=last: (
                data.batch(n, drop_last=last).map(sources.weighed).unbatch()
            ),
            f"batch {first}, async": lambda data, n=first: data.batch(n).map(sources.as_it_is_slowly).unbatch(),
            f"padded_batch {first}": lambda data, n=first, last=last: data.padded_batch(n, drop_last=last).unbatch(),
            f"bucket {first}": lambda data, n=first, last=last: data.bucket(
                sources.length, [2, 4], batch_size=n, drop_last=last
            ).unbatch(),
            f"bucket of {first} tokens": lambda data, n=first: data.bucket(
                sources.length, [3], batch_tokens=7 + n
            ).unbatch(),
            f"batch {first}, filter": lambda data, n=first: data.batch(n).filter(sources.most_batches).unbatch(),
            f"batches {first}, {second}": lambda data, n=first, m=second: (
                data.batch(n).map(sources.totals).batch(m).map(sources.weighed).unbatch()
            ),
        }
        if rng.random() < 0.3:
            names.append(f"take {most}")
            ways.append(lambda data, n=most: data.take(n))
            continue
        for name, make in registered_operators().items():
            made = make()
            if isinstance(made, hr.plugins.OrderOp):
                continue  # they come before that
            is_taken_apart = isinstance(made, hr.plugins.BatchOp)
            kinds[name] = lambda data, name=name, is_taken_apart=is_taken_apart: (
                data.apply_op(name).flat_map(list) if is_taken_apart else data.apply_op(name)
            )
        name = rng.choice(sorted(kinds))
        names.append(name)
        ways.append(kinds[name])
    return ", ".join(names), lambda data: functools.reduce(lambda made, way: way(made), ways, data)


def drawn(number: int, places: Places, workers: tuple[int, ...], timed: float) -> Case:
    """A case by its number.

    Args:
        timed: how probable it is that time cuts its batches.
    """
    rng, of_many, of_one, of_inputs, of_numbers, of_packs, of_time, of_functions = (
        random.Random(f"{what} {number}")
        for what in ("case", "many", "one", "inputs", "numbers", "packs", "time", "functions")
    )
    while True:
        kind = rng.choice(KINDS)
        counts = [rng.choice([0, 1, 3, 8, 15]) for _ in range(rng.randint(1, 5))]
        bad = frozenset(n for n in range(sum(counts)) if rng.random() < 0.1) if rng.random() < 0.4 else frozenset()
        options: dict[str, Any] = {"in_order": rng.random() < 0.7, "seed": rng.choice([None, 5])}
        if rng.random() < 0.3:
            options["ranks"] = hr.Ranks(last_batch=rng.choice(["drop", "pad", "carry"]))
        if bad:
            options |= rng.choice([{"errors": hr.Skip(max_in_row=None)}, {"errors": None}])
        size = rng.choice([1, 2, 4, 7])
        is_grouped = options.get("ranks", hr.Ranks()).last_batch in (None, "drop") and rng.random() < 0.2
        if not sum(counts):
            continue
        written = places.write(counts, bad)
        inputs, several = joined(kind, written, of_inputs)
        made = several or partial(sources.source, kind, written)
        try:
            total = sum(counts) if several is None else len(made())
        except hr.OptionError:
            continue  # documents that were shuffled before they were packed are no input
        if not total:
            continue
        (how, shuffle), (what, choose) = shuffled(kind, rng), chosen(kind, total, rng)
        which, step, keeps_random = stepped(kind, rng, bad, with_torch=0 not in workers)
        keeps_random = keeps_random and (several is None or which != "keys")  # no index is asked for keys of several
        operators = rng.choice([[shuffle, choose, step], [shuffle, step, choose]])
        if what == "these":  # numbers of all samples: a filter of keys leaves fewer
            operators = [shuffle, choose, step]
        if of_numbers.random() < 0.4 and which in ("map", "map, async"):
            which, operators = f"{which}, enumerate", [shuffle, choose, step, sources.numbered]
        elif of_numbers.random() < 0.2:
            which, operators = f"{which}, fork", [*operators, sources.branched]
        if not bad and of_functions.random() < 0.15:  # it would end with the first sample that fails
            options["in_order"] = True
            which, operators = f"{which}, apply", [*operators, sources.applied]
        if of_many.random() < 0.4:
            options["in_order"] = True
            many, gives_many = regrouped(
                total,
                of_many,
                is_begun_again=not what and which in ("map", "map, async") and sum(counts) > 8 and several is None,
            )
            which, operators = f"{which}, {many}", [*operators, gives_many]
        is_timed = options.get("errors", True) is not None and of_time.random() < timed
        knows_lengths = kind == sources.SEPARATE  # and would pack by those
        if is_timed:
            wait_s = of_time.choice([1e-5, 1e-3, 60])
            options, is_grouped = {**options, "in_order": True, "ranks": hr.Ranks(last_batch=None)}, False
            which = f"{which}, in time {wait_s}"
            operators = [*operators, partial(_timed, size, wait_s)]
        elif (
            not is_grouped
            and not knows_lengths
            and which in ("map", "map, async", "some", "most")
            and of_packs.random() < 0.5
        ):
            options |= {"in_order": True, "batch_size": size}
            long, method = of_packs.choice([3, 8]), of_packs.choice(["concat", "best_fit"])
            which = f"{which}, pack {long}, {method}"
            operators = [*operators, partial(sources.packed, long, method)]
        elif is_grouped:
            operators.append(lambda data, size=size: data.batch(size).map(sources.with_sum))
        elif of_one.random() < 0.3:
            options |= {"batch_size": None, "collate_fn": sources.of_one}
        else:
            options["batch_size"] = size
        told = f"case {number}: {inputs or kind} {counts}, {how}, {what}, {which}; {options}, "
        told += f"grouped={is_grouped}, bad={set(bad)}"
        errors = frozenset({"ValueError", "ChecksumError"} if options.get("errors", True) is None else ())
        case = Case(told, partial(_made, made, operators), options, keeps_random, workers, errors, is_timed)
        try:
            data = case.data()
        except hr.OptionError:
            continue  # these do not go together
        pipeline = (data if isinstance(data, hr.Stream) else hr.Stream(data)).pipeline()
        if options.get("ranks", hr.Ranks()).last_batch in ("pad", "carry") and not (
            pipeline.keeps_count and pipeline.has_numbers
        ):
            continue  # it is not known where the epoch ends
        if pipeline.gives_many is not None and not options["in_order"]:
            continue  # refused, as a slice after a filter is
        return case


def _made(source: Callable[[], Any], operators: Sequence[Callable[[Any], Any]]) -> Any:
    data = source()
    for operator in operators:
        data = operator(data)
    return data


def _timed(size: int, wait_s: float, data: Any) -> Any:
    return data.batch(size, max_wait_s=wait_s).map(dict)


@pytest.mark.usefixtures("warm_server")
@pytest.mark.parametrize(
    ("first", "resumes", "workers", "timed"),
    [
        pytest.param(0, RESUMES, (0,), 0.1, id="without workers", marks=pytest.mark.slow),
        pytest.param(10**7, RESUMES // 2, (0,), 1, id="time cuts the batches", marks=pytest.mark.slow),
        pytest.param(10**6, WITH_WORKERS, (1, 2), 0.1, id="with other workers"),
    ],
)
def test_killed_run_is_exact(places: Places, first: int, resumes: int, workers: tuple[int, ...], timed: float) -> None:
    """Through `hr.DataLoader`, over data, orders, operators and options of every kind that have states."""
    number, done = first, 0
    while done < resumes:
        case = drawn(number, places, workers, timed)
        rng = random.Random(f"run {number}")
        expected = uninterrupted(case, rng)
        got, more = interrupted(case, rng, expected, kills=2 if any(workers) else 3)
        assert_same(case, expected, got)
        done, number = done + more, number + 1
