"""Bad input is one clear error in its place in the order. The other samples come."""

import asyncio
import traceback
from collections import UserDict
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from builders.loops import outcomes_later, outcomes_of, words
from builders.numbers import Iterated, Made, Named
from builders.tars import number_of, numbered_samples, put_shards, tar, wanted_sample
from corpus import GROUPS, Case

import headrace as hr
from headrace.fetch.stores import memory
from headrace.torch_compat.collate_by_torch import check_fields

pytestmark = pytest.mark.usefixtures("warm_server")
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
NO_SAMPLES = pytest.mark.parametrize("errors", [None, hr.Skip()])  # only samples are skipped
QUICK = hr.Fetch(attempts=2, backoff_s=0.0)


def run(data: Any, **options: Any) -> list[Any]:
    with hr.DataLoader(data, **{"batch_size": 2, "fetch": QUICK, "timeout": 30, **options}) as loader:
        return outcomes_of(loader)


def run_later(data: Any, **options: Any) -> list[Any]:
    return outcomes_later(data, **{"batch_size": 2, "fetch": QUICK, "timeout": 30, **options})


def values(got: list[Any]) -> list[Any]:
    """Batches as lists, and errors as the names of their types."""
    plain = [type(g).__name__ if isinstance(g, Exception) else g for g in got]
    return [g.tolist() if isinstance(g, torch.Tensor) else g for g in plain]


def test_missing_shard_is_an_error_between_its_neighbours_and_not_lost_with_a_short_last_batch() -> None:
    urls = put_shards("missing", [4, 1, 4])
    memory.remove(urls[1])
    data, first = hr.stream(urls), hr.stream(urls[:2])
    for num_workers in (0, 2):
        got = run(data.map(number_of), num_workers=num_workers)
        assert values(got) == [[0, 1], [2, 3], "ObjectMissingError", [6, 7], [8]]
        assert (got[2].url, got[2].start) == (urls[1], 0)
        assert got[2].stage in ("fetch", "scan")
        assert got[2].attempts >= 1
        assert urls[1] in str(got[2])
        assert "bytes 0 to" in str(got[2])
    for short in (first.map(number_of), first.filter(lambda s: True).map(number_of)):
        assert values(run(short, drop_last=True))[2:] == ["ObjectMissingError"]
    assert values(run(first.map(number_of), drop_last=True, collate_fn=list))[2:] == ["ObjectMissingError"]
    assert values(run(first.shuffle().map(number_of), drop_last=True)).count("ObjectMissingError") == 1


class UsersError(Exception):
    """The user's own."""


def stumble(n: int) -> int:
    if n == 5:
        raise UsersError("five is too much")
    return n


async def astumble(n: int) -> int:
    return stumble(n)


async def astumble_or_true(n: int) -> bool:
    return stumble(n) >= 0


def numbers() -> hr.Stream:
    return hr.stream(put_shards("bad-input", [8])).map(number_of)


def put(name: str, samples: Sequence[tuple[str, dict[str, bytes]]]) -> hr.Stream:
    memory.put(f"memory://bad-input/{name}.tar", tar(samples))
    return hr.stream(f"memory://bad-input/{name}.tar")


def lacking() -> hr.Stream:
    samples = numbered_samples(0, 6)
    samples[3] = ("000003", {"bin": b"x", "txt": b"y"})
    return put("field", samples).to_tuple("cls").map(lambda fields: int(fields[0]))


