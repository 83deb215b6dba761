"""Windows of token ids as samples, read from token files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import DTypeLike

from headrace._util import check
from headrace._util.reads import Reads
from headrace.dataset.source import SampleSource, Wanted, blocking, fingerprint_of, forwarded
from headrace.dataset.stream import Stream
from headrace.errors import OptionError, masked
from headrace.formats.compression import kind_of
from headrace.formats.folders import split_path
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.tokens.layouts import Chunk, litdata_listed, rows_of, token_dtype
from headrace.formats.tokens.opener import TokenFormat, TokenOpener
from headrace.indexes.index import Index
from headrace.indexes.token_files import TokenFiles, TokenSettings, TokenTable, bin_of
from headrace.ops.operator import EachSample
from headrace.readers.indexed_members import Members
from headrace.sources.bodies import Where, bodies_at, version_of
from headrace.sources.constructors import Urls
from headrace.sources.discovery.entries import check_listed
from headrace.sources.discovery.guessing import names_at
from headrace.sources.discovery.urls import expand, is_pattern
from headrace.sources.files import Facts
from headrace.sources.reading import found
from headrace.sources.shards import IndexedShards, IndexedShardSource, current_reader
from headrace.types import Ints
from headrace.workers.tasks import Step

_CATALOGUE = "index.json"


def tokens(
    urls: Urls,
    dtype: DTypeLike | None = None,
    window: int | None = None,
    *,
    stride: int | None = None,
    eos: int | None = None,
    documents: Literal["ids", "samples", "separate"] | None = None,
    tail: Literal["drop", "short"] = "drop",
    limits: Limits = DEFAULTS,
    storage_options: Mapping[str, object] | None = None,
) -> Stream:
    """Read windows of token ids by ranges from token files.

    A sample is a dict: `tokens`, an array `[window]` in the file's dtype; `__key__`, the number of the window in its
    file; `__url__`. torch's embeddings do not take uint16; `.long()` is cheapest after the copy to the device.

    Windows have numbers before they are read, so shuffles, ranks, states, `data[i]` and mixtures work as with indexed
    shards. Only the first bytes of each file are read beforehand; of Megatron's indexes, their headers and ends.

    Supported files: raw; llm.c, with a header of 1,024 bytes; Megatron, with an `.idx` beside the `.bin`; `.npy` of one
    dimension, or of two, where rows are the windows; chunks of tokens in a folder of LitData. A window never spans
    files.

    Args:
        urls: A URL or path; a pattern such as "s3://bucket/train_{000000..000099}.bin" or "tokens/**/*.bin"; a folder,
            for its .bin and .npy files; or a list of these. For LitData, its folder.
        dtype: dtype of the tokens in raw files, such as "uint16". If a file declares its dtype, the two are compared.
        window: Tokens in a window. For labels shifted by one, use one more than the model takes, with the model's
            length as stride: `hr.tokens(url, "uint16", 1025, stride=1024)`.
        stride: Distance between the starts of consecutive windows; by default `window`.
        eos: Token that ends each document. Samples then have `document_ids`, an array `[window]` of int32, which counts
            the documents in the window from 0.
        documents: "ids": samples have `document_ids` from Megatron's index, which takes 8 bytes of memory per document.
            "samples": samples are the documents of that index, of any length. "separate": windows are cut from each
            document separately and never span documents. Documents then end as in that index, or with the token `eos`;
            for `eos`, each file is read in full whenever a loader opens it. "separate" takes 16 bytes of memory per
            document, and has no `document_ids`.
        tail: Treatment of the tokens at the end of a file, or of a document with "separate", that do not fill a window.
            "drop": they are dropped, as in nanoGPT and Megatron. "short": they form a shorter window.
        limits: Limits for files: `member_bytes` applies to one sample, and to the list of document starts.
        storage_options: Options of the store: credentials, endpoint, region.

    Raises:
        OptionError: An argument is invalid.
        FormatError: LitData's catalogue is damaged. Files are read later, when the number of samples is first needed; a
            file that is damaged, truncated, shorter than a window or of another dtype then raises it.

    Examples:
        >>> data = hr.tokens("s3://bucket/train_{000000..000099}.bin", "uint16", 1025, stride=1024).shuffle()
    """
    _check(window, stride, eos, documents, tail)
    settings = TokenSettings(
        None if dtype is None else token_dtype(dtype),
        window,
        stride,
        has_short=tail == "short",
        documents=documents,
        eos=eos,
    )
    named = expand(urls)
    chunks = () if any(map(is_pattern, named)) else _chunks(named, storage_options)
    names = names_at(named, storage_options, folders=None if chunks else (".bin", ".npy"))
    given = names.urls
    packed = next((url for url in given if kind_of(url) is not None), None)
    if packed is not None:
        raise OptionError.at(packed, "is compressed: windows are read at their places; unpack it first")
    places: Sequence[str] = given
    if chunks:
        places = tuple(chunk.url for chunk in chunks)
    elif any(bin_of(url) != url for url in given):
        places = tuple(map(bin_of, given))
    source = TokenShards(places, TokenFiles(settings, limits, chunks), storage_options, limits, names.facts)
    opener = TokenOpener(None if documents == "separate" else eos, has_ids=documents == "ids")
    step = Step("open(tokens)", "map", opener, is_implied=True, is_without_torch=True)
    return Stream(source, (EachSample(step, opens=True, columns=opener.columns),))


def _check(window: object, stride: object, eos: object, documents: object, tail: object) -> None:
    for name, count in (("window", window), ("stride", stride)):
        check.whole_or_none(name, count, 1)
    check.one_of("documents", documents, (None, "ids", "samples", "separate"))
    check.one_of("tail", tail, ("drop", "short"))
    if documents == "samples" and not (window is stride is None and tail == "drop"):
        raise check.conflict("documents='samples'", "window=, stride=, tail=", "a sample is a whole document")
    if eos is not None and documents not in (None, "separate"):
        raise check.conflict(f"eos={eos}", f"documents={documents!r}", "find documents by the token, or by an index")


def _chunks(urls: tuple[str, ...], storage_options: Mapping[str, object] | None) -> Sequence[Chunk]:
    """Return the chunks of LitData folders. Empty if the URLs are files."""
    names = [split_path(url)[0].rpartition("/")[2] for url in urls]
    if not all(name == _CATALOGUE or "." not in name for name in names):
        return ()
    chunks: list[Chunk] = []
    for url, name in zip(urls, names, strict=True):
        path, rest = split_path(url)
        place = url if name == _CATALOGUE else f"{path.rstrip('/')}/{_CATALOGUE}{rest}"
        data = blocking(partial(found, place, None, storage_options))
        if data is None:
            if name != _CATALOGUE and not chunks:
                return ()
            raise OptionError.at(url, f"is no folder of LitData: its {_CATALOGUE} cannot be read")
        chunks += litdata_listed(place, data)
    if not chunks:
        raise OptionError.at(urls[0], "has no chunks")
    return chunks


class TokenShards(IndexedShards):
    """Samples of token files by number. Their ranges are computed on demand."""

    def __init__(
        self,
        urls: Sequence[str],
        files: TokenFiles,
        storage_options: Mapping[str, object] | None,
        limits: Limits,
        facts: Facts = (),
    ) -> None:
        form = TokenFormat()
        facts = (*facts, ("format", form.name)) if facts else ()
        super().__init__(urls, Index(urls, files, limits, form), storage_options, limits, form, facts)
        self.files = files

    def __reduce__(self) -> tuple[object, ...]:
        return TokenShards, (self.urls, self.files, self.storage_options, self.limits, self.facts)

    def __sample_source__(self) -> SampleSource:
        return TokenSource(self)

    def table(self, ordinal: int) -> TokenTable:
        """Return the table of an open file."""
        table = self.files.tables[ordinal]
        check_listed(self.urls, ordinal, table.file.size, table.file.etag)
        return table

    async def members(self, ordinal: int, chosen: Ints, wanted: Wanted | None) -> Members:
        shard = self.table(ordinal).shard(chosen)
        return Members(shard.rows, None, shard.size, version_of(shard))

    async def get(self, number: int, wanted: Wanted | None) -> dict[str, object]:
        ordinal, row = self.index.locate(number)
        shard = self.table(ordinal).shard(np.array([row]))
        rows, url = shard.rows, self.urls[ordinal]
        places = list(zip(rows.offset.tolist(), rows.size.tolist(), strict=True))
        bodies = await bodies_at(current_reader(), Where(url, shard, self.limits), places, [None] * len(places))
        return {"__key__": str(row), "__url__": masked(url), **dict(zip(rows.fields, bodies, strict=True))}

    async def get_many(self, numbers: Sequence[int]) -> list[dict[str, object]]:
        chosen, starts = np.array(numbers), self.index.starts
        samples: list[dict[str, object]] = [{} for _ in numbers]
        ordinals = np.searchsorted(starts, chosen, side="right") - 1
        for ordinal in np.unique(ordinals).tolist():
            these, url = np.flatnonzero(ordinals == ordinal), self.urls[ordinal]
            keys = chosen[these] - starts[ordinal]
            shard = self.table(ordinal).shard(keys)
            rows, name = shard.rows, masked(url)
            ranges = list(zip(rows.offset.tolist(), (rows.offset + rows.size).tolist(), strict=True))
            bodies = await current_reader().read_each(url, ranges, version=version_of(shard))
            of_sample = pairwise(rows.starts.tolist())
            for k, key, (begin, end) in zip(these.tolist(), keys.tolist(), of_sample, strict=True):
                members = dict(zip(rows.fields, bodies[begin:end], strict=False))  # the longest sample has all fields
                samples[k] = {"__key__": str(key), "__url__": name, **members}
        return samples

    def lengths(self) -> Ints:
        len(self)  # opens the files
        places = [table.places(np.arange(table.count)) for table in self.files.tables]
        return np.concatenate([ends - begins for begins, ends in places])

    async def parts(self, numbers: Ints, starts: Ints, stops: Ints) -> list[dict[str, object]]:
        """Read tokens [starts[i], stops[i]) of sample numbers[i]. Nearby parts are read together."""
        async with self._readers.use() as reader:
            await self.aopen()
            shards = np.searchsorted(self.index.starts, numbers, side="right") - 1
            samples: list[dict[str, object]] = [{} for _ in numbers]
            for shard in np.unique(shards).tolist():
                these = np.flatnonzero(shards == shard)
                rows = numbers[these] - self.index.starts[shard]
                begins = self.table(shard).places(rows)[0]
                bodies = await self._tokens(reader, shard, begins + starts[these], begins + stops[these])
                url, field = masked(self.urls[shard]), self.table(shard).file.dtype.str
                for k, row, body in zip(these.tolist(), rows.tolist(), bodies, strict=True):
                    samples[k] = {"__key__": str(row), "__url__": url, field: body}
        return samples

    async def _tokens(self, reader: Reads, ordinal: int, begins: Ints, ends: Ints) -> list[memoryview]:
        table = self.table(ordinal)
        order = np.argsort(begins, kind="stable")
        reach = np.maximum.accumulate(ends[order])
        firsts = np.flatnonzero(np.append(True, begins[order][1:] > reach[:-1]))  # start of each run of touching ranges
        starts, stops = begins[order][firsts], reach[np.append(firsts[1:], len(order)) - 1]
        rows = rows_of(table.file, firsts, starts, stops)
        where = Where(self.urls[ordinal], ShardIndex(rows, None, table.file.size, table.file.etag), self.limits)
        places = list(zip(rows.offset.tolist(), rows.size.tolist(), strict=True))
        bodies = [memoryview(body) for body in await bodies_at(reader, where, places, [None] * len(places))]
        group = np.searchsorted(starts, begins, side="right") - 1
        itemsize = table.file.dtype.itemsize
        low, high = (begins - starts[group]) * itemsize, (ends - starts[group]) * itemsize
        return [bodies[k][a:b] for k, a, b in zip(group.tolist(), low.tolist(), high.tolist(), strict=True)]


class TokenSource(IndexedShardSource):
    data: TokenShards
    lengths = forwarded("data")
    parts = forwarded("data")

    @property
    def name(self) -> str:
        return "tokens"

    @property
    def text(self) -> str:
        return super().text.replace("stream(", "tokens(", 1)

    @property
    def has_lengths(self) -> bool:
        return self.data.files.settings.documents in ("samples", "separate")

    def fingerprint(self) -> str:
        return fingerprint_of((*self.urls, self.data.files.settings.text))

    def fingerprint_with(self, sizes: Ints) -> str:
        return fingerprint_of((*self.urls, self.data.files.settings.text), sizes)
