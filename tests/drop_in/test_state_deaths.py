"""States in the torch regime when workers have died, or were closed: right, or a clear error."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drop_in.stateful_data import Counted, EpochStream, Numbers, loader_of, resumed, through_text

import headrace as hr

pytestmark = pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")


def two_workers(dataset: Any, **options: Any) -> hr.DataLoader[Any]:
    return loader_of(dataset, num_workers=2, **options)


def kill(iterator: Any, number: int) -> None:
    worker = iterator._workers[number]
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()


def dying_once(number: int, mark: Path) -> Callable[[int], None]:
    """Ends one of the workers as it begins, the first time."""

    def begin(worker: int) -> None:
        if worker == number and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return begin


@pytest.mark.parametrize("kind", [Counted, EpochStream])
def test_state_is_there_when_a_worker_dies_at_being_asked(kind: Callable[[int], Any], tmp_path: Path) -> None:
    loader = two_workers(kind(4), worker_init_fn=dying_once(1, tmp_path / "mark"), prefetch_factor=1)
    iterator = iter(loader)
    state = loader.state_dict()
    assert (tmp_path / "mark").exists()
    if kind is Counted:
        assert [known["states"] for known in state["copies"]] == [{"dataset": {"given": 0}}] * 2
        assert list(iterator) == [[(0, 1), (1, 2), (2, 3), (3, 4)]]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_state_is_there_when_a_worker_has_died_in_the_epoch(number: int) -> None:
    expected = list(two_workers(Counted()))
    loader = two_workers(Counted())
    iterator = iter(loader)
    kill(iterator, number)
    assert next(iterator) == expected[0]
    assert list(resumed(two_workers(Counted()), through_text(loader.state_dict()))) == expected[1:]


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("is_asked_before", [False, True])
def test_state_after_an_epoch_is_exact_when_a_persistent_worker_died(is_asked_before: bool, every: int) -> None:
    options: dict[str, Any] = {"persistent_workers": True, "snapshot_every_n_steps": every}
    loader = two_workers(Counted(), **options)
    list(loader)
    before = loader.state_dict() if is_asked_before else None
    kill(loader._iterator, 0)
    state = loader.state_dict()
    assert state["copies"] == (before or state)["copies"]
    assert list(loader) == list(resumed(two_workers(Counted(), **options), through_text(state)))


def test_state_after_an_epoch_is_there_when_a_persistent_worker_had_nothing_to_do() -> None:
    loader = two_workers(Counted(4), persistent_workers=True)
    list(loader)
    copies = loader.state_dict()["copies"]
    assert [known["states"] for known in copies] == [{"dataset": {"given": given}} for given in (4, 0)]


@pytest.mark.parametrize(("kind", "begins_another"), [(Counted, False), (Counted, True), (EpochStream, True)])
def test_state_after_close_is_refused_if_copies_were_not_asked(kind: Callable[[], Any], begins_another: bool) -> None:
    loader = two_workers(kind(), persistent_workers=True)
    list(loader)
    if begins_another:
        iter(loader)
    loader.close()
    with pytest.raises(hr.OptionError, match=r"workers have ended.*before close"):
        loader.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Numbers, Counted, EpochStream])
@pytest.mark.parametrize("batches", [0, 3, None])
def test_state_after_close_is_that_before_when_somebody_had_asked(kind: Callable[[], Any], batches: int | None) -> None:
    loader = two_workers(kind(), persistent_workers=True)
    loader.state_dict()
    iterator = iter(loader)
    for _ in range(batches or 0):
        next(iterator)
    if batches is None:
        list(iterator)
    state = loader.state_dict()
    loader.close()
    assert loader.state_dict() == state


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Numbers, Counted, EpochStream])
def test_state_after_close_begins_the_epoch_when_it_was_the_first(kind: Callable[[], Any]) -> None:
    loader = two_workers(kind())
    iter(loader)
    loader.close()
    assert list(resumed(two_workers(kind()), through_text(loader.state_dict()))) == list(two_workers(kind()))
