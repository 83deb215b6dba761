"""States that a loader in the torch regime refuses, and failing states of users' data sets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from drop_in.acting import Acting, raising
from drop_in.reading import read_all
from drop_in.stateful_data import Counted, EpochSampler, EpochStream, Numbers, Stream, identity
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import headrace as hr

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def state_of(dataset: Any, **options: Any) -> dict[str, Any]:
    loader = hr.DataLoader(dataset, **options)
    iterator = iter(loader)
    next(iterator)
    return loader.state_dict()


@pytest.mark.parametrize(("kind", "saved", "loaded"), [(Numbers, 0, 2), (EpochStream, 1, 2)])
def test_state_of_another_number_of_workers_is_refused_by_name(kind: Any, saved: int, loaded: int) -> None:
    loader = hr.DataLoader(kind(), num_workers=loaded)
    with pytest.raises(
        hr.StateMismatchError, match=f"num_workers: {saved} in the state, {loaded} in the loader"
    ) as caught:
        loader.load_state_dict(state_of(kind(), num_workers=saved))
    assert caught.value.field == "num_workers"
    assert len(list(loader)) == 23


def test_force_takes_a_state_of_another_number_of_workers_for_map_style_data() -> None:
    state = state_of(Numbers(), num_workers=2)
    loader = hr.DataLoader(Numbers(), num_workers=0)
    loader.load_state_dict(state, force=True)
    assert [int(batch) for batch in loader] == list(range(1, 23))
    stream = hr.DataLoader(Stream(), num_workers=0)
    with pytest.raises(hr.StateMismatchError, match="num_workers"):
        stream.load_state_dict(state_of(Stream(), num_workers=2), force=True)


def test_state_of_other_data_is_refused_by_name() -> None:
    loader = hr.DataLoader(Numbers())
    state = loader.state_dict()
    for field, other in {"regime": "headrace", "version": 2, "is_map": False, "economic": True}.items():
        with pytest.raises(hr.StateMismatchError, match=field) as caught:
            loader.load_state_dict({**state, field: other})
        assert caught.value.field == field
    with pytest.raises(hr.StateMismatchError, match="regime"):
        loader.load_state_dict({"version": 1, "seed": 3})


def divided(**options: Any) -> DistributedSampler[Any]:
    return DistributedSampler(Numbers(), **{"num_replicas": 4, "rank": 1, **options})


def in_batches(sampler: Any) -> dict[str, Any]:
    return {"batch_sampler": BatchSampler(sampler, 2, drop_last=False)}


Options = dict[str, Any]
ANOTHER_LENGTH = r"sampler_length.*12 in the state, 16 in the loader"
# Text of the error, options of the saved loader and of the resumed one.
REFUSED: list[tuple[str, Options, Options]] = [
    ("count", {}, {"dataset": Numbers(24)}),
    ("sampler_type", {}, {"shuffle": True}),
    *(
        (field, form(divided()), form(divided(**{option: value})))
        for form in (lambda sampler: {"sampler": sampler}, in_batches)
        for field, option, value in (
            ("^num_replicas: ", "num_replicas", 2),
            ("^sampler_seed: ", "seed", 5),
            ("^sampler_shuffle: ", "shuffle", False),
            ("^sampler_drop_last: ", "drop_last", True),
        )
    ),
    *(
        (ANOTHER_LENGTH, {"sampler": kind(12)}, {"sampler": kind(16)})
        for kind in (
            lambda count: RandomSampler(range(23), True, count),
            lambda count: WeightedRandomSampler([1.0] * 23, count),
            lambda count: SubsetRandomSampler(range(count)),
            lambda count: list(range(count)),
        )
    ),
    (ANOTHER_LENGTH, {"batch_sampler": [[0]] * 12}, {"batch_sampler": [[0]] * 16}),
    (ANOTHER_LENGTH, {"batch_sampler": ((0, 1),) * 12}, {"batch_sampler": ((0, 1),) * 16}),
    *(
        ("^sampler_replacement: ", {"sampler": kind(True)}, {"sampler": kind(False)})
        for kind in (
            lambda replacement: RandomSampler(range(23), replacement=replacement),
            lambda replacement: WeightedRandomSampler([1.0] * 23, 23, replacement),
        )
    ),
]


@pytest.mark.parametrize(("text", "saved", "loaded"), REFUSED)
def test_state_of_another_sampler_is_refused_by_name_unless_forced(text: str, saved: Options, loaded: Options) -> None:
    def make(options: Options) -> hr.DataLoader[Any]:
        return hr.DataLoader(**{"dataset": Numbers(), **options})

    before = make(saved)
    next(iter(before))
    state = before.state_dict()
    make(saved).load_state_dict(state)
    loader = make(loaded)
    with pytest.raises(hr.StateMismatchError, match=text) as caught:
        loader.load_state_dict(state)
    assert caught.value.field == text.split(".", maxsplit=1)[0].strip("^: ")
    loader.load_state_dict(state, force=True)


def test_state_serves_other_ranks() -> None:
    state = state_of(Numbers(), sampler=divided())
    hr.DataLoader(Numbers(), sampler=divided(rank=3)).load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_told_by_the_loader", [False, True])
def test_state_is_refused_when_the_sampler_was_told_another_epoch_since(
    num_workers: int, is_told_by_the_loader: bool
) -> None:
    def make() -> tuple[Any, hr.DataLoader[Any]]:
        sampler = divided()
        return sampler, hr.DataLoader(Numbers(), 2, sampler=sampler, num_workers=num_workers)

    sampler, loader = make()
    sampler.set_epoch(1)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]

    sampler, loader = make()
    loader.load_state_dict(state)
    (loader if is_told_by_the_loader else sampler).set_epoch(0)
    with pytest.raises(hr.StateMismatchError, match=r"^epoch: 1 in the state, .* set to 0 since") as caught:
        iter(loader)
    assert caught.value.field == "epoch"
    (loader if is_told_by_the_loader else sampler).set_epoch(1)
    assert [batch.tolist() for batch in loader] == rest


class Unmeasured(EpochSampler):
    """Its length costs an epoch."""

    def __len__(self) -> int:
        raise AssertionError("nobody needs to know")


def test_sampler_of_the_users_is_not_asked_for_its_length() -> None:
    state = state_of(Numbers(), sampler=Unmeasured(23))
    loader = hr.DataLoader(Numbers(), sampler=Unmeasured(23))
    loader.load_state_dict(state)
    assert sum(1 for _ in loader) == 22


def test_state_that_is_damaged_is_refused_by_the_name_of_the_field() -> None:
    loader = hr.DataLoader(Counted(), shuffle=True)
    state = state_of(Counted(), shuffle=True)
    for field in set(state) - {"version", "regime", "check"}:  # earlier states have no check
        with pytest.raises(hr.StateMismatchError, match=field) as caught:
            loader.load_state_dict({name: value for name, value in state.items() if name != field})
        assert caught.value.field == field
    for field, value in (
        ("generators", ["xx"]),
        ("generators", [3]),
        ("generators", 3),
        ("generators", None),
        ("sampler", {}),
        ("sampler", {**state["sampler"], "start": None}),
        ("sampler", {**state["sampler"], "start": [None]}),
        ("copies", [{}]),
        ("beyond", [3]),
    ):
        with pytest.raises(hr.StateMismatchError) as caught:
            loader.load_state_dict({**state, field: value})
        assert caught.value.field == field
    for other in ({"_snapshot": {}, "_steps_since_snapshot": 1}, None, []):
        with pytest.raises(hr.StateMismatchError, match="is no state of a headrace loader"):
            loader.load_state_dict(other)  # type: ignore[arg-type]
    loader.load_state_dict(state)
    assert len(list(loader)) == 22


class LateToLoad(Counted):
    """It does not take its state back when it is asked for the first time."""

    is_there = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.is_there:
            self.is_there = True
            raise OSError("not mounted yet")
        super().load_state_dict(state)


def test_state_is_kept_when_the_first_iter_fails() -> None:
    loader = hr.DataLoader(LateToLoad(), batch_size=None)
    loader.load_state_dict(state_of(LateToLoad(), batch_size=None))
    with pytest.raises(OSError, match="not mounted"):
        iter(loader)
    assert loader.state_dict()["batches"] == 1
    assert len(list(loader)) == 22
    assert len(list(loader)) == 23


class Interrupted(Numbers):
    """The user stops it at one sample."""

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise KeyboardInterrupt
        return index


def test_batch_at_which_the_user_has_stopped_counts_as_received() -> None:
    loader = hr.DataLoader(Interrupted(), batch_size=None)
    iterator = iter(loader)
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert next(iterator) == 3
    other = hr.DataLoader(Interrupted(), batch_size=None)
    other.load_state_dict(loader.state_dict())
    assert list(other) == list(iterator) == list(range(4, 23))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_state_of_a_data_set_that_takes_none_is_refused_by_name(num_workers: int) -> None:
    loader = hr.DataLoader(Numbers(), num_workers=num_workers)
    loader.load_state_dict(state_of(Counted(), num_workers=num_workers))
    with pytest.raises(hr.StateMismatchError, match=r"dataset.*Numbers has no load_state_dict") as caught:
        next(iter(loader))
    assert caught.value.field == "dataset"


def test_state_of_a_sampler_that_takes_none_is_refused_by_name() -> None:
    loader = hr.DataLoader(Numbers(), sampler=range(23))
    loader.load_state_dict(state_of(Numbers(), sampler=EpochSampler(23)), force=True)
    with pytest.raises(hr.StateMismatchError, match=r"sampler.*range has no load_state_dict"):
        iter(loader)


class Forgetful(Counted):
    """It does not take its state back."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ZeroDivisionError("what state?")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_error_of_load_state_dict_comes_as_it_is(num_workers: int) -> None:
    loader = hr.DataLoader(Forgetful(), num_workers=num_workers)
    loader.load_state_dict(state_of(Forgetful(), num_workers=num_workers))
    with pytest.raises(ZeroDivisionError, match="what state"):
        next(iter(loader))


