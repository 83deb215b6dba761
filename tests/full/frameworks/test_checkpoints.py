"""Runs that are saved and resumed in the frameworks' own ways: exactly the remaining samples come."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from full.frameworks.kinds import COUNT, DATA, Feed, loader_of
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


KINDS = pytest.mark.parametrize(
    ("kind", "workers"),
    [*((kind, 0) for kind in DATA), ("stream without a length", 2), ("torch", 2)],
)


class Model(lightning.LightningModule):
    """It notes what it is trained on; the checkpoint of each step is written by a callback."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        self.got: list[tuple[int, list[int]]] = []

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        self.got.append((self.current_epoch, batch.tolist()))
        return self.line(batch[:, None].float()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


class Several(Model):
    """It is given batches of several loaders."""

    def training_step(self, batches: list[torch.Tensor], number: int) -> torch.Tensor:
        self.got.append([batch.tolist() for batch in batches])  # type: ignore[arg-type]
        return self.line(batches[0][:, None].float()).square().mean()


def fit(loader: hr.DataLoader[Any], folder: Path, resume: Path | None = None, **every: int) -> list[Any]:
    model = Model()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    callback = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, **every)  # type: ignore[arg-type]
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=EPOCHS, callbacks=[callback], default_root_dir=folder, **quiet
    )
    trainer.fit(model, loader, ckpt_path=resume, weights_only=False)
    return model.got


@KINDS
def test_lightning_goes_on_with_what_is_left_when_it_resumes_at_any_step(
    kind: str, workers: int, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("kind", DATA)
def test_lightning_goes_on_with_the_next_epoch_when_it_resumes_at_the_end_of_one(kind: str, tmp_path: Path) -> None:
    """Lightning itself loads no state of a loader then."""
    with loader_of(kind, 0) as loader:
        whole = fit(loader, tmp_path, every_n_epochs=1)
    with loader_of(kind, 0) as loader:
        got = fit(loader, tmp_path / "again", tmp_path / f"step={STEPS}.ckpt", every_n_epochs=1)
    if kind == "torch":  # random numbers of torch that are not saved: other orders
        got, whole = ([(n, sorted(batch)) for n, batch in run] for run in (got, whole))
        for epoch in range(1, EPOCHS):
            assert sorted(k for n, batch in got if n == epoch for k in batch) == list(range(COUNT))
    else:
        assert got == whole[STEPS:]


def test_state_leaves_out_what_lightning_took_and_did_not_train_on_when_the_training_has_ended(tmp_path: Path) -> None:
    with loader_of("stream without a length", 0) as loader:
        expected = [batch.tolist() for batch in loader]
    with loader_of("stream without a length", 0) as loader:
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False
        )
        model = Model()
        trainer.fit(model, loader)
        assert [batch for _, batch in model.got] == expected[:2]
        state = loader.state_dict()
    with loader_of("stream without a length", 0) as loader:
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == expected[2:]


@pytest.mark.parametrize("options", [{"limit_train_batches": 3}, {"max_steps": 3}])
@pytest.mark.parametrize("kinds", [["stream without a length"], ["sized stream", "iterable"], ["iterable", "torch"]])
@pytest.mark.parametrize("mode", ["min_size", "max_size"])
def test_states_leave_out_what_lightning_did_not_train_on_when_it_goes_through_loaders_together(
    kinds: list[str], mode: str, options: dict[str, int]
) -> None:
    """The lengths of all loaders and the limits decide if it takes batches ahead."""
    with contextlib.ExitStack() as stack:
        torch.manual_seed(0)
        loaders = [stack.enter_context(loader_of(kind, 0)) for kind in kinds]
        given = CombinedLoader(loaders, mode)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            **options,
        )
        model = Several()
        trainer.fit(model, given)
        assert len(model.got) == 3
        for number, (kind, loader) in enumerate(zip(kinds, loaders, strict=True)):
            with loader_of(kind, 0) as other:
                other.load_state_dict(loader.state_dict())
                rest = [n for batch in other for n in batch.tolist()]
            got = [n for batches in model.got for n in batches[number]]
            assert sorted(got + rest) == list(range(COUNT)), kind


@pytest.fixture
def accelerator_of() -> Iterator[Callable[..., Accelerator]]:
    """Makes an Accelerator as a new process would; only the newest is in use."""
    made: list[Accelerator] = []

    def make(**options: Any) -> Accelerator:
        end()
        made.append(Accelerator(cpu=True, **options))
        return made[-1]

    def end() -> None:
        for accelerator in made:
            accelerator.free_memory()
            accelerator._custom_objects.clear()
        made.clear()
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    yield make
    end()


@pytest.mark.parametrize("registers", [False, True])
@KINDS
def test_accelerate_goes_on_with_what_is_left_when_its_state_is_loaded(
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


@pytest.mark.parametrize("kind", DATA)
def test_accelerate_goes_on_when_a_loop_was_left_and_its_state_was_taken_afterwards(
    kind: str, accelerator_of: Callable[..., Accelerator]
) -> None:
    loader = loader_of(kind, 0)
    prepared = prepare(accelerator_of(), loader)
    list(prepared)
    got = [batch.tolist() for _, batch in zip(range(2), prepared, strict=False)]
    states = [prepared.state_dict(), loader.state_dict()]
    assert states[0] == states[1]
    loader.close()
    loader = loader_of(kind, 0)
    prepared = prepare(accelerator_of(), loader)
    prepared.load_state_dict(states[0])
    rest = [batch.tolist() for batch in prepared]
    assert sorted(n for batch in got + rest for n in batch) == list(range(COUNT))
    assert prepared.iteration == 2
    loader.close()


def test_accelerate_saves_the_rest_of_a_run_when_a_loader_has_no_state_and_says_so(
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
def test_later_batches_come_when_first_ones_are_skipped_and_states_are_right(
    kind: str, accelerator_of: Callable[..., Accelerator]
) -> None:
    with loader_of(kind, 0) as loader:
        expected = [batch.tolist() for batch in loader]
    with loader_of(kind, 0) as loader:
        got = []
        for batch in skip_first_batches(prepare(accelerator_of(), loader), 2):
            got.append(batch.tolist())
            if len(got) == 2:
                state = loader.state_dict()
                break
        assert got == expected[2:4]
    with loader_of(kind, 0) as loader:
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in prepare(accelerator_of(), loader)] == expected[4:]


def test_batches_are_refused_when_accelerate_would_divide_them_once_more(
    accelerator_of: Callable[..., Accelerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = accelerator_of(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    batches: Any = torch.utils.data.DataLoader(Batches(loader_of("sized stream", 0)), batch_size=None)
    assert len(list(accelerator.prepare(batches))) == STEPS
    monkeypatch.setitem(accelerator.state._shared_state, "num_processes", 2)
    monkeypatch.setitem(type(accelerator.state)._shared_state, "num_processes", 2)
    from accelerate.state import PartialState

    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    with pytest.raises(hr.OptionError, match=r"once more.*integrations\.prepare"):
        iter(batches)
    gc.collect()


@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_state_warns_that_a_batch_may_be_lost_when_a_framework_has_renamed_what_is_known_of_it(
    framework: str, monkeypatch: pytest.MonkeyPatch, accelerator_of: Callable[..., Accelerator]
) -> None:
    with loader_of("stream without a length", 0) as loader:
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
