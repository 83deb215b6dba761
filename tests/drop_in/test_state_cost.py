"""The cost of states in the torch regime if nobody asks for one, and data sets and samplers without one."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drop_in.acting import text_of
from drop_in.classes import ThreadLoader
from drop_in.stateful_data import Counted, EpochSampler, Numbers, begun, identity, loader_of, resumed

import headrace as hr

WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def unsaved(loader: hr.DataLoader[Any]) -> hr.DataLoader[Any]:
    """A loader of a program that does not ask for states."""
    loader.snapshot_every_n_steps = None  # type: ignore[assignment]
    return loader


class Asked(Numbers):
    """Each sample is how often this copy of the data set was asked for its state before."""

    asked = 0

    def __getitem__(self, index: int) -> int:
        return self.asked

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to take."""


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "workers": "thread"}])
def test_data_set_is_asked_once_an_epoch_when_nobody_wants_a_state(options: dict[str, Any]) -> None:
    loader = unsaved(loader_of(Asked(), None, **options))
    iterator = iter(loader)
    assert max(next(iterator) for _ in range(10)) <= 1
    loader.state_dict()
    assert max(iterator) > 2
    assert max(loader_of(Asked(), None, snapshot_every_n_steps=2, **options)) > 2


@WORKERS
def test_sampler_is_asked_at_begin_and_end_when_nobody_wants_a_state(num_workers: int) -> None:
    class Sampler(EpochSampler):
        asked = 0

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return super().state_dict()

    sampler = Sampler(23)
    loader = unsaved(loader_of(Numbers(), 1, sampler=sampler, num_workers=num_workers))
    assert len(list(loader)) == 23
    assert sampler.asked <= 2
    loader.state_dict()
    list(loader)
    assert sampler.asked > 20


class UnwillingSampler(EpochSampler):
    def state_dict(self) -> dict[str, Any]:
        raise ZeroDivisionError("only on rank 0")


class LockedSampler(EpochSampler):
    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


class Unwilling(Numbers):
    def state_dict(self) -> dict[str, Any]:
        raise ZeroDivisionError("no state today")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Never called."""


FAILING: dict[str, tuple[Callable[[], dict[str, Any]], type[Exception], str]] = {
    "sampler that raises": (lambda: {"sampler": UnwillingSampler(23)}, ZeroDivisionError, "sampler"),
    "sampler whose state cannot be copied": (lambda: {"sampler": LockedSampler(23)}, TypeError, "sampler"),
    "data set that raises": (lambda: {"dataset": Unwilling()}, ZeroDivisionError, "data set"),
}


@pytest.mark.parametrize("case", FAILING)
@WORKERS
def test_only_state_dict_raises_when_a_state_cannot_be_had(case: str, num_workers: int) -> None:
    make, error, name = FAILING[case]
    loader = hr.DataLoader(**{"dataset": Numbers(), "num_workers": num_workers, "collate_fn": identity, **make()})
    iterator = iter(loader)
    assert next(iterator) == [0]
    with pytest.raises(error) as caught:
        loader.state_dict()
    assert f"the state of the {name} was asked for" in text_of(caught.value)
    assert len(list(iterator)) == 22


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.given: list[int] = []

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.given.append(index)
        return index


@WORKERS
def test_parameters_of_a_module_are_no_state(num_workers: int) -> None:
    loader = hr.DataLoader(Module(), num_workers=num_workers)
    next(iter(loader))
    assert loader.state_dict()["copies"] == []


def test_threads_share_a_data_set_that_is_a_module() -> None:
    module = Module()
    list(ThreadLoader(module, num_workers=2))
    assert sorted(module.given) == [0, 1, 2, 3]


class WithLock(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_threads_share_a_data_set_that_cannot_be_copied_and_refuse_its_state() -> None:
    dataset = WithLock()
    loader = ThreadLoader(dataset, num_workers=2, collate_fn=identity)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(Exception, match=r"lock") as told:
        loader.state_dict()
    assert "cannot be copied for each thread" in text_of(told.value)
    assert len(list(iterator)) == 22
    assert dataset.given == 23
    _, state, _ = begun(ThreadLoader(Counted(), num_workers=2, collate_fn=identity))
    with pytest.raises(Exception, match=r"lock"):
        next(iter(resumed(loader, state)))


class Property(Numbers):
    @property
    def state_dict(self) -> Any:
        raise RuntimeError("not now")


@WORKERS
def test_batches_come_when_state_dict_is_a_property_that_raises(num_workers: int) -> None:
    assert len(list(hr.DataLoader(Property(), num_workers=num_workers))) == 23
