"""An iterator of torch's that can go on from a saved state."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from headrace.drop_in.loaded import common, epoch_of
from headrace.drop_in.state import RunPoint, RunProgress, SnapshotBook, StateDict, WorkerSnapshot, copy_of
from headrace.errors import StateMismatchError
from headrace.torch_compat.datapipes import seeded
from headrace.torch_compat.indices import Indices
from headrace.torch_compat.stateful import is_stateful
from headrace.torch_compat.tracebacks import trimming


class ResumableIterator(_BaseDataLoaderIter):
    """An iterator of torch's that can go on from a saved state, and tells the book of its loader how far it is.

    In `_again` are the numbers and indices of batches that were given after the state which it goes on from.

    torch's own draws are made where torch makes them. One that goes on draws nothing that was drawn before the state
    was made. A state of a finished run begins the next one; only persistent workers have more of it than the sampler.
    """

    @property
    def is_over(self) -> bool:
        """Whether it was closed for good: where workers are persistent, a next run needs others."""
        return False

    def _prepare(self, loader: DataLoader[object], snapshots: SnapshotBook) -> None:
        """Before `__init__`, which torch's own classes call with the loader alone."""
        self._snapshots, self._loaded, self._draws = snapshots, snapshots.take(), snapshots.draws_of(loader)
        self._common = common(loader)
        self._goes_on = self._loaded is not None and not self._loaded["is_finished"]
        if self._loaded is not None and self._goes_on:
            _check_epoch(self._loaded, self._common["epoch"])
        every = getattr(loader, "snapshot_every_n_steps", None)  # torch's own loaders have none
        if self._common["is_map"] and not self._common["economic"] and is_stateful(loader.dataset):
            is_in_turn = loader.in_order or not loader.num_workers
            if self._loaded is not None and self._goes_on:
                is_in_turn = is_in_turn and _is_dealt_in_turn(self._loaded)
            if not is_in_turn:
                every = 1  # nobody could say which batches a copy is to make again
        self._pace = snapshots.pace
        self._every = functools.partial(
            snapshots.pace.every, every
        )  # knows no iterator, so that those who have it do not

    def __init__(self, loader: DataLoader[object]) -> None:
        loaded, draws = self._loaded, self._draws
        if loaded is not None and not self._goes_on:
            if loaded["sampler"] is not None and loaded["sampler"]["states"] is not None:
                Indices.resumed(loader._index_sampler, draws.sampler, loaded["sampler"], self._every)
            draws.go_on(loaded["generators"])
        was_drawn = loaded is not None and (self._goes_on or loader.persistent_workers)
        self._before = draws.sampler.now()
        with draws.kept() if was_drawn else draws.base.drawing():
            super().__init__(loader)
        if was_drawn and loaded is not None:
            self._base_seed, self._shared_seed = loaded["base_seed"], loaded["shared_seed"]
            self._dataset = seeded(self._dataset, self._shared_seed)
        self._common["base_seed"], self._common["shared_seed"] = int(self._base_seed), self._shared_seed
        self._open_data()

    def _open_data(self) -> None:
        """Give a data set that no worker has a copy of its state."""

    def _reset(self, loader: DataLoader[object], first_iter: bool = False) -> None:
        before = self._draws.sampler.now()
        with self._draws.kept() if self._goes_on else self._draws.sampler.drawing():
            super()._reset(loader, first_iter)
        self._common["epoch"] = epoch_of(loader)
        self._open_run(before)

    def _open_run(self, before: torch.Tensor) -> None:
        """Begin to count; `self._sampler_iter` was opened by torch's own code, and random numbers were there before."""
        loaded = self._loaded if self._goes_on else None
        if loaded is not None:
            self._draws.go_on(loaded["generators"])
        source, every = self._draws.sampler, self._every
        is_map = self._common["is_map"]
        indices = None
        if is_map and loaded is not None:
            assert loaded["sampler"] is not None
            indices = Indices.resumed(self._index_sampler, source, loaded["sampler"], every)
        elif is_map:
            indices = Indices(self._index_sampler, self._sampler_iter, source, before, every)
        if indices is not None:
            self._sampler_iter = indices
        copies = self._first_copies()
        point = RunPoint(0, 0, (), 0, copies)
        if loaded is not None:
            copies = tuple(copy_of(known) for known in loaded["copies"])[: len(copies)] or copies
            point = RunPoint(
                loaded["batches"],
                loaded["due"],
                tuple((start, stop) for start, stop in loaded["beyond"]),
                loaded["turn"],
                copies,
            )
            self._num_yielded = loaded["batches"]
        self._again = [] if indices is None else indices.until(point.due)
        self._run = self._snapshots.run = RunProgress(self._common.copy(), indices, self._draws, point)

    def __next__(self) -> Any:
        this: Any = self
        length = this._IterableDataset_len_called
        with trimming:
            if torch._C._autograd._profiler_enabled() or (length is not None and self._num_yielded >= length):
                return super().__next__()  # which warns of more batches than `len` has told
            batch = this._next_data()  # without the mark for a profiler, which takes longer than all the rest
        self._num_yielded += 1
        return batch

    @property
    def run(self) -> RunProgress:
        """How far it has come."""
        return self._run

    def _first_copies(self) -> tuple[WorkerSnapshot, ...]:
        """Workers' copies of the data set as they begin, or the trainer's own; none, where they are never asked."""
        return ()

    def _has_begun(self) -> None:
        """All is as it was in the state that this goes on from: the next iterator begins anew."""
        if self._loaded is self._snapshots.loaded:
            self._snapshots.loaded = None
        self._loaded, self._goes_on = None, False

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The state after what was given so far; `DataLoader.state_dict` has the same of the newest iterator."""
        self._pace.is_asked = True
        return {**self._run.state(batches)}


def _check_epoch(loaded: StateDict, epoch: int | None) -> None:
    """Samplers may have been told another epoch since the state was loaded: the rest of that would be other samples.

    Raises:
        StateMismatchError: they have been, and batches of the state's epoch were received.
    """
    if loaded["batches"] and None not in (loaded["epoch"], epoch) and loaded["epoch"] != epoch:
        raise StateMismatchError(
            f"epoch: {loaded['epoch']} in the state, of which {loaded['batches']} batches were received, and the "
            f"sampler was told {epoch} since: call set_epoch({loaded['epoch']}), or load_state_dict({{}}) to begin "
            "anew",
            field="epoch",
        )


def _is_dealt_in_turn(loaded: StateDict) -> bool:
    """Whether, of map-style data, each batch k up to a state was worker k mod n's, and those that follow will be."""
    due, n = loaded["due"], max(1, loaded["num_workers"])
    batches = [known["batches"] for known in loaded["copies"]]
    turns = [len(range(worker, due, n)) for worker in range(n)]
    return not loaded["beyond"] and loaded["turn"] == due % n and batches == turns
