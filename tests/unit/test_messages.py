"""Chains and messages of workers: their fields, values, errors and needs; samples at once equal samples one by one."""

from __future__ import annotations

import dataclasses
import functools
import io
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from naming import name_of
from torch.utils.data import IterDataPipe

import headrace as hr
from headrace._util import pickled
from headrace._util.pickled import packed_once
from headrace._util.sample_ranges import Rows
from headrace.errors import LoaderClosedError
from headrace.formats.opening import MemberRows
from headrace.formats.tar.scanner import TarScanner
from headrace.ops.map import FieldMap
from headrace.torch_compat.serialize import pack_worker_error, unpack_error
from headrace.torch_compat.spec import Mismatch, Spec
from headrace.torch_compat.worker_info import seeded
from headrace.workers.chain_runner import Maker, note_origin
from headrace.workers.chains import KnownChains, may_use_torch
from headrace.workers.failures import NOWHERE, Failure, Origin
from headrace.workers.sample_chunks import ApartPart, ListPart, PackedPart, Part, RawPart
from headrace.workers.task_inputs import Inputs
from headrace.workers.tasks import Chain, Finish, PlaceMessage, Reply, Step, StreamChains, Task, TaskMessage, died


@pytest.mark.parametrize("kind", [TaskMessage, PlaceMessage, Reply, RawPart, PackedPart, ApartPart, ListPart])
def test_messages_arrive_with_all_of_their_fields_and_without_their_names(kind: type) -> None:
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    sent = kind(*[f"value {k}" for k in range(len(names))])
    packed = pickle.dumps(sent, protocol=5)
    come = pickle.loads(packed)
    assert type(come) is kind
    assert [getattr(come, name) for name in names] == [f"value {k}" for k in range(len(names))]
    assert max(names, key=len).encode() not in packed


def test_death_in_the_search_for_samples_names_the_shard() -> None:
    task = Task(0, 0, 5, Finish.SCAN, [], scan=(TarScanner("s3://bucket/a-5.tar"), 0, True))
    error = died(task, -1, 17, -9)
    assert str(error).startswith("DataLoader worker (pid(s) 17) exited unexpectedly (killed by SIGKILL)")
    assert "s3://bucket/a-5.tar" in str(error)
    assert error.url == "s3://bucket/a-5.tar"
    assert "batch 5" not in str(error)


@packed_once(tuple)
class Known(NamedTuple):
    number: int
    inner: Any = None


class _Counted:
    """Counts how often it is pickled."""

    times = 0

    def __reduce__(self) -> tuple[object, ...]:
        _Counted.times += 1
        return _Counted, ()


def test_value_of_many_messages_is_pickled_once_and_is_one_object_in_all_of_them() -> None:
    known = Known(1, _Counted())
    messages = [pickle.loads(pickle.dumps((k, known))) for k in range(3)]
    assert [k for k, _ in messages] == [0, 1, 2]
    assert all(one is messages[0][1] for _, one in messages)
    assert type(messages[0][1]) is Known
    assert _Counted.times == 1


@pytest.mark.parametrize("number", [1, True, 1.0])
def test_nested_values_keep_their_types(number: Any) -> None:
    known = Known(number, [Known(2), Known(3, "a")])
    loaded = pickle.loads(pickle.dumps(known))
    assert loaded == known
    assert type(loaded.number) is type(number)


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, pickled._LATEST_BYTES // 10, 2 * pickled._LATEST_BYTES])
def test_values_that_are_not_among_the_latest_are_pickled_again_and_not_held(size: int) -> None:
    many = [Known(k, bytes(size)) for k in range(50)]
    for _ in range(2):
        assert [pickle.loads(pickle.dumps(one)) for one in many] == many
    for kept in (pickled._packed, pickled._unpacked):
        assert kept.held_bytes <= max(pickled._LATEST_BYTES, size + 1000)
        assert kept.held_bytes == sum(map(kept._nbytes, kept._held.values()))


def test_note_of_an_origin_has_what_is_known() -> None:
    whole = Origin("map(f)", 5, "'a'", "memory://a", 1)
    assert whole.note == "stage: map(f); sample 5 of the epoch; key 'a'; url memory://a; worker 1"
    assert Origin("fetch", 0, worker=0).note == "stage: fetch; sample 0 of the epoch; worker 0"
    assert NOWHERE.note == ""


