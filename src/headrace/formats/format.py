"""The interface of formats: how the samples of a shard are found and decoded; row tables that formats share."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, overload, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headrace._util.reads import Reads, Version
from headrace._util.sample_ranges import Rows, Scanner
from headrace.errors import FormatError, LimitError, OptionError
from headrace.formats.compression import kind_of, path_of
from headrace.formats.index import Entry, ShardIndex
from headrace.formats.limits import DEFAULTS, Limits, check_bytes
from headrace.formats.pinned_object import PinnedObject
from headrace.types import Buffer, Ints

__all__ = ["Block", "Catalogue", "Format", "RowFilter", "Scanner", "ShardEntry", "packing_of"]


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A shard as its data set lists it.

    Attributes:
        samples: Number of samples. None: not listed.
        about: Data from `Format.catalogued` that `Format.index` needs. It must be picklable.
        shares_blocks: True if many samples share one block. They are read together if possible.
        version: Listed version of the object. None: the object was not listed.
    """

    url: str
    samples: int | None = None
    about: Any = None
    shares_blocks: bool = False
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The content of a folder's catalogue.

    Attributes:
        entries: The shards, in order.
        facts: Further metadata for the description of a stream: (name, value).
        form: The format that reads the shards. None: the format that owns the catalogue.
    """

    entries: Sequence[ShardEntry]
    facts: tuple[tuple[str, str], ...] = ()
    form: Format | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """The unit of decoding: one sample, or many that share members.

    Attributes:
        url: URL of the shard, with secrets hidden.
        members: Name of each member, from `Rows.fields`. Names may repeat.
        limits: Limits for decoding.
        about: Metadata of the block, from `Rows.about`.
    """

    url: str
    members: tuple[str, ...]
    limits: Limits = DEFAULTS
    about: Any = None


class RowFilter(NamedTuple):
    """A predicate on rows that a format applies when it decodes them.

    Attributes:
        text: The predicate as a call. States store this text.
        fields: Fields that the predicate needs. They are read even if samples do not need them.
    """

    text: str
    fields: tuple[str, ...]


@runtime_checkable
class Format(Protocol):
    """A container of samples. Subclass it and override what the format needs.

    There are two ways to find the samples of a shard. A `scanner` finds them while the shard is read from its start.
    The shard can then be streamed without an index and compressed as a whole, and `headrace index` can index it.
    Otherwise, `index` reads a footer, or a table stored next to the samples. Samples then have numbers from the start.

    Both ways give rows of a table. The members of a sample are byte ranges of the shard. Many samples may share the
    members of one block: its bytes are read once, and `open_block` decodes them once in a worker.

    Methods are called in several threads and processes, so a format must keep no state between calls. Formats are
    pickled for the workers. The class of a format in a module is pickled by reference.

    Attributes:
        name: Name for `hr.stream(…, format=name)`.
        suffixes: Suffixes of file names, in lower case, with the dot.
        catalogue: Name of the file in a folder that lists the shards. None: there is no such file.
        fields_are_members: True if the fields of samples are their members as bytes, so that blocks need no decoding.
        members_make_fields: True if each member makes exactly the field of its own name. Members of unneeded fields are
            then not read.
    """

    name: str
    suffixes: tuple[str, ...]
    catalogue: ClassVar[str | None] = None
    fields_are_members: ClassVar[bool] = False
    members_make_fields: ClassVar[bool] = False

    def sniff(self, name: str, head: bytes) -> float:
        """Return a confidence from 0 to 1 for this format, by an object's name and first bytes."""
        return 0.0

    def scanner(self, url: str, limits: Limits) -> Scanner | None:
        """Return a scanner that finds the samples of a shard while it is read. None: use `index`."""
        return None

    def catalogued(self, url: str, data: bytes, limits: Limits, others: Callable[[str], bytes | None]) -> Catalogue:
        """Return the content of a catalogue, which may refer to other files.

        Args:
            data: The catalogue, which is at `url`.
            others: Returns the bytes of a file next to the catalogue, by its name. None: there is no such file.

        Raises:
            FormatError, LimitError: The catalogue is damaged.
        """
        return Catalogue(())

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:
        """Return the table of the samples of a shard. Called if there is no scanner.

        Raises:
            FormatError, LimitError: The shard is damaged.
            StorageError: The shard could not be read.
        """
        raise OptionError.at(shard.url, f": the format {self.name!r} has neither a scanner nor an index")

    def row_filter(self, urls: Sequence[str]) -> RowFilter | None:
        """Return the predicate that excludes indexed rows of these shards. None: no row is excluded.

        `open_block` returns None for each excluded row. Such rows are skipped as by `.filter()`, with equal states.
        """
        return None

    async def own_index(self, shard: PinnedObject, limits: Limits) -> tuple[Entry, bytes] | None:
        """Return the index that `headrace index` stores for a shard without a table of samples.

        The result is (entry, block of the index file). None: a scanner finds the samples, and their table is stored.

        Raises:
            FormatError, LimitError: The shard is damaged.
            StorageError: The shard could not be read.
        """
        return None

    def gives_tensors(self, entries: Sequence[ShardEntry]) -> bool:
        """True if samples of these shards hold torch tensors.

        Workers then import torch at their start. Without this they avoid the import, which takes a second and much
        memory.
        """
        return False

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object] | None]:
        """Return the samples of a block as dicts, possibly lazy. Fields must not begin with "__".

        Args:
            bodies: The bytes of each member.

        Raises:
            ValueError: The block is damaged; the message explains how. This becomes a DecodeError of each of its
                samples.
        """
        return [dict(zip(block.members, bodies, strict=True))]

    def open_many(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object] | None]:
        """Decode several blocks of one member and one sample each, if that is faster.

        The result may be shorter, or have None for some samples. Missing samples are decoded by `open_block`, which
        reports errors; this method raises none. Results must equal those of `open_block`.
        """
        return ()


