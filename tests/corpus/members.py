"""Members of every type, and whatever they may be called."""

from dataclasses import replace

from corpus.parts import (
    BLOCK,
    END,
    GNU,
    V7,
    Case,
    Damage,
    S,
    Sample,
    bad,
    checksummed,
    fine,
    header,
    long_name,
    member,
    numeric,
    padded,
    pax,
    record,
    written,
)

BODY = padded(b"body")
X = ("x", {"jpg": b"body"})

TYPES = [
    fine("type/contiguous", member("x.jpg", b"body", b"7"), X),
    fine("type/regular as V7 wrote it", member("x.jpg", b"body", b"\0", magic=V7), X),
    # Links are passed over, as webdataset does: a sample lacks the field then, and `to_tuple` raises.
    fine("type/a hard link", member("x.jpg", b"body") + header(b"x.png", 0, b"1", link=b"x.jpg"), X),
    fine("type/a symbolic link", member("x.jpg", b"body") + header(b"x.png", 0, b"2", link=b"x.jpg"), X),
    fine("type/a link to nothing", header(b"y.jpg", 0, b"1", link=b"nothing.jpg") + member("x.jpg", b"body"), X),
    fine("type/a link to itself", header(b"y.jpg", 0, b"2", link=b"y.jpg") + member("x.jpg", b"body"), X),
    fine("type/a link out of the archive", header(b"y.jpg", 0, b"2", link=b"../../etc/passwd")
         + member("x.jpg", b"body"), X),
    fine("type/a directory", header(b"folder.d/", 0, b"5") + member("x.jpg", b"body"), X),
    fine("type/a directory as V7 wrote it, with a size", header(b"folder/", 5000, b"\0", magic=V7)
         + b"".join(member(f"{n}.jpg", b"body") for n in range(10)),
         *((str(n), {"jpg": b"body"}) for n in range(10))),
    fine("type/metadata at the top", member("__meta.json__", b"{}") + member("x.jpg", b"body"), X),
    fine("type/a folder of metadata", member("__meta__/a.json", b"{}") + member("x.jpg", b"body"), X),
    fine("type/a directory called like a field", header(b"x.png/", 0, b"5") + member("x.jpg", b"body"), X),
    fine("type/a directory between the members of a sample", member("x.jpg", b"body") + header(b"x/", 0, b"5")
         + member("x.cls", b"1"), ("x", {"jpg": b"body", "cls": b"1"})),
    fine("type/a character device", header(b"null.x", 0, b"3") + member("x.jpg", b"body"), X),
    fine("type/a block device", header(b"disk.x", 0, b"4") + member("x.jpg", b"body"), X),
    fine("type/a pipe", header(b"pipe.x", 0, b"6") + member("x.jpg", b"body"), X),
    fine("type/a volume's label", header(b"Backup of May.tar", bytes(12), b"V", magic=GNU)  # as GNU tar writes it
         + member("x.jpg", b"body"), X),
    fine("type/a directory's listing", member("folder.d/", b"Ya.jpg\0Yb.jpg\0\0", b"D", magic=GNU)
         + member("x.jpg", b"body"), X),
    # Whatever carries content in a way that we do not read is an error, never passed over: its sample would be torn.
    bad("type/continued from another volume", member("x.jpg", b"body", b"M", magic=GNU), "split over volumes", key="x"),
    bad("type/unknown", member("x.jpg", b"body", b"Z"), "members of type b'Z' are not supported", key="x"),
    bad("type/beyond ASCII", member("x.jpg", b"body", b"\xff"), "are not supported", key="x"),
    bad("type/access rights by Solaris", member("x.jpg", b"body", b"A"), "are not supported", key="x", otherwise=()),
    bad("type/unknown, of a wrong size", header(b"x.jpg", b"?" * 12, b"Z"), "which is no size", key="x"),
]  # fmt: skip

# "AAAA", a hole up to 1024, "BBBB"
FULL: Sample = ("x", {"jpg": b"AAAA" + bytes(1020) + b"BBBB" + bytes(508)})
HOLED = "sparse members are not supported"


def _old_gnu(stored: int, entries: list[tuple[int, int]], size: int, extended: bytes = b"\0") -> bytes:
    """A header of type S: four entries of its map of what is stored, whether more follow, and the real size."""
    block = bytearray(header(b"x.jpg", stored, b"S", magic=GNU))
    table = b"".join(numeric(at) + numeric(length) for at, length in entries).ljust(96, b"\0")
    block[386:482], block[482:483], block[483:495] = table, extended, numeric(size)
    return checksummed(bytes(block))


