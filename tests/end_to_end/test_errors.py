"""Errors: the first of a batch is raised at once, with the frames of the user and the operators of its sample."""

import asyncio
import linecache
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.loops import first_of, given_later, loaded
from builders.numbers import Iterated, Made, later
from builders.tars import number_of, numbered_samples, put_shards, tar
from end_to_end.state.runs import take

import headrace as hr
from headrace.testing import FaultServer

WORKERS = [0, 2]


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
@pytest.mark.parametrize("num_workers", WORKERS)
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


@pytest.mark.parametrize("num_workers", WORKERS)
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


@pytest.mark.parametrize("num_workers", WORKERS)
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
@pytest.mark.parametrize("num_workers", WORKERS)
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


@pytest.mark.parametrize("num_workers", WORKERS)
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
