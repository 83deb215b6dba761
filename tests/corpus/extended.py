"""Extended headers, of pax and of GNU tar: good ones, damaged ones, and those that are made to do harm."""

from corpus.parts import (
    BEFORE,
    BLOCK,
    END,
    GNU,
    Case,
    Damage,
    S,
    bad,
    fine,
    header,
    long_name,
    member,
    padded,
    pax,
    record,
    written,
)

BODY = padded(b"body")
X = ("x", {"jpg": b"body"})
DEEP = "deep/" * 60 + "s"
PLAIN = header(b"cut off", 4) + BODY
DAMAGED = "a record of a pax header is damaged"


def _path(name: str | bytes) -> bytes:
    return record(b"path", name.encode("utf-8", "surrogateescape") if isinstance(name, str) else name)


def _damaged(name: str, records: bytes, at: int = 0) -> Case:
    return bad(f"pax/{name}", pax(records) + member("x.jpg", b"body"), DAMAGED, at=BLOCK + at)


GOOD = [
    fine("pax/a path", pax(_path(DEEP + ".jpg")) + PLAIN, (DEEP, {"jpg": b"body"})),
    fine("pax/a path in another script", pax(_path("ünï/日本.jpg")) + PLAIN, ("ünï/日本", {"jpg": b"body"})),
    fine("pax/a path that is no UTF-8", pax(record(b"hdrcharset", b"BINARY"), _path(b"caf\xe9.jpg")) + PLAIN,
         ("caf\udce9", {"jpg": b"body"})),
    fine("pax/a size", pax(record(b"size", b"600")) + header(b"x.jpg") + padded(b"s" * 600),
         ("x", {"jpg": b"s" * 600})),
    fine("pax/path and size", pax(_path("x.jpg"), record(b"size", b"4")) + header(b"cut off", 0) + BODY, X),
    fine("pax/times, owners and what nobody knows", pax(
        record(b"mtime", b"1.5"), record(b"uname", "Zoë".encode()), record(b"SCHILY.xattr.user.a", b"=\n=\0"),
        record(b"LIBARCHIVE.creationtime", b"9")) + member("x.jpg", b"body"), X),
    fine("pax/by Solaris", pax(_path("x.jpg"), kind=b"X") + PLAIN, X),
    fine("pax/without a record", pax() + member("x.jpg", b"body"), X),
    fine("pax/padded with zeros", pax(_path("x.jpg"), bytes(40)) + PLAIN, X),
    fine("pax/the last of two paths in one header", pax(_path("y.jpg"), _path("x.jpg")) + PLAIN, X),
    fine("pax/a path that is taken back", pax(_path("y.jpg"), record(b"path", b"")) + member("x.jpg", b"body"), X),
    fine("pax/a length with zeros in front", pax(b"0016 path=x.jpg\n") + PLAIN, X),
    fine("pax/sixteen headers, the limit", pax(record(b"mtime", b"1")) * 15 + pax(_path("x.jpg")) + PLAIN, X),
    fine("pax/two headers that agree", pax(_path("x.jpg")) * 2 + PLAIN, X),
    fine("pax/two headers that add up", pax(_path("x.jpg")) + pax(record(b"size", b"4")) + header(b"cut") + BODY, X),
    fine("pax/a path for a directory", pax(_path(DEEP + "/")) + header(b"cut off/", 0, b"5") + member("x.jpg", b"body"),
         X),
    fine("pax/a link's target", pax(record(b"linkpath", DEEP.encode())) + header(b"x.png", 0, b"2")
         + member("x.jpg", b"body"), X),
]  # fmt: skip

