"""Contents of states, when they are available, and which are refused."""

from __future__ import annotations

import copy
import json
import random
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from builders.loops import rest_of, state_after
from builders.numbers import Numbers
from end_to_end.state import sources
from end_to_end.state.runs import QUICK, take
from end_to_end.state.sources import INDEXED, KEYS, STATEFUL, TAR, Places, Seen, Written, rows

import headrace as hr
from headrace.delivery.progress import ProgressSnapshot
from headrace.order.cursor import united
from headrace.state.state import merge_states


@pytest.fixture(scope="module")
def written(places: Places) -> Written:
    return places.write([13, 0, 20, 7, 30])


def loader_of(written: Written, kind: str = INDEXED, **options: Any) -> hr.DataLoader[Any]:
    data = options.pop("data", None)
    if data is None:
        data = sources.source(kind, written)
        data = (data.shuffle() if kind in (INDEXED, KEYS) else data).map(Seen())
    return hr.DataLoader(data, **{"batch_size": 4, "fetch": QUICK, "timeout": 30, **options})


def shuffled(by: str = "auto", **options: Any) -> Callable[[Written], Any]:
    return lambda written: sources.source(INDEXED, written).shuffle(by, **options).map(Seen())


def less_of_a_shard(written: Written) -> Written:
    return Written([*written.counts[:-1]], frozenset(), {**written.urls, TAR: written.urls[TAR][:-1]}, written.index)


