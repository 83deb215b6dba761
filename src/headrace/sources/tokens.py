"""Windows of token ids as samples: a few requests for each file, then arithmetic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import DTypeLike

from headrace._util import check
from headrace._util.reads import Reads
from headrace.dataset.source import SampleSource, Wanted, blocking, fingerprint_of, forwarded
from headrace.dataset.stream import Stream
from headrace.errors import AccessDeniedError, FormatError, LimitError, ObjectMissingError, OptionError, masked
from headrace.formats import tokens as layouts
from headrace.formats.catalogues import split_path
from headrace.formats.compression import kind_of
from headrace.formats.index import ShardIndex
from headrace.formats.limits import DEFAULTS, Limits, check_bytes
from headrace.formats.pinned_object import PinnedObject, for_each
from headrace.formats.tokens import (
    HEAD_BYTES,
    Chunk,
    FirstBytes,
    TokenFile,
    TokenFormat,
    TokenOpener,
    TokenWindows,
    WindowsOfDocuments,
    damage,
    litdata_listed,
    rows_of,
    rows_with_documents,
    token_dtype,
)
from headrace.indexes.index import Index, OpenedIndex
from headrace.ops.operator import EachSample
from headrace.readers.indexed_shards import Members
from headrace.sources.bodies import Where, bodies_at, version_of
from headrace.sources.discovery import Urls, expand, is_pattern, names_at, places_of_catalogues
from headrace.sources.entries import Facts, check_listed
from headrace.sources.reading import found
from headrace.sources.shards import IndexedShards, IndexedShardSource, current_reader
from headrace.types import Ints
from headrace.workers.tasks import Step

_PIECE_SEQUENCES = 2**19  # sequences of an .idx that are read and checked at once: 6 MiB
_BIN, _IDX = ".bin", ".idx"


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """Options for reading token files.

    Attributes:
        dtype: Type of the tokens, if the files do not contain it.
        window: Tokens in a window. None: the row length of a table.
        stride: Tokens from one window to the next. None: `window`.
        has_short: True if a file's last window may be shorter.
        documents: Use of document boundaries: "ids" adds each window's documents, "samples" makes documents the
            samples, "separate" makes windows within documents. All need Megatron's index; "separate" also works with
            `eos`.
        eos: Token that ends a document, if boundaries are found by it.
    """

    dtype: np.dtype[np.integer] | None = None
    window: int | None = None
    stride: int | None = None
    has_short: bool = False
    documents: Literal["ids", "samples", "separate"] | None = None
    eos: int | None = None

    @property
    def needs_index(self) -> bool:
        """True if a Megatron index must contain the document boundaries."""
        return self.documents is not None and self.eos is None

    @property
    def text(self) -> str:
        said = [self.window, self.stride, self.has_short, self.documents, self.eos, self.dtype]
        return " ".join(map(str, said))


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """The samples of one file.

    Attributes:
        windows: Windows of the whole file, or of its documents. None: samples are documents.
        documents: Starts of documents, ascending. If samples are documents, the last one's end follows.
    """

    file: TokenFile
    windows: WindowsOfDocuments | None
    documents: Ints | None = None

    @property
    def count(self) -> int:
        if self.windows is not None:
            return self.windows.count
        return 0 if self.documents is None else len(self.documents) - 1

    def shard(self, chosen: Ints) -> ShardIndex:
        file, places = self.file, self.places(chosen)
        if self.windows is None or self.documents is None:
            rows = rows_of(file, chosen, *places)
        else:
            rows = rows_with_documents(file, chosen, *places, self.documents)
        return ShardIndex(rows, None, file.size, file.etag)

    def places(self, chosen: Ints) -> tuple[Ints, Ints]:
        """Return (starts, ends) of samples in the file, in tokens."""
        if self.windows is not None:
            return self.windows.places(chosen)
        assert self.documents is not None
        return self.documents[chosen], self.documents[chosen + 1]


class TokenFiles:
    """The index of token files. `tables` is empty before `open`."""

    def __init__(self, settings: TokenSettings, limits: Limits, chunks: Sequence[Chunk] = ()) -> None:
        self.settings, self._limits, self._chunks = settings, limits, tuple(chunks)
        self.tables: Sequence[TokenTable] = ()

    def __reduce__(self) -> tuple[object, ...]:
        return TokenFiles, (self.settings, self._limits, self._chunks)

    async def open(self, reader: Reads, urls: Sequence[str], hold: Callable[[int, ShardIndex], object]) -> OpenedIndex:
        """Determine the numbers of samples from file sizes and headers."""
        tables = await for_each(len(urls), lambda k: self._table(reader, urls, k))
        first = tables[0].file
        for table in tables:
            if table.file.dtype != first.dtype:
                raise OptionError.at(
                    table.file.url,
                    f"has tokens of {table.file.dtype}, and {masked(first.url)} of "
                    f"{first.dtype}: read them apart, and put them together after a map that makes them one type",
                )
        self.tables = tables
        counts = np.array([table.count for table in tables], np.int64)
        if not counts.any():  # LitData's chunks may be shorter than a window
            raise self._too_short(urls[0], max(table.file.count for table in tables))
        nbytes = sum(map(self._nbytes, tables))
        return OpenedIndex(counts, self._load, nbytes / max(1, int(counts.sum())))

    async def _load(self, reader: Reads, ordinal: int) -> ShardIndex:
        table = self.tables[ordinal]
        return table.shard(np.arange(table.count))

    def _nbytes(self, table: TokenTable) -> int:
        most = table.file.count if table.windows is None else table.count * table.windows.windows.length
        return most * table.file.dtype.itemsize

    async def _table(self, reader: Reads, urls: Sequence[str], ordinal: int) -> TokenTable:
        settings, url = self.settings, urls[ordinal]
        chunk = self._chunks[ordinal] if self._chunks else None
        pinned = PinnedObject(reader, url)
        idx_at = None if chunk is not None or _is_npy(url) else PinnedObject(reader, _with(url, _IDX))
        head, idx = await asyncio.gather(_head(pinned), _found(idx_at, is_needed=settings.needs_index))
        if settings.needs_index and idx is None:
            text = "has no index of Megatron's, which lists them; eos= finds them by the token that ends each"
            raise OptionError.at(url, f": documents={settings.documents!r}: it {text}")
        file = self._file(head, idx, chunk)
        self._check(file)
        documents = None
        if idx is not None and idx_at is not None and not settings.needs_index:
            await _check_last(idx_at, idx, file)
        elif idx is not None and idx_at is not None:
            documents = await self._documents(idx_at, idx, file)
        if settings.documents == "samples":
            return TokenTable(file, None, documents)
        if settings.documents == "separate":
            return await self._separate(pinned, file, documents)
        windows = WindowsOfDocuments.of(self._windows(file), np.array([0, file.count]))
        table = TokenTable(file, windows, None if documents is None else np.unique(documents[:-1]))
        if not table.count and chunk is None:
            raise self._too_short(url, file.count)
        return table

    async def _separate(self, pinned: PinnedObject, file: TokenFile, documents: Ints | None) -> TokenTable:
        if file.width is not None:
            rows = f"has rows of {file.width} tokens, which are the windows"
            raise OptionError.at(file.url, f"{rows}; leave documents='separate' out")
        windows = self._windows(file)
        if documents is None:
            assert self.settings.eos is not None
            documents = await documents_by_eos(pinned, file, self.settings.eos, self._limits.member_bytes)
        table = TokenTable(file, WindowsOfDocuments.of(windows, documents))
        if not table.count:
            longest = int(np.diff(documents).max())
            text = f"the longest of its {len(documents) - 1} documents has {longest} tokens, and a window"
            raise damage(file.url, f"{text} {windows.length}: none fits; tail='short' gives shorter ones")
        return table

    def _too_short(self, url: str, tokens: int) -> FormatError:
        return damage(
            url,
            f"it has {tokens} tokens, and a window {self.settings.window}: none fits; tail='short' gives shorter ones",
        )

    def _file(self, head: FirstBytes, idx: layouts.Idx | None, chunk: Chunk | None) -> TokenFile:
        dtype = self.settings.dtype
        if chunk is not None:
            file = layouts.litdata(head, chunk)
        elif idx is not None:
            file = layouts.raw(head, idx.dtype)
        elif _is_npy(head.url):
            file = layouts.npy(head)
        elif layouts.has_llm_c_header(head):
            file = layouts.llm_c(head)
        elif dtype is None:
            raise OptionError.at(
                head.url,
                f"does not state the type of its tokens: it has no header that is known, and no "
                f"{_IDX} beside it; give it, as in hr.tokens(…, 'uint16', …)",
            )
        else:
            file = layouts.raw(head, dtype)
        if dtype not in (None, file.dtype):
            raise OptionError.at(head.url, f"has tokens of {file.dtype}, and dtype={dtype} was given")
        return file

    def _check(self, file: TokenFile) -> None:
        settings = self.settings
        if not file.count:
            raise damage(file.url, f"its {file.size} bytes have no tokens")
        if settings.eos is not None and not np.iinfo(file.dtype).min <= settings.eos <= np.iinfo(file.dtype).max:
            raise OptionError.at(file.url, f"has tokens of {file.dtype}: none can be eos={settings.eos}")

    def _windows(self, file: TokenFile) -> TokenWindows:
        settings, width = self.settings, file.width
        length = settings.window or width
        if length is None:
            raise OptionError.at(file.url, "is no table of rows: window=None needs one; give the number of tokens")
        stride = settings.stride or length
        if width not in (None, length) or (width is not None and stride != width):
            given = f"not window={settings.window}, stride={settings.stride}; window=None takes them"
            raise OptionError.at(file.url, f"has rows of {width} tokens, which are the windows, {given}")
        self._check_bytes(file, length, "a window")
        return TokenWindows(length, stride, settings.has_short)

    def _check_bytes(self, file: TokenFile, tokens: int, what: str) -> None:
        what = f"{what} of {tokens} tokens of {file.dtype}"
        check_bytes(what, tokens * file.dtype.itemsize, self._limits.member_bytes, url=file.url)

    async def _documents(self, pinned: PinnedObject, idx: layouts.Idx, file: TokenFile) -> Ints:
        what = f"the list of the starts of its {idx.documents} documents"
        check_bytes(what, 8 * (idx.documents + 1), self._limits.member_bytes, url=idx.url)
        if not idx.documents:
            raise damage(idx.url, f"it has no documents, and {idx.sequences} sequences")
        places = np.empty(idx.documents + 1, np.int64)
        for at in range(0, len(places), _PIECE_SEQUENCES):
            some = places[at : at + _PIECE_SEQUENCES]
            some[:] = np.frombuffer(await _all(pinned, idx.firsts + 8 * at, 8 * len(some)), "<i8")
            layouts.check_firsts(idx, at, some, int(places[at - 1]) if at else 0)
        if places[-1] != idx.sequences:
            raise damage(idx.url, f"its documents end with sequence {places[-1]}, and it has {idx.sequences}")
        check, done = layouts.SequenceCheck(idx), 0
        for at in range(0, idx.sequences, _PIECE_SEQUENCES):
            stop = min(at + _PIECE_SEQUENCES, idx.sequences)
            begins = check.feed(
                *await asyncio.gather(
                    _all(pinned, idx.lengths + 4 * at, 4 * (stop - at)),
                    _all(pinned, idx.pointers + 8 * at, 8 * (stop - at)),
                )
            )
            here = done + int(np.searchsorted(places[done:], stop))
            places[done:here], done = begins[places[done:here] - at], here
        _check_end(idx, check.begin, file)
        places[done:] = check.begin
        places //= file.dtype.itemsize
        if self.settings.documents == "samples":
            self._check_bytes(file, int(np.diff(places).max()), "a document")
        return places


async def _head(pinned: PinnedObject, nbytes: int = HEAD_BYTES) -> FirstBytes:
    data = await pinned.read(0, nbytes)
    return FirstBytes(pinned.url, data, pinned.size, pinned.etag)


async def _found(pinned: PinnedObject | None, *, is_needed: bool) -> layouts.Idx | None:
    """Read an index; None if missing. Some stores report missing objects as forbidden."""
    if pinned is None:
        return None
    try:
        head = await _head(pinned, layouts.IDX_HEAD.size)
    except (ObjectMissingError, AccessDeniedError):
        if is_needed:
            raise
        return None
    return layouts.read_idx(head)


async def _check_last(pinned: PinnedObject, idx: layouts.Idx, file: TokenFile) -> None:
    """Check that the index's last sequence ends at the file's end, without reading the others."""
    end = 0
    if idx.sequences:
        length, pointer = await asyncio.gather(
            _all(pinned, idx.pointers - 4, 4), _all(pinned, idx.firsts - 8, 8)
        )  # the last entry of each table
        end = int.from_bytes(pointer, "little", signed=True)
        end += int.from_bytes(length, "little", signed=True) * file.dtype.itemsize
    _check_end(idx, end, file)


def _check_end(idx: layouts.Idx, end: int, file: TokenFile) -> None:
    if end != file.size:
        raise damage(
            file.url,
            f"it has {file.size} bytes, and the sequences of {masked(idx.url)} end at {end}: one of the two was cut "
            "off, or they do not belong together",
        )


async def _all(pinned: PinnedObject, start: int, length: int) -> memoryview:
    data = await pinned.read(start, length)
    if len(data) < length:
        raise damage(pinned.url, f"bytes {start} to {start + length} are wanted, and {len(data)} of them came")
    return data


def _is_npy(url: str) -> bool:
    return split_path(url)[0].lower().endswith(".npy")


def bin_of(url: str) -> str:
    return _with(url, _BIN) if split_path(url)[0].endswith(_IDX) else url


def _with(url: str, suffix: str) -> str:
    path, rest = split_path(url)
    return path.removesuffix(_BIN).removesuffix(_IDX) + suffix + rest


_PLACE_BYTES = 8


async def documents_by_eos(pinned: PinnedObject, file: TokenFile, eos: int, most_bytes: int) -> Ints:
    """Return starts of documents and the last end, in tokens. Tokens after the last `eos` count.

    Holds a few pieces of the file, and 8 bytes for each document, up to `most_bytes`.
    """
    begin, stop, itemsize = file.begin, file.begin + file.count * file.dtype.itemsize, file.dtype.itemsize
    found = [np.zeros(1, np.int64)]
    count, at, rest = 1, 0, b""
    async with aclosing(pinned.pieces()) as pieces:
        async for piece in pieces:
            data = rest + bytes(piece[max(begin - at, 0) : max(stop - at, 0)])
            at += len(piece)
            whole = len(data) // itemsize * itemsize
            first = (min(at, stop) - begin - len(data)) // itemsize
            rest = data[whole:]
            ends = np.flatnonzero(np.frombuffer(data[:whole], file.dtype) == eos) + first + 1
            found.append(ends.astype(np.int64))
            count += len(ends)
            if _PLACE_BYTES * (count + 1) > most_bytes:
                raise LimitError.at(
                    file.url,
                    f"has {count} documents and more: where each begins takes {_PLACE_BYTES} bytes, "
                    f"over the limit of {most_bytes}",
                )
    if at < stop:
        raise damage(file.url, f"it has {at} bytes, and its tokens end at {stop}")
    places = np.concatenate(found)
    return places if places[-1] == file.count else np.append(places, file.count)


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
    places = [place for url in urls for place, _ in places_of_catalogues(url, (_CATALOGUE,))]
    if len(places) < len(urls):
        return ()
    chunks: list[Chunk] = []
    for url, place in zip(urls, places, strict=True):
        data = blocking(partial(found, place, None, storage_options))
        if data is None:
            if place != url and not chunks:
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
