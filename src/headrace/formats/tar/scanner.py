"""Finds the samples of a tar archive while it is read."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace._util.sample_ranges import Rows
from headrace.errors import FormatError, LimitError, masked
from headrace.formats.format import Format
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.tar.headers import (
    BLOCK,
    ZEROS,
    Header,
    find_header,
    key_of,
    looks_like,
    read_header,
    read_pax,
    read_size,
    shown,
)
from headrace.formats.tar.samples import Grouper, regular_run
from headrace.types import Buffer

_REGULAR = (b"0", b"\0", b"7")
_EXTENDED = (b"x", b"X", b"g", b"L", b"K")
_BODILESS = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, directories: they have no body, whatever their size
_PASSED_OVER = (*_BODILESS, b"V", b"D")
_REFUSED = {b"S": "sparse members are not supported", b"M": "members split over volumes are not supported"}


@dataclass(slots=True)
class _Extended:
    kind: bytes
    offset: int
    size: int
    body: bytearray = field(default_factory=bytearray)


class TarScanner:
    """Finds the samples of a tar archive in successive buffers.

    It holds numbers and names but no bodies, and may be pickled between calls, so that another process can scan the
    next buffer. A sample is returned once it is complete: when a member with another key begins, or at a proven end of
    the archive. The end is two zero blocks, or one at the very end of the object. Data after two zero blocks are
    ignored, unless they contain members, which means joined archives or a hole in one. That is an error. Names are
    keys, never paths. See `tar.samples` for the grouping of members.

    Attributes:
        error: Damage that was found. Nothing is scanned after it. The sample before it is incomplete, unless the member
            that exceeds a limit has another key.
        done: True once all of the archive was scanned or `error` is set.
        member: (name, offset, size) of the body of the last member. None after an extended header.
    """

    longest_run = 4096
    """Maximum number of members that the fast path parses at once. 0 disables it."""

    def __init__(self, url: str, limits: Limits = DEFAULTS) -> None:
        self.error: FormatError | None = None
        self.done = False
        self.member: tuple[bytes, int, int] | None = None
        self.url = url
        self._limits = limits
        self._samples = Grouper(limits)
        self._end = 0  # offset after the last fed byte
        self._next = 0  # offset of the next header
        self._extended: _Extended | None = None
        self._chain = 0  # number of extended headers of the next member; the values follow
        self._name: bytes | None = None
        self._size: bytes | None = None
        self._sparse: bytes | None = None
        self._zero: int | None = None
        self._ended = False  # two zero blocks were read
        self._run = self.longest_run

    @property
    def low(self) -> int:
        """The lowest offset that is still needed, for samples not yet returned or to continue."""
        if self.done:
            return self._end
        low = self._samples.low
        if low is not None:
            return low
        return self._end if self._extended is not None else self._next

    @property
    def next_header(self) -> int:
        return self._next

    @property
    def has_ended(self) -> bool:
        """True if an end mark follows at least one member, so that only padding may follow."""
        return self._ended and self.member is not None

    def skip(self, offset: int) -> None:
        """Continue at `offset`, at most the next header. The skipped bytes are part of a body."""
        if self._extended is not None or not self._end <= offset <= self._next:
            raise ValueError(f"bytes {self._end} to {offset} cannot be skipped: the next header is at {self._next}")
        self._end = offset

    def feed(self, buffer: Buffer, offset: int, last: bool) -> Rows:
        """Scan the buffer at `offset` of the archive. Return the samples that it completes.

        Offsets in the rows count from the start of the archive. Damage does not raise: the samples before it are
        returned and `error` is set.

        Args:
            buffer: The bytes after the previous buffer. The length is a multiple of 512 unless it is the last one.
            offset: Offset of the buffer, in bytes.
            last: True if the archive ends with this buffer, which may be empty.
        """
        view = memoryview(buffer).cast("B")
        if offset != self._end or (len(view) % BLOCK and not last):
            raise ValueError(
                f"fed bytes {offset} to {offset + len(view)} (last={last}) after {self._end}: "
                f"buffers must follow one another in multiples of {BLOCK} bytes"
            )
        self._end += len(view)
        if not self.done:
            try:
                self._read(view, offset)
                if last and not self._ended:
                    self._finish(view)
                self.done = last
            except FormatError as damage:
                self.error = self._located(damage)
                self.done = True
        rows = self._samples.take(ended=self._ended)
        if self.done:
            self._samples.drop()
        return rows

    def _located(self, damage: FormatError) -> FormatError:
        # a new error: the traceback of a raised one would keep the buffer alive
        where = f"{masked(self.url)}, byte {damage.offset}"
        return type(damage)(f"{damage.args[0]} ({where})", url=self.url, key=damage.key, offset=damage.offset)

    def _read(self, view: memoryview, offset: int) -> None:
        one_by_one_until = 0
        while not self._ended:
            if self._extended is not None and not self._collect(self._extended, view, offset):
                return
            at = self._next
            start = at - offset
            if at + BLOCK > self._end:
                return
            if self._run and at >= one_by_one_until and self._zero is None and not self._chain:
                run = regular_run(view, start, self._run, self._limits.member_bytes)
                # after a header that only the general path parses, try fewer at once, to avoid quadratic work
                self._run = min(self.longest_run, self._run * 2) if run.stop == run.tried else 16
                one_by_one_until = offset + run.tried
                if len(run.names):
                    bodies = offset + run.bodies
                    self._samples.add_run(run.names, bodies, run.sizes)
                    self.member = run.names[-1].item(), int(bodies[-1]), int(run.sizes[-1])
                    self._next = offset + run.stop
                    continue
            self._step(bytes(view[start : start + BLOCK]), at)
        found = find_header(view, self._next - offset)
        if found is not None:
            raise FormatError(
                "members follow the end mark: archives were joined, or zeros overwrite a part of one",
                offset=offset + found,
            )
        self._next = max(self._next, self._end // BLOCK * BLOCK)

    def _step(self, block: bytes, at: int) -> None:
        self._next = at + BLOCK
        if block == ZEROS:
            if self._chain:
                raise FormatError("no member follows an extended header", offset=at)
            self._ended = self._zero is not None
            self._zero = at
            return
        if self._zero is not None:
            raise FormatError("a zero block in the middle: more follows what marks the end", offset=self._zero)
        header = read_header(block, at)
        if header.kind in _EXTENDED:
            self._begin_extended(header, at)
            return
        name = self._name or header.name
        if self._sparse is not None:
            name = self._sparse or name
            raise FormatError(f"{_REFUSED[b'S']}: {shown(name)}", key=key_of(name), offset=at)
        size = 0
        is_folder = header.kind == b"\0" and name.endswith(b"/")  # V7 has no kind for them
        is_label = header.kind == b"V" and not header.size.strip(b" \0")  # GNU tar gives it no size
        if header.kind not in _BODILESS and not is_folder and not is_label:
            try:
                size = read_size(self._size or header.size, self._size is not None, self._limits.member_bytes, at, name)
            except LimitError:
                if header.kind in _REGULAR:
                    self._samples.refuse(name)
                raise
        self._chain, self._name, self._size = 0, None, None
        self._next += size + 511 & -BLOCK
        self.member = name, at + BLOCK, size
        if header.kind in _REGULAR:
            self._samples.add([name], [at + BLOCK], [size])
        elif header.kind not in _PASSED_OVER:
            why = _REFUSED.get(header.kind, f"members of type {header.kind!r} are not supported")
            raise FormatError(f"{why}: {shown(name)}", key=key_of(name), offset=at)

    def _begin_extended(self, header: Header, at: int) -> None:
        self._chain += header.kind != b"g"
        if self._chain > self._limits.extension_chain:
            raise LimitError(
                f"a member has more than {self._limits.extension_chain} extended headers, the limit", offset=at
            )
        size = read_size(header.size, False, self._limits.header_bytes, at)
        self._next += size + 511 & -BLOCK
        self._extended = _Extended(header.kind, at, size)
        self.member = None

    def _collect(self, extended: _Extended, view: memoryview, offset: int) -> bool:
        """Append to the body of an extended header. Return True if it is complete."""
        start = extended.offset + BLOCK + len(extended.body) - offset
        extended.body += view[start : start + extended.size - len(extended.body)]
        if len(extended.body) < extended.size:
            return False
        self._extended = None
        if extended.kind == b"L":
            name = bytes(extended.body.partition(b"\0")[0])
            if not name:
                raise FormatError("a long name is empty", offset=extended.offset)
            self._name = _agreed("names", self._name, name, extended.offset)
        elif extended.kind != b"K":
            pax = read_pax(bytes(extended.body), extended.offset + BLOCK)
            if extended.kind != b"g":
                self._name = _agreed("names", self._name, pax.path, extended.offset)
                self._size = _agreed("sizes", self._size, pax.size, extended.offset)
                if pax.sparse is not None:  # it may be empty; headers without it do not cancel it
                    self._sparse = self._sparse or pax.sparse
            elif pax != (None, None, None):
                what = "path" if pax.path is not None else "size" if pax.size is not None else "map of holes"
                raise FormatError(f"a global pax header gives all members one {what}", offset=extended.offset)
        return True

    def _finish(self, view: memoryview) -> None:
        """Check that the archive may end here without two zero blocks."""
        end = self._end
        if end == 0:
            raise FormatError("the archive is empty: it has not even an end mark", offset=0)
        if self._next > end:
            if self.member is None:
                raise FormatError("the archive is truncated: it ends inside an extended header", offset=end)
            name, body, size = self.member
            raise FormatError(
                f"the archive is truncated: it ends inside the member {shown(name)}, {size} bytes from byte {body} on",
                key=key_of(name),
                offset=end,
            )
        if self._next < end:
            known = looks_like(bytes(view)) if self._next == 0 else ""
            if known:
                raise FormatError(f"this is not a tar archive{known}", offset=0)
            raise FormatError(f"the archive is truncated: it ends inside the header at byte {self._next}", offset=end)
        if self._chain:
            raise FormatError("the archive is truncated: it ends after an extended header", offset=end)
        if self._zero is None:
            raise FormatError("the archive is truncated: it ends without its end mark (zero blocks)", offset=end)
        self._ended = True


def _agreed(what: str, before: bytes | None, now: bytes | None, offset: int) -> bytes | None:
    """Return the value that a member's extended headers agree on. Readers differ on conflicts."""
    if before and now and before != now:
        raise FormatError(f"a member has two {what}: {shown(before)} and {shown(now)}", offset=offset)
    return now or before


class TarFormat(Format):
    """Tar archives in WebDataset's layout; see `tar.samples`."""

    name = "tar"
    suffixes = (".tar",)
    fields_are_members = True

    def sniff(self, name: str, head: bytes) -> float:
        if len(head) < BLOCK or not any(head[:BLOCK]):
            return 0.0
        try:
            read_header(head[:BLOCK], 0)
        except FormatError:
            return 0.0
        return 1.0 if head[257:262] == b"ustar" else 0.6

    def scanner(self, url: str, limits: Limits) -> TarScanner:
        return TarScanner(url, limits)


TAR = TarFormat()