IN_PLACE = [[0, 1], [2, 3], "UsersError", [6, 7]]
FIELD = {"key": "000003", "url": "memory://bad-input/field.tar", "stage": "to_tuple"}
IMAGE = {"key": "0", "field": "png", "url": "memory://bad-input/image.tar", "stage": "decode"}
SAMPLES: dict[str, tuple[Callable[[], Any], list[Any], dict[str, Any], list[str]]] = {
    "map": (lambda: numbers().map(stumble), IN_PLACE, {}, ["stage: map(stumble)"]),
    "filter": (lambda: numbers().filter(lambda n: stumble(n) >= 0), IN_PLACE, {}, ["stage: filter("]),
    "async map": (lambda: numbers().map(astumble), IN_PLACE, {}, ["stage: map(astumble)"]),
    "map, async map": (lambda: numbers().map(abs).map(astumble), IN_PLACE, {}, ["stage: map(astumble)"]),
    "async map, map": (lambda: numbers().map(astumble).map(abs), IN_PLACE, {}, ["stage: map(astumble)"]),
    "async filter": (lambda: numbers().filter(astumble_or_true), IN_PLACE, {}, ["stage: filter(astumble_or_true)"]),
    "map of raw samples": (
        lambda: hr.stream(put_shards("bad-input", [8])).map(lambda sample: stumble(number_of(sample))),
        IN_PLACE,
        {},
        ["key '000005'", "url memory://bad-input/0.tar", "stage: map("],
    ),
    "field": (lacking, [[0, 1], "FormatError", [4, 5]], FIELD, ["'cls'", "bin, txt", "000003", FIELD["url"]]),
    "image": (
        lambda: put("image", [(f"{k}", {"png": b"not an image", "cls": b"1"}) for k in range(3)]).decode("rgb8"),
        ["DecodeError", "DecodeError"],
        IMAGE,
        ["stage: decode(rgb8)"],
    ),
}


def check_error(got: list[Any], expected: list[Any], attributes: dict[str, Any], texts: list[str]) -> None:
    assert values(got) == expected
    error = next(g for g in got if isinstance(g, Exception))
    assert {name: getattr(error, name) for name in attributes} == attributes
    for text in texts:
        assert text in words(error)
    if type(error).__name__ == "UsersError":
        assert str(error) == "five is too much"
        assert "in stumble" in "".join(traceback.format_exception(error))


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("case", SAMPLES)
def test_sample_that_fails_is_an_error_in_its_place(case: str, num_workers: int) -> None:
    make, expected, attributes, texts = SAMPLES[case]
    numbered = ["sample 5 of the epoch"] if expected is IN_PLACE else []
    check_error(run(make(), num_workers=num_workers), expected, attributes, texts + numbered)


def collate(samples: list[int]) -> int:
    return stumble(samples[1])


async def breaks() -> AsyncIterator[int]:
    for n in range(20):
        yield stumble(n)


def of_two_shapes() -> Any:
    return numbers().map(lambda n: torch.full((2 if n == 5 else 3,), n))


SHAPES = [[[0] * 3, [1] * 3], [[2] * 3, [3] * 3], "CollateError", [[6] * 3, [7] * 3]]
ENDED, FIFTH = IN_PLACE[:3], ["sample 5 of the epoch"]
BATCHES: dict[str, tuple[Callable[[], Any], dict[str, Any], list[Any], dict[str, Any], list[str]]] = {
    "collate_fn": (numbers, {"collate_fn": collate}, [1, 3, "UsersError", 7], {}, ["stage: collate; batch 2"]),
    "shapes": (of_two_shapes, {}, SHAPES, {"stage": "collate", "batch": 2}, ["Tensor[2]", "Tensor[3]"]),
    "map of batches": (
        lambda: Made(abs).batch(2).map(lambda batch: stumble(int(batch[1]))),
        {"batch_size": None},
        [1, 3, "UsersError", 7],
        {},
        [],
    ),
    "aiter": (lambda: Iterated(breaks), {}, ENDED, {}, FIFTH),
    "aiter, drop_last": (lambda: Iterated(breaks), {"drop_last": True}, ENDED, {}, FIFTH),
    "aiter, filter": (lambda: Iterated(breaks).filter(lambda _: True), {}, ENDED, {}, FIFTH),
}


