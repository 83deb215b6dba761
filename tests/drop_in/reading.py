"""Batches and errors of loaders in a form that can be compared."""

from collections.abc import Iterator
from typing import Any

import torch


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
