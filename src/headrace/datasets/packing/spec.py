"""Specification of planned packing, known before documents are read."""

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
        length: Tokens of a sequence.
        given: Token count of each document, by its number in the stream's source. None: the source knows it.
    """

    stream: Stream
    length: int
    method: str
    given: Ints | None

    def __getstate__(self) -> dict[str, object]:
        names = ("stream", "length", "method", "given")
        return {name: getattr(self, name) for name in names}  # omit cached properties, which are much larger

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        return self.stream.pipeline()

    @property
    def is_shuffled(self) -> bool:
        return self.pipeline.order.shuffle is not None

    @functools.cached_property
    def lengths(self) -> Ints:
        """Token count of each document, by its number in the source.

        Raises:
            OptionError: The number of lengths differs from that of documents.
        """
        source = self.pipeline.source
        lengths = source.lengths() if self.given is None else self.given
        if len(lengths) != source.count():
            raise OptionError(f".pack(lengths=…): there are {len(lengths)} of them, and {source.count()} documents")
        return lengths

    @functools.cached_property
    def count(self) -> int:
        """Number of sequences in a pass."""
        if self.method == "best_fit":
            return self._bins.count
        return sequences(int(self._lengths_of_pass.sum()), self.length)

    def pieces(self, sequence: int) -> Pieces:
        """Return the document parts of a sequence, if all passes have the same order."""
        return numbered(self._plan.pieces(sequence), self.documents)

    @functools.cached_property
    def _plan(self) -> PackPlan:
        return self.planned(self._lengths_of_pass, 0)

    @functools.cached_property
    def documents(self) -> Ints | None:
        """Document numbers in the order of the plan. None: all, in the source's order."""
        return self.documents_of(Planning(self.pipeline, 0), 0, 0)

    def documents_of(self, planning: Planning, epoch: int, number: int) -> Ints | None:
        """Return the document numbers in the order of a pass. None: all, in the source's order."""
        if not self.pipeline.order.operators and not self.pipeline.keeps:
            return None
        order = planning.one_pass(epoch, number)
        numbers = planning.numbers(order, np.arange(order.count))
        return numbers.astype(np.int32) if len(self.lengths) < 2**31 else numbers

    def planned(self, lengths: Ints, key: int) -> PackPlan:
        """Plan sequences of documents with these lengths. `key` is the seed of the sequences' order."""
        if self.method == "best_fit":
            return BestFitPlan(lengths, self.length, self._bins, draw("pack", self.length, key))
        return ConcatPlan(lengths, self.length)

    @property
    def described(self) -> str:
        return f"pack({self.length}, {self.method})"

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of the documents and their lengths."""
        digest = hashlib.blake2b(digest_size=8)
        for some in (self._lengths_of_pass, self._of_pass):
            digest.update(b"" if some is None else np.ascontiguousarray(some, "<i8").data)
        return digest.hexdigest()

    @functools.cached_property
    def _of_pass(self) -> Ints | None:
        """Numbers of the documents in any pass. None: all, in the source's order."""
        return self.pipeline.source.passing(self.pipeline.keeps) if self.is_shuffled else self.documents

    @property
    def _lengths_of_pass(self) -> Ints:
        return self.lengths if self._of_pass is None else self.lengths[self._of_pass]

    @functools.cached_property
    def _bins(self) -> Bins:
        return Bins(self._lengths_of_pass, self.length)


def numbered(pieces: Pieces, documents: Ints | None) -> Pieces:
    return pieces if documents is None else pieces._replace(documents=documents[pieces.documents])
