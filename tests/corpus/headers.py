"""Headers whose checksum or size is wrong, or written in an odd way."""

from corpus.parts import (
    AFTER,
    BEFORE,
    BLOCK,
    CLS,
    END,
    GNU,
    JPG,
    Case,
    Damage,
    S,
    bad,
    checksummed,
    fine,
    header,
    member,
    padded,
    pax,
    record,
    sample,
    written,
)

WRONG = "the checksum of a header is wrong"
BODY = padded(b"body")
X = ("x", {"jpg": b"body"})


def _flipped(data: bytes, byte: int, bit: int = 0) -> bytes:
    changed = bytearray(data)
    changed[byte] ^= 1 << bit
    return bytes(changed)


def _flip(name: str, byte: int, bit: int) -> Case:
    """One bit of the header of s2.cls is another one."""
    data = BEFORE + JPG + CLS + AFTER + END
    start = len(BEFORE + JPG)
    return Case(f"flip/{name}", _flipped(data, start + byte, bit), S[:2], Damage(WRONG, start))


WHOLE = written(*S[:4]) + END
MANY = tuple(sample(n) for n in range(40))
FLIPS = [
    _flip("a name's first letter", 0, 1),
    _flip("a name's dot", 2, 0),
    _flip("after a name", 6, 5),
    _flip("the mode", 104, 0),
    _flip("the size's last digit", 134, 0),
    _flip("the size's first digit", 124, 1),
    _flip("the size, to base 256", 124, 7),
    _flip("the size's end", 135, 4),
    _flip("the time", 140, 2),
    _flip("the checksum's first digit", 148, 1),
    _flip("the checksum's last digit", 153, 0),
    _flip("the type, to a link", 156, 0),
    _flip("the type, to an unknown one", 156, 6),
    _flip("the link's name", 157, 3),
    _flip("the magic", 257, 0),
    _flip("the prefix", 345, 6),
    _flip("the unused end", 511, 7),
    # No checksum covers bodies: the flip is given as it is. A member index with CRCs sees it.
    Case("flip/a body, which nothing covers", _flipped(WHOLE, 600), (
        ("s0", {**S[0][1], "jpg": _flipped(S[0][1]["jpg"], 600 - BLOCK)}), *S[1:4])),
    Case("flip/the padding, which means nothing", _flipped(WHOLE, BLOCK + 900), S[:4]),
    Case("flip/the end mark's first block", _flipped(WHOLE, 18 * BLOCK + 40), S[:3], Damage(WRONG, 18 * BLOCK)),
    Case("flip/the end mark's second block", _flipped(WHOLE, 19 * BLOCK + 40), S[:3],
         Damage("zero block in the middle", 18 * BLOCK)),
]  # fmt: skip

NOT_TAR = "this is not a tar archive"
_LONGER = written(*MANY) + END
_FORTIETH = len(written(*MANY[:39]))
CHECKSUMS = [
    Case("checksum/wrong in the first header", _flipped(WHOLE, 3), (), Damage(NOT_TAR, 0)),
    # s0 may continue in the damaged member
    Case("checksum/wrong between samples", _flipped(WHOLE, 5 * BLOCK + 3), (), Damage(WRONG, 5 * BLOCK)),
    Case("checksum/wrong inside a sample", _flipped(WHOLE, 7 * BLOCK + 3), S[:1], Damage(WRONG, 7 * BLOCK)),
    Case("checksum/wrong in the last header", _flipped(WHOLE, 16 * BLOCK + 3), S[:3], Damage(WRONG, 16 * BLOCK)),
    Case("checksum/wrong in the last of many", _flipped(_LONGER, _FORTIETH), MANY[:38], Damage(WRONG, _FORTIETH)),
    Case("checksum/wrong twice", _flipped(_flipped(WHOLE, 7 * BLOCK + 3), 13 * BLOCK), S[:1], Damage(WRONG, 7 * BLOCK)),
    Case("checksum/sectors swapped", WHOLE[: 7 * BLOCK] + WHOLE[8 * BLOCK : 9 * BLOCK] + WHOLE[7 * BLOCK : 8 * BLOCK]
         + WHOLE[9 * BLOCK :], S[:1], Damage(WRONG, 7 * BLOCK)),
    Case("checksum/a block lost", WHOLE[: 6 * BLOCK] + WHOLE[7 * BLOCK :], S[:1], Damage(WRONG, 7 * BLOCK)),
    Case("checksum/a block doubled", WHOLE[: 7 * BLOCK] + WHOLE[6 * BLOCK :], S[:1], Damage(WRONG, 7 * BLOCK)),
    Case("checksum/a byte lost", WHOLE[: 6 * BLOCK] + WHOLE[6 * BLOCK + 1 :] + b"\0", S[:1], Damage(WRONG, 7 * BLOCK)),
    bad("checksum/of zeros", CLS[:148] + b"000000\0 " + CLS[156:], WRONG),
    bad("checksum/blank", CLS[:148] + b" " * 8 + CLS[156:], WRONG),
    bad("checksum/zero bytes", CLS[:148] + bytes(8) + CLS[156:], WRONG),
    bad("checksum/no digits", CLS[:148] + b"abcdef\0 " + CLS[156:], WRONG),
    bad("checksum/with an eight", CLS[:148] + b"000008\0 " + CLS[156:], WRONG),
    bad("checksum/negative", CLS[:148] + b"-00001\0 " + CLS[156:], WRONG),
    fine("checksum/of signed bytes", checksummed(header("é.jpg".encode(), 4), signed=True) + BODY,
         ("é", {"jpg": b"body"})),
    fine("checksum/of unsigned bytes", header("é.jpg".encode(), 4) + BODY, ("é", {"jpg": b"body"})),
    fine("checksum/padded with spaces", checksummed(header(b"x.jpg", 4), form=b"%6o\0 ") + BODY, X),
    fine("checksum/of seven digits", checksummed(header(b"x.jpg", 4), form=b"%07o\0") + BODY, X),
    fine("checksum/of eight digits", checksummed(header(b"x.jpg", 4), form=b"%08o") + BODY, X),
    fine("checksum/that ends with a space first", checksummed(header(b"x.jpg", 4), form=b"%06o \0") + BODY, X),
]  # fmt: skip