STORED = padded(b"AAAA") + padded(b"BBBB")
MAP = [(0, 512), (1024, 512)]
PAX_MAP = b"2\n0\n512\n1024\n512\n".ljust(BLOCK, b"\0")
_REAL = record(b"GNU.sparse.name", b"x.jpg"), record(b"GNU.sparse.realsize", b"1536")
_V10 = record(b"GNU.sparse.major", b"1"), record(b"GNU.sparse.minor", b"0")
SPARSE = [
    bad("sparse/by GNU tar of old", _old_gnu(1024, MAP, 1536) + STORED, HOLED, key="x", otherwise=(FULL,)),
    bad("sparse/by GNU tar of old, map continues", _old_gnu(1024, MAP, 1536, b"\1") + bytes(BLOCK) + STORED, HOLED,
        key="x", otherwise=(FULL,)),
    bad("sparse/by GNU tar of old, eight gigabytes", _old_gnu(0, [(2**33 - 1, 0)], 2**33 - 1), HOLED, key="x"),
    bad("sparse/by GNU tar of old, map overlaps", _old_gnu(1024, [(512, 512), (0, 512)], 1024) + STORED, HOLED,
        key="x"),
    bad("sparse/by pax 0.0", pax(
        record(b"GNU.sparse.size", b"1536"), record(b"GNU.sparse.numblocks", b"2"),
        record(b"GNU.sparse.offset", b"0"), record(b"GNU.sparse.numbytes", b"512"),
        record(b"GNU.sparse.offset", b"1024"), record(b"GNU.sparse.numbytes", b"512"),
    ) + header(b"x.jpg", 1024) + STORED, HOLED, at=2 * BLOCK, key="x", otherwise=(FULL,)),
    bad("sparse/by pax 0.1", pax(
        record(b"GNU.sparse.size", b"1536"), record(b"GNU.sparse.numblocks", b"2"),
        record(b"GNU.sparse.name", b"x.jpg"), record(b"GNU.sparse.map", b"0,512,1024,512"),
    ) + header(b"GNUSparseFile.1/x.jpg", 1024) + STORED, HOLED, at=2 * BLOCK, key="x", otherwise=(FULL,)),
    bad("sparse/by pax 1.0", pax(*_V10, *_REAL) + header(b"GNUSparseFile.1/x.jpg", 1536) + PAX_MAP + STORED, HOLED,
        at=2 * BLOCK, key="x", otherwise=(FULL,)),
    bad("sparse/by pax 1.0, and another header after it", pax(_V10[0]) + pax(record(b"path", b"x.jpg"))
        + header(b"cut", 4) + BODY, HOLED, at=4 * BLOCK, key="x"),
    bad("sparse/by pax 0.1, map of letters", pax(
        record(b"GNU.sparse.name", b"x.jpg"), record(b"GNU.sparse.map", b"0,x,y,512"),
    ) + header(b"GNUSparseFile.1/x.jpg", 1024) + STORED, HOLED, at=2 * BLOCK, key="x"),
    bad("sparse/by pax 1.0, a terabyte", pax(*_V10, _REAL[0], record(b"GNU.sparse.realsize", b"%d" % 2**40))
        + header(b"GNUSparseFile.1/x.jpg", 1536) + PAX_MAP + STORED, HOLED, at=2 * BLOCK, key="x"),
    bad("sparse/by pax 1.0, without a map", pax(*_V10, *_REAL) + header(b"GNUSparseFile.1/x.jpg", 4) + BODY, HOLED,
        at=2 * BLOCK, key="x"),
    # Its body is only what is between the holes.
    bad("sparse/by Solaris", pax(record(b"SUN.holesdata", b" 0 512 1024")) + header(b"x.jpg", 1024) + STORED, HOLED,
        at=2 * BLOCK, key="x"),
]  # fmt: skip


def _called(name: str, member_name: str, key: str, field: str) -> Case:
    return fine(f"name/{name}", member(member_name, b"body"), (key, {field: b"body"}))


def _unnamed(name: str, member_name: str) -> Case:
    """A member that is of no sample, as for webdataset."""
    return fine(f"name/{name}", member(member_name, b"body") + member("x.jpg", b"body"), X)


