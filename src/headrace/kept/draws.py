"""What makes random numbers, by its name: what is kept of such a step would be the same in every epoch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable

_TORCH = frozenset(
    {
        *("bernoulli", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like"),
        *("randn", "randn_like", "randperm"),
    }
)
_RNG = "headrace.work.randomness", "rng"
_IN_PLACE = frozenset({"bernoulli_", "cauchy_", "exponential_", "geometric_", "normal_", "random_", "uniform_"})
# What the code of libraries names that augment at random: torchvision's, kornia's, albumentations' and their like.
_NAMES = _TORCH | _IN_PLACE | {"default_rng", "shuffle", "randrange", "py_random"}
_GENERATORS = {
    ("random", "Random"),
    ("numpy.random", "RandomState"),
    ("numpy.random.mtrand", "RandomState"),
    ("numpy.random._generator", "Generator"),
    ("torch._C", "Generator"),
    ("torch", "Generator"),
}


def is_drawn_from(module: str, name: str) -> bool:
    """Whether what a library has under a name draws random numbers."""
    return (
        module in ("random", "numpy.random", "secrets")
        or (module == "torch" and name in _TORCH)
        or (module, name) in (_RNG, ("headrace", "rng"))
    )


def is_generator(kind: type) -> bool:
    """Whether objects of this type give random numbers."""
    return (kind.__module__, kind.__qualname__) in _GENERATORS


def drawn_in(names: Iterable[str]) -> str | None:
    """The first of the names in code that is a tensor's method for random numbers."""
    return next((name for name in names if name in _IN_PLACE), None)


@functools.cache
def drawn_by(kind: type) -> str | None:
    """What in the methods of a library's class sounds like random numbers; None: nothing does."""
    for base in kind.__mro__:
        if base.__module__.startswith("torch.nn.") or base.__module__.partition(".")[0] in sys.stdlib_module_names:
            continue  # layers draw their first weights
        for member in vars(base).values():
            code = getattr(getattr(member, "__func__", member), "__code__", None)
            found = next((name for name in code.co_names if name in _NAMES), None) if code is not None else None
            if found is not None:
                return f"{base.__qualname__}, which uses {found}"
    return None