@pytest.mark.slow
@WORKERS
@NO_SAMPLES
@pytest.mark.parametrize("case", BATCHES)
def test_batch_or_iterator_that_fails_is_an_error_in_its_place(
    case: str, errors: hr.Skip | None, num_workers: int
) -> None:
    make, options, expected, attributes, texts = BATCHES[case]
    got = run(make(), num_workers=num_workers, errors=errors, **options)
    check_error(got, expected, attributes, texts)


ONE, TWO = {"__key__": "a", "x": 1}, {"__key__": "b", "x": 2, "y": {"z": 3}}
GROUPED = {
    "batch_size": lambda samples: hr.DataLoader(hr.from_map(samples), batch_size=2),
    "batch_size in workers": lambda samples: hr.DataLoader(hr.from_map(samples), batch_size=2, num_workers=2),
    "batch": lambda samples: hr.DataLoader(hr.from_map(samples).batch(2).unbatch(), batch_size=2),
    "collate": lambda samples: hr.DataLoader(hr.from_map([samples[:2], samples[2:]]).collate()),
    "padded_batch": lambda samples: hr.DataLoader(hr.from_map(samples).padded_batch(2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPED)
@pytest.mark.parametrize(
    ("samples", "has", "field", "lacks"),
    [
        ([ONE, TWO], "1 of the batch (key 'b')", "'y'", "0 of the batch (key 'a')"),
        ([TWO, ONE], "0 of the batch (key 'b')", "'y'", "1 of the batch (key 'a')"),
        ([{"x": {"n": 0}}, {"x": {"n": 0, "y": 1}}], "1 of the batch", "'x.y'", "0 of the batch"),
        ([({"n": 0}, {"n": 0}), ({"n": 0, "y": 1}, {"n": 0})], "1 of the batch", "'0.y'", "0 of the batch"),
    ],
)
def test_missing_field_of_a_batch_is_an_error(samples: list[Any], has: str, field: str, lacks: str, group: str) -> None:
    with GROUPED[group]([samples[0], samples[0], *samples]) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(hr.errors.CollateError) as caught:
            next(batches)
    assert f"sample {has} has the field {field}, and sample {lacks} lacks it" in str(caught.value)
    assert caught.value.stage == "collate"


def raising(error: type[BaseException]) -> Callable[[int], int]:
    def get(n: int) -> int:
        if n == 5:
            raise error
        return n

    return get


async def step_of(get: Callable[[int], int], n: int) -> int:
    return get(n)


COROUTINES: dict[str, Callable[[Callable[[int], int]], Any]] = {
    "aget": Made,
    "async step": lambda get: Made(abs).map(partial(step_of, get)),
    "async step after a plain one": lambda get: Made(abs).map(abs).map(partial(step_of, get)),
}


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("error", [UsersError, StopAsyncIteration, asyncio.CancelledError, StopIteration])
@pytest.mark.parametrize("place", COROUTINES)
def test_error_of_a_coroutine_is_in_its_place(place: str, error: type[BaseException], num_workers: int) -> None:
    for way in (run, run_later):
        got = way(COROUTINES[place](raising(error)), num_workers=num_workers)
        assert [v for v in values(got) if isinstance(v, list)] == [[0, 1], [2, 3], [6, 7]]
        assert isinstance(got[2], Exception)
        assert place != "aget" or ("key 5" in words(got[2]) and "stage: fetch" in words(got[2]))


class Closed(Made):
    async def aopen(self) -> None:
        raise UsersError("closed")


class Lost(list[int]):
    def __getitem__(self, index: Any) -> Any:
        raise UsersError(f"no key {index}")


def no_generator() -> Any:
    raise UsersError("at once")


@NO_SAMPLES
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Iterated(lambda: 3), "TypeError", ""),  # type: ignore[arg-type,return-value]
        (lambda: Iterated(no_generator), "UsersError", "at once"),
        (lambda: Closed(abs), "UsersError", "closed"),
        (lambda: Named(Lost(range(8)), abs), "UsersError", "no key"),
        (lambda: hr.stream("nosuch://bucket/a.tar", format="tar"), "OptionError", "nosuch"),
        (lambda: hr.stream("pipe:cat a.tar", format="tar"), "OptionError", "shell"),
        (lambda: hr.stream("http://[1/a.tar", format="tar"), "OptionError", "address"),
        *((lambda urls=urls: hr.stream(urls), "OptionError", "names no object") for urls in ([], "", "{,}")),
    ],
)
def test_data_that_cannot_be_opened_is_one_error(
    make: Callable[[], Any], error: str, text: str, errors: hr.Skip | None
) -> None:
    try:
        got = run(make(), errors=errors)
    except hr.OptionError as refused:
        got = [refused]
    assert {*values(got)} == {error}
    assert text in str(got[0])


