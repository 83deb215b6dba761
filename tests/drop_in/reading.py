"""Batches and errors of loaders in a form that can be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tolist()
    if isinstance(value, Mapping):
        return type(value).__name__, [(key, plain(of)) for key, of in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [plain(of) for of in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, plain(vars(value))
    return type(value).__name__, value


def read_all(iterator: Iterator[Any], at_most: int = 100) -> list[Any]:
    """Each batch as Python lists, or the error that came in its place, until the iterator ends.

    An AssertionError where it has not ended after `at_most` of them.
    """
    got: list[Any] = []
    while len(got) < at_most:
        try:
            batch = next(iterator)
        except StopIteration:
            return got
        except Exception as error:
            got.append(error.with_traceback(None))  # else it is a cycle, and the iterator ends when that is collected
        else:
            got.append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
    raise AssertionError(f"no end after {at_most} batches: {got}")


def next_error(iterator: Iterator[Any]) -> Exception:
    try:
        batch = next(iterator)
    except StopIteration as error:
        raise AssertionError("no error, and no batch either") from error
    except Exception as error:
        return error.with_traceback(None)
    raise AssertionError(f"no error but {batch}")


def text_of(error: BaseException) -> str:
    told = [str(error), *getattr(error, "__notes__", [])]
    cause = error.__cause__
    return "\n".join(told if cause is None else [*told, text_of(cause)])


def causes_of(error: BaseException) -> list[BaseException]:
    cause = error.__cause__
    return [] if cause is None else [cause, *causes_of(cause)]
