"""Where a source without numbers is begun again: what a state says of it, and that it is what was said."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from end_to_end.state import sources
from end_to_end.state.runs import QUICK
from end_to_end.state.sources import TAR, Places, Seen, Written

import headrace as hr
from headrace.state_checks import check_of


@pytest.fixture(scope="module")
def written(places: Places) -> Written:
    return places.write([13, 0, 20, 7, 30])


def after(loader: hr.DataLoader[Any], batches: int) -> tuple[dict[str, Any], list[Any]]:
    """(its state after so many batches, those that follow)."""
    with loader:
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator)
        return loader.state_dict(), list(iterator)


MARKS = [None, -1, 2**70, "x", [], {}, 1.5, [1], [[1, 2]], [2, 8, 0], [1, 9, 0], [1, 8, 1], [2**40, 8, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("mark", MARKS, ids=repr)
def test_edited_mark_of_shards_without_an_index_is_refused(written: Written, mark: Any) -> None:
    def make() -> hr.DataLoader[Any]:
        return hr.DataLoader(sources.source(TAR, written).map(Seen()), batch_size=4, fetch=QUICK, timeout=30)

    state, rest = after(make(), 3)
    assert len(state["mark"]) == 3
    assert state["mark"] != mark
    with make() as loader:
        with pytest.raises(hr.StateMismatchError) as caught:
            loader.load_state_dict({**state, "mark": mark})
        assert caught.value.field in ("check", "version")
        loader.load_state_dict(state)  # the refused one has left nothing behind
        assert str(list(loader)) == str(rest)
    with make() as loader:
        of_before = {name: value for name, value in state.items() if name != "marked"}  # as the release before has it
        loader.load_state_dict({**of_before, "check": check_of(of_before, np.zeros(0, np.int64))})
        assert str(list(loader)) == str(rest)


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
