"""Bad input and errors: one clear error in its place, with the frames of the user and the operators of its sample."""

import asyncio
import linecache
import threading
import traceback
from collections import UserDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.loops import first_of, given_later, loaded, outcomes, outcomes_later, words
from builders.numbers import Iterated, Made, Named, later
from builders.tars import number_of, numbered_samples, put_shards, tar, wanted_sample
from corpus import GROUPS, Case
from end_to_end.state.runs import take

import headrace as hr
from headrace.fetch.stores import memory
from headrace.testing import FaultServer
from headrace.torch_compat.collate_by_torch import check_fields

pytestmark = pytest.mark.usefixtures("warm_server")
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def waiting(bad: int, missing: range) -> Made:
    """160 samples. One fails, and some others never come."""

    async def get(index: int) -> int:
        if index == bad:
            raise ValueError(f"sample {index}")
        if index in missing:
            await asyncio.Event().wait()
        return index

    return Made(get, 160)


def is_kept(_: Any) -> bool:
    return True


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize("collate", [None, list])
@pytest.mark.parametrize("bad", [0, 5, 40])
def test_first_error_is_raised_when_later_samples_never_come(bad: int, collate: Any, num_workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 64, "collate_fn": collate, "num_workers": num_workers}
    with hr.DataLoader(waiting(bad, range(bad + 1, 64)), **options) as loader:
        batches = iter(loader)
        with pytest.raises(ValueError, match=f"^sample {bad}\n"):
            next(batches)
        assert [int(k) for batch in batches for k in batch] == list(range(64, 160))
        assert loader.stats().fetch.claimed_bytes == 0
        assert loader.stats().fetch.input_bytes == 0
    with pytest.raises(ValueError, match=f"^sample {bad}\n"):
        first_of(waiting(bad, range(bad + 1, 160)).filter(is_kept), **options)


@WORKERS
def test_earlier_error_is_raised_when_a_later_one_came_first(num_workers: int) -> None:
    is_later_told = threading.Event()

    async def get(index: int) -> int:
        if index == 9:
            is_later_told.set()
            raise ValueError("the later one")
        if index == 4:
            await asyncio.to_thread(is_later_told.wait)
            raise ValueError("the earlier one")
        if index > 9:
            await asyncio.Event().wait()
        return index

    with hr.DataLoader(Made(get, 64), batch_size=64, num_workers=num_workers) as loader:
        batches = iter(loader)
        with pytest.raises(ValueError, match="the earlier one"):
            next(batches)
        assert list(batches) == []


@WORKERS
def test_error_of_an_asynchronous_step_is_raised_when_the_next_sample_never_comes(num_workers: int) -> None:
    async def two_samples() -> AsyncIterator[int]:
        yield 0
        yield 1
        await asyncio.Event().wait()

    async def fails(sample: int) -> int:
        if sample:
            raise ValueError("no ones")
        return sample

    with pytest.raises(ValueError, match="no ones"):
        first_of(Iterated(two_samples).map(fails), batch_size=64, num_workers=num_workers)


def served(server: FaultServer, silent: range) -> list[str]:
    shards = [tar(numbered_samples(k * 10, 10, 10)) for k in range(12)]
    return [server.add(f"{k}.tar", shard, *(["hang"] if k in silent else [])) for k, shard in enumerate(shards)]


def no_threes(sample: dict[str, bytes]) -> int:
    if sample["cls"] == b"3":
        raise ValueError("no threes")
    return int(sample["cls"])


def shards_behind_a_missing_one(server: FaultServer) -> Any:
    urls = served(server, range(2, 12))
    return hr.stream([urls[0], f"{server.url}/missing.tar", *urls[2:]]).to_tuple("cls")


def files_behind_a_missing_one(server: FaultServer) -> Any:
    return hr.files([f"{server.url}/missing.bin", *(server.add(f"{k}.bin", b"x", "hang") for k in range(63))])


@pytest.mark.slow
@WORKERS
@pytest.mark.parametrize(
    ("make", "collate", "error"),
    [
        (shards_behind_a_missing_one, None, hr.errors.ObjectMissingError),
        (shards_behind_a_missing_one, list, hr.errors.ObjectMissingError),
        (lambda server: hr.stream(served(server, range(1, 12))).map(no_threes), None, ValueError),
        (files_behind_a_missing_one, None, hr.errors.ObjectMissingError),
    ],
)
def test_first_error_needs_no_later_answer(make: Any, collate: Any, error: Any, num_workers: int) -> None:
    with FaultServer() as server, pytest.raises(error, match=r"missing|no threes"):
        first_of(make(server), batch_size=64, collate_fn=collate, num_workers=num_workers)