def test_missing_files_are_errors_one_by_one() -> None:
    memory.put("memory://some/1.txt", b"1")
    got = run(hr.files("memory://some/{0..2}.txt"), batch_size=None)
    assert [type(g) for g in got] == [hr.errors.ObjectMissingError, dict, hr.errors.ObjectMissingError]
    assert got[2].url == "memory://some/2.txt"
    assert "key 2" in words(got[2])


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (None, r"field 'a\.b' of sample 1 of the batch \(key 'k1'\) is None\. Fill it by \.map\(\)"),
        ([1, 2], r"field 'a\.b' of sample 0 .* has 1 values, and of sample 1 .* 2\. Pad them by \.padded_batch"),
    ],
)
def test_collation_names_the_field_and_the_sample_that_do_not_fit(value: object, match: str) -> None:
    wide = {f"c{number}": list(range(30)) for number in range(30)}
    samples = [{"__key__": f"k{k}", **wide, "a": {"b": value if k == 1 else [1]}} for k in range(3)]
    with hr.DataLoader(hr.from_map(samples), batch_size=3) as loader:
        with pytest.raises(hr.errors.CollateError, match=match) as caught:
            next(iter(loader))
    assert len(str(caught.value)) < 300


def test_fields_are_compared_of_mappings_whose_keys_are_no_set() -> None:
    class Row(UserDict[str, int]):
        def keys(self) -> Any:
            return iter(self)

    check_fields([Row(a=1, b=2), Row(a=1, b=2)])


URL, NEXT_URL = "memory://damaged/shard.tar", "memory://damaged/next.tar"
NEXT = numbered_samples(0, 3)


def wanted(case: Case) -> list[Any]:
    """Batches of two; one with the error in it is the error."""
    each: list[Any] = [wanted_sample(URL, key, dict(fields)) for key, fields in case.samples]
    if case.damage is not None:
        each.append(case.damage)
    each += [wanted_sample(NEXT_URL, key, fields) for key, fields in NEXT]
    batches: list[Sequence[Any]] = [each[at : at + 2] for at in range(0, len(each), 2)]
    return [next((sample for sample in batch if sample is case.damage), batch) for batch in batches]


def check_case(case: Case, num_workers: int) -> None:
    memory.put(URL, case.data)
    memory.put(NEXT_URL, tar(NEXT))
    got = run(hr.stream([URL, NEXT_URL]), collate_fn=list, num_workers=num_workers)
    errors = [batch for batch in got if isinstance(batch, Exception)]
    assert [case.damage if batch in errors else batch for batch in got] == wanted(case), case.name
    assert len(errors) == (case.damage is not None), case.name
    for error in errors:
        assert isinstance(error, hr.errors.FormatError), case.name
        assert case.damage is not None
        assert (error.url, error.stage) == (URL, "scan"), case.name
        where = type(error).__name__, error.key, error.offset
        assert where == (case.damage.error, case.damage.key, case.damage.offset), case.name
        assert case.damage.text in str(error), case.name


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_damaged_shard_gives_earlier_batches_and_then_the_error(group: str) -> None:
    for case in GROUPS[group]:
        check_case(case, 0)
    check_case(max(GROUPS[group], key=lambda case: (case.damage is not None, len(case.samples))), 2)