def test_noted_origin_is_the_one_that_is_sent() -> None:
    error, sample = KeyError("x"), {"__key__": "a" * 300, "__url__": "s3://user:word@a/0.tar"}
    origin = note_origin(error, Step("map(f)", "map", abs, passed="FromMap → map(f)"), sample, 5, 2)
    assert error.__notes__ == [origin.note]
    assert len(origin.key) == 200
    assert origin.note.endswith("worker 2; operators: FromMap → map(f)")
    assert "word" not in origin.note


def test_error_of_a_worker_is_raised_as_by_torchs_loader() -> None:
    raised = ValueError("x")
    raised.code = 7  # type: ignore[attr-defined]
    error = unpack_error(pack_worker_error(raised, "in DataLoader worker process 3", Origin("map(f)", 5)))
    assert str(error).startswith("Caught ValueError in DataLoader worker process 3.\nOriginal ")
    assert error.code == 7  # type: ignore[attr-defined]
    assert isinstance(error.__cause__, ValueError)
    assert error.__cause__.args == ("x",)


def times(factor: list[int]) -> StreamChains:
    return StreamChains({1: Chain((Step("map(times)", "map", lambda n: n * factor[0]),))})


def test_chain_of_thread_workers_is_not_kept_alive() -> None:
    chain = times([2])
    known = KnownChains(chain)
    assert known.load() is chain
    del chain
    with pytest.raises(LoaderClosedError):
        known.load()


