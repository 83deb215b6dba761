"""How archives begin and end, what is no archive at all, bodies, and what other tools write."""

import bz2
import gzip
import io
import lzma
import tarfile

from corpus.parts import AFTER, BLOCK, END, GNU, V7, Case, Damage, S, Sample, fine, header, member, picture, written

TWO = written(*S[:2])
FOUR = written(*S[:4])
JOINED = "members follow the end mark"
ENDS = [
    Case("end/of an archive without members", END, ()),
    Case("end/one zero block and nothing else", bytes(BLOCK), ()),
    Case("end/a record of zeros and nothing else", bytes(20 * BLOCK), ()),
    Case("end/less than a zero block", bytes(300), (), Damage("truncated", 300)),
    Case("end/filled up to a record", TWO.ljust(20 * BLOCK, b"\0"), S[:2]),
    Case("end/a megabyte of zeros", FOUR + bytes(2**20), S[:4]),
    Case("end/garbage after it", FOUR + END + b"garbage" * 500, S[:4]),
    Case("end/part of a block after it", FOUR + END + bytes(100), S[:4]),
    Case("end/what looks like a header after it",
         FOUR + END + b"x.jpg".ljust(257, b"\0") + b"ustar\x0000" + bytes(999), S[:4]),
    # tarfile and webdataset give the first half in silence. `cat` does not join archives; `tar --concatenate` does.
    Case("end/another archive after it", TWO + END + written(*S[2:4]) + END, S[:2], Damage(JOINED, len(TWO + END))),
    Case("end/another archive after a whole record", TWO + bytes(20 * BLOCK) + written(*S[2:4]) + END, S[:2],
         Damage(JOINED, len(TWO) + 20 * BLOCK)),
    Case("end/members after it and garbage", TWO + END + b"g" * 1000 + bytes(24) + written(*S[2:4]) + END, S[:2],
         Damage(JOINED, len(TWO + END) + 1024)),
    Case("end/part of an archive after it", TWO + END + AFTER[:700], S[:2], Damage(JOINED, len(TWO + END))),
    # A page that a disk or a writer lost: header, body and header of the third sample are zeros.
    Case("end/a hole in the middle", FOUR[: 9 * BLOCK] + bytes(3 * BLOCK) + FOUR[12 * BLOCK :] + END, S[:2],
         Damage(JOINED, 13 * BLOCK)),
    Case("end/a zero block between samples", TWO + bytes(BLOCK) + AFTER + END, S[:1],
         Damage("a zero block in the middle", len(TWO))),
    Case("end/a zero block inside a sample", FOUR[: 7 * BLOCK] + bytes(BLOCK) + FOUR[7 * BLOCK :] + END, S[:1],
         Damage("a zero block in the middle", 7 * BLOCK)),
    Case("end/a zero block at the start", bytes(BLOCK) + FOUR + END, (), Damage("a zero block in the middle", 0)),
    Case("end/two zero blocks at the start", END + FOUR + END, (), Damage(JOINED, 2 * BLOCK)),
    Case("end/a zero block in place of a header", FOUR[: 7 * BLOCK] + bytes(BLOCK) + FOUR[8 * BLOCK :] + END, S[:1],
         Damage("a zero block in the middle", 7 * BLOCK)),
    Case("end/a zero block, then garbage", FOUR + bytes(BLOCK) + b"?" * BLOCK, S[:3],
         Damage("a zero block in the middle", len(FOUR))),
]  # fmt: skip


def _foreign(
    name: str, data: bytes, looks: str = "this is not a tar archive", otherwise: tuple[Sample, ...] | None = None
) -> Case:
    return Case(f"foreign/{name}", data, (), Damage(looks, 0), otherwise=otherwise)


