"""`.pack()`: documents packed into sequences of tokens, planned or in rows as they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace._util import check
from headrace._util.check import array_of, holds
from headrace.dataset.stream import Stream
from headrace.ops.operator import EachSample, GroupOperator
from headrace.ops.run_inline import split_steps
from headrace.order.packing import Packing
from headrace.pipeline.pipeline import Pipeline, refusal
from headrace.types import Ints
from headrace.workers.tasks import Step

_IDS = ("document_ids", "position_ids")
_TOKENS_MOST = 2**60
Tokens = NDArray[Any]


def pack(
    stream: Stream,
    length: int,
    tokens: str,
    method: str,
    document_ids: bool,
    lengths: ArrayLike | None,
    fields: Sequence[str],
    pad_value: float | Mapping[str, float],
) -> Stream:
    call = f".pack({length!r})"
    length = check.whole(".pack(): length", length, 1)
    check.one_of(".pack(): method", method, ("concat", "best_fit"))
    names = (tokens, fields) if isinstance(fields, str) else (tokens, *fields)
    check.names(".pack(): names of fields, with document_ids and position_ids", (*names, *_IDS))
    pads = dict(pad_value) if isinstance(pad_value, Mapping) else {tokens: pad_value}
    for name, pad in pads.items():
        check.one_of(".pack(): field of pad_value", name, names)
        if not hasattr(pad, "__float__"):
            raise check.invalid(f".pack(): pad_value of {name!r}", pad, "a number")
    given = None if lengths is None else checked_lengths(lengths, ".pack(): lengths")
    stream = stream.indexed(".pack() needs")
    pipeline = stream.pipeline()
    _check_documents(pipeline, call)
    is_planned = given is not None or (pipeline.source.has_lengths and pipeline.keeps_count)
    if is_planned:
        _check_planned(pipeline, call)
    # Documents that are read for rows go through all steps before they are packed.
    steps = [(step.name, step.fn) for step in split_steps(pipeline.narrowed_steps)[1]] if is_planned else []
    makes = PackStep(length, tokens, names[1:], pads, document_ids, tuple(steps))
    if is_planned:
        from headrace.ops.pack_planned import PackDataset

        is_random = any(step.random for step in pipeline.steps)
        packed = PackDataset(stream, Packing(length, method), given)
        return Stream(packed, (EachSample(Step("pack", "map", makes, is_random, is_implied=True)),))
    source, mixing = pipeline.source.drawn_by_tokens or (stream.source, None)
    packing = Packing(length, method, mixing)
    _check_rows(pipeline, packing, call)
    rows = GroupOperator(packing.text, batcher=None, measure=makes.count, collate=makes, packing=packing)
    return Stream(source, stream.operators)._with(rows)


def _check_documents(pipeline: Pipeline, call: str) -> None:
    source = pipeline.source
    if source.without_numbers is not None:
        raise refusal("numbers", call, source.name, remedy=source.without_numbers)
    if pipeline.is_batched or pipeline.group is not None:
        raise refusal("single samples", call, ".batch()")


def _check_rows(pipeline: Pipeline, packing: Packing, call: str) -> None:
    """Check that documents have numbers, and an order that all ranks know."""
    if pipeline.regroups or pipeline.limit is not None:
        before = pipeline.regroups[0].name if pipeline.regroups else f"take({pipeline.limit})"
        raise refusal("documents of this rank", call, f".{before}")
    if packing.mixing is not None and pipeline.numbered is not None:
        raise refusal("positions", call, f".{pipeline.numbered.name}", of="a mixture by tokens")


def _check_planned(pipeline: Pipeline, call: str) -> None:
    """Check that the documents are known before they are read, and are the same in each pass."""
    source, order = pipeline.source, pipeline.order
    if source.only_in_order is not None:
        raise refusal("random access", call, source.name, remedy=source.only_in_order)
    if not source.is_in_order or not source.keeps_numbers:
        need = "stored order" if source.is_steady and source.keeps_numbers else "same documents"
        remedy = "pack each of its inputs, and combine the sequences, which are equally long"
        raise refusal(need, call, source.name, remedy=remedy)
    if not pipeline.keeps_count:
        remedy = "select documents by their numbers: .sample(numbers)"
        raise refusal("known number", call, f".{pipeline.changing[0]}", remedy=remedy)
    if pipeline.of_all is not None:
        raise refusal("global batches", call, f".{pipeline.of_all}")
    if order.passes is not None:
        raise refusal("same documents", call, f".{order.passes.text}")
    others = [one for one in order.one_pass if one is not order.shuffle]
    drawn = next((one for one in others if not (one.is_constant and one.is_fixed)), None)
    if drawn is not None:
        raise refusal("same documents", call, f".{drawn.text}")
    if order.shuffle is not None and others:
        remedy = f"put .{others[0].text} after .pack(), or .shuffle()"
        raise refusal("same documents", call, f".{others[0].text}", remedy=remedy)
    split_steps(pipeline.steps, "a document", ".pack()")


def checked_lengths(lengths: ArrayLike, name: str) -> Ints:
    """Return token counts as an int64 array.

    Args:
        name: Name of the argument, for errors.
    """
    given = check.whole_numbers(name, lengths, _TOKENS_MOST)
    check.number(f"sum of {name}", float(given.astype(np.float64).sum()), most=_TOKENS_MOST)
    return given


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
        """Return the token count of a document."""
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