BAD = [
    # 30 kB of digits cost readers with a regular expression seconds, a megabyte hours.
    _damaged("30 kB of digits", b"9" * 30_000),
    _damaged("30 kB of digits in many records", record(b"mtime", b"1") * 9 + b"9" * 30_000, at=9 * 11),
    _damaged("a record of length zero", b"0 path=x.jpg\n"),
    _damaged("a length that is too small", b"13 path=x.jpg\n"),
    _damaged("a length within the length", b"1 path=x.jpg\n"),
    _damaged("a length that ends at the space", b"3 path=x.jpg\n"),
    _damaged("a length that is too large", b"18 path=x.jpg\n" + record(b"mtime", b"1")),
    _damaged("a length beyond the header", b"9999 path=x.jpg\n"),
    _damaged("a length of many digits", b"9" * 19 + b" path=x.jpg\n"),
    _damaged("a negative length", b"-14 path=x.jpg\n"),
    _damaged("a length of letters", b"xx path=x.jpg\n"),
    _damaged("no length", b" path=x.jpg\n"),
    _damaged("no space", b"13path=x.jpg\n"),
    _damaged("no equals sign", b"13 pathx.jpg\n"),
    _damaged("no key", b"10 =x.jpg\n"),
    _damaged("no newline", b"14 path=x.jpgX"),
    _damaged("the second record damaged", record(b"mtime", b"1") + b"99 path=x.jpg\n", at=11),
    _damaged("records after zeros", bytes(8) + _path("x.jpg")),
    _damaged("cut off by its own size", _path("x.jpg")[:-4]),
    bad("pax/a path with a zero byte", pax(_path("x\0.jpg")) + PLAIN, "holds a zero byte", at=BLOCK),
    bad("pax/a negative size", pax(record(b"size", b"-4")) + member("x.jpg", b"body"), "is b'-4', which is no size",
        at=2 * BLOCK, key="x"),
    bad("pax/a size of letters", pax(record(b"size", b"four")) + member("x.jpg", b"body"), "which is no size",
        at=2 * BLOCK, key="x"),
    bad("pax/an octal size", pax(record(b"size", b"0o4")) + member("x.jpg", b"body"), "which is no size",
        at=2 * BLOCK, key="x"),
    bad("pax/a size of 5,000 digits", pax(record(b"size", b"1" * 5000)) + member("x.jpg", b"body"), "which is no size",
        at=11 * BLOCK, key="x"),
    bad("pax/a size of two terabytes", pax(record(b"size", b"%d" % 2**41)) + member("x.jpg", b"body"),
        "over the limit", at=2 * BLOCK, key="x", error="LimitError", ends=True),
    bad("pax/a size smaller than the body", pax(record(b"size", b"4")) + member("s2.png", b"b" * 600),
        "the checksum of a header is wrong", at=4 * BLOCK),
    bad("pax/2 MiB of records", pax(record(b"comment", bytes(2**21))) + member("x.jpg", b"body"),
        "an extended header is 2097", error="LimitError", otherwise=(X,)),
    bad("pax/a header of a terabyte", header(b"pax", b"\x80" + (2**40).to_bytes(11, "big"), b"x"), "over the limit",
        error="LimitError"),
    bad("pax/a header of negative size", header(b"pax", b"\xff" * 12, b"x"),
        "an extended header is -1, which is no size"),
    bad("pax/a header without a size", header(b"pax", b" " * 12, b"x"), "which is no size"),
    bad("pax/a path over the limit", pax(_path("n" * 4093 + ".jpg")) + PLAIN, "over the limit of 4096", at=10 * BLOCK,
        error="LimitError", otherwise=(("n" * 4093, X[1]),), ends=True),
    bad("pax/seventeen headers", pax(record(b"mtime", b"1")) * 17 + member("x.jpg", b"body"),
        "more than 16 extended headers", at=32 * BLOCK, error="LimitError", otherwise=(X,)),
    bad("pax/a thousand headers", pax(_path("x.jpg")) * 1000 + member("x.jpg", b"body"),
        "more than 16 extended headers", at=32 * BLOCK, error="LimitError", otherwise=(X,)),
    # Readers disagree on which of two answers holds; no writer gives two.
    bad("pax/two headers with two paths", pax(_path("x.jpg")) + pax(_path("y.jpg")) + PLAIN, "has two names",
        at=2 * BLOCK),
    bad("pax/two headers with two sizes", pax(record(b"size", b"4")) + pax(record(b"size", b"600")) + PLAIN,
        "has two sizes", at=2 * BLOCK),
    bad("pax/a path, and GNU's long name is another", pax(_path("x.jpg")) + long_name(b"y.jpg") + PLAIN,
        "has two names", at=2 * BLOCK),
    Case("pax/no member after it, but the end", BEFORE + pax(_path("x.jpg")) + END, S[:1],
         Damage("no member follows an extended", len(BEFORE) + 2 * BLOCK)),
    Case("pax/no member after it, but nothing", BEFORE + pax(_path("x.jpg")), S[:1],
         Damage("ends after an extended header", len(BEFORE) + 2 * BLOCK)),
]  # fmt: skip

