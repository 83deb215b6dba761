"""Contents of states, when they are available, and which are refused, edited ones among them."""

import copy
import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from builders.loops import assert_refused, lists, rest_of, saved, state_after
from builders.numbers import Counting, Numbers, is_odd, streamed
from drop_in.acting import Made
from drop_in.stateful_data import StreamOfPlaces
from end_to_end.state import sources
from end_to_end.state.runs import QUICK
from end_to_end.state.sources import INDEXED, KEYS, STATEFUL, TAR, Places, Seen, Written, rows
from unit.test_states import LOADERS

import headrace as hr
from headrace.state.state import whole_check


@pytest.fixture(scope="module")
def written(places: Places) -> Written:
    return places.write([13, 0, 20, 7, 30])


def loader_of(written: Written, kind: str = INDEXED, **options: Any) -> hr.DataLoader[Any]:
    data = options.pop("data", None)
    if data is None:
        data = sources.source(kind, written)
        data = (data.shuffle() if kind in (INDEXED, KEYS) else data).map(Seen())
    return hr.DataLoader(data, **{"batch_size": 4, "fetch": QUICK, "timeout": 30, **options})


def all_of(batches: Any) -> list[Any]:
    return [rows(batch) for batch in batches]


def numbers_in(data: Any = None, **options: Any) -> hr.DataLoader[Any]:
    return hr.DataLoader(Numbers() if data is None else data, **{"batch_size": 4, **options})


def shuffled(by: str = "auto", **options: Any) -> Callable[[Written], Any]:
    return lambda written: sources.source(INDEXED, written).shuffle(by, **options).map(Seen())


def less_of_a_shard(written: Written) -> Written:
    return Written([*written.counts[:-1]], frozenset(), {**written.urls, TAR: written.urls[TAR][:-1]}, written.index)


