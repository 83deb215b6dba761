"""Random numbers of data sets after a resume in the torch regime."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from drop_in.stateful_data import Numbers, identity

import headrace as hr


class Drawing(Numbers):
    """Numbers with random ones of all kinds."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), np.random.rand(), random.random()  # noqa: NPY002


def epoch_and_resumed(num_workers: int, **options: Any) -> tuple[list[Any], list[Any], list[Any]]:
    def make() -> hr.DataLoader[Any]:
        return hr.DataLoader(
            Drawing(), 2, num_workers=num_workers, collate_fn=identity, generator=torch.Generator(), **options
        )

    with make() as loader, make() as other:
        iterator = iter(loader)
        head = [next(iterator) for _ in range(3)]
        state, outside = loader.state_dict(), (torch.get_rng_state(), np.random.get_state(), random.getstate())  # noqa: NPY002
        whole, after = head + list(iterator), list(loader)
        torch.manual_seed(977)
        other.load_state_dict(state)
        torch.set_rng_state(outside[0])
        np.random.set_state(outside[1])  # noqa: NPY002
        random.setstate(outside[2])
        return whole, list(other), [after, list(other)]


@pytest.mark.slow
def test_random_numbers_go_on_when_the_mode_is_economic() -> None:
    whole, resumed, (after, after_resumed) = epoch_and_resumed(2, economic=True)
    assert resumed == whole[3:]
    assert after_resumed == after


def test_random_numbers_go_on_without_workers_when_the_user_restores_the_generators() -> None:
    whole, resumed, (after, after_resumed) = epoch_and_resumed(0)
    assert resumed == whole[3:]
    assert after_resumed == after


def test_random_numbers_of_workers_are_those_of_the_begin_of_the_epoch_when_resumed() -> None:
    whole, resumed, (after, after_resumed) = epoch_and_resumed(1)
    keys = [[sample[0] for sample in batch] for batch in resumed]
    assert keys == [[sample[0] for sample in batch] for batch in whole[3:]]
    drawn = [[sample[1:] for sample in batch] for batch in whole]
    assert [[sample[1:] for sample in batch] for batch in resumed[:-1]] == drawn[: len(resumed) - 1]
    assert after_resumed == after
