"""What a container of samples tells of itself: the seam for whoever adds a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from headrace.errors import OptionError, masked
from headrace.formats.compression.decompressor import kind_of
from headrace.formats.index.file import Entry
from headrace.formats.index.shard import ShardIndex
from headrace.formats.limits import DEFAULTS, Limits
from headrace.protocols import ObjectReads, Reads, Version
from headrace.rows import Rows, Scanner

__all__ = ["Block", "Catalogue", "Format", "RowFilter", "Scanner", "ShardEntry", "packing_of"]


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A shard, and what its data set says of it.

    Attributes:
        samples: how many it has; None: not said.
        about: whatever `Format.listed` found that `Format.index` needs; it must pickle.
        shares_blocks: whether many of its samples lie in one block: they are read together then, where that can be.
        version: which version of the object was listed; None: it was not listed.
    """

    url: str
    samples: int | None = None
    about: Any = None
    shares_blocks: bool = False
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What a folder's catalogue says.

    Attributes:
        entries: the shards, in their order.
        facts: what else is told of them where a stream describes itself: (of what, what).
        form: what reads the shards, where the format whose catalogue it is does not.
    """

    entries: Sequence[ShardEntry]
    facts: tuple[tuple[str, str], ...] = ()
    form: Format | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """What is opened at once: one sample, or many that lie together.

    Attributes:
        url: the shard's address, secrets hidden.
        members: what the format has called each of its members in `Rows.fields`; several may be called the same.
        limits: how much it may ask for.
        about: what the format has said of it in `Rows.about`.
    """

    url: str
    members: tuple[str, ...]
    limits: Limits = DEFAULTS
    about: Any = None


class RowFilter(NamedTuple):
    """What of rows a format leaves out once it has opened them.

    Attributes:
        text: as a call: states name it.
        fields: of the members that it asks: they are read whatever is wanted of samples.
    """

    text: str
    fields: tuple[str, ...]


@runtime_checkable
class Format(Protocol):
    """A container of samples. Inherit it: what a format does not need is here.

    A shard's samples are told in one of two ways. A `scanner` finds them while the shard is read from its start: then
    it can be streamed without an index, can be compressed as a whole, and `headrace index` makes its index. Or `index`
    knows them from a footer, or from a table beside them: then samples have numbers from the start.

    Either way they are rows of a table. A sample's members are byte ranges of the shard. Many samples may share the
    members of one block: its bytes are read once, and `open_block` opens them once in a worker.

    Methods are called in several threads and processes: a format keeps nothing between calls. It goes to the workers by
    pickle, one of a module as its class.

    Attributes:
        name: as in `hr.stream(…, format=name)`.
        suffixes: of names, in lower case, with the dot.
        catalogue: the name, in a folder, of the file that says which shards this has; None: there is none.
        fields_are_members: whether samples are their members as bytes, and need not be opened.
        members_make_fields: whether each member makes the field that is called as it is, and no other: those of fields
            that nobody wants are not read.
        keeps_tables: whether what `index` reads of a shard in the cloud is kept on this machine for two minutes, for
            its other processes. A shard that is replaced meanwhile is an ObjectChangedError when its samples are read.
    """

    name: str
    suffixes: tuple[str, ...]
    catalogue: ClassVar[str | None] = None
    fields_are_members: ClassVar[bool] = False
    members_make_fields: ClassVar[bool] = False
    keeps_tables: ClassVar[bool] = False

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        """How sure it is that an object is of this format, from 0 to 1, by its name and its first bytes."""
        return 0.0

    def sniff_end(self, name: str, tail: bytes) -> float:  # noqa: ARG002
        """The same by its last bytes, or all of it if it is short; it is asked where no format knows the first ones."""
        return 0.0

    def scanner(self, url: str, limits: Limits) -> Scanner | None:  # noqa: ARG002
        """What finds the samples of a shard while it is read; None: they are not found so."""
        return None

    def listed(self, url: str, data: bytes, limits: Limits) -> Sequence[ShardEntry]:  # noqa: ARG002
        """The shards that the catalogue at `url` names, whose bytes are `data`.

        Raises:
            FormatError, LimitError: it is damaged.
        """
        return ()

    def catalogued(
        self,
        url: str,
        data: bytes,
        limits: Limits,
        others: Callable[[str], bytes | None],  # noqa: ARG002
    ) -> Catalogue:
        """As `listed`, for catalogues that go on in other files.

        Args:
            others: gives the bytes of what lies beside the catalogue, by its name; None where nothing does.
        """
        return Catalogue(self.listed(url, data, limits))

    async def index(self, reads: Reads, shard: ShardEntry, limits: Limits) -> ShardIndex:  # noqa: ARG002
        """Where the samples of a shard lie, where no scanner finds them.

        Raises:
            FormatError, LimitError: it is damaged.
            StorageError: it could not be read.
        """
        raise OptionError(f"{masked(shard.url)}: the format {self.name!r} has neither a scanner nor an index")

    def row_filter(self, urls: Sequence[str]) -> RowFilter | None:  # noqa: ARG002
        """What leaves rows of these shards out that their indexes have; None: all come.

        `open_block` gives None in the place of each. They are left out as by `.filter()`, with the same states.
        """
        return None

    async def own_index(self, shard: ObjectReads, limits: Limits) -> tuple[Entry, bytes] | None:  # noqa: ARG002
        """What `headrace index` keeps of a shard that is no table of samples: (its entry, its block in the file).

        None: a scanner finds its samples, and the table of these is kept.

        Raises:
            FormatError, LimitError: it is damaged.
            StorageError: it could not be read.
        """
        return None

    async def single(
        self,
        reads: Reads,  # noqa: ARG002
        url: str,  # noqa: ARG002
        shard: ShardIndex,  # noqa: ARG002
        row: int,  # noqa: ARG002
        wanted: Sequence[frozenset[str]] | None,  # noqa: ARG002
    ) -> Rows | None:
        """The table of one sample alone, where fewer bytes than its block make it; None: as the index has it.

        Args:
            row: its number in the shard.
            wanted: of each of these sets of fields at least one is wanted; None: all fields.
        """
        return None

    def gives_tensors(self, entries: Sequence[ShardEntry]) -> bool:  # noqa: ARG002
        """Whether the samples of shards, of which a catalogue says this, hold torch's tensors.

        Workers are started with torch then. Where nothing needs it they are without: it takes a second and much memory.
        """
        return False

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object] | None]:
        """The samples of a block, each a dict of fields whose names do not begin with "__"; they may be made lazily.

        Args:
            bodies: the bytes of each member.

        Raises:
            ValueError: it is damaged; the message says how. That is a DecodeError of each sample then.
        """
        return [dict(zip(block.members, bodies, strict=True))]

    def open_many(self, block: Block, bodies: Sequence[bytes]) -> Sequence[Mapping[str, object] | None]:  # noqa: ARG002
        """The samples of blocks that are one member and one sample each, where many at once take less time.

        It may give fewer, or None in the place of one, and raises nothing: what is missing goes through `open_block`,
        which says what is wrong with it. What it does give must be the same.
        """
        return ()


def opens_many(form: Format) -> bool:
    """Whether a format opens several samples together that are one member each."""
    return type(form).open_many is not Format.open_many


def packing_of(form: Format, url: str) -> str | None:
    """How a shard is compressed as a whole; None where it is not, or where that is the format's own business."""
    return None if type(form).scanner is Format.scanner else kind_of(url)
