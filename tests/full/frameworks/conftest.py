"""Tests of the loader inside training frameworks, run by `nox -s frameworks` alone.

That session installs the frameworks; the others do not, so pytest looks into this folder only where it is named on the
command line. A framework that cannot be imported there fails its tests: nothing is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

# Nothing is fetched from the hub, and nobody counts these runs.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = (config.invocation_params.dir / argument.partition("::")[0] for argument in config.args)
    return None if any(path.resolve().is_relative_to(HERE) for path in named) else True


@pytest.fixture(autouse=True)
def _one_process_without_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Frameworks read these from the environment, and write them there."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"):
        os.environ.pop(name, None)
    _reset_accelerate()


def _reset_accelerate() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def accelerator_of() -> Iterator[Callable[..., Any]]:
    """Makes an Accelerator as a new process would; only the newest is in use."""
    from accelerate import Accelerator

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
        _reset_accelerate()

    yield make
    end()


@pytest.fixture
def accelerator(accelerator_of: Callable[..., Any]) -> Any:
    return accelerator_of()
