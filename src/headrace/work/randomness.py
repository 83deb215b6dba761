"""Random numbers that depend on (seed, epoch, position) alone, whichever worker makes the sample."""

from __future__ import annotations

import random
import threading

import numpy as np

_MASK = 2**64 - 1


class _Current(threading.local):
    def __init__(self) -> None:
        self.bits: np.random.Philox | None = None
        self.generator: np.random.Generator | None = None
        self.key: tuple[int, int] | None = None


_current = _Current()


def rng() -> np.random.Generator:
    """The random generator of the sample that is being made.

    Its numbers depend on the loader's seed, the epoch and the sample's position in the epoch, and on nothing else: they
    are the same for any number of workers. Outside a loader it is seeded by the system, once for each thread.

    Examples:
        >>> import headrace as hr
        >>> def flip(image):
        ...     return image[:, ::-1] if hr.rng().random() < 0.5 else image
    """
    if _current.generator is None:
        _current.bits = np.random.Philox()
        _current.generator = np.random.Generator(_current.bits)
    if _current.key is not None:
        key, position = _current.key
        assert _current.bits is not None
        _current.bits.state = {
            "bit_generator": "Philox",
            "state": {
                "counter": np.zeros(4, np.uint64),
                "key": np.array([key & _MASK, position & _MASK], np.uint64),
            },
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        _current.key = None
    return _current.generator


def begin_sample(key: int, position: int, *, everywhere: bool) -> None:
    """Set the generators for the sample at `position` of the epoch whose key is `key`.

    Args:
        everywhere: set Python's, numpy's and torch's global generators too. Only in a process of our own: in the
            trainer's they are the trainer's.
    """
    _current.key = (key, position)
    if everywhere:
        seed = (key ^ (position * 0x9E3779B97F4A7C15)) & _MASK
        seed = ((seed ^ (seed >> 31)) * 0xBF58476D1CE4E5B9) & _MASK
        import torch

        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 (users' functions draw from it)
