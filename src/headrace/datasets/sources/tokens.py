"""Windows of token ids as samples, over files of tokens as they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import DTypeLike

from headrace.datasets.blocking import blocking
from headrace.datasets.faces import Parts
from headrace.datasets.fingerprints import fingerprint_of
from headrace.datasets.operators.values import EachSample
from headrace.datasets.places.entries import check_listed
from headrace.datasets.places.guessing import Facts, names_at
from headrace.datasets.places.patterns import is_pattern
from headrace.datasets.places.urls import expand
from headrace.datasets.source import KeepsKey, SampleSource, SourceOrders, Wanted
from headrace.datasets.sources.bodies import Where, bodies_at, version_of
from headrace.datasets.sources.constructors import Urls
from headrace.datasets.sources.shards import IndexedShards, IndexedShardSource
from headrace.datasets.stream import Stream
from headrace.errors import OptionError, masked
from headrace.formats.compression.decompressor import kind_of
from headrace.formats.folders import split_path
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.tokens.layouts import Chunk, litdata_listed, token_dtype
from headrace.formats.tokens.opener import TokenFormat, TokenOpener
from headrace.formats.tokens.windows import rows_of
from headrace.indexes.index import Index
from headrace.indexes.of_tokens import TokenFiles, TokenSettings, TokenTable, bin_of
from headrace.producers.members import Members
from headrace.protocols import Reads
from headrace.reading import found
from headrace.running import running_reader
from headrace.tasks import Step
from headrace.types import Ints

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
    """Windows of token ids, read in ranges from files of tokens as they lie.

    A sample is a dict: `tokens`, an array `[window]` of the type that they have in the file; `__key__`, the number of
    the window there; `__url__`. torch's embeddings take no uint16: `.long()` costs least behind the copy to the device.

    Windows have numbers before they are read: shuffles, ranks, states, `data[i]` and mixtures are as with indexed
    shards. What is asked for beforehand is each file's first bytes; of Megatron's indexes their heads and ends.

    Files are raw; or llm.c's, with a header of 1,024 bytes; or Megatron's, with an `.idx` beside the `.bin`; `.npy`, of
    one dimension, or of two, where rows are the windows; or chunks of tokens in a folder of LitData's. A window lies in
    one file.

    Args:
        urls: an address, a pattern such as "s3://bucket/train_{000000..000099}.bin" or "tokens/**/*.bin", that of a
            folder, whose .bin and .npy files are meant, or a list of them; of LitData that of its folder.
        dtype: of the tokens in raw files, such as "uint16"; where files say it themselves it is compared.
        window: tokens in a window. For labels that are shifted by one, ask for one more than the model takes, and for a
            stride of as many as it takes: `hr.tokens(url, "uint16", 1025, stride=1024)`.
        stride: from the begin of one window to that of the next; by default `window`.
        eos: the token that ends each document. Samples have `document_ids` then: an array `[window]` of int32, which
            counts the documents in the window from 0.
        documents: "ids": samples have `document_ids` by Megatron's index, which is read for that: 8 bytes of memory
            for each document. "samples": samples are the documents of that index, of any length, and not windows.
            "separate": windows are cut from each document by itself, and none goes over the end of one. That index
            says where documents end, or `eos`, which is then a document's last token: all of each file is read for that
            whenever a loader opens it. It takes 16 bytes of memory for each document; there are no `document_ids`.
        tail: what becomes of the tokens at a file's end that fill no window; with "separate" those at the end of each
            document. "drop": they are left out, as nanoGPT and Megatron do. "short": they come, as a shorter window.
        limits: how much files may ask for: `member_bytes` for one sample, and for where documents begin.
        storage_options: for the store: credentials, endpoint, region.

    Raises:
        OptionError: an argument is of no use.
        FormatError: LitData's catalogue is damaged. Files are read later, when it is first asked how many samples there
            are: then a file that is damaged, cut off, shorter than a window or of another type is an error.

    Examples:
        >>> import headrace as hr
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
        raise OptionError(f"{masked(packed)} is compressed: windows are read at their places; unpack it first")
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
        if count is not None and (not isinstance(count, int) or count < 1):
            raise OptionError(f"{name}={count!r}: 1 token or more")
    if documents not in (None, "ids", "samples", "separate") or tail not in ("drop", "short"):
        known = "'ids', 'samples' or 'separate', and 'drop' or 'short' are meant"
        raise OptionError(f"documents={documents!r}, tail={tail!r}: {known}")
    if documents == "samples" and not (window is stride is None and tail == "drop"):
        raise OptionError("documents='samples': a sample is a whole document; window=, stride=, tail= are of windows")
    if eos is not None and documents not in (None, "separate"):
        raise OptionError(f"eos={eos}, documents={documents!r}: they are found by the token, or by an index; give one")


