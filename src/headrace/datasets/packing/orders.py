"""The orders of packed sequences, and their content if documents are shuffled in each pass."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headrace.datasets.faces import HasKeys
from headrace.datasets.packing.spec import PackSpec, numbered
from headrace.datasets.planning import Planning
from headrace.datasets.source import SampleSource, SourceOrders
from headrace.errors import OptionError
from headrace.plan import Order, Places, draw
from headrace.plan.order import sequential_end
from headrace.plan.packs import PackPlan, Pieces
from headrace.types import Ints

_PASSES = 2**20  # maximum passes in an epoch with numbered sequences
_NUMBERS = 2**62


@dataclass(frozen=True, slots=True)
class PackedKey:
    """A sequence of a pass, and its pieces."""

    sequence: int
    pieces: Pieces

    def __repr__(self) -> str:
        return f"sequence {self.sequence}"


class PackOrders(SourceOrders):
    """The orders of sequences.

    If documents are shuffled, sequences differ in each pass, and the number of a sequence includes its pass.
    """

    def __init__(self, source: SampleSource, spec: PackSpec, planning: Planning, seed: int) -> None:
        super().__init__(source, ())
        self._spec, self._documents, self._seed = spec, planning, seed
        self._planned: dict[int, tuple[PackPlan, Ints | None]] = {}  # by pass; at most two

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_planned": {}}

    @property
    def count(self) -> int:
        return self._spec.count

    @cached_property
    def sizes(self) -> Ints:
        return np.array([self._spec.count])

    @property
    def fingerprint(self) -> str:
        known = f"{self._documents.fingerprint} {self._spec.fingerprint}"
        return hashlib.blake2b(known.encode(), digest_size=8).hexdigest()

    def described(self) -> list[str]:
        return [*(f"documents: {line}" for line in self._documents.described()), self._spec.described]

    def order(self, epoch: int, number: int) -> Order:
        if not self._spec.is_shuffled:
            return PackedOrder(self.count, 0)
        first = (epoch * _PASSES + number) * self.count
        if number >= _PASSES or first > _NUMBERS - self.count:
            raise OptionError(
                f"epoch {epoch}, pass {number}: sequences of shuffled documents have no more numbers; put .shuffle() "
                "behind .pack()"
            )
        return PackedOrder(self.count, first)

    def keys(self, keys: Sequence[object]) -> HasKeys:
        return _KeysOfPasses(self) if self._spec.is_shuffled else keys

    def work(self, numbers: Ints, power: int) -> NDArray[np.float64]:
        of_key = self.key if self._spec.is_shuffled else self._key
        pieces = [of_key(number).pieces for number in numbers.tolist()]
        return np.array([((some.stops - some.starts).astype(np.float64) ** power).sum() for some in pieces])

    def _key(self, number: int) -> PackedKey:
        return PackedKey(number, self._spec.pieces(number))

    def key(self, number: int) -> PackedKey:
        """Return the sequence with a number, if documents are shuffled."""
        turn, sequence = divmod(number, self.count)
        if turn not in self._planned:
            documents = self._spec.documents_of(self._documents, *divmod(turn, _PASSES))
            lengths = self._spec.lengths if documents is None else self._spec.lengths[documents]
            plan = self._spec.planned(lengths, draw(self._seed, turn))
            self._planned = {**dict(list(self._planned.items())[-1:]), turn: (plan, documents)}
        plan, documents = self._planned[turn]
        return PackedKey(sequence, numbered(plan.pieces(sequence), documents))


class PackedOrder:
    """The sequences of a pass in order, numbered from `first`."""

    lanes = 1

    def __init__(self, count: int, first: int) -> None:
        self.count, self._first = count, first

    def locate(self, positions: Ints) -> Places:
        return Places(np.zeros(len(positions), np.int64), self._first + np.asarray(positions, np.int64))

    def window_end(self, position: int) -> int:
        return sequential_end(position)


class _KeysOfPasses:
    def __init__(self, orders: PackOrders) -> None:
        self._orders = orders

    def __getitem__(self, number: int) -> PackedKey:
        return self._orders.key(number)
