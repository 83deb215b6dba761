"""States that a loader in the torch regime refuses, and failing states of users' data sets."""

import os
from pathlib import Path
from typing import Any

import pytest
from drop_in.acting import Acting, raising
from drop_in.stateful_data import (
    Counted,
    EpochSampler,
    EpochStream,
    Numbers,
    Stream,
    begun,
    loader_of,
    refused,
    resumed,
)
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import headrace as hr


def state_of(dataset: Any, **options: Any) -> dict[str, Any]:
    return begun(hr.DataLoader(dataset, **options))[1]


@pytest.mark.parametrize(("kind", "saved", "loaded"), [(Numbers, 0, 2), (EpochStream, 1, 2)])
def test_state_of_another_number_of_workers_is_refused_by_name(kind: Any, saved: int, loaded: int) -> None:
    loader = hr.DataLoader(kind(), num_workers=loaded)
    text = f"num_workers: {saved} in the state, {loaded} in the loader"
    refused(loader, state_of(kind(), num_workers=saved), text, "num_workers")
    assert len(list(loader)) == 23


def test_force_takes_a_state_of_another_number_of_workers_for_map_style_data() -> None:
    loader = resumed(hr.DataLoader(Numbers()), state_of(Numbers(), num_workers=2), force=True)
    assert [int(batch) for batch in loader] == list(range(1, 23))
    refused(hr.DataLoader(Stream()), state_of(Stream(), num_workers=2), "num_workers", "num_workers", force=True)


def test_state_of_other_data_is_refused_by_name() -> None:
    loader = hr.DataLoader(Numbers())
    state = loader.state_dict()
    for field, other in {"regime": "headrace", "version": 1, "is_map": False, "economic": True}.items():
        refused(loader, {**state, field: other}, field, field)
    refused(loader, {"version": 2, "seed": 3}, "regime", "regime")
    for other in ({"_snapshot": {}, "_steps_since_snapshot": 1}, None, []):
        with pytest.raises(hr.StateMismatchError, match="is no state of a headrace loader"):
            loader.load_state_dict(other)  # type: ignore[arg-type]


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

    state = state_of(**{"dataset": Numbers(), **saved})
    make(saved).load_state_dict(state)
    loader = make(loaded)
    refused(loader, state, text, text.split(".", maxsplit=1)[0].strip("^: "))
    loader.load_state_dict(state, force=True)


def test_state_serves_other_ranks() -> None:
    state = state_of(Numbers(), sampler=divided())
    resumed(hr.DataLoader(Numbers(), sampler=divided(rank=3)), state)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_told_by_the_loader", [False, True])
def test_state_is_refused_when_the_sampler_has_another_epoch(num_workers: int, is_told_by_the_loader: bool) -> None:
    def make() -> tuple[Any, hr.DataLoader[Any]]:
        sampler = divided()
        return sampler, loader_of(Numbers(), 2, sampler=sampler, num_workers=num_workers)

    sampler, loader = make()
    sampler.set_epoch(1)
    _, state, iterator = begun(loader)
    rest = list(iterator)

    sampler, loader = make()
    loader.load_state_dict(state)
    (loader if is_told_by_the_loader else sampler).set_epoch(0)
    with pytest.raises(hr.StateMismatchError, match=r"^epoch: 1 in the state, .* set to 0 since") as caught:
        iter(loader)
    assert caught.value.field == "epoch"
    (loader if is_told_by_the_loader else sampler).set_epoch(1)
    assert list(loader) == rest


class Unmeasured(EpochSampler):
    """Its length costs an epoch."""

    def __len__(self) -> int:
        raise AssertionError("nobody needs to know")


def test_sampler_of_the_users_is_not_asked_for_its_length() -> None:
    state = state_of(Numbers(), sampler=Unmeasured(23))
    assert sum(1 for _ in resumed(hr.DataLoader(Numbers(), sampler=Unmeasured(23)), state)) == 22


