"""Data sets that make themselves ready for the next epoch, and shards that were mended since a state was saved."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from builders.loops import resumed_anywhere
from end_to_end.state.runs import QUICK
from end_to_end.state.sources import rows
from end_to_end.tars import numbered_samples, tar

import headrace as hr

EPOCHS = 3


class Resets(hr.AsyncIterableDataset):
    """Numbers with their epoch. The data set starts again at its end and counts epochs."""

    def __init__(self, total: int) -> None:
        self.total, self.next, self.epoch = total, 0, 0

    async def aiter(self) -> AsyncIterator[dict[str, int]]:
        while self.next < self.total:
            self.next += 1
            yield {"n": 1000 * self.epoch + self.next - 1, "crc": 0}
        self.next, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next, self.epoch = state["next"], state["epoch"]


class _Iterator:
    """Numbers from `next` on. The end of the iterator counts an epoch of its data set."""

    def __init__(self, dataset: Counts) -> None:
        self.dataset, self.next = dataset, 0

    def __aiter__(self) -> _Iterator:
        return self

    async def __anext__(self) -> dict[str, int]:
        if self.next >= self.dataset.total:
            self.next, self.dataset.epoch = 0, self.dataset.epoch + 1
            raise StopAsyncIteration
        self.next += 1
        return {"n": 1000 * self.dataset.epoch + self.next - 1, "crc": 0}

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Counts(hr.AsyncIterableDataset):
    """Knows the epoch, and its iterator the place in that, which it resets at its end."""

    def __init__(self, total: int) -> None:
        self.total, self.epoch = total, 0

    def aiter(self) -> AsyncIterator[dict[str, int]]:
        return _Iterator(self)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


KINDS: dict[str, Callable[[int], Any]] = {"resets": Resets, "resets, with its iterator": Counts}


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 5])
@pytest.mark.parametrize("taken", [None, 8, 2])
@pytest.mark.parametrize("total", [12, 10, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_data_set_goes_on_from_every_state_when_it_makes_itself_ready_at_its_end(
    kind: str, total: int, taken: int | None, prefetch: int
) -> None:
    def loader() -> hr.DataLoader[Any]:
        data = KINDS[kind](total)
        data = data if taken is None else data.take(taken)
        return hr.DataLoader(data, batch_size=4, prefetch_factor=prefetch, timeout=30, fetch=QUICK)

    resumed_anywhere(loader, rows, epochs=EPOCHS)


def number_of(sample: dict[str, Any]) -> int:
    return int(sample["__key__"])


class Shards:
    """Three archives of 30 samples. Tests truncate one."""

    def __init__(self, folder: Path) -> None:
        self.urls = [str(folder / f"{k}.tar") for k in range(3)]
        self._whole = [tar(numbered_samples(30 * k, 30, 40)) for k in range(3)]
        for url, archive in zip(self.urls, self._whole, strict=True):
            Path(url).write_bytes(archive)

    def cut_off(self, is_so: bool, shard: int = 0) -> None:
        whole = self._whole[shard]
        cut = whole[: whole.index(b"%06d.bin\0" % (30 * shard + 10)) + 100]
        Path(self.urls[shard]).write_bytes(cut if is_so else whole)

    def shorten(self, shard: int) -> None:
        Path(self.urls[shard]).write_bytes(tar(numbered_samples(30 * shard, 10, 40)))

    def loader(self, seed: int, window: int = 40, **options: Any) -> hr.DataLoader[Any]:
        data = hr.stream(self.urls, index=None).shuffle(window=window).map(number_of)
        options = {"batch_size": 4, "on_error": "skip", **options}
        return hr.DataLoader(data, seed=seed, timeout=30, fetch=QUICK, **options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_cut_off", [(True, True), (True, False), (False, True)])
def test_state_is_refused_or_exact_when_a_shard_was_damaged_or_mended_since(
    tmp_path: Path, is_cut_off: tuple[bool, bool], seed: int
) -> None:
    """Where a shard ends too soon, so does the window of the shuffle: places in that are those of other samples."""
    shards, before, after = Shards(tmp_path), *is_cut_off
    shards.cut_off(before)
    received, states = list[int](), list[tuple[list[int], str]]()
    with shards.loader(seed) as loader:
        for batch in loader:
            received += batch.tolist()
            states.append((list(received), json.dumps(loader.state_dict())))
    shards.cut_off(after)
    refused = []
    for had, state in states:
        with shards.loader(seed) as loader:
            loader.load_state_dict(json.loads(state))
            try:
                came = [number for batch in loader for number in batch.tolist()]
            except hr.StateMismatchError as error:
                refused.append(error.field)
                continue
        got = sorted(had + came)
        assert len(got) == len(set(got))
        assert set(range(30, 90)) <= set(got)
        if before == after:
            assert had + came == received
    assert set(refused) == (set() if before == after else {"mark"})


def rest_of(loader: hr.DataLoader[Any], state: str) -> list[int]:
    with loader:
        loader.load_state_dict(json.loads(state))
        return [number for batch in loader for number in batch.tolist()]


class Held:
    """Keeps its worker busy with one sample until released. Later batches come first."""

    def __init__(self, number: int) -> None:
        self.number, self.may_go_on = number, threading.Event()

    def __call__(self, sample: dict[str, Any]) -> int:
        number = number_of(sample)
        if number == self.number:
            assert self.may_go_on.wait(30)
        return number


@pytest.mark.slow
@pytest.mark.parametrize("is_cut_off", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("held", [0, 4])
def test_state_of_batches_that_came_early_is_refused_or_exact_when_a_shard_was_damaged_or_mended_since(
    tmp_path: Path, is_cut_off: tuple[bool, bool], held: int
) -> None:
    shards, before, after = Shards(tmp_path), *is_cut_off
    data = hr.stream(shards.urls, index=None)
    options: dict[str, Any] = {"batch_size": 4, "on_error": "skip", "in_order": False, "timeout": 30, "fetch": QUICK}
    shards.cut_off(before)
    hold, received, states = Held(held), list[int](), list[tuple[list[int], str]]()
    with hr.DataLoader(data.map(hold), num_workers=2, workers="thread", prefetch_factor=4, **options) as loader:
        batches = iter(loader)
        for _ in range(5):
            received += next(batches).tolist()
            states.append((list(received), json.dumps(loader.state_dict())))
        hold.may_go_on.set()
    assert held not in received
    shards.cut_off(after)
    refused = []
    for had, state in states:
        try:
            got = sorted(had + rest_of(hr.DataLoader(data.map(number_of), **options), state))
        except hr.StateMismatchError as error:
            refused.append(error.field)
            continue
        there = range(90) if not (before or after) else [*range(9), *range(30, 90)]
        assert len(got) == len(set(got))
        assert set(there) <= set(got)
    assert set(refused) == (set() if before == after else {"mark"})


def stopped_in_a_shard(shards: Shards, batches: int, window: int = 7) -> tuple[int, list[int], str]:
    """(the shard that is read first, what came of it in batches of one, the state)."""
    with shards.loader(0, window, batch_size=1) as loader:
        had = [int(batch) for _, batch in zip(range(batches), loader, strict=False)]
        state = json.dumps(loader.state_dict())
    assert {number // 30 for number in had} == {had[0] // 30}
    return had[0] // 30, had, state


def test_state_is_refused_when_a_shard_is_damaged_before_what_was_used_out_of_order(tmp_path: Path) -> None:
    shards = Shards(tmp_path)
    shard, _, state = stopped_in_a_shard(shards, 18)
    shards.cut_off(True, shard)
    with pytest.raises(hr.StateMismatchError) as caught:
        rest_of(shards.loader(0, 7, batch_size=1), state)
    assert caught.value.field == "mark"
    with pytest.raises(hr.errors.FormatError, match="is truncated"):
        rest_of(shards.loader(0, 7, batch_size=1, on_error="raise"), state)
    shards.cut_off(False, shard)
    assert len(rest_of(shards.loader(0, 7, batch_size=1), state)) == 90 - 18


@pytest.mark.parametrize("batches", [11, 14])
def test_damage_is_told_when_it_lies_before_what_was_used_of_a_shard(tmp_path: Path, batches: int) -> None:
    window = 1  # the mark is right before the next sample
    shards = Shards(tmp_path)
    shard, had, state = stopped_in_a_shard(shards, batches, window)
    shards.cut_off(True, shard)
    with pytest.raises(hr.errors.FormatError, match="is truncated"):
        rest_of(shards.loader(0, window, batch_size=1, on_error="raise"), state)
    loader = shards.loader(0, window, batch_size=1)
    others = {number for number in range(90) if number // 30 != shard}
    assert set(rest_of(loader, state)) == others
    assert loader.stats().skipped == 1
    assert len(had) == batches