PAGE = b"<!DOCTYPE html>\n<html><body><h1>404 Not Found</h1>" + b"<p>no such page</p>" * 40
FOREIGN = [
    _foreign("a short HTML page", PAGE[:80], "looks like an HTML page"),
    _foreign("an HTML page", PAGE, "looks like an HTML page"),
    _foreign("an HTML page of whole blocks", PAGE[:100].ljust(1024), "looks like an HTML page"),
    _foreign("an XML error", b"<?xml version='1.0'?><Error>NoSuchKey</Error>", "looks like an XML document"),
    _foreign("a JSON error", b'{"error": "not found"}' * 30, "looks like JSON"),
    _foreign("a Git LFS pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    _foreign("gzip called .tar", gzip.compress(FOUR + END, mtime=0), "looks like gzip data", S[:4]),
    _foreign("bzip2 called .tar", bz2.compress(FOUR + END), "looks like bzip2 data", S[:4]),
    _foreign("xz called .tar", lzma.compress(FOUR + END), "looks like xz data", S[:4]),
    _foreign("zstandard called .tar", b"\x28\xb5\x2f\xfd" + bytes(range(256)) * 4, "looks like zstandard data"),
    _foreign("lz4 called .tar", b"\x04\x22\x4d\x18" + bytes(range(256)) * 4, "looks like lz4 data"),
    _foreign("zip called .tar", b"PK\x03\x04" + bytes(range(256)) * 4, "looks like a zip archive"),
    _foreign("text", b"no archive at all\n" * 100),
    _foreign("noise", bytes(k * k % 251 | 1 for k in range(5000))),
    _foreign("a picture", picture(1, 5000)),
    # Less than one block, and nothing that is known: a cut archive's first header looks the same.
    Case("foreign/a few letters", b"oops", (), Damage("ends inside the header at byte 0", 4)),
    Case("foreign/a page after whole samples", TWO + PAGE, S[:1], Damage("checksum", len(TWO))),
]  # fmt: skip

INNER = written(*S[3:5])
MAGIC = header(b"inner.jpg", 4) * 3
BODIES = [
    fine("body/of zero bytes", member("x.jpg", b"") + member("x.cls", b"1"), ("x", {"jpg": b"", "cls": b"1"})),
    fine("body/of zero bytes, all of them", b"".join(member(f"{k}.jpg", b"") for k in range(9)),
         *((str(k), {"jpg": b""}) for k in range(9))),
    Case("body/of zero bytes in the last member", TWO + member("x.jpg", b"") + END, (*S[:2], ("x", {"jpg": b""}))),
    fine("body/an archive", member("x.tar", INNER + END), ("x", {"tar": INNER + END})),
    fine("body/an archive without its end mark", member("x.tar", INNER), ("x", {"tar": INNER})),
    fine("body/headers", member("x.bin", MAGIC), ("x", {"bin": MAGIC})),
    fine("body/zero blocks", member("x.bin", bytes(4096)), ("x", {"bin": bytes(4096)})),
    fine("body/of one byte less than a block", member("x.jpg", picture(1, 511)), ("x", {"jpg": picture(1, 511)})),
    fine("body/of one block", member("x.jpg", picture(1, 512)), ("x", {"jpg": picture(1, 512)})),
    fine("body/of one byte more than a block", member("x.jpg", picture(1, 513)), ("x", {"jpg": picture(1, 513)})),
    fine("body/with padding that is not zero", header(b"x.jpg", 4) + b"body".ljust(BLOCK, b"#"),
         ("x", {"jpg": b"body"})),
    fine("body/of a hundred kilobytes", member("x.jpg", picture(1, 100_000)), ("x", {"jpg": picture(1, 100_000)})),
]  # fmt: skip

MIXED: tuple[Sample, ...] = (
    *S[:3], ("a/" * 60 + "long", {"jpg": b"1"}), ("日本/é", {"jpg": b"2", "seg.png": b"3"}), ("n" * 300, {"cls": b""}),
    *S[3:],
)  # fmt: skip


def _by_tarfile(name: str, samples: tuple[Sample, ...], form: int, **pax: str) -> Case:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, pax_headers=pax or None) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for key, fields in samples:
            for field, body in fields.items():
                info = tarfile.TarInfo(f"{key}.{field}")
                info.size, info.mtime = len(body), 1.5 if form == tarfile.PAX_FORMAT else 1
                archive.addfile(info, io.BytesIO(body))
    return Case(f"writer/{name}", out.getvalue(), samples)


def _written(samples: tuple[Sample, ...], kind: bytes, magic: bytes) -> bytes:
    return b"".join(
        member(f"{key}.{field}", body, kind, magic=magic) for key, fields in samples for field, body in fields.items()
    )


def _v7(samples: tuple[Sample, ...]) -> bytes:
    """As it was before POSIX: without a magic, and of the type zero byte."""
    return _written(samples, b"\0", V7)


WRITERS = [
    _by_tarfile("tarfile, ustar", S, tarfile.USTAR_FORMAT),
    _by_tarfile("tarfile, GNU", MIXED, tarfile.GNU_FORMAT),
    _by_tarfile("tarfile, pax", MIXED, tarfile.PAX_FORMAT),
    _by_tarfile("tarfile, pax with a global header", MIXED, tarfile.PAX_FORMAT, comment="made by a test"),
    Case("writer/V7", _v7(S) + END, S),
    Case("writer/GNU's magic", _written(S, b"0", GNU) + END, S),
    Case("writer/several, by turns", _v7(S[:2]) + written(*S[2:4]) + _v7(S[4:]) + END, S),
    Case("writer/with members of every kind in front",
         header(b"./", 0, b"5") + header(b"label", 0, b"V") + header(b"fifo", 0, b"6") + FOUR + END, S[:4]),
]  # fmt: skip

CASES = [*ENDS, *FOREIGN, *BODIES, *WRITERS]
