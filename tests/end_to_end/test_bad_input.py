"""Bad input is one clear error in its place in the order. The other samples come."""

from __future__ import annotations

import asyncio
import gzip
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from builders.loops import outcomes_later, outcomes_of, words
from builders.numbers import Made
from corpus import GROUPS, Case
from end_to_end.tars import number_of, numbered_samples, put_shards, tar, wanted_sample

import headrace as hr
from headrace.fetch.stores import memory
from headrace.torch_compat.collate_by_torch import check_fields

pytestmark = pytest.mark.usefixtures("warm_server")
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])
NO_SAMPLES = pytest.mark.parametrize("on_error", ["raise", "skip"])  # only samples are skipped
QUICK = hr.FetchOptions(attempts=2, backoff_s=0.0)


def run(data: Any, **options: Any) -> list[Any]:
    with hr.DataLoader(data, **{"fetch": QUICK, "timeout": 30, **options}) as loader:
        return outcomes_of(loader)


def run_later(data: Any, **options: Any) -> list[Any]:
    return outcomes_later(data, **{"fetch": QUICK, "timeout": 30, **options})


def values(got: list[Any]) -> list[Any]:
    return [type(g) if isinstance(g, Exception) else g.tolist() for g in got]


def with_bad_shard(name: str, data: bytes | None) -> list[str]:
    urls = put_shards(name, [4, 1, 4])
    memory.remove(urls[1])
    if data is not None:
        memory.put(urls[1], data)
    return urls


GOOD = tar(numbered_samples(0, 8))
BAD_SHARDS: dict[str, tuple[bytes | None, type[Exception], str]] = {
    "missing": (None, hr.errors.ObjectMissingError, "bytes 0 to"),
    "empty": (b"", hr.errors.FormatError, "empty"),
    "html": (b"<!DOCTYPE html><html>no such page</html>", hr.errors.FormatError, "not a tar archive"),
    "gzip": (gzip.compress(GOOD, mtime=0), hr.errors.FormatError, "gzip"),
    "zeros of another kind": (b"x" * 5000, hr.errors.FormatError, "byte 0"),
}


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize(("data", "kind", "said"), BAD_SHARDS.values(), ids=BAD_SHARDS.keys())
def test_a_bad_shard_is_an_error_between_its_neighbours(
    data: bytes | None, kind: type[Exception], said: str, num_workers: int
) -> None:
    urls = with_bad_shard("bad-shard", data)
    got = run(hr.stream(urls).map(number_of), batch_size=2, num_workers=num_workers)
    assert values(got) == [[0, 1], [2, 3], kind, [6, 7], [8]]
    error = got[2]
    assert error.url == urls[1]
    assert urls[1] in str(error)
    assert said in str(error)
    assert error.stage in ("fetch", "scan")
    if isinstance(error, hr.StorageError):
        assert error.attempts >= 1
        assert error.start == 0


def test_a_bad_shard_is_not_lost_with_a_short_last_batch() -> None:
    urls = put_shards("bad-end", [4, 1])
    memory.remove(urls[1])
    for collate in (None, list):
        got = run(hr.stream(urls).map(number_of), batch_size=2, drop_last=True, collate_fn=collate)
        assert [type(g) for g in got[2:]] == [hr.errors.ObjectMissingError]
    got = run(hr.stream(urls).filter(lambda s: True).map(number_of), batch_size=2, drop_last=True)
    assert [type(g) for g in got[2:]] == [hr.errors.ObjectMissingError]
    shuffled = run(hr.stream(urls).shuffle().map(number_of), batch_size=2, drop_last=True)
    assert sum(isinstance(g, hr.errors.ObjectMissingError) for g in shuffled) == 1