NAMES = [
    # Names are keys, never paths: nothing is opened by them.
    _called("absolute", "/etc/passwd.jpg", "/etc/passwd", "jpg"),
    _called("that leads upwards", "../../up.jpg", "../../up", "jpg"),
    _called("that leads upwards in the middle", "a/../b.jpg", "a/../b", "jpg"),
    _called("with ./ before it", "./x.jpg", "./x", "jpg"),
    _called("with ./ in it", "a/./x.jpg", "a/./x", "jpg"),
    _called("with two slashes", "a//x.jpg", "a//x", "jpg"),
    _called("with a backslash", "a\\x.jpg", "a\\x", "jpg"),
    _called("of a drive", "C:/x.jpg", "C:/x", "jpg"),
    _called("that is no UTF-8", "caf\udce9.jpg", "caf\udce9", "jpg"),
    _called("whose field is no UTF-8", "x.jp\udce9", "x", "jp\udce9"),
    _called("in another script", "日本/é.jpg", "日本/é", "jpg"),
    _called("with a combining accent, which makes another key", "e\u0301.jpg", "e\u0301", "jpg"),
    _called("with spaces", "my cat .jpg", "my cat ", "jpg"),
    _called("with a tab", "a\tb.jpg", "a\tb", "jpg"),
    _called("with several dots", "x.seg.v2.png", "x", "seg.v2.png"),
    _called("with dots in its folder", "v1.2/x.jpg", "v1.2/x", "jpg"),
    _called("of upper case", "X.JPG", "X", "jpg"),
    _called("of a field in upper case with several dots", "x.Seg.PNG", "x", "seg.png"),
    _called("that ends with a dot", "x.", "x", ""),
    _called("of a hundred bytes", "n" * 96 + ".jpg", "n" * 96, "jpg"),
    fine("name/with a prefix", header(b"x.jpg", 4, prefix=b"p" * 155) + BODY, ("p" * 155 + "/x", {"jpg": b"body"})),
    fine("name/cut off by a zero byte", header(b"x.jpg\0.png", 4) + BODY, X),
    fine("name/of 4,096 bytes, the limit", long_name(b"n" * 4092 + b".jpg") + header(b"cut", 4) + BODY,
         ("n" * 4092, {"jpg": b"body"})),
    _unnamed("without an extension", "README"),
    _unnamed("without an extension in a folder with a dot", "v1.2/README"),
    _unnamed("with a dot in front", ".hidden"),
    _unnamed("with a dot in front, after ./", "./.hidden"),
    _unnamed("of nothing", ""),
    _unnamed("of metadata", "__index__"),
    _unnamed("of metadata with a dot", "__index.json__"),
    # A file that macOS adds to each other file. webdataset makes samples of them, called like their folder.
    replace(
        fine("name/of what macOS adds", member("folder/._x.jpg", b"\0\5") + member("folder/x.jpg", b"body"),
             ("folder/x", X[1])),
        otherwise=(*S[:2], ("folder/", {"_x.jpg": b"\0\5"}), ("folder/x", X[1]), S[3])),
    # A field that would hide what the loader adds itself.
    bad("name/of a field that is taken", member("s2.__url__", b"body"), "begins with '__'", key="s2",
        otherwise=(("s2", {**S[2][1], "__url__": b"body"}),)),
]  # fmt: skip

J, C = member("a.jpg", b"1"), member("a.cls", b"2")
A = ("a", {"jpg": b"1", "cls": b"2"})
SAMPLES = [
    bad("sample/a name twice", member("s2.jpg", b"again"), "second field 'jpg'", key="s2"),
    bad("sample/a name twice in another case", member("s2.JPG", b"again"), "second field 'jpg'", key="s2"),
    bad("sample/a name twice, the second time by pax", pax(record(b"path", b"s2.jpg")) + member("cut", b"again"),
        "second field 'jpg'", at=2 * BLOCK, key="s2"),
    # The key is the same, and neither of the two is complete by itself: webdataset refuses that too.
    Case("sample/twice, the one after the other", written(*S[:2]) + J + C + J + C + END, S[:2],
         Damage("second field 'jpg'", len(written(*S[:2])) + 4 * BLOCK, "a")),
    # Members of one key belong together where they follow one another; further on the key is another sample's.
    fine("sample/twice, with another between", J + C + member("b.jpg", b"3") + J + C, A, ("b", {"jpg": b"3"}), A),
    fine("sample/members out of order", C + J, ("a", {"cls": b"2", "jpg": b"1"})),
    # Not sorted by key, as `tar --sort=name` would: four samples, each of one field. `to_tuple` refuses them.
    fine("sample/members interleaved", J + member("b.jpg", b"3") + C + member("b.cls", b"4"),
         ("a", {"jpg": b"1"}), ("b", {"jpg": b"3"}), ("a", {"cls": b"2"}), ("b", {"cls": b"4"})),
    fine("sample/without one of its fields", J, ("a", {"jpg": b"1"})),
    fine("sample/with a field that others lack", J + C + member("a.txt", b"!"), ("a", {**A[1], "txt": b"!"})),
    fine("sample/with members of other names between", J + member("README", b"read") + C, A),
    fine("sample/of 1,000 members, the limit", b"".join(member(f"a.{k}", b"") for k in range(1000)),
         ("a", {str(k): b"" for k in range(1000)})),
    bad("sample/of more members than the limit", b"".join(member(f"s2.{k}", b"") for k in range(1000)),
        "more than 1000 members", at=999 * BLOCK, key="s2", error="LimitError",
        otherwise=(("s2", {**S[2][1], **{str(k): b"" for k in range(1000)}}),)),
    fine("sample/of the same name in two folders", member("1/a.jpg", b"1") + member("2/a.jpg", b"2"),
         ("1/a", {"jpg": b"1"}), ("2/a", {"jpg": b"2"})),
]  # fmt: skip

CASES = [*TYPES, *SPARSE, *NAMES, *SAMPLES]