GLOBAL = member("pax_global_header", record(b"comment", b"a" * 40), b"g")
GLOBALS = [
    Case("global/a comment at the start, as git writes it", GLOBAL + written(*S[:2]) + END, S[:2]),
    fine("global/a comment in the middle", GLOBAL + member("x.jpg", b"body"), X),
    fine("global/between a header and its member", pax(_path("x.jpg")) + GLOBAL + PLAIN, X),
    fine("global/without a record", member("g", b"", b"g") + member("x.jpg", b"body"), X),
    fine("global/a hundred of them", GLOBAL * 100 + member("x.jpg", b"body"), X),
    Case("global/at the end, for no member", written(*S[:2]) + GLOBAL + END, S[:2]),
    Case("global/alone, as git writes an empty tree", GLOBAL + END, ()),
    # By the letter it would rename every member to the same; an archive with that is a mistake.
    bad("global/a path", member("g", _path("x.jpg"), b"g") + PLAIN, "gives all members one path"),
    bad("global/a size", member("g", record(b"size", b"4"), b"g") + PLAIN, "gives all members one size"),
    bad("global/a map of holes", member("g", record(b"GNU.sparse.major", b"1"), b"g") + PLAIN,
        "gives all members one map of holes"),
    bad("global/a damaged record", member("g", b"99 comment=a\n", b"g") + PLAIN, DAMAGED, at=BLOCK),
    bad("global/2 MiB", member("g", record(b"comment", bytes(2**21)), b"g") + PLAIN, "over the limit",
        error="LimitError", otherwise=()),
]  # fmt: skip

LONG = (DEEP + ".jpg").encode()
GNUS = [
    fine("gnu/a long name", long_name(LONG) + header(LONG[:100], 4, magic=GNU) + BODY, (DEEP, {"jpg": b"body"})),
    fine("gnu/a long link name", long_name(LONG, b"K") + header(b"x.png", 0, b"2") + member("x.jpg", b"body"), X),
    fine("gnu/a long name and a long link name", long_name(LONG, b"K") + long_name(LONG)
         + header(b"cut", 0, b"2", magic=GNU) + member("x.jpg", b"body"), X),
    fine("gnu/a long name of a directory", long_name(DEEP.encode() + b"/") + header(b"cut/", 0, b"5", magic=GNU)
         + member("x.jpg", b"body"), X),
    fine("gnu/a long name that no zero byte ends", member("././@LongLink", b"x.jpg", b"L", magic=GNU) + PLAIN, X),
    fine("gnu/a short long name", long_name(b"x.jpg") + PLAIN, X),
    fine("gnu/a long name that is no UTF-8", long_name(b"caf\xe9.jpg") + PLAIN, ("caf\udce9", {"jpg": b"body"})),
    fine("gnu/a long name with something after its end", long_name(b"x.jpg\0left over") + PLAIN, X),
    fine("gnu/a long name, and the same by pax", long_name(b"x.jpg") + pax(_path("x.jpg")) + PLAIN, X),
    fine("gnu/a prefix that belongs to the times", header(b"x.jpg", 4, magic=GNU, prefix=b"14713355211") + BODY, X),
    # Without it the name would be the cut one in the header.
    bad("gnu/an empty long name", long_name(b"") + member("x.jpg", b"body"), "a long name is empty"),
    bad("gnu/a long name without a body", header(b"././@LongLink", 0, b"L") + PLAIN, "a long name is empty"),
    bad("gnu/two long names", long_name(b"x.jpg") + long_name(b"y.jpg") + PLAIN, "has two names", at=2 * BLOCK),
    bad("gnu/a long name of 2 MiB", long_name(b"n" * 2**21) + PLAIN, "over the limit", error="LimitError",
        otherwise=()),
    bad("gnu/a long name of negative size", header(b"././@LongLink", b"\xff" * 12, b"L") + PLAIN, "which is no size"),
    bad("gnu/a long name over the limit", long_name(b"n" * 5000 + b".jpg") + PLAIN, "over the limit of 4096",
        at=11 * BLOCK, error="LimitError", otherwise=(("n" * 5000, X[1]),), ends=True),
    bad("gnu/a long link name of 2 MiB", long_name(b"n" * 2**21, b"K") + PLAIN, "over the limit", error="LimitError",
        otherwise=()),
    bad("gnu/a chain of long names", long_name(b"x.jpg") * 40 + PLAIN, "more than 16 extended headers", at=32 * BLOCK,
        error="LimitError", otherwise=(X,)),
    Case("gnu/a long name with no member after it", BEFORE + long_name(b"x.jpg") + END, S[:1],
         Damage("no member follows an extended", len(BEFORE) + 2 * BLOCK)),
]  # fmt: skip

CASES = [*GOOD, *BAD, *GLOBALS, *GNUS]
