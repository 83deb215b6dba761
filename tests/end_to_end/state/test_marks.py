"""Resume points of sources without numbers survive a file."""

from __future__ import annotations

import json
from typing import Any

import pytest

import headrace as hr


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
    with hr.DataLoader(Kept(kind), batch_size=4) as loader:
        loader.load_state_dict(state)
        again = [n for batch in loader for n in batch.tolist()]
    assert again == [n for batch in rest for n in batch.tolist()] == list(range(12, 40))
