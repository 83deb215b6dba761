"""`.pack()`: documents packed into sequences of tokens, planned or in rows as they are read."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace._util import check
from headrace._util.check import array_of, holds
from headrace._util.context import RunningSample, running_sample
from headrace.dataset.asynchronous import MadeDataset, MadeSource
from headrace.dataset.source import HasKeys, KeepsKey, Parts, SampleSource, SourceOrders
from headrace.dataset.stream import Stream
from headrace.formats.pinned_object import for_each
from headrace.ops.operator import EachSample, GroupOperator
from headrace.ops.run_inline import split_steps, through_first
from headrace.order.orders import Order, Places, UnwindowedOrder
from headrace.order.packing import Bins, Packing, PackPlan, Pieces
from headrace.order.permutation import draw
from headrace.pipeline.epoch_orders import Planning
from headrace.pipeline.pipeline import Pipeline, refusal
from headrace.readers.protocol import Producer
from headrace.types import Ints
from headrace.workers.tasks import Step

if TYPE_CHECKING:
    from headrace.engine.open_readers import EpochIO


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


_TOGETHER_TOKENS = 2**18  # tokens of sequences that are read together
_PASSES = 2**20  # maximum passes in an epoch with numbered sequences
_NUMBERS = 2**62


@dataclass(frozen=True, slots=True)
class PackedKey:
    """A sequence of a pass, and its pieces, whose documents have the source's numbers."""

    sequence: int
    pieces: Pieces

    def __repr__(self) -> str:
        return f"sequence {self.sequence}"


