"""The parts that archives are made of, right and wrong: headers, members, extended headers, samples."""

from collections.abc import Mapping
from dataclasses import dataclass

BLOCK = 512
END = bytes(2 * BLOCK)
USTAR = b"ustar\x0000"
GNU = b"ustar  \0"
V7 = bytes(8)

Sample = tuple[str, Mapping[str, bytes]]
"""A key, and the body of each field."""


@dataclass(frozen=True)
class Damage:
    """The error that a case must end in.

    Attributes:
        text: words of its message.
        offset: the byte that it names.
        key: of the sample that it names; None where it can name none.
        error: the name of its type.
    """

    text: str
    offset: int
    key: str | None = None
    error: str = "FormatError"


@dataclass(frozen=True)
class Case:
    """One archive, and what a reader must make of it.

    Attributes:
        name: "group/peculiarity".
        samples: Expected samples in order, before the damage.
        damage: Error after them. None: the archive is whole.
        doubtful: Sample before the damage, which may be incomplete and is not delivered. None: it is known.
        otherwise: Samples that are right too, from a reader without our limits and refusals.
    """

    name: str
    data: bytes
    samples: tuple[Sample, ...]
    damage: Damage | None = None
    doubtful: Sample | None = None
    otherwise: tuple[Sample, ...] | None = None


def numeric(value: int) -> bytes:
    """A size field: eleven octal digits."""
    return b"%011o\0" % value


def checksummed(block: bytes, *, signed: bool = False, form: bytes = b"%06o\0 ") -> bytes:
    """The header `block` with the checksum that belongs to it."""
    blank = block[:148] + b" " * 8 + block[156:]
    total = sum(blank) - (256 * sum(byte >= 128 for byte in blank) if signed else 0)
    return block[:148] + (form % total).ljust(8, b" ") + block[156:]


def header(
    name: bytes,
    size: int | bytes = 0,
    kind: bytes = b"0",
    *,
    magic: bytes = USTAR,
    prefix: bytes = b"",
    link: bytes = b"",
) -> bytes:
    """A header block; `size` may be the raw bytes of its field."""
    field = numeric(size) if isinstance(size, int) else size
    block = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + field + b"00000000000\0" + bytes(8) + kind
    block = block.ljust(157, b"\0") + link.ljust(100, b"\0") + magic
    block = block.ljust(345, b"\0") + prefix
    return checksummed(block.ljust(BLOCK, b"\0"))


def padded(body: bytes) -> bytes:
    return body + bytes(-len(body) % BLOCK)


def member(name: str | bytes, body: bytes, kind: bytes = b"0", *, magic: bytes = USTAR) -> bytes:
    raw = name.encode("utf-8", "surrogateescape") if isinstance(name, str) else name
    return header(raw, len(body), kind, magic=magic) + padded(body)


def record(key: bytes, value: bytes) -> bytes:
    """A record of a pax header: its length counts itself."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest)
    while len(b"%d" % length) + len(rest) != length:
        length = len(b"%d" % length) + len(rest)
    return b"%d" % length + rest


def pax(*records: bytes, kind: bytes = b"x") -> bytes:
    return member("./PaxHeaders/a.jpg", b"".join(records), kind)


def long_name(name: bytes, kind: bytes = b"L") -> bytes:
    return member("././@LongLink", name + b"\0", kind, magic=GNU)


def picture(number: int, size: int = 700) -> bytes:
    """Bytes that begin and end as a JPEG does; they hold their number."""
    return b"\xff\xd8\xff\xe0" + bytes((number * 31 + k) % 256 for k in range(size - 6)) + b"\xff\xd9"


SIZES = (700, 512, 1, 513, 1300)


def sample(number: int) -> Sample:
    """The sample "s0", "s1" ... as every archive here has them: a picture and a label."""
    size = SIZES[number % len(SIZES)]
    return f"s{number}", {"jpg": picture(number, size) if size > 6 else b"\xff", "cls": b"%d" % number}


def written(*samples: Sample) -> bytes:
    """Samples as members, without an end mark."""
    return b"".join(member(f"{key}.{field}", body) for key, fields in samples for field, body in fields.items())


S = tuple(sample(number) for number in range(6))
BEFORE = written(*S[:2])
"""Two samples: enough members for the way that reads many at once."""
JPG, CLS = (member(f"s2.{field}", S[2][1][field]) for field in ("jpg", "cls"))
AFTER = written(S[3])


def fine(name: str, middle: bytes, *found: Sample) -> Case:
    """An archive that is right, if odd: `middle` among ordinary samples gives the samples `found`."""
    return Case(name, BEFORE + middle + AFTER + END, (*S[:2], *found, S[3]))


def bad(
    name: str,
    middle: bytes,
    text: str,
    *,
    at: int = 0,
    key: str | None = None,
    error: str = "FormatError",
    otherwise: tuple[Sample, ...] | None = None,
    ends: bool = False,
) -> Case:
    """An archive with damage, `at` bytes into `middle`, between the two members of a third sample.

    The two samples before are whole, because a third one has started. `otherwise` is what may be made of the `middle`.
    With `ends`, what is wrong is the size of a member of another name, or the length of that name: the third sample has
    ended there, as it would without limits.
    """
    half, rest = (("s2", {field: S[2][1][field]}) for field in ("jpg", "cls"))
    also = None
    if otherwise is not None:
        middles = (half, *otherwise, rest) if otherwise and otherwise[0][0] != "s2" else otherwise or (S[2],)
        also = (*S[:2], *middles, S[3])
    damage = Damage(text, len(BEFORE) + len(JPG) + at, key, error)
    given, doubtful = ((*S[:2], half), None) if ends else (S[:2], half)
    return Case(name, BEFORE + JPG + middle + CLS + AFTER + END, given, damage, doubtful, also)
