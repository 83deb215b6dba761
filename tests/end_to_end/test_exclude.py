"""Excluded samples and steps, on any number of ranks, and the quarantine of skipped samples."""

import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
from builders.loops import loaded
from builders.numbers import Numbers
from builders.ranks import ran, steps_of, whole
from builders.tars import put_shards
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import headrace as hr

pytestmark = pytest.mark.usefixtures("warm_server")
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
REFUSED: list[tuple[str, Callable[[Path], Any]]] = [
    ("exclude= of sample 5: FromMap has 5, counted from 0", lambda _: excluding(SOME_MORE, hr.from_map(range(5)))),
    ("'pad'", lambda _: excluding(SOME, ranks=hr.Ranks(last_batch="pad"))),
    ("have no numbers", lambda _: excluding(SOME, hr.from_iterable(ALL))),
    ("has no end", lambda _: excluding(SOME, STREAM.repeat())),
    ("sampler", lambda _: excluding(SOME, STREAM.sample(torch.utils.data.RandomSampler(ALL)))),
    (r"files=\[\[1\]\] must be a list of paths", lambda _: excluding([1])),
    ("cannot be read", lambda path: excluding(path / "none")),
    ("cannot be read: it is a pipe", lambda path: excluding(path / "fifo")),
    ("line 1: this is no line", lambda path: excluding(written(path, "nonsense"))),
    ("has no number", lambda path: excluding(written(path, '{"data": "x"}'))),
    ("other data", lambda path: excluding(written(path, '{"data": "x", "number": 1}'))),
    ("other data", lambda path: excluding(written(path, '{"data": "x", "number": true}'))),
    ("is for headrace's data sets", lambda _: hr.DataLoader(ALL, exclude=SOME)),  # type: ignore[arg-type]
    ("cannot be written", lambda path: quarantine(path / "no" / "bad.jsonl")),
    ("cannot be written", lambda path: quarantine(path / "fifo")),
    (r"\.bucket", lambda path: quarantine(path / "bad.jsonl", STREAM.bucket(int, [9], batch_size=2))),
    *(("must be a", lambda _, options=options: hr.Exclude(**options)) for options in NO_NAMES),
]


@pytest.mark.parametrize(("match", "use"), REFUSED)
def test_meaningless_exclude_or_quarantine_is_refused(match: str, use: Callable[[Path], Any], tmp_path: Path) -> None:
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
    stream = hr.from_map(ALL).filter(lambda number: number >= 0).epoch(samples=40)
    _, states = ran(2, lambda: stream, most=2, ranks=hr.Ranks(global_batch_size=4, compare=False), collate_fn=list)
    exclude = hr.Exclude(steps=[(5, 6)])
    with loader_of(stream, 4, 0, 2, exclude=exclude) as loader, pytest.raises(hr.StateMismatchError, match="merge"):
        loader.load_state_dict(states[0])
    loaders = [loader_of(stream, 4, rank, 2, exclude=exclude) for rank in range(2)]
    for loader in loaders:
        loader.load_state_dict(hr.merge_states(states))
    assert numbers_of(loaders, 4) == cut([*range(8, 20), *range(24, 28)], 4)