HUGE = "over the limit of 1073741824"


def _no_size(name: str, field: bytes) -> Case:
    return bad(f"size/{name}", header(b"x.jpg", field) + BODY, "the size of the member 'x.jpg' is", key="x")


def _huge(name: str, field: bytes) -> Case:
    return bad(f"size/{name}", header(b"x.jpg", field) + BODY, HUGE, key="x", error="LimitError", ends=True)


SIZES = [
    _no_size("negative", b"-0000000004\0"),
    _no_size("negative, padded", b"         -4 "),
    _no_size("with a plus", b"+0000000004\0"),
    _no_size("with an eight", b"00000000008\0"),
    _no_size("hexadecimal", b"0x000000004\0"),
    _no_size("of letters", b"four bytes!\0"),
    _no_size("with a space inside", b"0000 000004\0"),
    _no_size("with an underscore", b"0_000000004\0"),
    _no_size("with a zero byte inside", b"00000\x00000004\0"),
    # tarfile takes the empty text before the zero byte for 0, others skip the byte
    _no_size("after a zero byte", b"\x000000000004\0"),
    _no_size("blank", b" " * 12),
    _no_size("zero bytes", bytes(12)),
    _no_size("of digits of another script", "٤٤٤٤٤٤".encode()),
    _no_size("with what follows its end", b"4\0" + b"9999999999"),
    _no_size("with a quote after its digits", b'00000000001"'),
    _no_size("with a control character after its digits", b"00000000001\x02"),
    _no_size("base 256: -1", b"\xff" * 12),
    _no_size("base 256: -512", b"\xff" * 10 + b"\xfe\x00"),
    _no_size("base 256: the most negative", b"\xc0" + bytes(11)),
    _huge("base 256: 2**63", b"\x80" + (2**63).to_bytes(11, "big")),
    _huge("base 256: the largest", b"\xbf" + b"\xff" * 11),
    _huge("one byte over the limit", b"%011o\0" % (2**30 + 1)),
    _huge("all sevens", b"7" * 11 + b"\0"),
    _huge("twelve sevens", b"7" * 12),
    fine("size/base 256", header(b"x.jpg", b"\x80" + (4).to_bytes(11, "big"), magic=GNU) + BODY, X),
    fine("size/base 256: 0", header(b"x.jpg", b"\x80" + bytes(11), magic=GNU), ("x", {"jpg": b""})),
    fine("size/padded with spaces", header(b"x.jpg", b"          4 ") + BODY, X),
    fine("size/with spaces after", header(b"x.jpg", b"4           ") + BODY, X),
    fine("size/with a space after its digits", header(b"x.jpg", b"00000000004 ") + BODY, X),
    fine("size/of twelve digits", header(b"x.jpg", b"000000000004") + BODY, X),
    fine("size/of one digit", header(b"x.jpg", b"4".ljust(12, b"\0")) + BODY, X),
    bad("size/smaller than the body", header(b"s2.png", 4) + padded(b"b" * 600), WRONG, at=2 * BLOCK),
    bad("size/of nothing, before a body", header(b"s2.png", 0) + padded(b"b" * 600), WRONG, at=BLOCK),
    bad("size/larger than the body by less than the next", header(b"s2.png", 600) + BODY, WRONG, at=3 * BLOCK),
    # It swallows the next member whole, and the chain of headers is unbroken: the wrong size cannot be seen.
    fine("size/that swallows a whole member, unseen", header(b"x.jpg", 3 * BLOCK) + BODY
         + member("y.jpg", b"lost"), ("x", {"jpg": BODY + header(b"y.jpg", 4) + padded(b"lost")})),
    fine("size/on a symbolic link, which has no body", header(b"x.png", 4096, b"2", link=b"x.jpg")),
    fine("size/on a hard link, which has no body", header(b"x.png", 4096, b"1", link=b"x.jpg")),
    fine("size/on a directory, which has no body", header(b"folder/", 4096, b"5")),
    fine("size/on devices and a pipe, which have no body",
         b"".join(header(b"dev%s.x" % kind, 4096, kind) for kind in (b"3", b"4", b"6"))),
    fine("size/no size on a directory", header(b"folder/", bytes(12), b"5")),
    # Some writers put a hard link's content after it. Then what is read as a header is none.
    bad("size/on a hard link that has a body", header(b"x.png", 4, b"1", link=b"x.jpg") + BODY, WRONG, at=BLOCK),
    # If that is zeros, it looks like an end mark, but for what follows.
    Case("size/on a hard link that has a body of zeros",
         BEFORE + header(b"x.png", 1024, b"1", link=b"x.jpg") + bytes(1024) + AFTER + END, S[:2],
         Damage("members follow the end mark", len(BEFORE) + 3 * BLOCK)),
    fine("size/a pax record's goes before the header's", pax(record(b"size", b"4")) + header(b"x.jpg", 7777) + BODY, X),
]  # fmt: skip

CASES = [*CHECKSUMS, *FLIPS, *SIZES]
