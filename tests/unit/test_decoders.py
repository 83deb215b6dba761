"""Fields decode to what was written, run no code, and fail with the name of the sample."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import zipfile
import zlib
from typing import Any

import numpy as np
import pytest
from builders.arrays import saved
from builders.memory import peak_of
from builders.zips import zipped
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from unit.decoding import WHERE, decoded, failure, picture

from headrace.errors import DecodeError, OptionError
from headrace.formats.decoders import NpyDecoder, decoder
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


def npy(array: Any, version: tuple[int, int] | None = None) -> bytes:
    np.lib.format.write_array(out := io.BytesIO(), np.asanyarray(array), version=version)
    return out.getvalue()


def npz(members: dict[str, bytes], kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    return zipped(members, kind)


def with_size(data: bytes, size: int) -> bytes:
    """An archive whose directory states another size of its first member."""
    central = data.index(b"PK\x01\x02")
    return data[: central + 24] + struct.pack("<I", size) + data[central + 28 :]


DTYPES = st.one_of(
    hnp.scalar_dtypes(),
    hnp.unicode_string_dtypes(),
    st.just(np.dtype([("a", ">f4"), ("b", [("c", "S3")]), ("d", "i2", (2,))])),
).filter(lambda dtype: dtype.itemsize > 0)


@given(st.data(), st.sampled_from([(1, 0), (2, 0)]), st.booleans())
def test_npy_equals_the_saved_array_and_owns_its_memory(
    data: st.DataObject, version: tuple[int, int], by_column: bool
) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    dtype = data.draw(DTYPES)
    array = np.ndarray(shape, dtype, bytes(range(1, 128)) * (64 * dtype.itemsize // 127 + 1))
    if by_column:
        array = np.asfortranarray(array)
    decode = NpyDecoder()
    for buffer in (npy(array, version), memoryview(npy(array, version))):  # the second by the remembered header
        got = decode(buffer)
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert got.flags.owndata
        assert got.flags.writeable
        assert got.flags.f_contiguous == array.flags.f_contiguous


def test_npy_header_is_read_again_when_it_changes() -> None:
    decode, first = NpyDecoder(), np.arange(6, dtype="f4")
    for array in (first, np.arange(6, dtype="i4"), np.arange(6.0).reshape(2, 3), first):
        got = decode(npy(array))
        assert got.dtype == array.dtype
        assert np.array_equal(got, array)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: data[:128]])
def test_npy_is_refused_when_its_length_is_not_its_headers(change: Any) -> None:
    decode = decoder()
    whole = npy(np.arange(9))
    for _ in range(2):
        with pytest.raises(DecodeError, match="the header describes 72 bytes"):
            decode({**WHERE, "npy": change(whole)})
        decode({**WHERE, "npy": whole})


def crafted(text: str) -> bytes:
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(text) + 1) + text.encode("latin1") + b"\n"


@pytest.mark.parametrize("text", [
    "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -1), }" + " " * 8,
    "{'descr': '<f8', 'fortran_order': False, 'shape': (0,), }" + " " * 10_000,
    "{'descr': '|O', 'fortran_order': False, 'shape': (0,), }",
    "{'descr': [('a', '<f4'), ('b', '|O')], 'fortran_order': False, 'shape': (0,), }",
    "{'descr': '|V0', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': [], 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (0, 1" + "0" * 400 + "), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (0," + "1," * 200 + "), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (0, 4611686018427387904, 4611686018427387904), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (1.0,), }",
    "{'descr': '<f8', 'fortran_order': 'False', 'shape': (1,), }",
    "{'descr': '<f8', 'fortran_order': False}",
    "{'descr': 'nothing', 'fortran_order': False, 'shape': (0,), }",
    "__import__('os').abort()", "(" * 5000, "-" * 9000 + "1", "1" + "+1" * 4000, "[" * 9000, "\xff", "",
])  # fmt: skip
def test_npy_with_a_wrong_header_is_refused(text: str) -> None:
    for rest in (b"", bytes(8)):
        failure("npy", crafted(text) + rest)


def test_npz_is_refused_when_it_would_unpack_to_more_than_the_limits_given() -> None:
    array = npy(np.zeros(1000, np.uint8))
    data, low = npz({"a.npy": array}), Limits(unpacked_free_bytes=1, unpacked_ratio=1)
    assert "over the limit of 1 times" in str(failure("npz", data, limits=low))
    for enough in (Limits(unpacked_free_bytes=len(array), unpacked_ratio=1), Limits(unpacked_free_bytes=1)):
        assert decoded("npz", data, limits=enough)["a"].shape == (1000,)


def test_npz_member_longer_than_its_entry_is_not_unpacked() -> None:
    data = with_size(npz({"a.npy": npy(np.zeros(2**25, np.uint8))}), 200)
    assert peak_of(lambda: failure("npz", data)) < 2**22
    assert "CRC" in str(failure("npz", data))


def test_npz_is_an_error_wherever_it_is_cut_off_or_its_arrays_changed() -> None:
    data = npz({"a.npy": npy(np.arange(3))}, zipfile.ZIP_STORED)
    for length in range(0, len(data), 3):
        failure("npz", data[:length])
    array = data.index(b"\x93NUMPY")
    for place in range(array, data.index(b"PK\x01\x02"), 7):
        failure("npz", data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


def test_npz_keeps_names_with_folders_and_refuses_the_same_name_twice() -> None:
    assert list(decoded("npz", npz({"a/b.npy": npy(1), "../c.npy": npy(2), ".npy": npy(3)}))) == ["a/b", "../c", ""]
    twice = npz({"a.npy": npy(1), "b.npy": npy(2)}).replace(b"b.npy", b"a.npy")
    assert "two arrays named 'a'" in str(failure("npz", twice))
    assert len(str(failure("npz", npz({"x" * 60_000: b""})))) < 1000


OBJECTS, NINE = np.array([{}], object), {"a.npy": npy(np.arange(9))}


@pytest.mark.parametrize(("field", "why", "data"), [
    ("npy", "never unpickled", saved(np.save, OBJECTS)),
    ("npz", "never unpickled", saved(np.savez, a=OBJECTS)),
    ("npz", "does not begin", b"the rest of arrays" + npz({})),
    ("npz", "over the limit of 200 times", saved(np.savez_compressed, a=np.zeros(2**26 + 1, np.uint8))),
    *(("npy", "version 1 or 2", npy(3)[:6] + version + npy(3)[8:]) for version in (b"\x04\0", b"\x01\x01", b"\0\0")),
    ("npz", "1000000", with_size(npz(NINE), 10**6)),
    # Python's zipfile unpacks these without a bound
    *(("npz", "packed in a way", npz(NINE, kind)) for kind in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)),
    *(("npz", f"{n!r} is no array", npz({n: b"1"})) for n in ("script.py", "a.pkl", "a.npy/", "a", "a.NPY")),
])  # fmt: skip
def test_foreign_archives_are_refused_and_run_no_code(field: str, why: str, data: bytes) -> None:
    assert why in str(failure(field, data))
