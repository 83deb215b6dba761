"""Base of torch iterators that resume from a saved state."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from headrace.errors import StateMismatchError
from headrace.torch_compat.stateful import Indices, is_stateful
from headrace.torch_compat.torch_loader import TorchLoader
from headrace.torch_compat.tracebacks import trimming
from headrace.torch_compat.worker_info import seeded
from headrace.torch_regime.state import (
    RunPoint,
    RunProgress,
    SnapshotBook,
    StateDict,
    WorkerSnapshot,
    common,
    copy_of,
    epoch_of,
)


class ResumableIterator(_BaseDataLoaderIter):
    """A torch iterator that resumes from a saved state and reports its progress to the loader.

    `_again` has (number, index) of the batches received after the saved state of the data set.

    torch's draws happen where torch makes them. A resumed iterator repeats no draw made before the state. A state of a
    finished run starts the next one. Only persistent workers carry more into it than the sampler's state.
    """

    @property
    def is_over(self) -> bool:
        """True if persistent workers were closed, so that a next run needs new ones."""
        return False

    def _prepare(self, loader: TorchLoader[object], snapshots: SnapshotBook) -> None:
        """Initialize before `__init__`, which torch's classes call with the loader only."""
        self._snapshots, self._loaded, self._draws = snapshots, snapshots.take(), snapshots.draws_of(loader)
        self._common = common(loader)
        self._goes_on = self._loaded is not None and not self._loaded["is_finished"]
        if self._loaded is not None and self._goes_on:
            _check_epoch(self._loaded, self._common["epoch"])
        every = loader.snapshot_every_n_steps
        if self._common["is_map"] and not self._common["economic"] and is_stateful(loader.dataset):
            is_in_turn = loader.in_order or not loader.num_workers
            if self._loaded is not None and self._goes_on:
                is_in_turn = is_in_turn and _is_dealt_in_turn(self._loaded)
            if not is_in_turn:
                every = 1  # it is unknown which batches a copy must make again
        self._pace = snapshots.pace
        self._every = functools.partial(snapshots.pace.every, every)  # must not refer to the iterator

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

    def _open_data(self) -> None: ...

    def _reset(self, loader: DataLoader[object], first_iter: bool = False) -> None:
        before = self._draws.sampler.now()
        with self._draws.kept() if self._goes_on else self._draws.sampler.drawing():
            super()._reset(loader, first_iter)
        self._common["epoch"] = epoch_of(loader)
        self._open_run(before)

    def _open_run(self, before: torch.Tensor) -> None:
        """Start the progress of a run. `before` is the sampler's random state before `iter`."""
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
        self.run = self._snapshots.run = RunProgress(self._common.copy(), indices, self._draws, point)

    def __next__(self) -> Any:
        this: Any = self
        length = this._IterableDataset_len_called
        with trimming:
            if torch._C._autograd._profiler_enabled() or (length is not None and self._num_yielded >= length):
                return super().__next__()  # warns of more batches than `len`
            batch = this._next_data()  # without torch's profiler mark, which takes longer than the rest
        self._num_yielded += 1
        return batch

    def _first_copies(self) -> tuple[WorkerSnapshot, ...]:
        """Return the initial snapshots of workers' data sets, or the trainer's. Empty if unused."""
        return ()

    def _has_begun(self) -> None:
        """Drop the loaded state: it is restored, and the next iterator must not use it."""
        if self._loaded is self._snapshots.loaded:
            self._snapshots.loaded = None
        self._loaded, self._goes_on = None, False

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        self._pace.is_asked = True
        return {**self.run.state(batches)}


def _check_epoch(loaded: StateDict, epoch: int | None) -> None:
    """Raise StateMismatchError if samplers left the epoch of a partly received state."""
    if loaded["batches"] and None not in (loaded["epoch"], epoch) and loaded["epoch"] != epoch:
        raise StateMismatchError(
            f"epoch: {loaded['epoch']} in the state, with {loaded['batches']} received batches, and the sampler's was "
            f"set to {epoch} since: call set_epoch({loaded['epoch']}), or load_state_dict({{}}) for a new start",
            field="epoch",
        )


def _is_dealt_in_turn(loaded: StateDict) -> bool:
    """True if map-style batch k was and will be made by worker k mod n."""
    due, n = loaded["due"], max(1, loaded["num_workers"])
    batches = [known["batches"] for known in loaded["copies"]]
    turns = [len(range(worker, due, n)) for worker in range(n)]
    return not loaded["beyond"] and loaded["turn"] == due % n and batches == turns