class LateToLoad(Counted):
    """It does not take its state back when it is asked for the first time."""

    is_there = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.is_there:
            self.is_there = True
            raise OSError("not mounted yet")
        super().load_state_dict(state)


def test_state_is_kept_when_the_first_iter_fails() -> None:
    loader = resumed(hr.DataLoader(LateToLoad(), None), state_of(LateToLoad(), batch_size=None))
    with pytest.raises(OSError, match="not mounted"):
        iter(loader)
    assert loader.state_dict()["batches"] == 1
    assert [len(list(loader)) for _ in range(2)] == [22, 23]


class Forgetful(Counted):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ZeroDivisionError("what state?")


# Saved data and sampler, resumed data and sampler, the error, its text and its field.
UNTAKEN: dict[str, tuple[Any, Any, Any, Any, type[Exception], str, str | None]] = {
    "data set": (
        *(Counted, None, Numbers, None),
        *(hr.StateMismatchError, r"dataset.*Numbers has no load_state_dict", "dataset"),
    ),
    "sampler": (
        *(Numbers, EpochSampler(23), Numbers, range(23)),
        *(hr.StateMismatchError, r"sampler.*range has no load_state_dict", "sampler"),
    ),
    "data set that fails": (Forgetful, None, Forgetful, None, ZeroDivisionError, "what state", None),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("case", UNTAKEN)
def test_state_that_the_user_does_not_take_is_an_error(case: str, num_workers: int) -> None:
    saved, saved_sampler, kind, sampler, error, text, field = UNTAKEN[case]
    state = state_of(saved(), sampler=saved_sampler, num_workers=num_workers)
    loader = resumed(hr.DataLoader(kind(), sampler=sampler, num_workers=num_workers), state, force=True)
    with pytest.raises(error, match=text) as caught:
        next(iter(loader))
    assert getattr(caught.value, "field", None) == field


def test_state_is_there_when_no_worker_can_begin() -> None:
    def fail(number: int) -> None:
        raise ValueError(f"worker {number} cannot begin")

    loader = hr.DataLoader(Counted(), num_workers=2, worker_init_fn=fail)
    iterator = iter(loader)
    assert loader.state_dict()["batches"] == 0
    with pytest.raises(ValueError, match="cannot begin"):
        next(iterator)


def test_state_is_there_when_workers_have_nothing_to_do() -> None:
    _, state, iterator = begun(loader_of(Counted(1), 1, num_workers=3), 0)
    assert [known["states"] for known in state["copies"]] == [{"dataset": {"given": 0}}] * 3
    assert list(iterator) == [[(0, 1)]]


@pytest.mark.parametrize(("num_workers", "error"), [(0, ValueError), (2, ValueError), (0, KeyboardInterrupt)])
def test_batch_that_has_failed_counts_as_received(num_workers: int, error: type[BaseException]) -> None:
    dataset = Acting(raising(lambda: error("bad sample")))
    loader = loader_of(dataset, 1, num_workers=num_workers)
    _, _, iterator = begun(loader, 5)
    with pytest.raises(error, match="bad sample"):
        next(iterator)
    state = loader.state_dict()
    assert state["batches"] == 5
    other = resumed(loader_of(dataset, 1, num_workers=num_workers), state)
    assert list(other) == list(iterator) == [[number] for number in range(6, 20)]


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


class Unwilling(Dying):
    def state_dict(self) -> dict[str, Any]:
        raise ZeroDivisionError("no state today")


@pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")
def test_worker_that_replaces_a_dead_one_has_the_state_of_its_copy_if_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "quiet").touch()
    quiet, loud, unwilling = (
        list(loader_of(kind(tmp_path / name), 1, num_workers=2, snapshot_every_n_steps=every))
        for kind, name, every in ((Dying, "quiet", 1), (Dying, "loud", 1), (Unwilling, "unwilling", None))
    )
    assert loud == quiet
    assert [batch[0][0] for batch in unwilling] == list(range(23))