def test_state_is_there_when_no_worker_can_begin() -> None:
    def fail(number: int) -> None:
        raise ValueError(f"worker {number} cannot begin")

    loader = hr.DataLoader(Counted(), num_workers=2, worker_init_fn=fail)
    iterator = iter(loader)
    assert loader.state_dict()["batches"] == 0
    with pytest.raises(ValueError, match="cannot begin"):
        next(iterator)


def test_state_is_there_when_workers_have_nothing_to_do() -> None:
    loader = hr.DataLoader(Counted(1), num_workers=3, collate_fn=identity)
    iterator = iter(loader)
    state = loader.state_dict()
    assert [known["states"] for known in state["copies"]] == [{"dataset": {"given": 0}}] * 3
    assert list(iterator) == [[(0, 1)]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batch_that_has_failed_counts_as_received(num_workers: int) -> None:
    dataset = Acting(raising(lambda: ValueError("bad sample")))
    loader = hr.DataLoader(dataset, num_workers=num_workers)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    with pytest.raises(ValueError, match="bad sample"):
        next(iterator)
    state = loader.state_dict()
    assert state["batches"] == 5
    other = hr.DataLoader(dataset, num_workers=num_workers)
    other.load_state_dict(state)
    assert read_all(iter(other)) == read_all(iterator) == [[number] for number in range(6, 20)]


class Dying(Counted):
    """Its process ends at one sample, when that is asked for first."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def __getitem__(self, index: int) -> Any:
        if index == 9 and not self.mark.exists():
            self.mark.touch()
            os._exit(3)
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")
def test_worker_that_replaces_a_dead_one_has_the_state_of_its_copy(tmp_path: Path) -> None:
    quiet = tmp_path / "quiet"
    quiet.touch()
    options: dict[str, Any] = {"num_workers": 2, "collate_fn": identity, "snapshot_every_n_steps": 1}
    expected = list(hr.DataLoader(Dying(quiet), **options))
    assert list(hr.DataLoader(Dying(tmp_path / "loud"), **options)) == expected


class Unwilling(Dying):
    """A `Dying` data set whose state cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        raise ZeroDivisionError("no state today")


@pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")
def test_worker_is_replaced_when_its_data_set_cannot_say_its_state(tmp_path: Path) -> None:
    loader = hr.DataLoader(Unwilling(tmp_path / "loud"), num_workers=2, collate_fn=identity)
    assert [batch[0][0] for batch in loader] == list(range(23))