OTHERS: dict[str, tuple[str, Callable[[Written], hr.DataLoader[Any]]]] = {
    "a shard less": ("data", lambda w: loader_of(less_of_a_shard(w))),
    "the shards in another order": (
        "data",
        lambda w: loader_of(Written(w.counts, w.bad, {TAR: w.urls[TAR][::-1]}, w.index)),
    ),
    "no shuffle": ("order", lambda w: loader_of(w, data=sources.source(INDEXED, w).map(Seen()))),
    "another shuffle": ("order", lambda w: loader_of(w, data=shuffled("shards")(w))),
    "another window": ("order", lambda w: loader_of(w, data=shuffled("window", window=6)(w))),
    "a seed of the shuffle": ("order", lambda w: loader_of(w, data=shuffled(seed=4)(w))),
    "fewer samples": ("order", lambda w: loader_of(w, data=shuffled()(w).take(50))),
    "a filter": ("steps", lambda w: loader_of(w, data=shuffled()(w).filter(sources.some))),
    "a seed": ("seed", lambda w: loader_of(w, seed=9)),
    "data of torch": ("regime", lambda w: hr.DataLoader(list(range(70)), batch_size=4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
def test_state_is_refused_by_the_name_of_what_differs(written: Written, other: str) -> None:
    state = state_after(loader_of(written), 3)
    field, make = OTHERS[other]
    with make(written) as loader:
        with pytest.raises(hr.StateMismatchError) as caught:
            loader.load_state_dict(state)
        assert caught.value.field == field


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("which", ["all", "some"])
def test_sampler_that_gives_other_numbers_is_found_out(written: Written, in_order: bool, which: str) -> None:
    """Its numbers are not in the state, but a check of the last ones is."""
    numbers = list(range(70))

    def loader(numbers: list[int]) -> hr.DataLoader[Any]:
        data = sources.source(KEYS, written).sample(numbers).map(Seen())
        data = data if which == "all" else data.filter(sources.some)
        return loader_of(written, data=data, in_order=in_order)

    state = state_after(loader(numbers), 3)
    with loader(numbers[::-1]) as other:
        with pytest.raises(hr.StateMismatchError) as caught:
            other.load_state_dict(state)
        assert caught.value.field == "check"
        other.load_state_dict(state, force=True)
        next(iter(other))
    with loader(numbers) as same:
        same.load_state_dict(state)


def test_forced_state_goes_on_at_the_same_place_of_another_order(written: Written) -> None:
    state = state_after(loader_of(written), 3)
    with loader_of(written, data=sources.source(INDEXED, written).map(Seen())) as loader:
        loader.load_state_dict(state, force=True)
        assert [row[1] for row in rows(next(iter(loader)))] == [12, 13, 14, 15]


def test_loading_is_refused_while_an_iterator_is_in_use(written: Written) -> None:
    with loader_of(written) as loader:
        state = loader.state_dict()
        iterator = iter(loader)
        next(iterator)
        for use in (lambda: loader.load_state_dict(state), lambda: loader.skip(1)):
            with pytest.raises(hr.errors.LoaderBusyError, match="iterator"):
                use()
        iterator.close()
        loader.load_state_dict(state)
        again = iter(loader)
        next(again)
        del again, iterator  # a deleted iterator is not in use
        loader.load_state_dict(state)
        assert len(list(loader)) == len(loader)
        loader.load_state_dict(state)  # after the last one nothing is in use
    with pytest.raises(hr.OptionError, match="0 or more"):
        loader.skip(-1)


def test_state_can_be_asked_for_by_another_thread_while_batches_are_taken(written: Written) -> None:
    with loader_of(written, prefetch_factor=8) as loader:
        whole = [rows(batch) for batch in loader]
    states: list[dict[str, Any]] = []
    begun, is_over = threading.Event(), threading.Event()
    with loader_of(written, prefetch_factor=8) as loader:

        def ask() -> None:
            while not is_over.wait(0.0005):  # without a pause it had the lock of Python, and connections timed out
                states.append(copy.deepcopy(loader.state_dict()))
                begun.set()

        thread = threading.Thread(target=ask)
        thread.start()
        begun.wait(10)
        batches = [rows(batch) for batch in loader]
        is_over.set()
        thread.join()
    assert batches == whole
    numbers = [state["epoch"] * 100 + state["batches"] for state in states]
    assert numbers == sorted(numbers)
    with loader_of(written) as loader:
        for state in {state["batches"]: state for state in states if not state["epoch"]}.values():
            loader.load_state_dict(state)
            assert [rows(batch) for batch in loader] == whole[state["batches"] :]


def test_state_does_not_change_when_the_loop_goes_on(written: Written) -> None:
    for kind in (INDEXED, STATEFUL, sources.STATEFUL_ITERATOR):
        with loader_of(written, kind) as loader:
            iterator = iter(loader)
            next(iterator)
            states = [loader.state_dict(), iterator.state_dict()]
            told = [json.dumps(state) for state in states]
            loader.state_dict()["position"] = 99
            for _ in iterator:
                pass
            assert [json.dumps(state) for state in states] == told
            assert told[0] == told[1]
        with loader_of(written, kind) as loader:
            loader.load_state_dict(states[0])
            list(loader)
        assert [json.dumps(state) for state in states] == told


def test_peek_at_a_loader_counts_as_nothing(written: Written) -> None:
    with loader_of(written) as loader:
        state = loader.state_dict()
        first = rows(loader.peek())
        assert loader.state_dict() == state
        loader.load_state_dict(state_after(loader_of(written), 2))
        third = rows(loader.peek())
        assert loader.state_dict()["batches"] == 2
        batches = [rows(batch) for batch in loader]
        assert third == batches[0] != first
        loader.load_state_dict(state)
        assert rows(next(iter(loader))) == first


def test_states_after_the_last_sixteen_batches_are_known(written: Written) -> None:
    with loader_of(written, batch_size=2) as loader:
        iterator = iter(loader)
        states = [loader.state_dict()]
        for _ in range(20):
            next(iterator)
            states.append(loader.state_dict())
        for batches in range(4, 21):
            assert loader.state_dict(batches=batches) == states[batches]
        for batches in (3, 21, -1):
            with pytest.raises(hr.OptionError, match="4 to 20"):
                loader.state_dict(batches=batches)


def test_states_by_number_count_from_the_begin_of_the_epoch_when_it_was_gone_on_with(written: Written) -> None:
    state = state_after(loader_of(written), 5)
    with loader_of(written) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        iterator = iter(loader)
        assert loader.state_dict(batches=5) == state
        next(iterator)
        next(iterator)
        assert loader.state_dict(batches=6) == state_after(loader_of(written), 6)
        for _ in iterator:
            pass
        assert loader.state_dict(batches=18)["epoch"] == 0
        assert loader.state_dict()["epoch"] == 1


def test_error_counts_as_a_batch_once_the_next_one_is_asked_for(written: Written) -> None:
    data = lambda: sources.source(KEYS, written).map(Seen(frozenset({5})))
    with loader_of(written, data=data()) as loader:
        iterator = iter(loader)
        next(iterator)
        assert isinstance(take(iterator), ValueError)
        failed = loader.state_dict()
        assert (failed["batches"], loader.position.batch) == (1, 1)
        third = rows(next(iterator))
        passed = loader.state_dict()
        assert passed["batches"] == 3
    with loader_of(written, data=data()) as loader:
        loader.load_state_dict(failed)
        iterator = iter(loader)
        assert isinstance(take(iterator), ValueError)
        assert rows(next(iterator)) == third
        assert loader.state_dict() == passed


def test_set_epoch_goes_on_where_it_is_the_state_s_own_and_begins_anew_where_it_is_not(written: Written) -> None:
    with loader_of(written) as loader:
        epochs = [[rows(batch) for batch in loader] for _ in range(3)]
        loader.set_epoch(1)
        state = state_after(loader_of(written), 3)
        loader.load_state_dict(state)
        assert loader.epoch == 0
        loader.set_epoch(0)
        assert [rows(batch) for batch in loader] == epochs[0][3:]
        loader.load_state_dict(state)
        loader.set_epoch(2)
        assert (loader.epoch, loader.position.batch) == (2, 0)
        assert [rows(batch) for batch in loader] == epochs[2]


def test_empty_state_is_the_begin(written: Written) -> None:
    with loader_of(written) as loader:
        begin = loader.state_dict()
        epochs = [[rows(batch) for batch in loader] for _ in range(2)]
        loader.load_state_dict({})
        assert loader.state_dict() == begin
        assert [[rows(batch) for batch in loader] for _ in range(2)] == epochs


@pytest.mark.slow
@pytest.mark.parametrize("kind", [INDEXED, KEYS, TAR, STATEFUL])
@pytest.mark.parametrize("which", ["all", "some"])
def test_skip_begins_so_many_batches_further_on(written: Written, kind: str, which: str) -> None:
    make = lambda: sources.source(kind, written).map(Seen())
    data = make if which == "all" else lambda: make().filter(sources.some)
    with loader_of(written, data=data()) as loader:
        whole = [rows(batch) for batch in loader]
    for count in (0, 1, 3, len(whole), len(whole) + 2):
        with loader_of(written, data=data()) as loader:
            loader.skip(count)
            assert [rows(batch) for batch in loader] == whole[count:]
    with loader_of(written, data=data()) as loader:
        loader.load_state_dict(state_after(loader_of(written, data=data()), 2))
        loader.skip(1)
        loader.skip(1)
        iterator = iter(loader)
        assert rows(next(iterator)) == whole[4]
        state = loader.state_dict()
    assert [rows(batch) for batch in rest_of(loader_of(written, data=data()), state)] == whole[5:]


def test_skip_counts_in_the_state_before_anything_was_read(written: Written) -> None:
    with loader_of(written) as loader:
        list(loader)
        loader.set_epoch(0)
        loader.skip(3)
        assert loader.state_dict() == state_after(loader_of(written), 3)
        assert loader.position == (3, 12, 12)
        assert len(list(loader)) == 15
    with loader_of(written) as loader:
        next(iter(loader))
        loader.skip(3)  # of the next epoch: the loop has stopped
        assert (loader.state_dict()["epoch"], loader.position) == (1, (3, 12, 12))


def test_skip_counts_also_behind_a_peek(written: Written) -> None:
    with loader_of(written) as loader:
        whole = [rows(batch) for batch in loader]
        loader.load_state_dict(state_after(loader_of(written), 4))
        assert rows(loader.peek()) == whole[4]
        loader.skip(2)
        assert loader.position.batch == 6
        assert rows(loader.peek()) == whole[6]
        assert [rows(batch) for batch in loader] == whole[6:]


def test_state_is_refused_of_samples_in_a_buffer_and_of_a_data_set_without_one(written: Written) -> None:
    class Silent(hr.AsyncIterableDataset):
        async def aiter(self) -> AsyncIterator[int]:
            for n in range(9):
                yield n

    buffered = sources.source(TAR, written).shuffle(buffer=5).map(Seen())
    for data, why in ((buffered, "buffer"), (Silent(), "Silent gives no state")):
        with loader_of(written, data=data, batch_size=2) as loader:
            iterator = iter(loader)
            next(iterator)
            with pytest.raises(hr.OptionError, match=why):
                loader.state_dict()
            next(iterator)


@pytest.mark.slow
def test_states_have_less_than_forty_kilobytes_when_batches_come_in_any_order() -> None:
    """On 8 ranks whose steps have 4,096 samples, with any of 64 batches that are made ahead received; and merged."""
    chance, states = random.Random(3), []
    for rank in range(8):
        data = Numbers(10**7).shuffle()
        with hr.DataLoader(data, batch_size=512, rank=rank, world_size=8, in_order=False) as loader:
            loader.peek()
            plan = loader._behind._next.plan()  # type: ignore[union-attr]
            gaps = [(512 * k, 512 * (k + 1)) for k in range(400, 464) if chance.random() < 0.5]
            covers = united([(0, 512 * 400), *gaps])
            states.append(plan.save(ProgressSnapshot(400 + len(gaps), 0, 512 * (400 + len(gaps)), covers)))
    sizes = [len(json.dumps(state)) for state in (*states, merge_states(states))]
    assert max(sizes[:-1]) <= 1_500, sizes
    assert sizes[-1] <= 40_000, sizes


def after(loader: hr.DataLoader[Any], batches: int) -> tuple[dict[str, Any], list[Any]]:
    """(its state after so many batches, those that follow)."""
    with loader:
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator)
        return loader.state_dict(), list(iterator)


class Kept(hr.AsyncIterableDataset):
    """Numbers, whose state is a dict by numbers, which are texts when it comes back from a file."""

    def __init__(self, kind: type) -> None:
        self.kind, self.state = kind, {}

    async def aiter(self) -> Any:
        for n in range(self.state.get(self.kind(2), 0), 40):
            self.state = {self.kind(2): n + 1, self.kind(10): "ten"}
            yield n

    def state_dict(self) -> dict[Any, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = {self.kind(key): value for key, value in state.items()}


@pytest.mark.parametrize(
    ("kind", "is_file"),
    [(int, True), (int, False), (str, True), (str, False), (bytes, False)],  # which are no JSON
)
def test_mark_that_a_data_set_gives_is_the_same_when_it_comes_back_from_a_file(kind: type, is_file: bool) -> None:
    state, rest = after(hr.DataLoader(Kept(kind), batch_size=4), 3)
    state = json.loads(json.dumps(state)) if is_file else state
    again = [n for batch in rest_of(hr.DataLoader(Kept(kind), batch_size=4), state) for n in batch.tolist()]
    assert again == [n for batch in rest for n in batch.tolist()] == list(range(12, 40))
