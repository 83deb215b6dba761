"""Fields decode to what was written, run no code, and fail with the name of the sample."""

from __future__ import annotations

import gzip
import json
import pickle
import zlib
from typing import Any

import numpy as np
import pytest
from builders.arrays import saved
from unit.decoding import WHERE, decoded, failure, picture

from headrace.errors import OptionError
from headrace.formats.decoders import decoder
from headrace.formats.limits import Limits


@pytest.mark.slow
@pytest.mark.parametrize("as_buffer", [bytes, bytearray, memoryview])
@pytest.mark.parametrize(("field", "data", "value"), [
    ("cls", b"17", 17), ("index", b"-3\n", -3), ("id", b"0", 0), ("cls", b"  3\n", 3), ("cls", b"+7\t", 7),
    ("cls", b"-0", 0), ("cls", b"007", 7), ("cls", b"9" * 4300, int("9" * 4300)), ("cls", b"\r\n12\x0b\x0c", 12),
    ("txt", "grüße".encode(), "grüße"), ("text", b"", ""), ("transcript", b"a b", "a b"), ("en.txt", b"hi", "hi"),
    ("json", b'{"a": [1, null]}', {"a": [1, None]}), ("meta.json", b"3", 3),
    ("json", b'{"a": 1, "a": [1e999, -Infinity]}', {"a": [float("inf"), -float("inf")]}),
    ("json.gz", gzip.compress(b"[1]", mtime=0), [1]),
    ("a.txt.gz", gzip.compress(b"a", mtime=0) + gzip.compress(b"b", mtime=0), "ab"),
])  # fmt: skip
def test_last_part_of_a_field_selects_the_decoder(field: str, data: bytes, value: object, as_buffer: Any) -> None:
    assert decoded(field, as_buffer(data)) == value


@pytest.mark.parametrize("field", [
    "pth", "pt", "pkl", "pickle", "pyd", "pyc", "joblib", "jpg", "seg.png", "unknown", "", "json5", "gz", "bin.gz",
    "pkl.gz", "tar.gz", "jpg.gz", "json.gz.gz", "wav", "msgpack",
])  # fmt: skip
def test_bytes_of_unknown_extensions_are_not_decoded(field: str) -> None:
    data = gzip.compress(pickle.dumps(print)) if field.endswith("gz") else pickle.dumps(print)
    assert decoded(field, data) is data


def test_decoder_returns_a_new_sample_and_keeps_reserved_names() -> None:
    sample = {"__key__": b"7", "__url__": "u", "__x__.json": b"{}", "cls": b"1", "json": {"not": "bytes"}}
    assert decoder()(sample) == {**sample, "cls": 1}
    assert sample["cls"] == b"1"