OTHERS: dict[str, tuple[str, Callable[[Written], hr.DataLoader[Any]]]] = {
    "a shard less": ("data", lambda w: loader_of(less_of_a_shard(w))),
    "another order": ("data", lambda w: loader_of(Written(w.counts, w.bad, {TAR: w.urls[TAR][::-1]}, w.index))),
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
        next(iter(loader))
        before = saved(loader)
        with pytest.raises(hr.StateMismatchError) as caught:
            loader.load_state_dict(state)
        assert caught.value.field == field
        assert saved(loader) == before


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


def test_forced_state_continues_at_the_same_position_of_another_order_and_becomes_one_of_it(written: Written) -> None:
    state = state_after(loader_of(written), 3)
    data = sources.source(INDEXED, written).map(Seen())
    with loader_of(written, data=data) as loader:
        loader.load_state_dict(state, force=True)
        own = saved(loader)
        assert [row[1] for row in rows(next(iter(loader)))] == [12, 13, 14, 15]
    assert len(rest_of(loader_of(written, data=data), own)) == 15


def test_loading_and_skipping_are_refused_while_any_iterator_is_in_use(written: Written) -> None:
    with loader_of(written) as loader:
        state = loader.state_dict()
        iterator, second = iter(loader), iter(loader)
        next(iterator), next(second)
        second.close()
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
    whole, states = all_of(rest_of(loader_of(written, prefetch_factor=8), {})), list[dict[str, Any]]()
    begun, is_over = threading.Event(), threading.Event()
    with loader_of(written, prefetch_factor=8) as loader:

        def ask() -> None:
            while not is_over.wait(0.0005):  # without a pause it had the lock of Python, and connections timed out
                states.append(copy.deepcopy(loader.state_dict()))
                begun.set()

        thread = threading.Thread(target=ask)
        thread.start()
        begun.wait(10)
        batches = all_of(loader)
        is_over.set()
        thread.join()
    assert batches == whole
    numbers = [state["epoch"] * 100 + state["batches"] for state in states]
    assert numbers == sorted(numbers)
    with loader_of(written) as loader:
        for state in {state["batches"]: state for state in states if not state["epoch"]}.values():
            loader.load_state_dict(state)
            assert all_of(loader) == whole[state["batches"] :]


def test_state_does_not_change_when_the_loop_goes_on(written: Written) -> None:
    for kind in (INDEXED, STATEFUL, sources.STATEFUL_ITERATOR):
        with loader_of(written, kind) as loader:
            iterator = iter(loader)
            next(iterator)
            states = [loader.state_dict(), iterator.state_dict()]
            told = [json.dumps(state) for state in states]
            loader.state_dict()["source"]["position"] = 99
            for _ in iterator:
                pass
            assert [json.dumps(state) for state in states] == told
            assert told[0] == told[1]
        rest_of(loader_of(written, kind), states[0])
        assert [json.dumps(state) for state in states] == told


def test_peek_changes_no_state_and_skipping_continues_from_the_state(written: Written) -> None:
    with loader_of(written) as loader:
        begin, whole = loader.state_dict(), all_of(loader)
        assert rows(loader.peek()) != whole[0]
        assert loader.state_dict() == {**loader.state_dict(), "epoch": 1, "batches": 0}
        loader.load_state_dict(state_after(loader_of(written), 4))
        assert rows(loader.peek()) == whole[4]
        assert loader.state_dict()["batches"] == 4
        loader.skip(2)
        assert loader.state_dict() == state_after(loader_of(written), 6)
        assert loader.position == (6, 24, 24)
        assert rows(loader.peek()) == whole[6]
        assert all_of(loader) == whole[6:]
        loader.load_state_dict(begin)
        assert rows(next(iter(loader))) == whole[0]
        loader.skip(3)  # of the next epoch: the loop has stopped
        assert (loader.state_dict()["epoch"], loader.position) == (1, (3, 12, 12))


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


def test_set_epoch_keeps_the_position_of_a_state_of_the_same_epoch_alone(written: Written) -> None:
    with loader_of(written) as loader:
        begin = loader.state_dict()
        epochs = [all_of(loader) for _ in range(3)]
        loader.set_epoch(1)
        state = state_after(loader_of(written), 3)
        loader.load_state_dict(state)
        assert loader.epoch == 0
        loader.set_epoch(0)
        assert all_of(loader) == epochs[0][3:]
        loader.load_state_dict(state)
        loader.set_epoch(2)
        assert (loader.epoch, loader.position.batch) == (2, 0)
        assert all_of(loader) == epochs[2]
        loader.load_state_dict({})  # the begin of the run
        assert loader.state_dict() == begin
        assert [all_of(loader) for _ in range(2)] == epochs[:2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [INDEXED, KEYS, TAR, STATEFUL])
@pytest.mark.parametrize("which", ["all", "some"])
def test_skip_begins_so_many_batches_further_on(written: Written, kind: str, which: str) -> None:
    make = lambda: sources.source(kind, written).map(Seen())
    data = make if which == "all" else lambda: make().filter(sources.some)
    whole = all_of(rest_of(loader_of(written, data=data()), {}))
    for count in (0, 1, 3, len(whole), len(whole) + 2):
        with loader_of(written, data=data()) as loader:
            loader.skip(count)
            assert all_of(loader) == whole[count:]
    with loader_of(written, data=data()) as loader:
        loader.load_state_dict(state_after(loader_of(written, data=data()), 2))
        loader.skip(1)
        loader.skip(1)
        iterator = iter(loader)
        assert rows(next(iterator)) == whole[4]
        state = loader.state_dict()
    assert all_of(rest_of(loader_of(written, data=data()), state)) == whole[5:]


def in_pairs(samples: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    yield from zip(samples, samples, strict=False)


WITHOUT_STATE: list[tuple[Callable[[Written], Any], str]] = [
    (lambda written: sources.source(TAR, written).shuffle(buffer=5).map(Seen()), "buffer"),
    (lambda _: streamed(range(9)), "Iterated gives no state"),
    (lambda _: hr.from_iterable([1, 2]).repeat(2), "FromIterable gives no state"),
    (lambda _: hr.from_map(range(9)).apply(in_pairs), r"states of \.apply\(in_pairs\) would have to hold"),
]


@pytest.mark.parametrize(("data", "why"), WITHOUT_STATE)
def test_state_is_refused_where_data_or_operators_have_none(written: Written, data: Any, why: str) -> None:
    with loader_of(written, data=data(written), batch_size=2) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(hr.OptionError, match=why):
            loader.state_dict()
        next(iterator)


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
    [(int, True), (int, False), (str, True), (str, False), (bytes, False)],  # bytes are no JSON
)
def test_state_of_a_data_set_is_the_same_when_it_was_written_to_a_file(kind: type, is_file: bool) -> None:
    with hr.DataLoader(Kept(kind), batch_size=4) as loader:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        state, rest = loader.state_dict(), lists(iterator)
    state = json.loads(json.dumps(state)) if is_file else state
    assert lists(rest_of(hr.DataLoader(Kept(kind), batch_size=4), state)) == rest
    assert [number for batch in rest for number in batch] == list(range(12, 40))


def test_peek_reads_the_next_epoch_while_an_iterator_is_in_use() -> None:
    with numbers_in(Numbers().shuffle()) as loader:
        epochs = [lists(loader) for _ in range(3)]
    with numbers_in(Numbers().shuffle()) as loader:
        batches = iter(loader)
        next(batches)
        assert loader.peek().tolist() == epochs[1][0]  # as `iter` would begin now
        assert saved(loader)["source"]["position"] == 4
        assert lists(batches) == epochs[0][1:]
        assert loader.peek().tolist() == epochs[1][0]
        assert [[batch.tolist() for batch in loader if loader.peek() is not None] for _ in range(2)] == epochs[1:]
        assert loader.peek().tolist() != epochs[2][0]
        assert loader.epoch == 3


def test_peek_does_not_consume_the_end_of_an_epoch() -> None:
    state = state_after(numbers_in(), 10)
    with numbers_in() as loader:
        loader.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(StopIteration):
                loader.peek()
        assert saved(loader) == state
        assert lists(loader) == []
        assert loader.epoch == 1
        assert len(lists(loader)) == 10


def test_global_batch_of_a_state_is_forgotten_when_another_state_is_loaded() -> None:
    states = [
        state_after(numbers_in(batch_size=size, ranks=hr.Ranks(rank=0, world_size=world, compare=False)), 1)
        for size, world in ((4, 2), (2, 1))
    ]
    with numbers_in() as loader:
        loader.load_state_dict(states[0])
        assert len(loader.peek()) == 8
        loader.load_state_dict(states[1])
        assert len(loader.peek()) == 4


def test_skipped_batches_are_those_of_an_epoch_that_is_set_later() -> None:
    with numbers_in() as loader:
        loader.skip(5)
        loader.set_epoch(3)
        assert lists(loader) == [[*range(k, k + 4)] for k in range(20, 40, 4)]
        assert loader.epoch == 4


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_epoch_that_is_set_within_another_follows_it(epoch: int) -> None:
    with numbers_in(Numbers().shuffle()) as loader:
        list(loader)
        for number, _ in enumerate(loader, 1):
            if number == 2:
                loader.set_epoch(epoch)
            assert loader.state_dict()["batches"] == number
            assert loader.state_dict()["epoch"] == 1
        assert loader.epoch == loader.state_dict()["epoch"] == epoch
        list(loader)
        assert loader.epoch == epoch + 1


def test_state_of_skipped_filtered_batches_is_refused_when_the_batch_size_differs() -> None:
    data = Numbers(60).filter(is_odd)
    with numbers_in(data) as loader:
        loader.skip(3)
        state = saved(loader)
    assert_refused(numbers_in(data, batch_size=8), state, field="global_batch_size")


def test_peek_is_refused_while_an_iterator_reads_an_iterable_data_set() -> None:
    with numbers_in(Counting(200), prefetch_factor=0) as loader:
        batches = iter(loader)
        got = next(batches).tolist()
        with pytest.raises(hr.errors.LoaderBusyError, match="peek"):
            loader.peek()
        assert got + [number for batch in batches for number in batch.tolist()] == [*range(200)]
        assert loader.peek().tolist() == [0, 1, 2, 3]


def test_only_the_newest_iterator_advances_the_epoch() -> None:
    with numbers_in(Numbers().shuffle()) as loader:
        list(loader)
        first = iter(loader)
        next(first)
        loader.set_epoch(0)
        second = iter(loader)
        next(second)
        list(first)
        assert loader.epoch == 0
        list(second)
        assert loader.epoch == 1


class Weights:
    """Weights of a mixture. One thread waits for them."""

    def __init__(self, web: float, waits: bool = False) -> None:
        self.web, self.waits = web, waits
        self.entered, self.may_go = threading.Event(), threading.Event()

    def __call__(self, step: int) -> dict[str, float]:
        if self.waits and threading.current_thread().name == "loads":
            self.entered.set()
            self.may_go.wait()
        return {"web": self.web, "code": 1.0}


def mixed(weights: Weights) -> hr.DataLoader[Any]:
    return numbers_in(hr.mix({"web": Numbers(60), "code": Numbers(40)}, weights, step=8))


@pytest.mark.slow
@pytest.mark.parametrize(
    "read", [lambda loader: loader.state_dict(), lambda loader: loader.position, lambda loader: loader.epoch]
)
def test_reads_wait_for_another_thread_that_loads_a_state_which_is_refused(read: Callable[[Any], Any]) -> None:
    state = {**state_after(mixed(Weights(3.0)), 3), "epoch": 5}
    weights, errors, found = Weights(1.0, waits=True), list[BaseException](), list[Any]()
    with mixed(Weights(1.0)) as alike, mixed(weights) as loader:

        def load() -> None:
            try:
                loader.load_state_dict(state)
            except hr.StateMismatchError as error:
                errors.append(error)

        loads = threading.Thread(target=load, name="loads")
        reads = threading.Thread(target=lambda: found.append(read(loader)))
        loads.start()
        assert weights.entered.wait(30)
        reads.start()
        reads.join(0.5)  # it would be done by then, if it did not wait
        weights.may_go.set()
        loads.join()
        reads.join()
        assert errors
        assert found == [read(alike)]


Make = Callable[[], hr.DataLoader[Any]]
_DELETED = object()
_VALUES = [_DELETED, None, -1, 10**7, 2**70, 1.5, "x", "", [], [3], {}, True, False]
_MIB_MOST = 64


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


TORCH: dict[str, Make] = {
    "map-style": lambda: hr.DataLoader(Made(int, 23), batch_size=3, shuffle=True, generator=generator()),
    "iterable": lambda: hr.DataLoader(StreamOfPlaces(23), batch_size=3),
    "economic": lambda: hr.DataLoader(  # type: ignore[call-arg]
        Made(int, 23), 3, shuffle=True, generator=generator(), num_workers=2, economic=True, workers="thread"
    ),
}


def edits(state: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(what is edited, the edited state), for each value inside of a state, and each of several edits."""
    for path in paths(state):
        old = state
        for name in path:
            old = old[name]
        values = [*_VALUES]
        if isinstance(old, int):
            values += [old + 1, old - 1]
        if isinstance(old, str) and len(old) > 3:
            middle = len(old) // 2
            values += [old[:middle], old[:middle] + ("1" if old[middle] == "0" else "0") + old[middle + 1 :]]
        for value in values:
            edited = copy.deepcopy(state)
            inner = edited
            for name in path[:-1]:
                inner = inner[name]
            if value is _DELETED:
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
            if edited != state or str(edited) != str(state):
                yield f"{path} = {'(deleted)' if value is _DELETED else repr(value)}", edited


def paths(value: Any, *above: Any) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        yield (*above, name)
        yield from paths(part, *above, name)


@pytest.mark.parametrize("make", [*TORCH.values(), *LOADERS.values()], ids=[*TORCH, *LOADERS])
def test_edited_state_is_refused_or_goes_on_with_the_same_samples(make: Make) -> None:
    state = state_after(make(), 2)
    rest = str(lists(rest_of(make(), state)))
    wrong, loader = [], make()
    tracemalloc.start()
    for what, edited in edits(state):
        try:
            loader.load_state_dict(edited)
            again = str(lists(loader))
        except hr.StateMismatchError as error:
            again = rest if error.field else "no field"
        except Exception as error:
            again = repr(error)
        if again != rest:
            wrong.append((what, again))
            loader.close()
            loader = make()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    loader.close()
    assert not wrong, (len(wrong), wrong[:50])
    assert peak < _MIB_MOST * 2**20


@pytest.mark.parametrize("make", TORCH.values(), ids=TORCH)
def test_edited_state_without_its_check_is_refused_where_it_makes_no_sense(make: Make) -> None:
    """As states of earlier releases, or with a new checksum."""
    with make() as loader:
        next(iter(loader))
        state = loader.state_dict()
        wrong: list[tuple[str, object]] = [("batches", "x"), ("due", -1), ("turn", None), ("copies", 3)]
        wrong += [("base_seed", []), ("beyond", [[2]]), *(("generators", value) for value in (["xx"], [3], 3, None))]
        if state["is_map"]:
            wrong += [("sampler", None)]
            wrong += [("sampler", {**state["sampler"], name: 3}) for name in ("states", "is_over")]
        else:
            wrong += [("copies", [])]
            wrong += [("copies", [{**state["copies"][0], name: 3}]) for name in ("states", "is_over")]
        for name, value in wrong:
            unchecked = {**{k: v for k, v in state.items() if k != "check"}, name: value}
            for edited in (unchecked, {**unchecked, "check": whole_check(unchecked)}):
                with pytest.raises(hr.StateMismatchError) as told:
                    loader.load_state_dict(edited)
                assert told.value.field == name
        for name in state.keys() - {"version", "regime", "check"}:
            with pytest.raises(hr.StateMismatchError) as told:
                loader.load_state_dict({k: v for k, v in state.items() if k not in ("check", name)})
            assert told.value.field == name