@WORKERS
def test_a_missing_field_names_the_sample_and_what_it_has(num_workers: int) -> None:
    samples = numbered_samples(0, 6)
    samples[3] = ("000003", {"bin": b"x", "txt": b"y"})
    memory.put("memory://field/0.tar", tar(samples))
    data = hr.stream("memory://field/0.tar").to_tuple("cls").map(lambda t: int(t[0]))
    got = run(data, batch_size=2, num_workers=num_workers)
    assert values(got) == [[0, 1], hr.errors.FormatError, [4, 5]]
    error = got[1]
    assert (error.key, error.url, error.stage) == ("000003", "memory://field/0.tar", "to_tuple")
    for said in ("'cls'", "bin, txt", "000003", "memory://field/0.tar"):
        assert said in str(error)


@WORKERS
def test_an_image_that_does_not_decode_names_sample_and_field(num_workers: int) -> None:
    samples = [(f"{k}", {"png": b"not an image", "cls": b"1"}) for k in range(3)]
    memory.put("memory://image/0.tar", tar(samples))
    got = run(hr.stream("memory://image/0.tar").decode("rgb8"), batch_size=1, num_workers=num_workers)
    assert [type(g) for g in got] == [hr.DecodeError] * 3
    assert (got[1].key, got[1].field, got[1].url, got[1].stage) == ("1", "png", "memory://image/0.tar", "decode")
    assert "stage: decode(rgb8)" in words(got[1])


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


STUMBLES: dict[str, tuple[Callable[[hr.Stream], hr.Stream], str]] = {
    "map": (lambda s: s.map(stumble), "stage: map(stumble)"),
    "filter": (lambda s: s.filter(lambda n: stumble(n) >= 0), "stage: filter("),
    "async map": (lambda s: s.map(astumble), "stage: map(astumble)"),
    "map, async map": (lambda s: s.map(abs).map(astumble), "stage: map(astumble)"),
    "async map, map": (lambda s: s.map(astumble).map(abs), "stage: map(astumble)"),
    "async filter": (lambda s: s.filter(astumble_or_true), "stage: filter(astumble_or_true)"),
}


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize(("step", "note"), STUMBLES.values(), ids=STUMBLES.keys())
def test_what_a_users_function_raises_is_raised_in_its_place(
    step: Callable[[hr.Stream], hr.Stream], note: str, num_workers: int
) -> None:
    urls = put_shards("stumble", [8])
    got = run(step(hr.stream(urls).map(number_of)), batch_size=2, num_workers=num_workers)
    assert [v for v in values(got) if isinstance(v, list)] == [[0, 1], [2, 3], [6, 7]]
    assert type(got[2]).__name__ == "UsersError"
    assert str(got[2]) == "five is too much"
    assert note in words(got[2])
    assert "sample 5 of the epoch" in words(got[2])
    assert "in stumble" in "".join(traceback.format_exception(got[2]))


@WORKERS
def test_a_function_of_raw_samples_is_told_with_key_and_url(num_workers: int) -> None:
    urls = put_shards("raw", [3])

    def fail(sample: dict[str, Any]) -> int:
        return 1 // int(sample["cls"])

    got = run(hr.stream(urls).map(fail), batch_size=1, num_workers=num_workers)
    assert [type(g) for g in got] == [ZeroDivisionError, torch.Tensor, torch.Tensor]
    for said in ("key '000000'", f"url {urls[0]}", "fail", "stage: map("):
        assert said in words(got[0])


@pytest.mark.slow
@WORKERS
@NO_SAMPLES
def test_a_collate_function_that_raises_is_told_with_the_batch(num_workers: int, on_error: str) -> None:
    def collate(samples: list[int]) -> int:
        return stumble(samples[1])

    data = hr.stream(put_shards("collate", [8])).map(number_of)
    got = run(data, batch_size=2, collate_fn=collate, num_workers=num_workers, on_error=on_error)
    assert [g for g in got if not isinstance(g, Exception)] == [1, 3, 7]
    assert type(got[2]).__name__ == "UsersError"
    assert "stage: collate; batch 2" in words(got[2])