def _chunks(urls: tuple[str, ...], storage_options: Mapping[str, object] | None) -> Sequence[Chunk]:
    """The chunks of folders of LitData; none where these are files."""
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
            raise OptionError(f"{masked(url)} is no folder of LitData: its {_CATALOGUE} cannot be read")
        chunks += litdata_listed(place, data)
    if not chunks:
        raise OptionError(f"{masked(urls[0])} has no chunks")
    return chunks


class TokenShards(IndexedShards):
    """Samples of files of tokens, by number: where they lie is computed when they are wanted."""

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
        """What is known of a file; once they are open.

        Raises:
            ObjectChangedError: it is another than was listed.
        """
        table = self.files.tables[ordinal]
        check_listed(self.urls, ordinal, table.file.size, table.file.etag)
        return table

    async def members(self, ordinal: int, chosen: Ints, wanted: Wanted | None) -> Members:  # noqa: ARG002
        shard = self.table(ordinal).shard(chosen)
        return Members(shard.rows, None, shard.size, version_of(shard))

    async def get(self, number: int, wanted: Wanted | None) -> dict[str, object]:  # noqa: ARG002
        reader = running_reader.get()
        assert reader is not None
        ordinal, row = self.index.locate(number)
        shard = self.table(ordinal).shard(np.array([row]))
        rows, url = shard.rows, self.urls[ordinal]
        places = list(zip(rows.offset.tolist(), rows.size.tolist(), strict=True))
        bodies = await bodies_at(reader, Where(url, shard, False, self.limits), places, [None] * len(places))
        return {"__key__": str(row), "__url__": masked(url), **dict(zip(rows.fields, bodies, strict=True))}

    def lengths(self) -> Ints:
        """How many tokens each sample has."""
        len(self)  # opens them
        places = [table.places(np.arange(table.count)) for table in self.files.tables]
        return np.concatenate([ends - begins for begins, ends in places])

    async def parts(self, numbers: Ints, starts: Ints, stops: Ints) -> list[dict[str, object]]:
        """Of samples with these numbers what they were with the tokens [starts, stops) alone.

        Parts that touch are read at once, and so are those that lie near one another.
        """
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
        """The tokens [begins, ends) of a file."""
        table = self.table(ordinal)
        order = np.argsort(begins, kind="stable")
        reach = np.maximum.accumulate(ends[order])
        firsts = np.flatnonzero(np.append(True, begins[order][1:] > reach[:-1]))  # of what touches
        starts, stops = begins[order][firsts], reach[np.append(firsts[1:], len(order)) - 1]
        rows = rows_of(table.file, firsts, starts, stops)
        where = Where(self.urls[ordinal], ShardIndex(rows, None, table.file.size, table.file.etag), False, self.limits)
        places = list(zip(rows.offset.tolist(), rows.size.tolist(), strict=True))
        bodies = [memoryview(body) for body in await bodies_at(reader, where, places, [None] * len(places))]
        group = np.searchsorted(starts, begins, side="right") - 1
        itemsize = table.file.dtype.itemsize
        low, high = (begins - starts[group]) * itemsize, (ends - starts[group]) * itemsize
        return [bodies[k][a:b] for k, a, b in zip(group.tolist(), low.tolist(), high.tolist(), strict=True)]


class TokenSource(IndexedShardSource):
    """Windows of tokens: got one by one, or read in ranges."""

    data: TokenShards

    @property
    def name(self) -> str:
        return "tokens"

    @property
    def text(self) -> str:
        return super().text.replace("stream(", "tokens(", 1)

    @property
    def has_lengths(self) -> bool:
        return self.data.files.settings.documents in ("samples", "separate")

    def lengths(self) -> Ints:
        return self.data.lengths()

    @property
    def parts(self) -> Parts | None:
        return self.data.parts

    def fingerprint(self) -> str:
        return fingerprint_of((*self.urls, self.data.files.settings.text))

    def orders(self, keeps: tuple[KeepsKey, ...], seed: int) -> SourceOrders:  # noqa: ARG002
        return _TokenOrders(self, keeps, self.data.files.settings.text)


class _TokenOrders(SourceOrders):
    """The same orders as those of shards; states know which windows they are of."""

    def __init__(self, source: SampleSource, keeps: tuple[KeepsKey, ...], text: str) -> None:
        super().__init__(source, keeps)
        self._text = text

    @property
    def fingerprint(self) -> str:
        return fingerprint_of((*self._source.urls, self._text), self.sizes)