@WORKERS
def test_iteration_and_states_continue_after_the_batches_of_failed_shards(num_workers: int) -> None:
    urls = put_shards("first-error", [20] * 12, 10)
    for number in (1, 6, 7):
        urls[number] = f"memory://first-error/missing-{number}.tar"
    data = hr.stream(urls).map(number_of)

    def loader() -> hr.DataLoader[Any]:
        return hr.DataLoader(data, batch_size=32, num_workers=num_workers, collate_fn=list)

    with loader() as first:
        told = list(failures_too(first))
    samples = [*range(20), urls[1], *range(40, 120), urls[6], urls[7], *range(160, 240)]
    cut = [samples[k : k + 32] for k in range(0, len(samples), 32)]
    assert [outcome for outcome, _ in told] == [next((s for s in batch if isinstance(s, str)), batch) for batch in cut]
    check_states(loader, told, [] if num_workers == 0 else [3])


def failures_too(loader: hr.DataLoader[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each batch, or the text of its error, with the state after it."""
    batches = iter(loader)
    while (outcome := take(batches)) is not None:
        if isinstance(outcome, Exception):
            outcome = getattr(outcome, "url", "") or str(outcome).partition("\n")[0]
        yield outcome, loader.state_dict()


def check_states(
    loader: Callable[[], hr.DataLoader[Any]], told: list[tuple[Any, dict[str, Any]]], places: Sequence[int] = ()
) -> None:
    """See that from each state on the same follows: an error is used up once the next batch is asked for."""
    for at in places or range(len(told)):
        outcome, state = told[at]
        with loader() as resumed:
            resumed.load_state_dict(state)
            wanted = told[at:] if isinstance(outcome, str) else told[at + 1 :]
            assert [outcome for outcome, _ in failures_too(resumed)] == [outcome for outcome, _ in wanted]


def test_states_of_a_filter_are_exact_when_an_error_came_first() -> None:
    first_told: Future[None] = Future()

    async def get(index: int) -> int:
        if index in (0, 17):
            raise ValueError(f"sample {index}")
        await asyncio.wrap_future(first_told)
        return index

    def loader() -> hr.DataLoader[Any]:
        return hr.DataLoader(Made(get, 48).filter(is_kept), batch_size=8, collate_fn=list, num_workers=0)

    with loader() as first:
        outcomes = failures_too(first)
        told = [next(outcomes)]
        first_told.set_result(None)
        told += outcomes
    batches = [list(range(k, k + 8)) for k in (8, 24, 32, 40)]
    assert [outcome for outcome, _ in told] == ["sample 0", batches[0], "sample 17", *batches[1:]]
    check_states(loader, told)


PACKAGE = str(Path(hr.__file__).parent)
RAISED: list[BaseException] = []


class RefusedError(Exception):
    """Makes its text of what does not pickle."""

    def __init__(self, status: int) -> None:
        self.connection, self.status = threading.Lock(), status

    def __str__(self) -> str:
        return f"refused with {self.status} over {self.connection and 'a connection'}"


def refuse(status: int) -> None:
    error = RefusedError(status)
    RAISED.append(error)
    raise error


class Stored(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, key: int) -> int:
        if key == 3:
            refuse(503)
        return key


def refusing(number: int) -> int:
    if number == 3:
        refuse(503)
    return number


def async_loop(data: Any, **options: Any) -> list[Any]:
    return given_later(data, collate_fn=None, **options)


@pytest.fixture(autouse=True)
def _no_error_stays() -> Any:
    yield
    RAISED.clear()


async def read(key: int) -> bytes:
    return await hr.read(f"memory://tracebacks/{key}")


DATA: dict[str, Callable[[], Any]] = {
    "aget": lambda: Made(refusing),
    "map": lambda: hr.from_map([*range(8)]).map(refusing),
    "torch": Stored,
}


@pytest.mark.parametrize("read", [loaded, async_loop])
@pytest.mark.parametrize("name", DATA)
def test_error_of_this_process_is_the_very_object_with_the_users_frames(read: Callable[..., object], name: str) -> None:
    with pytest.raises(RefusedError) as caught:
        read(DATA[name](), batch_size=4)
    assert caught.value is RAISED[0]
    assert caught.value.__cause__ is None
    assert not [frame for frame in traceback.extract_tb(caught.tb) if frame.filename.startswith(PACKAGE)]
    assert caught.traceback[-1].name == "refuse"
    assert "refused with 503 over a connection" in "".join(traceback.format_exception(caught.value))


@pytest.mark.slow
@pytest.mark.parametrize("read", [loaded, async_loop])
@pytest.mark.parametrize(("name", "options"), [("map", {}), ("torch", {}), ("torch", {"economic": True})])
def test_error_of_a_worker_has_its_text_and_the_users_frames(read: Any, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as caught:
        read(DATA[name](), batch_size=4, num_workers=1, **options)
    told = "".join(traceback.format_exception(caught.value))
    assert "RefusedError: refused with 503 over a connection" in told
    assert "in refuse\n    raise error" in told
    assert PACKAGE not in told


CELL = """\
import inspect

def double(number):
    if number == 3:
        raise ValueError("not this one")
    return inspect.getsource(double)
"""


def test_lines_of_a_notebooks_cell_are_known_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "<ipython-input-7-8a1b>"
    monkeypatch.setitem(linecache.cache, cell, (len(CELL), None, CELL.splitlines(keepends=True), cell))
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, cell, "exec"), scope)
    with hr.DataLoader(hr.from_map([1, 3]).map(scope["double"]), batch_size=None, num_workers=1) as loader:
        batches = iter(loader)
        assert next(batches) in CELL
        with pytest.raises(ValueError, match="not this one") as caught:
            next(batches)
    told = "".join(traceback.format_exception(caught.value))
    assert 'File "<ipython-input-7-8a1b>", line 5, in double\n    raise ValueError("not this one")\n' in told


def test_documented_error_has_no_frames_of_ours() -> None:
    for act, inner in (
        (lambda: list(hr.stream("memory://tracebacks/none.tar")), None),
        (lambda: Made(read, 1)[0], "read"),
        (lambda: list(Made(read, 1)), "read"),
    ):
        with pytest.raises(hr.errors.ObjectMissingError) as caught:
            act()
        assert PACKAGE not in "".join(traceback.format_exception(caught.value))
        assert inner is None or caught.traceback[-1].name == inner


def test_error_is_the_one_that_was_raised_when_on_error_keeps_it() -> None:
    raised = OSError("of the reader")
    raised.lock = threading.Lock()  # type: ignore[attr-defined]

    async def get(key: int) -> int:
        raise raised

    with pytest.raises(OSError, match="of") as caught:
        loaded(Made(get, 2), errors=hr.Skip(when=lambda error: False))
    assert caught.value is raised


def fails(sample: Any) -> Any:
    raise ValueError(f"{sample!r} is refused")


async def fails_later(sample: Any) -> Any:
    return fails(sample)


def branched(data: hr.Stream) -> hr.Stream:
    first, second = data.fork(2)
    return first.zip(second.map(fails))


CASES: list[tuple[Callable[[hr.Stream], Any], str]] = [
    (lambda data: data.shuffle().map(abs).map(fails), "shuffle(auto) → map(abs) → map(fails)"),
    (lambda data: data.map(abs).map(fails_later), "map(abs) → map(fails_later)"),
    (lambda data: data.map(later).map(fails_later), "map(later) → map(fails_later)"),
    (lambda data: data.take(2).filter(fails), "take(2) → filter(fails)"),
    (lambda data: data.flat_map(fails), "flat_map(fails)"),
    (
        lambda data: data.flat_map(many).batch(2).unbatch().map(fails),
        "flat_map(many) → batch(2) → unbatch() → map(fails)",
    ),
    (lambda data: data.batch(2).map(fails), "batch(2) → map(fails)"),
    (lambda data: data.map(abs).zip(data.map(later).map(fails)), "map(later) → map(fails)"),
    (branched, "fork(2) → map(fails) of branch 1"),
]


def many(sample: Any) -> list[Any]:
    return [sample]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "passed"), CASES)
@pytest.mark.parametrize("workers", [0, 1])
def test_error_names_the_operators_that_the_sample_has_passed(make: Any, passed: str, workers: int) -> None:
    with pytest.raises(ValueError, match="is refused") as caught:
        loaded(make(hr.from_map([1, 2, 3])), batch_size=None, num_workers=workers)
    assert any(note.endswith(f"operators: FromMap(…) → {passed}") for note in caught.value.__notes__)


NO_SAMPLES = pytest.mark.parametrize("errors", [None, hr.Skip()])  # only samples are skipped
QUICK = hr.Fetch(attempts=2, backoff_s=0.0)


def run(data: Any, **options: Any) -> list[Any]:
    return outcomes(data, **{"batch_size": 2, "fetch": QUICK, "timeout": 30, **options})


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
        *((lambda urls=urls: hr.stream(urls), "OptionError", "must be an address") for urls in ([], "", "{,}")),
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