@WORKERS
@NO_SAMPLES
def test_samples_that_make_no_batch_are_told_with_their_forms(num_workers: int, on_error: str) -> None:
    data = hr.stream(put_shards("shapes", [8])).map(lambda s: torch.zeros(2 if s["cls"] == b"5" else 3))
    got = run(data, batch_size=2, num_workers=num_workers, on_error=on_error)
    assert [type(g) for g in got] == [torch.Tensor, torch.Tensor, hr.errors.CollateError, torch.Tensor]
    error = got[2]
    assert (error.stage, error.batch) == ("collate", 2)
    assert "Tensor[2]" in str(error)
    assert "Tensor[3]" in str(error)


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
        ([ONE, TWO], "sample 1 of the batch (key 'b')", "'y'", "sample 0 of the batch (key 'a')"),
        ([TWO, ONE], "sample 0 of the batch (key 'b')", "'y'", "sample 1 of the batch (key 'a')"),
        ([{"x": {"n": 0}}, {"x": {"n": 0, "y": 1}}], "sample 1 of the batch", "'x.y'", "sample 0 of the batch"),
        (
            [({"n": 0}, {"n": 0}), ({"n": 0, "y": 1}, {"n": 0})],
            "sample 1 of the batch",
            "'0.y'",
            "sample 0 of the batch",
        ),
    ],
)
def test_field_that_some_samples_of_a_batch_lack_is_an_error(
    samples: list[Any], has: str, field: str, lacks: str, group: str
) -> None:
    with GROUPED[group]([samples[0], samples[0], *samples]) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(hr.errors.CollateError) as caught:
            next(batches)
    assert f"{has} has the field {field}, and {lacks} lacks it" in str(caught.value)
    assert caught.value.stage == "collate"


def raising(error: type[BaseException]) -> Callable[[int], int]:
    def get(n: int) -> int:
        if n == 5:
            raise error
        return n

    return get


async def step_of(get: Callable[[int], int], n: int) -> int:
    return get(n)


FAILING: dict[str, Callable[[Callable[[int], int]], Any]] = {
    "aget": Made,
    "async step": lambda get: Made(abs).map(partial(step_of, get)),
    "async step after a plain one": lambda get: Made(abs).map(abs).map(partial(step_of, get)),
}


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("error", [UsersError, StopAsyncIteration, asyncio.CancelledError, StopIteration])
@pytest.mark.parametrize("place", FAILING)
def test_any_exception_of_a_coroutine_is_an_error_in_its_place(
    place: str, error: type[BaseException], num_workers: int
) -> None:
    for way in (run, run_later):
        got = way(FAILING[place](raising(error)), batch_size=2, num_workers=num_workers)
        assert [v for v in values(got) if isinstance(v, list)] == [[0, 1], [2, 3], [6, 7]]
        assert isinstance(got[2], Exception)
        assert place != "aget" or ("key 5" in words(got[2]) and "stage: fetch" in words(got[2]))


@NO_SAMPLES
def test_step_behind_the_batch_is_told_in_its_place(on_error: str) -> None:
    got = run(Made(abs).batch(2).map(lambda batch: stumble(int(batch[1]))), batch_size=None, on_error=on_error)
    assert [type(g).__name__ for g in got] == ["int", "int", "UsersError", "int"]


@WORKERS
@NO_SAMPLES
def test_what_aiter_raises_ends_the_epoch_in_its_place(num_workers: int, on_error: str) -> None:
    class Breaks(hr.AsyncIterableDataset):
        async def aiter(self) -> AsyncIterator[int]:
            for n in range(20):
                yield stumble(n)

    options = {"batch_size": 2, "num_workers": num_workers, "on_error": on_error}
    for data, drop_last in ((Breaks(), False), (Breaks(), True), (Breaks().filter(lambda _: True), False)):
        got = run(data, drop_last=drop_last, **options)
        assert [v for v in values(got) if isinstance(v, list)] == [[0, 1], [2, 3]]
        assert type(got[2]).__name__ == "UsersError"
        assert "sample 5 of the epoch" in words(got[2])
        assert len(got) == 3


class NoGenerator(hr.AsyncIterableDataset):
    def aiter(self) -> Any:
        return 3


class Raising(hr.AsyncIterableDataset):
    def aiter(self) -> Any:
        raise UsersError("at once")


