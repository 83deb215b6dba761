"""Assembly of a sequence of tokens from documents, in the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace._util.check import array_of, holds
from headrace.types import Ints

Tokens = NDArray[Any]


class DocumentPart(NamedTuple):
    """Tokens [start, stop) of a document that has `whole` tokens.

    If `whole` is None, `sample` has only the part.
    """

    number: int
    start: int
    stop: int
    whole: int | None
    sample: Any


@dataclass(frozen=True, slots=True)
class PackStep:
    """Makes a sequence of parts of documents.

    Attributes:
        tokens: Field with the tokens.
        fields: Other fields with a value per token.
        has_ids: True if sequences have `document_ids` and `position_ids`.
        steps: Named steps for each document.
    """

    length: int
    tokens: str
    fields: tuple[str, ...]
    pads: Mapping[str, float]
    has_ids: bool
    steps: tuple[tuple[str, Callable[[Any], Any]], ...]

    def __call__(self, pieces: Sequence[tuple[int, int, int, int | None, Any]]) -> dict[str, Tokens]:
        """Make a sequence of `DocumentPart`s, or of equal tuples."""
        parts: dict[str, list[Tokens]] = {name: [] for name in (self.tokens, *self.fields)}
        for piece in map(DocumentPart._make, pieces):
            try:
                self._take(piece, parts)
            except Exception as error:
                error.add_note(f"document {piece.number}")
                raise
        made = {name: self._joined(name, some) for name, some in parts.items()}
        if self.has_ids:
            made |= self._ids(np.array([stop - start for _, start, stop, _, _ in pieces], np.int64))
        return made

    def count(self, document: object) -> int:
        """Return the token count of a document.

        Raises:
            ValueError: Another field has a different length.
        """
        sizes = {name: len(self._values(document, name)) for name in (self.tokens, *self.fields)}
        if len(set(sizes.values())) > 1:
            raise ValueError(f".pack(): the fields of a document have different lengths: {sizes}")
        return sizes[self.tokens]

    def _take(self, piece: DocumentPart, parts: dict[str, list[Tokens]]) -> None:
        """Apply the steps to a document, and append its part to `parts`."""
        sample = piece.sample
        for name, function in self.steps:
            try:
                sample = function(sample)
            except Exception as error:
                error.add_note(f"stage: {name}")
                raise
        whole = piece.whole
        shift = piece.start if whole is None else 0
        count = piece.stop - piece.start if whole is None else whole
        for name, some in parts.items():
            values = self._values(sample, name)
            if len(values) != count:
                what = "has" if whole is not None else "was cut to"
                raise ValueError(
                    f"field {name!r} of document {piece.number} has {len(values)} values, and the document {what} "
                    f"{count} tokens by the lengths that it was packed by: these are of other data, or a step before "
                    ".pack() changes how many there are"
                )
            some.append(values[piece.start - shift : piece.stop - shift])

    def _values(self, sample: Any, name: str) -> Tokens:
        if not hasattr(sample, "keys") or name not in sample:
            have = ", ".join(map(str, sample)) if hasattr(sample, "keys") else f"it is a {type(sample).__name__}"
            argument = f"tokens={name!r}" if name == self.tokens else f"fields={self.fields!r}"
            raise KeyError(f".pack({argument}): a document has no field {name!r}; it has: {have}")
        values, kinds = array_of(sample[name]), "iu" if name == self.tokens else "iufb"
        if values.ndim != 1 or (values.size and values.dtype.kind not in kinds):  # an empty list has no dtype
            kind = "whole numbers" if name == self.tokens else "numbers"
            raise TypeError(
                f"field {name!r} is an array of {values.dtype} of shape {values.shape}: {kind} in one dimension are "
                "needed"
            )
        return values

    def _joined(self, name: str, parts: Sequence[Tokens]) -> Tokens:
        dtype = parts[0].dtype
        for part in parts:
            if part.dtype != dtype:
                raise TypeError(f"field {name!r} is of {dtype} in one document, and of {part.dtype} in another")
        pad = self.pads.get(name, 0)
        if not holds(dtype.name, pad, np.finfo(dtype).max if dtype.kind == "f" else 0):
            raise ValueError(f".pack(pad_value=…): field {name!r} is of {dtype}, which cannot hold {pad}")
        joined = np.full(self.length, pad, dtype)
        np.concatenate(parts, out=joined[: sum(map(len, parts))])
        return joined

    def _ids(self, sizes: Ints) -> dict[str, Tokens]:
        left = self.length - int(sizes.sum())
        ids, firsts = np.arange(len(sizes)), np.cumsum(sizes) - sizes
        if left:
            ids, sizes, firsts = np.append(ids, -1), np.append(sizes, left), np.append(firsts, self.length - left)
        return {
            "document_ids": np.repeat(ids, sizes).astype(np.int32),
            "position_ids": (np.arange(self.length) - np.repeat(firsts, sizes)).astype(np.int32),
        }