def without_torch(source: str) -> Callable[..., Any]:
    """The function `fn` of a module that is sent by value, and has headrace and numpy alone."""
    module = types.ModuleType("without_torch")
    module.__dict__.update(hr=hr, np=np)
    exec(source, module.__dict__)
    return module.fn  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def module_is_sent_by_value(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("without_torch")
    monkeypatch.setitem(sys.modules, "without_torch", module)
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


DRAWS = "def fn(sample): return sample + hr.rng().random()"
IMPORTS = "def fn(sample):\n    import torch\n    return torch.zeros(1)"
IMPORTS_INSIDE = "def fn(sample):\n    def inner():\n        import torch\n    return inner()"
CALLS_ANOTHER = "def helper():\n    import torch\ndef fn(sample): helper()"
HOLDS_ARRAY = "class Scale:\n    by = np.ones(3)\n    def __call__(self, x): return x * self.by\nfn = Scale()"

NEED_TORCH: dict[str, Any] = {
    "imports torch": without_torch(IMPORTS),
    "has a function that imports torch": without_torch(IMPORTS_INSIDE),
    "calls a function that imports torch": without_torch(CALLS_ANOTHER),
    "is for a field": FieldMap(without_torch(IMPORTS), "x"),
    "is torch's": torch.zeros,
    "holds a type from torch": functools.partial(without_torch(DRAWS), torch.float64),
    "holds a tensor": functools.partial(without_torch(DRAWS), torch.zeros(1)),
    "is headrace's": may_use_torch,
    "holds too much": functools.partial(without_torch(DRAWS), [f"{k:0100}" for k in range(20_000)]),
    "cannot be pickled": threading.Lock().acquire,
}
NEED_NONE: dict[str, Any] = {
    "draws": without_torch(DRAWS),
    "holds an array": without_torch(HOLDS_ARRAY),
    "is for a field": FieldMap(without_torch(DRAWS), "x"),
    "has arguments": functools.partial(without_torch(DRAWS), 3),
    "is Python's": str.upper,
    "is numpy's": np.sqrt,
    "is of a module without torch": name_of,
}


@pytest.mark.parametrize(("function", "is_found"), [
    *(pytest.param(function, True, id=f"torch: {name}") for name, function in NEED_TORCH.items()),
    *(pytest.param(function, False, id=f"none: {name}") for name, function in NEED_NONE.items()),
])  # fmt: skip
def test_torch_is_found_in_a_function_that(function: Any, is_found: bool) -> None:
    assert may_use_torch([Step("map", "map", function)], ()) is is_found
    assert may_use_torch([], (None, function)) is is_found
    assert not may_use_torch([Step("open", "map", function, is_without_torch=True)], ())


KEYS = st.integers() | st.text(max_size=2) | st.booleans() | st.floats() | st.tuples(st.integers()) | st.binary()
WHAT = st.sampled_from(["value", "draw", "draw twice", "error", "stop", "exit"])


class Steps:
    """A step with an action for each of its calls. Records the samples it was called with."""

    def __init__(self, what: list[str]) -> None:
        self.what, self.called = what, list[object]()

    def __call__(self, sample: object) -> object:
        what = self.what[len(self.called)]
        self.called.append(sample)
        if what == "error":
            raise ValueError(f"no {sample!r}")
        if what == "stop":
            raise StopIteration
        if what == "exit":
            raise SystemExit(3)
        draws = what.count("draw") + what.count("twice")
        return sample, [int(hr.rng().integers(2**40)) for _ in range(draws)], io.BytesIO if what == "value" else None


class Record(list[int]):
    """Progress that keeps all values."""

    def __setitem__(self, at: Any, index: Any) -> None:
        self.append(index)


def lines_of(count: int) -> Part:
    one = np.arange(count)
    texts, keys = [b"%d" % k for k in one], np.zeros(count, "S1")
    ends = np.cumsum([0, *map(len, texts)])
    rows = Rows(keys, np.arange(count + 1), np.zeros(count, np.int32), ends[:-1], np.diff(ends), ("line",))
    return RawPart(rows, 0 * one, ("memory://a",), [], (0,), [(0, b"".join(texts))])


def outcome(
    at_once: int, keys: list[object], what: list[str], chain: Callable[[Steps, list[object]], Chain], **order: Any
) -> list[object]:
    steps, indexes = Steps(what), Record()
    maker = Maker(Inputs(), everywhere=False, progress=indexes, number=1)
    of = chain(steps, keys)
    maker.begin(5, of)
    part = ListPart(keys) if of.by_key else lines_of(len(keys))
    message = TaskMessage(5, 77, 4, Finish.SAMPLES, [part], 100, order.get("positions"), task=1)
    made = [one for some in maker.make(of, message, {}, at_once) for one in some]
    shown = [(one.error.origin, str(unpack_error(one.error))) if type(one) is Failure else repr(one) for one in made]
    numbers = [number for k, number in enumerate(indexes) if number not in indexes[:k]]
    return [shown, repr(steps.called), numbers, indexes[-1], int(hr.rng().integers(2**40)) if keys else None]


def by_key(steps: Steps, keys: list[object]) -> Chain:
    return Chain((Step("__getitem__", "map", steps, random=True),), None, by_key=True)


def behind_lines(steps: Steps, keys: list[object]) -> Chain:
    def opened(rows: MemberRows, start: int, stop: int) -> tuple[list[object], int]:
        some = [keys[int(body)] for body in rows.bodies(start, stop)]
        return [None if one == 3 else one for one in some], 8 * len(some)

    first = Step("open", "map", lambda sample: keys[int(sample["line"])], is_implied=True, open_many=opened)
    return Chain((first, Step("map(step)", "map", steps, random=True)), None)


@pytest.mark.slow
@given(st.lists(st.tuples(KEYS, WHAT), max_size=12), st.integers(2, 20), st.sampled_from([by_key, behind_lines]))
def test_samples_at_once_equal_samples_one_by_one(
    samples: list[tuple[object, str]], at_once: int, chain: Callable[[Steps, list[object]], Chain]
) -> None:
    keys, what = [key for key, _ in samples], [what for _, what in samples]
    for positions in (None, list(range(50, 50 - len(keys), -1))):
        one_by_one = outcome(1, keys, what, chain, positions=positions)
        assert outcome(at_once, keys, what, chain, positions=positions) == one_by_one


VALUES = st.recursive(
    st.integers(-3, 3) | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from([0, 1, True, "a"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(VALUES, st.lists(VALUES, max_size=2), st.integers(1, 3))
def test_samples_are_written_together_if_each_of_them_fits(sample: Any, others: list[Any], copies: int) -> None:
    spec = Spec.of(sample)
    assert spec is not None
    samples = [sample] * copies + others
    slab = memoryview(bytearray(spec.nbytes(len(samples))))
    if all(map(spec.fits, samples)):
        columns = spec.write(samples, slab, 0, len(samples))
        assert repr(spec.samples(slab, len(samples), len(samples), columns)) == repr(samples)
    else:
        with pytest.raises(Mismatch):
            spec.write(samples, slab, 0, len(samples))


class Numbers(IterDataPipe[int]):
    """A pipe that calls `looked` when torch traverses it."""

    def __init__(self, looked: Callable[[], object]) -> None:
        self.looked = looked

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])

    def __getstate__(self) -> dict[str, Any]:
        self.looked()
        return {}


def test_one_thread_at_a_time_goes_through_a_pipe() -> None:
    inside, release = threading.Event(), threading.Event()

    def first() -> None:
        inside.set()
        release.wait(30)

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(seeded, Numbers(first), 1)
        assert inside.wait(30)
        other = pool.submit(seeded, Numbers(lambda: None), 1)
        try:
            with pytest.raises(TimeoutError):  # it waits; else it ends now, with torch's error
                other.result(0.2)
        finally:
            release.set()
        one.result()
        other.result()