class Closed(Made):
    async def aopen(self) -> None:
        raise UsersError("closed")


class Lost(list[int]):
    def __getitem__(self, index: Any) -> Any:
        raise UsersError(f"no key {index}")


class Keyless(Made):
    def keys(self) -> Any:
        return Lost(range(8))


@NO_SAMPLES
@pytest.mark.parametrize(
    ("data", "kind"),
    [(NoGenerator(), TypeError), (Raising(), UsersError), (Closed(abs), UsersError), (Keyless(abs), UsersError)],
)
def test_data_set_that_cannot_be_begun_is_told(data: Any, kind: type[Exception], on_error: str) -> None:
    assert {type(g) for g in run(data, batch_size=2, on_error=on_error)} == {kind}


@NO_SAMPLES
@pytest.mark.parametrize(
    ("url", "said"), [("nosuch://bucket/a.tar", "nosuch"), ("pipe:cat a.tar", "shell"), ("http://[1/a.tar", "address")]
)
def test_addresses_that_mean_nothing_are_told(url: str, said: str, on_error: str) -> None:
    try:
        got = run(hr.stream(url, format="tar"), batch_size=2, on_error=on_error)
    except hr.OptionError as error:
        got = [error]
    assert [type(g) for g in got] == [hr.OptionError]
    assert said in str(got[0])


def test_a_url_pattern_of_nothing_is_told_while_building() -> None:
    for urls in ([], "", "{,}"):
        with pytest.raises(hr.OptionError, match="names no object"):
            hr.stream(urls)


def test_missing_files_are_told_one_by_one() -> None:
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
    class Row(Mapping[str, int]):
        def __getitem__(self, name: str) -> int:
            return {"a": 1, "b": 2}[name]

        def __iter__(self) -> Iterator[str]:
            return iter(("a", "b"))

        def __len__(self) -> int:
            return 2

        def keys(self) -> Any:
            return iter(self)

    check_fields([Row(), Row()])


URL, NEXT_URL = "memory://damaged/shard.tar", "memory://damaged/next.tar"
NEXT = numbered_samples(0, 3)


def epoch(case: Case, data: hr.Stream, num_workers: int) -> list[Any]:
    memory.put(URL, case.data)
    memory.put(NEXT_URL, tar(NEXT))
    with hr.DataLoader(data, batch_size=2, collate_fn=list, num_workers=num_workers, timeout=30) as loader:
        return outcomes_of(loader)


def wanted(case: Case) -> list[Any]:
    """Batches of two; one with the error in it is the error."""
    each: list[Any] = [wanted_sample(URL, key, dict(fields)) for key, fields in case.samples]
    if case.damage is not None:
        each.append(case.damage)
    each += [wanted_sample(NEXT_URL, key, fields) for key, fields in NEXT]
    batches: list[Sequence[Any]] = [each[at : at + 2] for at in range(0, len(each), 2)]
    return [next((sample for sample in batch if sample is case.damage), batch) for batch in batches]


def check(case: Case, num_workers: int) -> None:
    got = epoch(case, hr.stream([URL, NEXT_URL]), num_workers)
    told = [batch for batch in got if isinstance(batch, Exception)]
    assert [case.damage if batch in told else batch for batch in got] == wanted(case), case.name
    assert len(told) == (case.damage is not None), case.name
    for error in told:
        assert isinstance(error, hr.errors.FormatError), case.name
        assert case.damage is not None
        assert (error.url, error.stage) == (URL, "scan"), case.name
        where = type(error).__name__, error.key, error.offset
        assert where == (case.damage.error, case.damage.key, case.damage.offset), case.name
        assert case.damage.text in str(error), case.name


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_a_damaged_shard_gives_earlier_batches_and_then_the_error(group: str) -> None:
    for case in GROUPS[group]:
        check(case, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_server")
@pytest.mark.parametrize("group", GROUPS)
def test_a_damaged_shard_gives_the_same_when_workers_read_it(group: str) -> None:
    check(max(GROUPS[group], key=lambda case: (case.damage is not None, len(case.samples))), 2)
