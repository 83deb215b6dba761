"""What the heads of Arrow's messages say: schemas, dictionaries, and batches of rows."""

from __future__ import annotations

from typing import NamedTuple

from headrace.formats.arrow.flat import FlatTable

SCHEMA, DICTIONARY, BATCH = 1, 2, 3
CODECS = ("LZ4", "ZSTD")

PREFIX_BYTES = 8
CONTINUATION = b"\xff\xff\xff\xff"
_BLOCK = "<qi4xq"


class MessageHead(NamedTuple):
    """The head of a message.

    Attributes:
        kind: SCHEMA, DICTIONARY, BATCH, or another number.
        version: of the layout, as Arrow numbers it: 3 is the fourth.
        body: bytes that follow the head.
        rows: of a batch.
        nodes: how many arrays it has, with those that lie in others.
        buffers: (where in the body, how many bytes) of each.
        codec: a number of `CODECS`; None: it is not compressed.
        variadic: how many buffers more each column of views has.
        dictionary: the number of the dictionary that this is.
        is_delta: whether it goes on from the same one's values before.
    """

    kind: int
    version: int
    body: int
    rows: int = 0
    nodes: int = 0
    buffers: tuple[tuple[int, int], ...] = ()
    codec: int | None = None
    variadic: tuple[int, ...] = ()
    dictionary: int = 0
    is_delta: bool = False


class MessagePlace(NamedTuple):
    """Where a message of a file lies: where it begins, how long its head is, and how long its body."""

    start: int
    head: int
    body: int


def head_bytes(prefix: bytes) -> int:
    """How many bytes a message has before its body, by its first 8; 0: here a stream ends.

    Raises:
        ValueError: that is no number, or is said in the way of before 2019.
    """
    if len(prefix) < PREFIX_BYTES:
        raise ValueError("it is cut off in the head of a message")
    if prefix[:4] != CONTINUATION:
        raise ValueError("a message does not begin as those do that Arrow has written since 0.15")
    length = int.from_bytes(prefix[4:PREFIX_BYTES], "little", signed=True)
    if length < 0:
        raise ValueError(f"the head of a message would have {length} bytes")
    return length + PREFIX_BYTES if length else 0


def head_of(data: bytes) -> MessageHead:
    """What the head of a message says, `data` being all that lies before its body.

    Raises:
        ValueError: it is damaged.
    """
    message = FlatTable.root(data[PREFIX_BYTES:])
    kind, version, body, header = message.number(1, 1), message.number(0, 2), message.number(3, 8), message.table(2)
    if header is None or body < 0:
        raise ValueError("the head of a message is damaged")
    if kind == DICTIONARY:
        batch = header.table(1)
        if batch is None:
            raise ValueError("a dictionary has no values")
        head = _batch(batch, MessageHead(kind, version, body))
        return head._replace(dictionary=header.number(0, 8), is_delta=bool(header.number(2, 1)))
    return _batch(header, MessageHead(kind, version, body)) if kind == BATCH else MessageHead(kind, version, body)


def _batch(batch: FlatTable, head: MessageHead) -> MessageHead:
    rows, packed = batch.number(0, 8), batch.table(3)
    codec = None if packed is None else packed.number(0, 1)
    if rows < 0 or not (codec is None or 0 <= codec < len(CODECS)):
        raise ValueError(f"a batch has {rows} rows" if rows < 0 else f"a batch is compressed by the codec {codec}")
    buffers, end = [], 0
    for start, size in batch.structs(2, "<qq"):
        if size < 0 or start < (end if size else 0) or start + size > head.body:
            raise ValueError(f"a buffer has {size} bytes at {start} of {head.body}, and the one before ends at {end}")
        end = start + size if size else end
        buffers.append((start, size))
    variadic = tuple(count for (count,) in batch.structs(4, "<q"))
    nodes = list(batch.structs(1, "<qq"))
    return head._replace(rows=rows, nodes=len(nodes), buffers=tuple(buffers), codec=codec, variadic=variadic)


def blocks_of(footer: bytes) -> tuple[list[MessagePlace], list[MessagePlace]]:
    """(the dictionaries, the batches) that the footer of a file names.

    Raises:
        ValueError: it is damaged.
    """
    table = FlatTable.root(footer)
    dictionaries, batches = ([MessagePlace(*one) for one in table.structs(field, _BLOCK)] for field in (2, 3))
    return dictionaries, batches
