"""Operators that decide which samples occur in an epoch of a stream, and when."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.errors import OptionError
from headrace.ops.shuffle import EpochOperator, OrderOperator, PassOperator, Shuffle, Take


@dataclass(frozen=True, slots=True)
class Ordering:
    """The operators that decide which samples of the source occur in an epoch, and when.

    Attributes:
        operators: All of them, in order.
        one_pass: Those that apply to each pass over the samples separately.
        takes: Sample limits of `.take()` in each pass.
        takes_of_all: Sample limits of `.take()` over all passes together.
    """

    operators: tuple[OrderOperator, ...] = ()
    one_pass: tuple[PassOperator, ...] = ()
    shuffle: Shuffle | None = None
    passes: EpochOperator | None = None
    takes: tuple[int, ...] = ()
    takes_of_all: tuple[int, ...] = ()

    @property
    def by_numbers(self) -> PassOperator | None:
        """First operator that needs samples with numbers before they are read."""
        return next((operator for operator in self.one_pass if operator.needs_numbers), None)

    @property
    def is_fixed(self) -> bool:
        """True if repeated calls for the same epoch give the same order."""
        return all(operator.is_fixed for operator in self.one_pass)

    @property
    def is_steady(self) -> bool:
        """True if the order is the same in every epoch, whatever the seed."""
        return all(operator.is_steady for operator in self.operators)

    @property
    def is_shuffled_first(self) -> bool:
        return self.shuffle is not None and self.shuffle is self.one_pass[0]

    @property
    def most(self) -> int | None:
        """Maximum number of samples in an epoch, whatever the source has. None: not set."""
        samples = None if self.passes is None else self.passes.passes[1]
        bounds = [*self.takes_of_all, *(self.takes if self.passes is None else ())]
        return min([*bounds, *(() if samples is None else (samples,))], default=None)

    def check_as_read(self) -> None:
        """Raise OptionError if shards that are read sequentially do not support this order."""
        if self.shuffle is not None and self.shuffle.by in ("global", "within"):
            raise OptionError(
                f".shuffle(by={self.shuffle.by!r}) of shards without an index, or that are compressed: by='window' is "
                "what can be done, or make an index of plain ones: headrace index URL…, and hr.stream(…, index='auto')"
            )

    def described(self, shuffle: str) -> list[str]:
        """Return the names of the operators in a state, with `shuffle` for the shuffle."""
        return [shuffle if operator is self.shuffle else operator.in_state for operator in self.operators]


@dataclass(slots=True)
class OrderBuilder:
    """Builds an `Ordering` from operators that are added in order."""

    operators: list[OrderOperator] = field(default_factory=list)
    _one_pass: list[PassOperator] = field(default_factory=list)
    _shuffle: Shuffle | None = None
    _passes: EpochOperator | None = None
    _takes: list[int] = field(default_factory=list)
    _takes_of_all: list[int] = field(default_factory=list)

    @property
    def has_passes(self) -> bool:
        return self._passes is not None

    @property
    def has_only_shuffles(self) -> bool:
        """True if no operator so far selects samples."""
        return len(self.operators) == self.is_shuffled

    @property
    def is_shuffled(self) -> bool:
        return self._shuffle is not None

    def add(self, operator: PassOperator) -> None:
        self.operators.append(operator)
        self._one_pass.append(operator)

    def add_shuffle(self, operator: Shuffle) -> None:
        self._shuffle = operator
        self.add(operator)

    def add_take(self, samples: int) -> None:
        """Limit the samples: of each pass, or of all passes after `.repeat()` or `.epoch()`."""
        operator = Take(samples)
        if self.has_passes:
            self.operators.append(operator)
            self._takes_of_all.append(samples)
        else:
            self.add(operator)
            self._takes.append(samples)

    def add_passes(self, operator: EpochOperator) -> None:
        self.operators.append(operator)
        self._passes = operator

    def ordering(self) -> Ordering:
        return Ordering(
            tuple(self.operators),
            tuple(self._one_pass),
            self._shuffle,
            self._passes,
            tuple(self._takes),
            tuple(self._takes_of_all),
        )
