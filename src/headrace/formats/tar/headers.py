"""Parses one header of a tar archive: ustar, pax (POSIX.1-2008) and GNU tar.

Damage raises a FormatError with its offset; the scanner adds the URL.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.errors import FormatError, LimitError

BLOCK = 512
ZEROS = bytes(BLOCK)

_HIGH = bytes(range(128))
_OCTAL = b"01234567"
_DIGITS_MOST = 20
_NO_TEXT = (
    (b"\x1f\x8b", "gzip data"),
    (b"\x28\xb5\x2f\xfd", "zstandard data"),
    (b"BZh", "bzip2 data"),
    (b"\xfd7zXZ\x00", "xz data"),
    (b"\x04\x22\x4d\x18", "lz4 data"),
    (b"PK\x03\x04", "a zip archive"),
    (b"%pdf-", "a PDF"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
    (b"version https://git-lfs", "a Git LFS pointer: the object itself was not fetched"),
)
_LOOKS = (
    *_NO_TEXT,
    (b"<!doctype html", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"<?xml", "an XML document"),
    (b"{", "JSON"),
)


class Header(NamedTuple):
    """A header block with a correct checksum. A pax record may replace the unparsed `size`."""

    kind: bytes
    name: bytes
    size: bytes


class Pax(NamedTuple):
    """The records of an extended header about the next member. None: not specified.

    `sparse` is set if the body of the member is not its content. It is the member's real name, which may be empty.
    """

    path: bytes | None
    size: bytes | None
    sparse: bytes | None


def shown(name: bytes) -> str:
    """Return `name` for a message, escaped and shortened."""
    text = name if len(name) <= 200 else name[:200] + b"..."
    return repr(text.decode("utf-8", "backslashreplace"))


def key_of(name: bytes) -> str | None:
    """Return the key of the sample of the member `name`. None if it belongs to no sample."""
    slash = name.rfind(b"/") + 1
    dot = name.find(b".", slash)
    return name[:dot].decode("utf-8", "surrogateescape") if dot > slash else None


def read_header(block: bytes, offset: int) -> Header:
    """Parse the header `block` at `offset`. It must not be all zeros."""
    if not _has_right_checksum(block):
        if offset == 0:
            raise FormatError(f"this is not a tar archive{looks_like(block)}", offset=0)
        total = sum(block) - sum(block[148:156]) + 256
        raise FormatError(
            f"the checksum of a header is wrong: it is {block[148:156]!r}, the bytes make {total:06o} (octal)",
            offset=offset,
        )
    return Header(block[156:157], header_name(block), block[124:136])


def _has_right_checksum(block: bytes) -> bool:
    said = block[148:156]
    digits = said.strip(b" \0")
    if not digits or digits.strip(_OCTAL):
        return False
    check, total = int(digits, 8), sum(block) - sum(said) + 256
    if check == total:
        return True
    # historical tar programs summed signed bytes
    high = len(block[:148].translate(None, _HIGH)) + len(block[156:].translate(None, _HIGH))
    return check == total - 256 * high


def find_header(view: memoryview, start: int) -> int | None:
    """Return the first ustar header at a multiple of 512 bytes from `start`, or None."""
    rest = bytes(view[start:])
    at = -1
    while (at := rest.find(b"ustar", at + 1)) >= 0:
        head = at - 257
        if head % BLOCK == 0 and head + BLOCK <= len(rest) and _has_right_checksum(rest[head : head + BLOCK]):
            return start + head
    return None


def header_name(block: bytes) -> bytes:
    """Return the name in a header block, with ustar's prefix. GNU headers have no prefix."""
    name = block[:100].partition(b"\0")[0]
    if block[345] and block[257:263] == b"ustar\0":
        return block[345:500].partition(b"\0")[0] + b"/" + name
    return name


def looks_like(start: bytes, *, is_text: bool = False) -> str:
    """Guess an object's type by its first bytes, as the end of a message. "" if unknown.

    If `is_text`, the object may be any text, and only other types are recognized.
    """
    head = start[:64].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for magic, kind in _NO_TEXT if is_text else _LOOKS:
        if start.startswith(magic) or head.startswith(magic):
            return f": it looks like {kind}"
    return ""


def read_size(said: bytes, is_pax: bool, limit: int, offset: int, name: bytes | None = None) -> int:
    """Parse a size in bytes from a header field, or from a pax record, which is decimal.

    `offset` is that of the header, for errors. `name` is None for an extended header.
    """
    size: int | None = None
    if is_pax:
        size = int(said) if said.isdigit() and len(said) <= _DIGITS_MOST else None
    elif said[0] & 0x80:  # base-256, two's complement below the mark
        size = int.from_bytes(bytes([said[0] & 0x7F]) + said[1:], "big")
        if said[0] & 0x40:
            size -= 2**95
    else:
        digits = said.lstrip(b" ").rstrip(b" \0")
        size = int(digits, 8) if digits and not digits.strip(_OCTAL) else None
    if size is not None and 0 <= size <= limit:
        return size
    what, key = ("an extended header", None) if name is None else (f"the member {shown(name)}", key_of(name))
    if size is None or size < 0:
        seen = repr(said[:40]) if size is None else size
        raise FormatError(f"the size of {what} is {seen}, which is no size", key=key, offset=offset)
    raise LimitError(f"the size of {what} is {size} bytes, over the limit of {limit}", key=key, offset=offset)


def read_pax(body: bytes, offset: int) -> Pax:
    """Parse the records of an extended header at `offset` that matter for samples.

    The work is linear in the length of the body (unlike CVE-2024-6232).
    """
    path: bytes | None = None
    size: bytes | None = None
    sparse: bytes | None = None
    position = 0
    while position < len(body):
        if body[position] == 0 and not body[position:].strip(b"\0"):
            break  # some writers pad with zeros
        space = body.find(b" ", position, position + _DIGITS_MOST)
        digits = body[position:space] if space > 0 else b""
        end = position + int(digits) if digits.isdigit() else 0
        equals = body.find(b"=", space + 1, end - 1) if space + 1 < end <= len(body) else -1
        if equals <= space + 1 or body[end - 1] != 0x0A:
            raise FormatError("a record of a pax header is damaged", offset=offset + position)
        name, value = body[space + 1 : equals], body[equals + 1 : end - 1]
        if name == b"path":
            if b"\0" in value:
                raise FormatError("the path in a pax header holds a zero byte", offset=offset + position)
            path = value or None  # an empty value cancels an earlier one
        elif name == b"size":
            size = value or None
        elif name.startswith((b"GNU.sparse.", b"SUN.holesdata")):
            sparse = value if name == b"GNU.sparse.name" else sparse or b""
        position = end
    return Pax(path, size, sparse)