class PackDataset(MadeDataset):
    """The documents of each sequence, by its number. A step in workers makes the sequence.

    Attributes:
        stream: The documents.
        given: Token count of each document, by its number in the stream's source. None: the source knows it.
    """

    def __init__(self, stream: Stream, packing: Packing, given: Ints | None) -> None:
        self.stream, self.packing, self.given = stream, packing, given

    def __reduce__(self) -> tuple[object, ...]:
        return PackDataset, (self.stream, self.packing, self.given)  # omit cached properties, which are much larger

    def __sample_source__(self) -> SampleSource:
        return PackSource(self)

    @cached_property
    def pipeline(self) -> Pipeline:
        return self.stream.pipeline()

    @property
    def inner(self) -> SampleSource:
        return self.pipeline.source

    @property
    def is_shuffled(self) -> bool:
        """True if documents are shuffled, so that sequences differ in each pass."""
        return self.pipeline.order.shuffle is not None

    @cached_property
    def lengths(self) -> Ints:
        """Token count of each document, by its number in the source."""
        lengths = self.inner.lengths() if self.given is None else self.given
        if len(lengths) != (count := self.inner.count()):
            raise check.unequal(".pack(): lengths", f"{len(lengths)} values", "the stream", f"{count} documents")
        return lengths

    def __len__(self) -> int:
        """Return the number of sequences in a pass."""
        return self._count

    @cached_property
    def _count(self) -> int:
        if self._bins is not None:
            return self._bins.count
        return -(-int(self._lengths_of_pass.sum()) // self.packing.length)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the documents and their lengths."""
        digest = hashlib.blake2b(digest_size=8)
        for some in (self._lengths_of_pass, self._of_pass):
            digest.update(b"" if some is None else np.ascontiguousarray(some, "<i8").data)
        return digest.hexdigest()

    def pieces(self, sequence: int) -> Pieces:
        """Return the document parts of a sequence, if all passes have the same order."""
        return _numbered(self._plan.pieces(sequence), self._documents)

    def documents_of(self, planning: Planning, epoch: int, number: int) -> Ints | None:
        """Return the document numbers in the order of a pass. None: all, in the source's order."""
        if not self.pipeline.order.operators and not self.pipeline.keeps:
            return None
        order = planning.one_pass(epoch, number)
        numbers = planning.numbers(order, np.arange(order.count))
        return numbers.astype(np.int32) if len(self.lengths) < 2**31 else numbers

    def planned(self, documents: Ints | None, key: int) -> PackPlan:
        """Plan sequences of documents in this order. `key` is the seed of the sequences' order."""
        lengths = self.lengths if documents is None else self.lengths[documents]
        return self.packing.planned(lengths, self._bins, key)

    @cached_property
    def _documents(self) -> Ints | None:
        return self.documents_of(Planning(self.pipeline, 0), 0, 0)

    @cached_property
    def _plan(self) -> PackPlan:
        return self.planned(self._documents, 0)

    @cached_property
    def _of_pass(self) -> Ints | None:
        """Numbers of the documents in any pass. None: all, in the source's order."""
        return self.inner.passing(self.pipeline.keeps) if self.is_shuffled else self._documents

    @property
    def _lengths_of_pass(self) -> Ints:
        return self.lengths if self._of_pass is None else self.lengths[self._of_pass]

    @cached_property
    def _bins(self) -> Bins | None:
        return Bins(self._lengths_of_pass, self.packing.length) if self.packing.method == "best_fit" else None

    async def aget(self, key: int) -> list[DocumentPart]:
        """Read the documents of a sequence. TypeError if sequences differ in each epoch."""
        if self.is_shuffled:
            raise TypeError(f"{self.stream!r} is shuffled: sequences of it are others in each epoch")
        return await self._read(self.pieces(range(len(self))[key]))

    async def aget_key(self, key: PackedKey) -> list[DocumentPart]:
        return await self._read(key.pieces)

    @property
    def reads_several(self) -> bool:
        """True if parts of documents are read, which may be adjacent."""
        return self._parts is not None

    async def read_several(self, keys: Sequence[int | PackedKey]) -> list[list[DocumentPart]]:
        """Read the documents of several sequences, adjacent parts together."""
        each = max(1, _TOGETHER_TOKENS // self.packing.length)
        groups = [keys[k : k + each] for k in range(0, len(keys), each)]
        made = await for_each(len(groups), lambda k: self._read_together(groups[k]))
        return [sequence for group in made for sequence in group]

    async def _read_together(self, keys: Sequence[int | PackedKey]) -> list[list[DocumentPart]]:
        pieces = [key.pieces if isinstance(key, PackedKey) else self.pieces(key) for key in keys]
        ends = np.cumsum([0, *(len(some.documents) for some in pieces)]).tolist()
        parts = await self._read(Pieces(*map(np.concatenate, zip(*pieces, strict=True))))
        return [parts[start:stop] for start, stop in itertools.pairwise(ends)]

    async def _read(self, pieces: Pieces) -> list[DocumentPart]:
        steps, wanted = self._first_steps, self.pipeline.wanted
        numbers, starts, stops = (some.tolist() for some in pieces)
        if self._parts is not None:
            some = zip(numbers, starts, stops, await self._parts(*pieces), strict=True)
            return [DocumentPart(number, start, stop, None, sample) for number, start, stop, sample in some]
        wholes, running = self.lengths[pieces.documents].tolist(), running_sample.get()

        async def get(k: int) -> DocumentPart:
            number = numbers[k]
            # concurrent reads need random generators of their own: draws from a shared one would depend on timing
            if running is not None:
                running_sample.set(RunningSample(draw("document", running.key, k), running.position))
            try:
                sample = await through_first(steps, await self.original(number, wanted))
            except Exception as error:
                error.add_note(f"document {number}")
                raise
            return DocumentPart(number, starts[k], stops[k], wholes[k], sample)

        return await for_each(len(numbers), get)

    @cached_property
    def _first_steps(self) -> list[Step]:
        return split_steps(self.pipeline.steps)[0]

    @cached_property
    def _parts(self) -> Parts | None:
        """Function that reads parts of documents, if no step or check needs whole ones."""
        is_plain = all(step.is_implied for step in self.pipeline.steps)
        return self.inner.parts if is_plain and self.given is None else None


class PackSource(MadeSource):
    data: PackDataset
    name = "pack"

    def __init__(self, data: PackDataset) -> None:
        super().__init__(data)
        self.keeps_numbers = not data.is_shuffled

    @property
    def text(self) -> str:
        return f"{self.data.stream!r}.{self.data.packing.text}"

    def orders(self, keeps: tuple[KeepsKey, ...], seed: int) -> SourceOrders:
        assert not keeps, "no index is asked for keys of sequences"
        return PackOrders(self, seed)

    def open(self, io: EpochIO) -> Producer:
        data = self.data
        get = data.aget_key if data.is_shuffled else data.aget
        return io.keys(data, get, data.read_several if data.reads_several else None)


class PackOrders(SourceOrders):
    """The orders of sequences.

    If documents are shuffled, sequences differ in each pass, and the number of a sequence includes its pass. Then these
    orders map numbers to keys.
    """

    def __init__(self, source: PackSource, seed: int) -> None:
        super().__init__(source, ())
        self._data, self._seed = source.data, seed
        self._documents = Planning(source.data.pipeline, seed)
        self._planned: dict[int, tuple[PackPlan, Ints | None]] = {}  # by pass; at most two

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_planned": {}}

    @property
    def count(self) -> int:
        return len(self._data)

    @cached_property
    def sizes(self) -> Ints:
        return np.array([self.count])

    @property
    def fingerprint(self) -> str:
        known = f"{self._documents.fingerprint} {self._data.fingerprint}"
        return hashlib.blake2b(known.encode(), digest_size=8).hexdigest()

    def described(self) -> list[str]:
        return [*(f"documents: {line}" for line in self._documents.described()), self._data.packing.text]

    def order(self, epoch: int, number: int) -> Order:
        if not self._data.is_shuffled:
            return PackedOrder(self.count, 0)
        first = (epoch * _PASSES + number) * self.count
        if number >= _PASSES or first > _NUMBERS - self.count:
            things = "numbers left for sequences of shuffled documents"
            raise check.empty(f"pass {number} of epoch {epoch}", things, "put .shuffle() after .pack()")
        return PackedOrder(self.count, first)

    def keys(self, keys: Sequence[object]) -> HasKeys:
        return self if self._data.is_shuffled else keys

    def work(self, numbers: Ints, power: int) -> NDArray[np.float64]:
        pieces = [self._pieces(number) for number in numbers.tolist()]
        return np.array([((some.stops - some.starts).astype(np.float64) ** power).sum() for some in pieces])

    def __getitem__(self, number: int) -> PackedKey:
        return PackedKey(number % self.count, self._pieces(number))

    def _pieces(self, number: int) -> Pieces:
        if not self._data.is_shuffled:
            return self._data.pieces(number)
        turn, sequence = divmod(number, self.count)
        if turn not in self._planned:
            documents = self._data.documents_of(self._documents, *divmod(turn, _PASSES))
            made = self._data.planned(documents, draw(self._seed, turn)), documents
            self._planned = {**dict(list(self._planned.items())[-1:]), turn: made}
        plan, documents = self._planned[turn]
        return _numbered(plan.pieces(sequence), documents)


class PackedOrder(UnwindowedOrder):
    """The sequences of a pass in order, numbered from `first`."""

    def __init__(self, count: int, first: int) -> None:
        self.count, self._first = count, first

    def locate(self, positions: Ints) -> Places:
        return Places(np.zeros(len(positions), np.int64), self._first + np.asarray(positions, np.int64))


def _numbered(pieces: Pieces, documents: Ints | None) -> Pieces:
    return pieces if documents is None else pieces._replace(documents=documents[pieces.documents])
