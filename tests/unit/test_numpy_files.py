"""Arrays of .npy and .npz are those that were written; wrong headers and objects are refused."""

from __future__ import annotations

import io
import struct
import zipfile
from typing import Any

import numpy as np
import pytest
from builders.arrays import saved
from builders.memory import peak_of
from builders.zips import zipped
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from unit.decoding import WHERE, decoded, failure

from headrace.errors import DecodeError
from headrace.formats.decoders import NpyDecoder, decoder
from headrace.formats.limits import Limits


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
