"""What is done to samples that are given on one by one, in the place of collation."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.data import default_convert

from headrace.functions import as_it_is
from headrace.torch_compat.packed_each import is_data


class Single:
    """Collation where there is none: the function of the only sample."""

    def __init__(self, function: Callable[[object], object]) -> None:
        self.function = function

    def __call__(self, samples: list[object]) -> object:
        return self.function(samples[0])


def of_single(function: Callable[[object], object]) -> Single | None:
    """What does it to a list with the only sample; None: nothing is done."""
    return None if function is as_it_is else Single(function)


def unchanged_by(collate: Callable[[list[object]], object] | None) -> Callable[[object], bool] | None:
    """What tells of a sample whether it stays as it is; None: nobody can tell."""
    return _is_unchanged if isinstance(collate, Single) and collate.function is default_convert else None


def _is_unchanged(sample: object) -> bool:
    """Whether torch's default conversion gives a sample back as it is."""
    return is_data(sample, (dict, list))
