"""Runs that are saved and resumed in the frameworks' own ways: exactly the remaining samples come."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.state import PartialState
from builders.loops import flat, lists
from full.frameworks.data import FEW, KINDS, Feed, loader_of
from full.frameworks.fitting import Model, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader

import headrace as hr
from headrace.integrations import Batches, prepare

pytestmark = [
    pytest.mark.timeout(300),  # a dozen trainings each
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:::pytorch_lightning"),
]
STEPS, EPOCHS = 5, 3


LOADERS = pytest.mark.parametrize(
    ("kind", "workers"), [*((kind, 0) for kind in KINDS), ("stream without a length", 2), ("torch", 2)]
)


def fit(loader: hr.DataLoader[Any], folder: Path, resume: Path | None = None, **every: int) -> list[Any]:
    """The batches of a training whose checkpoints are written by a callback, each with its epoch."""
    model = Model()
    callback = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **every)  # type: ignore[arg-type]
    options = {"enable_checkpointing": True, "callbacks": [callback], "default_root_dir": folder}
    trainer(max_epochs=EPOCHS, **options).fit(model, loader, ckpt_path=resume, weights_only=False)
    return list(zip(model.epochs, lists(model.batches), strict=True))


@LOADERS
def test_lightning_resumes_exactly_at_any_step(kind: str, workers: int, tmp_path: Path) -> None:
    """Also after the last step of an epoch, and if it takes a batch ahead."""
    with loader_of(kind, workers) as loader:
        whole = fit(loader, tmp_path, every_n_train_steps=1)
    assert len(whole) == STEPS * EPOCHS
    for step in (1, 3, STEPS, STEPS + 1, 2 * STEPS - 1, 2 * STEPS):
        torch.manual_seed(step)
        with loader_of(kind, workers) as loader:
            got = fit(loader, tmp_path / "again", tmp_path / f"step={step}.ckpt", every_n_train_steps=1)
        assert got == whole[step:], f"resumed after step {step}"
        with loader_of(kind, workers) as loader:  # and from what the resumed run has saved
            last = tmp_path / "again" / f"step={step + 1}.ckpt"
            assert fit(loader, tmp_path / "third", last, every_n_train_steps=100) == whole[step + 1 :]


@pytest.mark.parametrize("kind", KINDS)
def test_lightning_resumes_with_the_next_epoch_at_the_end_of_one(kind: str, tmp_path: Path) -> None:
    """Lightning itself loads no state of a loader then."""
    with loader_of(kind) as loader:
        whole = fit(loader, tmp_path, every_n_epochs=1)
    with loader_of(kind) as loader:
        got = fit(loader, tmp_path / "again", tmp_path / f"step={STEPS}.ckpt", every_n_epochs=1)
    if kind == "torch":  # random numbers of torch that are not saved: other orders
        got, whole = ([(n, sorted(batch)) for n, batch in run] for run in (got, whole))
        for epoch in range(1, EPOCHS):
            assert sorted(k for n, batch in got if n == epoch for k in batch) == list(range(FEW))
    else:
        assert got == whole[STEPS:]


def test_state_excludes_batches_lightning_prefetched(tmp_path: Path) -> None:
    with loader_of("stream without a length") as loader:
        expected = lists(loader)
    with loader_of("stream without a length") as loader:
        model = Model()
        trainer(max_steps=2).fit(model, loader)
        assert lists(model.batches) == expected[:2]
        state = loader.state_dict()
    with loader_of("stream without a length") as loader:
        loader.load_state_dict(state)
        assert lists(loader) == expected[2:]


@pytest.mark.parametrize("options", [{"limit_train_batches": 3}, {"max_steps": 3}])
@pytest.mark.parametrize("kinds", [["stream without a length"], ["sized stream", "iterable"], ["iterable", "torch"]])
@pytest.mark.parametrize("mode", ["min_size", "max_size"])
def test_states_of_combined_loaders_exclude_prefetched_batches(
    kinds: list[str], mode: str, options: dict[str, int]
) -> None:
    """The lengths of all loaders and the limits decide if it takes batches ahead."""
    with contextlib.ExitStack() as stack:
        torch.manual_seed(0)
        loaders = [stack.enter_context(loader_of(kind)) for kind in kinds]
        model = Model()
        trainer(max_epochs=1, **options).fit(model, CombinedLoader(loaders, mode))
        assert len(model.batches) == 3
        for number, (kind, loader) in enumerate(zip(kinds, loaders, strict=True)):
            with loader_of(kind) as other:
                other.load_state_dict(loader.state_dict())
                rest = flat(lists(other))
            got = [n for batches in model.batches for n in batches[number].tolist()]
            assert sorted(got + rest) == list(range(FEW)), kind


@pytest.mark.parametrize("registers", [False, True])
@LOADERS
def test_accelerate_resumes_exactly_from_its_state(
    kind: str, workers: int, registers: bool, tmp_path: Path, accelerator_of: Callable[..., Accelerator]
) -> None:
    """By `save_state` alone, and by `register_for_checkpointing`."""

    def begin() -> tuple[Accelerator, Any, Any]:
        accelerator = accelerator_of()
        loader = loader_of(kind, workers)
        prepared = prepare(accelerator, loader)
        accelerator._dataloaders = [] if registers else accelerator._dataloaders
        if registers:
            accelerator.register_for_checkpointing(loader)
        return accelerator, prepared, loader

    accelerator, prepared, loader = begin()
    whole = []
    for _ in range(EPOCHS):
        for batch in prepared:
            whole.append(batch.tolist())
            accelerator.save_state(str(tmp_path / str(len(whole))))
    accelerator.save_state(str(tmp_path / "end"))
    loader.close()
    for step in (1, 3, STEPS, STEPS + 1, 2 * STEPS - 1, 2 * STEPS):
        torch.manual_seed(step)
        accelerator, prepared, loader = begin()
        accelerator.load_state(str(tmp_path / str(step)))
        epochs = EPOCHS - step // STEPS
        assert [batch.tolist() for _ in range(epochs) for batch in prepared] == whole[step:], f"after step {step}"
        loader.close()


@pytest.mark.parametrize("kind", KINDS)
def test_accelerate_resumes_after_a_loop_was_left(kind: str, accelerator_of: Callable[..., Accelerator]) -> None:
    loader = loader_of(kind)
    prepared = prepare(accelerator_of(), loader)
    list(prepared)
    got = [batch.tolist() for _, batch in zip(range(2), prepared, strict=False)]
    states = [prepared.state_dict(), loader.state_dict()]
    assert states[0] == states[1]
    loader.close()
    loader = loader_of(kind)
    prepared = prepare(accelerator_of(), loader)
    prepared.load_state_dict(states[0])
    rest = lists(prepared)
    assert sorted(n for batch in got + rest for n in batch) == list(range(FEW))
    assert prepared.iteration == 2
    loader.close()


def test_accelerate_saves_a_run_whose_loader_has_no_state(
    tmp_path: Path, accelerator_of: Callable[..., Accelerator], caplog: pytest.LogCaptureFixture
) -> None:
    class Silent(Feed):
        state_dict = None  # type: ignore[assignment]

    accelerator = accelerator_of()
    with hr.DataLoader(Silent(), batch_size=2) as loader:
        next(iter(prepare(accelerator, loader)))
        accelerator.save_state(str(tmp_path))
    assert "place in its data is not saved: Silent gives no state" in caplog.text
    accelerator = accelerator_of()
    with hr.DataLoader(Silent(), batch_size=2) as loader:
        prepared = prepare(accelerator, loader)
        accelerator.load_state(str(tmp_path))
        assert "starts a new epoch" in caplog.text
        assert len(list(prepared)) == STEPS


@pytest.mark.parametrize("kind", ["sized stream", "stream without a length"])
def test_states_are_right_after_skipped_batches(kind: str, accelerator_of: Callable[..., Accelerator]) -> None:
    with loader_of(kind) as loader:
        expected = lists(loader)
    with loader_of(kind) as loader:
        got = []
        for batch in skip_first_batches(prepare(accelerator_of(), loader), 2):
            got.append(batch.tolist())
            if len(got) == 2:
                state = loader.state_dict()
                break
        assert got == expected[2:4]
    with loader_of(kind) as loader:
        loader.load_state_dict(state)
        assert lists(prepare(accelerator_of(), loader)) == expected[4:]


def test_batches_are_refused_when_accelerate_would_divide_them_once_more(
    accelerator_of: Callable[..., Accelerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = accelerator_of(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    batches: Any = torch.utils.data.DataLoader(Batches(loader_of("sized stream")), batch_size=None)
    assert len(list(accelerator.prepare(batches))) == STEPS
    monkeypatch.setitem(accelerator.state._shared_state, "num_processes", 2)
    monkeypatch.setitem(type(accelerator.state)._shared_state, "num_processes", 2)
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    with pytest.raises(hr.OptionError, match=r"once more.*integrations\.prepare"):
        iter(batches)
    gc.collect()


@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_state_warns_after_a_framework_renamed_its_loop(
    framework: str, monkeypatch: pytest.MonkeyPatch, accelerator_of: Callable[..., Accelerator]
) -> None:
    with loader_of("stream without a length") as loader:
        if framework == "lightning":
            monkeypatch.delattr(lightning.pytorch.loops.fetchers, "_DataFetcher")
            fetcher = lightning.pytorch.loops.fetchers._PrefetchDataFetcher()
            fetcher.setup(CombinedLoader(loader))
            batches: Any = iter(fetcher)
        else:
            prepared = prepare(accelerator_of(), loader)
            monkeypatch.delattr(accelerate.data_loader, "DataLoaderShard")
            batches = iter(prepared)
        next(batches)
        with pytest.warns(RuntimeWarning, match=rf"{framework}.* iterates over .* state_dict\(batches=n\)"):
            loader.state_dict()
        del batches