def packing_of(form: Format, url: str) -> str | None:
    """Return the compression of a whole shard. None: none, or handled by the format."""
    return None if type(form).scanner is Format.scanner else kind_of(url)


@contextmanager
def errors_named(url: str, what: str = "is damaged") -> Iterator[None]:
    """Name the shard at `url` in errors. A ValueError becomes a FormatError."""
    try:
        yield
    except LimitError as error:
        raise LimitError.at(url, f": {error.args[0]}") from None
    except FormatError as error:
        raise FormatError.at(url, f"{what}: {error.args[0]}") from None
    except ValueError as error:
        raise FormatError.at(url, f"{what}: {error}") from None


MemberRange = tuple[int, int, str]
"""(offset in the shard, number of bytes, name)."""


def keys_of(numbers: Ints) -> NDArray[np.bytes_]:
    return np.asarray(numbers).astype(f"S{len(str(int(numbers.max(initial=0))))}")


def rows_of_members(keys: NDArray[np.bytes_], offsets: Ints, sizes: Ints, member: str) -> Rows:
    """Return a table of samples with one member each, all named `member`."""
    count = len(keys)
    return Rows(keys, np.arange(count + 1), np.zeros(count, np.int32), offsets, sizes, (member,))


def rows_of_one_block(count: int, offset: int, size: int, member: str) -> Rows:
    """Return a table of `count` samples that are the rows of one block with one member."""
    some = min(count, 1)
    return rows_of_blocks(keys_of(np.arange(count)), [count] * some, [[(offset, size, member)]] * some, [None] * some)


def rows_of_blocks(
    keys: NDArray[np.bytes_], counts: Sequence[int], members: Sequence[list[MemberRange]], about: Sequence[object]
) -> Rows:
    """Return a table of samples that are the rows of blocks, `counts[k]` of block `k`, in this order."""
    order = sorted(range(len(members)), key=lambda k: members[k][:1])
    stored = [members[k] for k in order]
    names = tuple(dict.fromkeys(name for some in stored for _, _, name in some))
    number = {name: k for k, name in enumerate(names)}
    table = np.array([(at, size, number[name]) for some in stored for at, size, name in some], np.int64).reshape(-1, 3)
    return Rows(
        keys,
        np.cumsum([0, *map(len, stored)]),
        table[:, 2].astype(np.int32),
        table[:, 0].copy(),
        table[:, 1].copy(),
        names,
        block=np.repeat(np.argsort(order), counts),
        row=np.concatenate([np.zeros(0, np.int64), *map(np.arange, counts)]),
        about=tuple(about[k] for k in order),
    )


async def index_of_file(reads: Reads, shard: ShardEntry, member: str, limits: Limits) -> ShardIndex:
    """Return an index with the file as one sample. Its key is the name up to the first dot."""
    whole = PinnedObject(reads, shard.url)
    await whole.read(0, 1)
    check_bytes("all of it", whole.size, limits.member_bytes, url=shard.url)
    name = path_of(shard.url).rpartition("/")[2].partition(".")[0] or "0"
    keys = np.array([name.encode("utf-8", "surrogateescape")])
    rows = rows_of_members(keys, np.zeros(1, np.int64), np.array([whole.size], np.int64), member)
    return ShardIndex(rows, None, whole.size, whole.etag)


class RowsOfBlock(Sequence[dict[str, object] | None]):
    """Lazily decoded samples of a block, as a result of `Format.open_block`.

    None replaces a skipped sample.
    """

    @abc.abstractmethod
    def row(self, number: int) -> dict[str, object] | None:
        """Return one sample. `number` is in range."""

    def columns(self, numbers: Sequence[int]) -> Mapping[str, Iterable[object]] | None:
        """Return the values of several samples by field. None: use `row` instead.

        Override it if all samples have the same fields and none is skipped; values must equal those of `row`.

        Args:
            numbers: A range if the numbers are consecutive.
        """
        return None

    @overload
    def __getitem__(self, at: int) -> dict[str, object] | None: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[dict[str, object] | None]: ...
    def __getitem__(self, at: int | slice) -> dict[str, object] | Sequence[dict[str, object] | None] | None:
        numbers = range(len(self))[at]
        return self.row(numbers) if isinstance(numbers, int) else list(map(self.row, numbers))


class CutRows(RowsOfBlock):
    """Samples that are consecutive parts of a block. `offsets` has their starts, and the end of the last."""

    def __init__(self, data: Buffer, offsets: Ints, decode: Callable[[bytes], dict[str, object]]) -> None:
        self._data, self._offsets, self._decode = data, offsets, decode
        self.nbytes = len(data)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def row(self, number: int) -> dict[str, object]:
        start, stop = self._offsets[number : number + 2].tolist()
        return self._decode(bytes(self._data[start:stop]))


def dicts_of(columns: Mapping[str, Iterable[object]], count: int) -> list[dict[str, object]]:
    """Return `count` dicts, of one value of each column."""
    form = dict[str, object].fromkeys(columns)
    made = [form.copy() for _ in range(count)]  # copies are large enough: no dict has to grow
    for name, values in columns.items():
        for one, value in zip(made, values, strict=True):
            one[name] = value
    return made
