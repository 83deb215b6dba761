"""Chains of one step: samples at once equal samples one by one, with any failures. Seeding of data pipes."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterDataPipe

import headrace as hr
from headrace._util.sample_ranges import Rows
from headrace.formats.opening import MemberRows
from headrace.torch_compat.serialize import unpack_error
from headrace.torch_compat.spec import Mismatch, Spec
from headrace.torch_compat.worker_info import seeded
from headrace.workers.chain_runner import Maker
from headrace.workers.failures import Failure
from headrace.workers.sample_chunks import ListPart, Part, RawPart
from headrace.workers.task_inputs import Inputs
from headrace.workers.tasks import Chain, Finish, Step, TaskMessage

pytestmark = pytest.mark.filterwarnings("ignore")

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
    message = TaskMessage(1, 5, 77, 4, Finish.SAMPLES, [part], 100, order.get("positions"), 0, 0, None, None, {})
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