@pytest.mark.parametrize(("field", "says", "damaged"), [
    ("cls", "int: ", [b"", b" ", b"-", b"+ 3", b"--3", b"1_000", b"1 000", b"1,000", b"0x10", b"1e3", b"1.0", b"3\0"]),
    ("cls", "int: ", ["\u0663".encode(), "\u00a03".encode(), "\ufeff3".encode(), b"9" * 4301, b"\xff", b"True"]),
    ("txt", "text: ", [b"\xff"]),
    ("json", "json: ", [b"", b"{", b"{} {}", b"{'a': 1}", b'"\xff"', b"[1,]", b"nan", b'"a\nb"']),
    ("json", "100000 digits", [b"1" * 10**5]),
    ("json", "too deep", [b"[" * 200_000]),
    ("json.gz", "json in gzip: ", [b"", b"{}", zlib.compress(b"{}"), gzip.compress(b"{}", mtime=0) + b"more"]),
    ("npy", "npy: ", [b""]),
    ("npz", "npz: ", [b"PK"]),
])  # fmt: skip
def test_failure_names_field_key_and_address(field: str, says: str, damaged: list[bytes]) -> None:
    for data in damaged:
        error = failure(field, data)
        assert says in str(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


# in gzip


def test_gzip_is_removed_unless_bytes_are_wanted() -> None:
    assert decoded("count.gz", memoryview(gzip.compress(b"7")), **{"count.gz": "int"}) == 7
    packed = gzip.compress(b"7")
    assert decoded("cls.gz", packed, **{"cls.gz": "bytes"}) is packed
    assert decoded("cls.gz", packed, **{"cls.gz": len}) == len(packed)


def test_gzip_that_is_cut_off_or_changed_is_an_error() -> None:
    packed = gzip.compress(b'"some text of some length"', mtime=0)
    for place in range(len(packed)):
        assert "json in gzip: " in str(failure("json.gz", packed[:place]))
        if place >= 10:
            failure("json.gz", packed[:place] + bytes([packed[place] ^ 4]) + packed[place + 1 :])


@pytest.mark.slow
def test_gzip_that_unpacks_to_more_than_the_limits_is_refused() -> None:
    packed = gzip.compress(b"x" * 10_000)
    low, *enough = (Limits(unpacked_free_bytes=n, unpacked_ratio=r) for n, r in ((9_999, 1), (10_000, 1), (1, 300)))
    assert "9999, which is the limit" in str(failure("txt.gz", packed, limits=low))
    for limits in enough:
        assert len(decoded("txt.gz", packed, limits=limits)) == 10_000
    assert "which is the limit" in str(failure("txt.gz", gzip.compress(bytes(2**26 + 1))))


# fields by name


def test_decoder_by_field_goes_before_the_extension() -> None:
    sample = {**WHERE, "jpg": b"raw", "cls": b"word", "count.bin": b"12", "seg.png": picture("PNG")}
    decode = decoder("rgb8", jpg="bytes", cls="text", **{"count.bin": "int", "seg.png": "l8"})
    values = decode(sample)
    assert (values["jpg"], values["cls"], values["count.bin"]) == (b"raw", "word", 12)
    assert values["seg.png"].shape == (36, 48)
    assert decoded("cls", memoryview(b"abc"), cls=lambda data: (type(data), data)) == (bytes, b"abc")
    assert "it is a str, not bytes" in str(failure("bin", "text", bin="int"))


def test_what_names_built_in_decoders() -> None:
    decode = decoder("rgb8", own=len, raw="bytes", size=(2, 2), **{"a.bin": "npy", "b.gz": "int"})
    for _ in range(2):
        assert [decode.what(f) for f in ("cls", "x.npy", "a.bin", "jpg")] == ["int", "npy", "npy", "rgb8"]
        assert {decode.what(f) for f in ("own", "raw", "b.gz", "npy.gz", "__key__.npy", "other")} == {None}


def test_exception_of_a_users_function_gets_a_note() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        decoded("bin", b"", bin=lambda data: 1 / len(data))
    assert caught.value.__notes__ == ["while decoding field 'bin' of sample 'd/7'"]


@pytest.mark.parametrize(("args", "options", "says"), [
    (("rgb",), {}, "spec='rgb' must be one of 'rgb8'"),
    ((), {"cls": "integer"}, "cls='integer' must be one of"),
    ((), {"cls": 3}, "cls=3"),
    ((), {"size": (8, 8)}, "needs a spec"),
    (("rgb8",), {"size": (0, 8)}, r"size=\(0, 8\)"),
    (("rgb8",), {"size": 8}, "size=8"),
    (("rgb8",), {"size": (8, 8.5)}, "size="),
    ((), {"__key__": "int"}, "__key__"),
])  # fmt: skip
def test_decoder_refuses_options_it_cannot_use(args: tuple[Any, ...], options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        decoder(*args, **options)


def test_decoder_survives_pickling_when_it_was_used() -> None:
    decode = decoder("rgb8", size=(4, 5), bin=json.loads)
    sample = {
        **WHERE,
        "npz": saved(np.savez, a=np.arange(3)),
        "png": picture("PNG"),
        "bin": b"[1]",
        "cls.gz": gzip.compress(b"4"),
    }
    first = decode(sample)
    second = pickle.loads(pickle.dumps(decode))(sample)
    assert (second["bin"], second["cls.gz"]) == ([1], 4)
    assert np.array_equal(second["npz"]["a"], np.arange(3))
    assert np.array_equal(first["png"], second["png"])


def test_decoder_forgets_field_names_when_there_are_many() -> None:
    decode = decoder()
    decode({f"{k}.cls": b"1" for k in range(10_000)})
    assert len(decode._known) <= 4096
