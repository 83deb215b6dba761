"""Killed and resumed runs, compared with an uninterrupted one."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from builders.loops import saved
from end_to_end.state.sources import rows

import headrace as hr

EPOCHS = 2
QUICK = hr.Fetch(attempts=1, backoff_s=0.0)


@dataclass
class Case:
    """A loader that a test starts, kills and resumes.

    Attributes:
        data: Makes the data set, as a new process would.
        random_kept: True if samples draw the same random numbers wherever the run is interrupted.
        workers: Numbers of workers to choose from.
        errors: Types of errors in place of batches.
        is_timed: True if time cuts the batches, so that only samples and their order are the same.
    """

    name: str
    data: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)
    random_kept: bool = True
    workers: tuple[int, ...] = (0,)
    errors: frozenset[str] = frozenset()
    is_timed: bool = False

    def parts(self, batches: list[Any]) -> list[Any]:
        return [sample for batch in batches for sample in batch] if self.is_timed else batches

    @property
    def in_order(self) -> bool:
        return bool(self.options.get("in_order", True))

    def loader(self, rng: random.Random, **more: Any) -> hr.DataLoader[Any]:
        settings = {
            "num_workers": rng.choice(self.workers),
            "fetch": replace(QUICK, concurrency=rng.choice([1, 3, 64, "auto"])),
            "prefetch_factor": rng.choice([None, 0, 1, 5]),
            "timeout": 30,
        }
        return hr.DataLoader(self.data(), **{**settings, **self.options, **more})


def take(batches: Any) -> Any:
    """The next batch, or the error in its place; None at the end."""
    try:
        return next(batches)
    except StopIteration:
        return None
    except Exception as error:
        if "timed out" in str(error):
            raise
        return error


def epoch_of(loader: Any) -> list[Any]:
    batches, got = iter(loader), []
    while (batch := take(batches)) is not None:
        got.append(rows(batch))
    return got


def uninterrupted(case: Case, rng: random.Random) -> list[list[Any]]:
    with case.loader(rng) as loader:
        epochs = [epoch_of(loader) for _ in range(EPOCHS)]
    errors = {batch[0] for batches in epochs for batch in batches if batch and isinstance(batch[0], str)}
    assert errors <= case.errors, f"{case.name}: {errors}"
    return epochs


def interrupted(case: Case, rng: random.Random, expected: list[list[Any]], kills: int) -> tuple[list[list[Any]], int]:
    """(what each epoch gives, how many resumes there were) of a run that is killed several times."""
    got: list[list[Any]] = [[] for _ in range(EPOCHS)]
    epoch, state, resumes = 0, None, 0
    while epoch < EPOCHS:
        with case.loader(rng) as loader:
            if state is not None:
                loader.load_state_dict(state)
                resumes += 1
            assert loader.epoch == epoch, f"{case.name}: epoch {loader.epoch}, not {epoch}"
            left = len(case.parts(expected[epoch])) - len(case.parts(got[epoch]))
            most = rng.choice([0, 1, left, left + 1, rng.randint(0, max(0, left))]) if kills > 0 else left + 9
            kills -= 1
            batches = iter(loader)
            outcome: Any = ()
            for _ in range(most):
                outcome = take(batches)
                if outcome is None:
                    epoch += 1
                    break
                got[epoch].append(rows(outcome))
            if isinstance(outcome, Exception):
                got[epoch].pop()  # an error repeats unless the next batch was requested
            state = saved(loader)
        if kills < -3:
            break  # more comes than should
    return got, resumes


def assert_same(case: Case, expected: list[list[Any]], got: list[list[Any]]) -> None:
    """The interrupted run has given what the other one has."""
    for number, (wanted, found) in enumerate(zip(expected, got, strict=True)):
        if case.in_order:
            assert case.parts(found) == case.parts(wanted), f"{case.name}: epoch {number}"
        else:
            assert tally(case, found) == tally(case, wanted), f"{case.name}: epoch {number}"


def tally(case: Case, batches: list[Any]) -> Counter[Any]:
    samples = [sample for batch in batches for sample in batch]
    return Counter(samples if case.random_kept else [sample[:2] for sample in samples])
