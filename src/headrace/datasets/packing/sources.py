"""Packed sequences as a data set: reading of their documents."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from headrace.datasets.asynchronous import MadeDataset, MadeSource
from headrace.datasets.doing import split_steps, through_first
from headrace.datasets.faces import Parts
from headrace.datasets.packing.orders import PackedKey, PackOrders
from headrace.datasets.packing.sequences import DocumentPart
from headrace.datasets.packing.spec import PackSpec
from headrace.datasets.planning import Planning
from headrace.datasets.source import KeepsKey, SampleSource, SourceOrders
from headrace.indexes.index import for_each
from headrace.plan import draw
from headrace.plan.packs import Pieces
from headrace.producer import Producer
from headrace.running import RunningSample, running_sample
from headrace.tasks import Step

if TYPE_CHECKING:
    from headrace.engine.sources import EpochIO

_TOGETHER_TOKENS = 2**18  # tokens of sequences that are read together


class PackDataset(MadeDataset):
    """The documents of each sequence, by its number. A step in workers makes the sequence."""

    def __init__(self, spec: PackSpec) -> None:
        self.spec = spec

    def __getstate__(self) -> dict[str, object]:
        return {"spec": self.spec}

    def __sample_source__(self) -> SampleSource:
        return PackSource(self)

    @property
    def inner(self) -> SampleSource:
        return self.spec.pipeline.source

    def __len__(self) -> int:
        return self.spec.count

    async def aget(self, key: int) -> list[DocumentPart]:
        """Read the documents of a sequence. TypeError if sequences differ in each epoch."""
        if self.spec.is_shuffled:
            raise TypeError(f"{self.spec.stream!r} is shuffled: sequences of it are others in each epoch")
        return await self.read(self.spec.pieces(range(self.spec.count)[key]))

    async def aget_key(self, key: PackedKey) -> list[DocumentPart]:
        return await self.read(key.pieces)

    async def read(self, pieces: Pieces) -> list[DocumentPart]:
        steps, wanted = self._first_steps, self.spec.pipeline.wanted
        numbers, starts, stops = (some.tolist() for some in pieces)
        if self._parts is not None:
            samples = await self._parts(*pieces)
            return [DocumentPart(*one, None) for one in zip(numbers, samples, starts, stops, strict=True)]
        wholes, running = self.spec.lengths[pieces.documents].tolist(), running_sample.get()

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
            return DocumentPart(number, sample, starts[k], stops[k], wholes[k])

        return await for_each(len(numbers), get)

    @property
    def reads_several(self) -> bool:
        """True if parts of documents are read, which may be adjacent."""
        return self._parts is not None

    async def read_several(self, keys: Sequence[int | PackedKey]) -> list[list[DocumentPart]]:
        """Read the documents of several sequences, adjacent parts together."""
        each = max(1, _TOGETHER_TOKENS // self.spec.length)
        groups = [keys[k : k + each] for k in range(0, len(keys), each)]
        made = await for_each(len(groups), lambda k: self._read_together(groups[k]))
        return [sequence for group in made for sequence in group]

    async def _read_together(self, keys: Sequence[int | PackedKey]) -> list[list[DocumentPart]]:
        pieces = [key.pieces if isinstance(key, PackedKey) else self.spec.pieces(key) for key in keys]
        ends = np.cumsum([0, *(len(some.documents) for some in pieces)]).tolist()
        parts = await self.read(Pieces(*map(np.concatenate, zip(*pieces, strict=True))))
        return [parts[start:stop] for start, stop in itertools.pairwise(ends)]

    @cached_property
    def _first_steps(self) -> list[Step]:
        return split_steps(self.spec.pipeline.steps)[0]

    @cached_property
    def _parts(self) -> Parts | None:
        """Function that reads parts of documents, if no step or check needs whole ones."""
        is_plain = all(step.is_implied for step in self.spec.pipeline.steps)
        return self.inner.parts if is_plain and self.spec.given is None else None


class PackSource(MadeSource):
    def __init__(self, data: PackDataset) -> None:
        super().__init__(data)
        self.data: PackDataset = data

    @property
    def name(self) -> str:
        return "pack"

    @property
    def text(self) -> str:
        spec = self.data.spec
        return f"{spec.stream!r}.{spec.described}"

    @property
    def keeps_numbers(self) -> bool:
        return not self.data.spec.is_shuffled

    def orders(self, keeps: tuple[KeepsKey, ...], seed: int) -> SourceOrders:
        assert not keeps, "no index is asked for keys of sequences"
        spec = self.data.spec
        return PackOrders(self, spec, Planning(spec.pipeline, seed), seed)

    def open(self, io: EpochIO) -> Producer:
        data = self.data
        get = data.aget_key if data.spec.is_shuffled else data.aget
        return io.keys(data, get, data.read_several if data.reads_several else None)
