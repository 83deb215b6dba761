"""Notes on exceptions of user functions about their origin."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from headrace._util.context import divided
from headrace.errors import CollateError, StageError, masked, printable
from headrace.torch_compat.collate_by_torch import collate_by_torch, why_no_batch
from headrace.workers.failures import Origin, shown
from headrace.workers.tasks import Step

_FORMS_MOST = 400  # characters


def note_origin(
    error: BaseException, step: Step, sample: object, position: int, worker: int | None, key: object = None
) -> Origin:
    url: object = None
    if key is None:
        key, url = _names(sample)
    address = "" if url is None else printable(masked(str(url)))
    key_text = "" if key is None else shown(key)
    origin = Origin(step.name, divided(position)[0], key_text, address, worker, passed=step.passed)
    with contextlib.suppress(Exception):
        error.add_note(origin.note)
    if isinstance(error, StageError) and error.key is None:
        error.key = key
    return origin


def collate_error(error: BaseException, function: object, samples: Sequence[object], batch: int) -> BaseException:
    """Add the batch to an error. Errors of default_collate become CollateErrors."""
    keys = [key for key in (key_of(s) for s in samples[:1]) if key is not None]
    if isinstance(error, CollateError):
        error.batch = batch
    elif function is collate_by_torch:
        if (why := why_no_batch(samples)) is None:
            forms = "; ".join(sorted({_form(sample) for sample in samples})[:4])
            forms = forms if len(forms) <= _FORMS_MOST else forms[: _FORMS_MOST - 1] + "…"
            why = f"{error}. Their forms: {forms}. Give them one shape, or give a collate_fn"
        made = CollateError(
            f"the samples of batch {batch} do not make a batch: {why}",
            stage="collate",
            batch=batch,
            key=keys[0] if keys else None,
        )
        made.__cause__ = error
        return made
    error.add_note(f"stage: collate; batch {batch}" + (f", whose first key is {keys[0]!r}" if keys else ""))
    return error


def _form(sample: object) -> str:
    if isinstance(sample, dict):
        return "{" + ", ".join(f"{k!r}: {_form(v)}" for k, v in sample.items()) + "}"
    if isinstance(sample, tuple | list):
        return "(" + ", ".join(_form(v) for v in sample) + ")"
    shape = getattr(sample, "shape", None)
    return f"{type(sample).__name__}{list(shape)}" if shape is not None else type(sample).__name__


def key_of(sample: object) -> object:
    return _names(sample)[0]


def _names(sample: object) -> tuple[object, object]:
    return (sample.get("__key__"), sample.get("__url__")) if isinstance(sample, dict) else (None, None)
