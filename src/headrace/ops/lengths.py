"""Validation of token counts given by users."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from headrace.errors import OptionError
from headrace.types import Ints

_TOKENS_MOST = 2**60


def checked_lengths(lengths: ArrayLike, call: str) -> Ints:
    """Return token counts as an int64 array.

    Args:
        call: The user's call, for errors.

    Raises:
        OptionError: Not a one-dimensional array of whole numbers, or negative, or too many tokens in total.
    """
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise OptionError(
            f"{call}: a whole number for each document is needed, and not an array of {given.dtype} of shape "
            f"{given.shape}"
        )
    if given.size and given.min() < 0:
        wrong = int(np.flatnonzero(given < 0)[0])
        raise OptionError(f"{call}: document {wrong} has {given[wrong]} tokens; 0 or more are meant")
    if given.astype(np.float64).sum() > _TOKENS_MOST:
        longest = int(given.argmax())
        raise OptionError(f"{call}: there are too many tokens; document {longest} has {given[longest]}")
    return given.astype(np.int64)
