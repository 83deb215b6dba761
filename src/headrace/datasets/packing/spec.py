"""What is packed, and how: a value that is known before anything is read."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np

from headrace.datasets.pipeline import Pipeline
from headrace.datasets.planning import Planning
from headrace.datasets.stream import Stream
from headrace.errors import OptionError
from headrace.plan import draw
from headrace.plan.packs import BestFitPlan, Bins, ConcatPlan, PackPlan, Pieces, sequences
from headrace.types import Ints


@dataclass(frozen=True, eq=False)
class PackSpec:
    """How the documents of a stream become sequences.

    Attributes:
        stream: its samples are the documents.
        length: tokens of a sequence.
        method: "concat" or "best_fit".
        given: how many tokens each document has, by its number in the stream's source; None: the source knows it.
    """

    stream: Stream
    length: int
    method: str
    given: Ints | None

    def __getstate__(self) -> dict[str, object]:
        names = ("stream", "length", "method", "given")
        return {name: getattr(self, name) for name in names}  # what has been worked out from them is much larger

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        """The stream's."""
        return self.stream.pipeline()

    @property
    def is_shuffled(self) -> bool:
        """Whether documents come in another order in each pass."""
        return self.pipeline.order.shuffle is not None

    @functools.cached_property
    def lengths(self) -> Ints:
        """How many tokens each document has, by its number in the source.

        Raises:
            OptionError: there are not as many lengths as documents.
        """
        source = self.pipeline.source
        lengths = source.lengths() if self.given is None else self.given
        if len(lengths) != source.count():
            raise OptionError(f".pack(lengths=…): there are {len(lengths)} of them, and {source.count()} documents")
        return lengths

    @functools.cached_property
    def count(self) -> int:
        """How many sequences a pass has."""
        if self.method == "best_fit":
            return self._bins.count
        return sequences(int(self._lengths_of_pass.sum()), self.length)

    def pieces(self, sequence: int) -> Pieces:
        """What a sequence is made of, by the numbers of documents, where these come in the same order in each pass."""
        return numbered(self._plan.pieces(sequence), self.documents)

    @functools.cached_property
    def _plan(self) -> PackPlan:
        return self.planned(self._lengths_of_pass, 0)

    @functools.cached_property
    def documents(self) -> Ints | None:
        """The numbers of the documents in the order of the plan; None: they come as the source has them."""
        return self.documents_of(Planning(self.pipeline, 0), 0, 0)

    def documents_of(self, planning: Planning, epoch: int, number: int) -> Ints | None:
        """The numbers of the documents in the order of a pass; None: they come as the source has them."""
        if not self.pipeline.order.operators and not self.pipeline.keeps:
            return None
        order = planning.one_pass(epoch, number)
        numbers = planning.numbers(order, np.arange(order.count))
        return numbers.astype(np.int32) if len(self.lengths) < 2**31 else numbers

    def planned(self, lengths: Ints, key: int) -> PackPlan:
        """The sequences of documents that have these lengths, in their order.

        Args:
            key: of the order of sequences that has nothing to do with that of documents.
        """
        if self.method == "best_fit":
            return BestFitPlan(lengths, self.length, self._bins, draw("pack", self.length, key))
        return ConcatPlan(lengths, self.length)

    @property
    def described(self) -> str:
        """What states say of it."""
        return f"pack({self.length}, {self.method})"

    @functools.cached_property
    def fingerprint(self) -> str:
        """What tells these documents and their lengths from others."""
        digest = hashlib.blake2b(digest_size=8)
        for some in (self._lengths_of_pass, self._of_pass):
            digest.update(b"" if some is None else np.ascontiguousarray(some, "<i8").data)
        return digest.hexdigest()

    @functools.cached_property
    def _of_pass(self) -> Ints | None:
        """The numbers of the documents of any pass; None: all of them, as the source has them."""
        return self.pipeline.source.passing(self.pipeline.keeps) if self.is_shuffled else self.documents

    @property
    def _lengths_of_pass(self) -> Ints:
        return self.lengths if self._of_pass is None else self.lengths[self._of_pass]

    @functools.cached_property
    def _bins(self) -> Bins:
        return Bins(self._lengths_of_pass, self.length)


def numbered(pieces: Pieces, documents: Ints | None) -> Pieces:
    """The same of documents that are called by their numbers, of those at some positions."""
    return pieces if documents is None else pieces._replace(documents=documents[pieces.documents])
