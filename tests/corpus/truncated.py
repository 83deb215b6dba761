"""Archives that end too soon, at every place where they can."""

from corpus.parts import BLOCK, END, GNU, Case, Damage, S, header, long_name, member, padded, pax, record, written

WHOLE = written(*S[:4]) + END
"""Headers and bodies, in blocks: 0 1-2 | 3 4 | 5 6 | 7 8 | 9 10 | 11 12 | 13 14-15 | 16 17 | end 18 19."""


def _cut(name: str, stop: int, whole: int, says: str, key: str | None = None) -> Case:
    return Case(f"truncated/{name}", WHOLE[:stop], S[:whole], Damage(f"is truncated: it ends {says}", stop, key))


PLAIN = [
    Case("truncated/to nothing", b"", (), Damage("the archive is empty", 0)),
    _cut("inside the first header", 100, 0, "inside the header at byte 0"),
    _cut("one byte before the end of the first header", BLOCK - 1, 0, "inside the header at byte 0"),
    _cut("after the first header", BLOCK, 0, "inside the member 's0.jpg', 700 bytes", "s0"),
    _cut("inside the first body", BLOCK + 300, 0, "inside the member 's0.jpg'", "s0"),
    _cut("at a block inside the first body", 2 * BLOCK, 0, "inside the member 's0.jpg'", "s0"),
    _cut("inside the last block of the first body", 2 * BLOCK + 100, 0, "inside the member 's0.jpg'", "s0"),
    # All bytes of the body are there, but no writer stops here: it is the transfer that did.
    _cut("after the first body, before its padding", BLOCK + 700, 0, "inside the member 's0.jpg'", "s0"),
    _cut("inside the padding", BLOCK + 800, 0, "inside the member 's0.jpg'", "s0"),
    _cut("between the members of a sample", 3 * BLOCK, 0, "without its end mark"),
    _cut("inside the header of a sample's last member", 3 * BLOCK + 257, 0, "inside the header at byte 1536"),
    _cut("after the header of a sample's last member", 4 * BLOCK, 0, "inside the member 's0.cls'", "s0"),
    _cut("one byte into a sample's last body", 4 * BLOCK + 1, 0, "inside the member 's0.cls'", "s0"),
    # Here webdataset gives the sample; but it may have had more members.
    _cut("between samples", 5 * BLOCK, 0, "without its end mark"),
    _cut("inside the header of the next sample", 5 * BLOCK + 511, 0, "inside the header at byte 2560"),
    _cut("after the header of the next sample", 6 * BLOCK, 1, "inside the member 's1.jpg'", "s1"),
    _cut("after a body that fills its block", 7 * BLOCK, 1, "without its end mark"),
    _cut("inside a body of one byte", 10 * BLOCK, 2, "inside the member 's2.jpg', 1 bytes", "s2"),
    _cut("after the body of one byte", 10 * BLOCK + 1, 2, "inside the member 's2.jpg'", "s2"),
    _cut("between samples, late", 13 * BLOCK, 2, "without its end mark"),
    _cut("inside the last header", 16 * BLOCK + 200, 3, "inside the header at byte 8192"),
    _cut("inside the last body", 17 * BLOCK + 0, 3, "inside the member 's3.cls'", "s3"),
    _cut("inside the last padding", 17 * BLOCK + 511, 3, "inside the member 's3.cls'", "s3"),
    _cut("before the end mark", 18 * BLOCK, 3, "without its end mark"),
    _cut("one byte into the end mark", 18 * BLOCK + 1, 3, "inside the header at byte 9216"),
    _cut("inside the end mark", 18 * BLOCK + 300, 3, "inside the header at byte 9216"),
    # One zero block at the very end is what some writers leave, and what GNU tar takes with a warning.
    Case("truncated/after one zero block", WHOLE[: 19 * BLOCK], S[:4]),
    # No writer leaves half a block: whatever cut it may have cut more.
    _cut("inside the second zero block", 19 * BLOCK + 300, 3, "inside the header at byte 9728"),
    Case("truncated/not at all", WHOLE, S[:4]),
]

PATH = ("deep/" * 40 + "s.jpg").encode()
LONG = ("deep/" * 40 + "s", {"jpg": b"long"})


def _extended(what: str, head: bytes) -> list[Case]:
    """An archive cut at each place of the extended header `head`, after a whole sample."""
    before = written(*S[:2]) + member("s2.jpg", b"2")
    after = header(PATH[:100], 4) + padded(b"long")
    data = before + head + after + END
    at, body = len(before), len(before) + BLOCK
    size = int(head[124:135], 8)
    inside = "is truncated: it ends inside an extended header"
    boundaries = [
        ("inside its header", at + 200, f"inside the header at byte {at}", None),
        ("after its header", body, inside, None),
        ("inside its body", body + size // 2, inside, None),
        ("inside its padding", body + size + 1, inside, None),
        ("after it", at + len(head), "ends after an extended header", None),
        ("inside the header after it", at + len(head) + 99, f"inside the header at byte {at + len(head)}", None),
        ("after the header after it", at + len(head) + BLOCK, "inside the member 'deep/deep", LONG[0]),
    ]
    # the member's own header starts another sample
    found = [(*S[:2], ("s2", {"jpg": b"2"})) if key else S[:2] for _, _, _, key in boundaries]
    return [
        Case(f"truncated/{what}: {where}", data[:stop], samples, Damage(says, stop, key))
        for samples, (where, stop, says, key) in zip(found, boundaries, strict=True)
    ] + [Case(f"truncated/{what}: not at all", data, (*S[:2], ("s2", {"jpg": b"2"}), LONG))]


GLOBAL = member("pax_global_header", record(b"comment", b"made by a test"), b"g")
_BEFORE = written(S[0], S[1])
CASES = [
    *PLAIN,
    *_extended("pax header", pax(record(b"mtime", b"1.5"), record(b"path", PATH))),
    *_extended("GNU long name", long_name(PATH)),
    Case(
        "truncated/global header: inside its padding",
        (_BEFORE + GLOBAL)[:-1],
        S[:1],
        Damage("ends inside an extended header", len(_BEFORE + GLOBAL) - 1),
    ),
    # The global header belongs to no member: what is missing is the end mark.
    Case(
        "truncated/global header: after it", _BEFORE + GLOBAL, S[:1],
        Damage("ends without its end mark", len(_BEFORE + GLOBAL)),
    ),
    # The header claims more than the archive has.
    Case(
        "truncated/size of the last member is too large",
        _BEFORE + header(b"s2.jpg", 10_000, magic=GNU) + padded(b"2") + END,
        S[:2],
        Damage("inside the member 's2.jpg', 10000 bytes", len(_BEFORE) + 4 * BLOCK, "s2"),
    ),
]  # fmt: skip
