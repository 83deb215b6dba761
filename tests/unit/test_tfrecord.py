"""TFRecord files: features are what was written; cut, changed or foreign records are errors with a location."""

from __future__ import annotations

import gzip
import struct
from typing import Any

import numpy as np
import pytest
from builders import tfrecords
from builders.stored import put
from builders.tfrecords import example, feature, features, field, record, sequence_example, varint

import headrace as hr
from headrace.errors import DecodeError, FormatError, LimitError
from headrace.formats.format import Block
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.tfrecord import TFRECORD, RecordScanner, TFRecord, integers_of, sample_of
from headrace.testing.decoders import same
from headrace.testing.formats import scanned

NUMBERS = [0, 1, -1, 127, 128, 2**62, -(2**63), 2**63 - 1]
SAMPLE: dict[str, Any] = {
    "image/encoded": b"\xff\xd8",
    "empty": b"",
    "many": [b"a", b"", b"c"],
    "none": [],
    "floats": np.array([1.5, -0.0, np.inf], np.float32),
    "ints": np.array(NUMBERS, np.int64),
    "long": np.array(NUMBERS * 9, np.int64),
    "unset": None,
}


def opened(data: bytes, lists: frozenset[str] = frozenset(), limits: Limits = DEFAULTS) -> dict[str, object]:
    return sample_of(data, lists, limits)


@pytest.mark.parametrize("packed", [True, False])
def test_features_are_what_was_written(packed: bool) -> None:
    assert same(opened(example(SAMPLE, packed=packed)), SAMPLE)


def test_single_value_is_a_list_where_lists_are_asked_for() -> None:
    assert opened(example(SAMPLE), frozenset(["empty"]))["empty"] == [b""]
    (sample,) = hr.stream(put(tfrecords.file_of([SAMPLE]), "0.tfrecord"), format=TFRecord(lists=["empty"]))
    assert (sample["empty"], sample["image/encoded"]) == ([b""], b"\xff\xd8")


def test_lists_of_a_sequence_example_are_fields() -> None:
    lists = {"words": [[b"a"], [b"b", b"c"]], "ids": [np.array([1]), np.array([2, 3])], "nothing": []}
    assert same(opened(sequence_example({"n": np.array([5])}, lists)), {"n": np.array([5]), **lists})
    with pytest.raises(ValueError, match="'n' is in its context and in its lists"):
        opened(sequence_example({"n": np.array([5])}, {"n": []}))


def test_parts_of_a_message_are_merged_and_the_last_of_a_name_holds() -> None:
    one, other = field(1, features({"a": np.array([1])})), field(1, features({"a": np.array([2]), "b": b"x"}))
    assert same(opened(one + other), {"a": np.array([2]), "b": b"x"})
    two = feature(np.array([1])) + feature(np.array([2]))
    assert same(opened(field(1, field(1, field(1, b"a") + field(2, two)))), {"a": np.array([1, 2])})
    two = feature(np.array([1])) + feature(b"x")
    assert opened(field(1, field(1, field(1, b"a") + field(2, two)))) == {"a": b"x"}


@pytest.mark.parametrize("count", [3, 40])
def test_number_of_more_than_64_bits_is_an_error(count: int) -> None:
    good = varint(7) * count
    assert integers_of(good).tolist() == [7] * count
    for wrong in (b"\xff" * 9 + b"\2", b"\xff" * 11, b"\x80", b"\x80" * 10 + b"\1"):
        with pytest.raises(ValueError, match="number in it"):
            integers_of(good + wrong)


def test_example_that_is_cut_off_anywhere_is_an_error_or_lacks_nothing_silently() -> None:
    whole = example(SAMPLE)
    assert opened(b"") == {}
    for end in range(1, len(whole)):
        with pytest.raises(ValueError, match=r"."):
            opened(whole[:end])


@pytest.mark.parametrize(("data", "why"), [
    (b"\x0b", "wire type 3"), (b"\x02", "field 0"), (field(3, b""), "raw=True"), (b"\x08\x01", "should be bytes"),
    (field(1, field(2, b"")), "field 2"), (field(1, field(1, field(1, b"\xff") + field(2, b""))), "utf-8"),
    (field(1, field(1, field(1, b"a") + field(2, field(4, b"")))), "'a': it is of a kind 4"),
    (field(1, field(1, field(1, b"a") + field(2, field(2, field(1, b"abc"))))), "'a': its 3 bytes"),
    (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "bytes, and 0 are left"),
])  # fmt: skip
def test_bytes_that_are_no_example_are_errors_with_a_reason(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        opened(data)


def test_example_of_too_many_features_is_an_error() -> None:
    with pytest.raises(ValueError, match="more than 3 features"):
        opened(example({str(k): b"" for k in range(4)}), limits=Limits(fields=3))


RECORDS = [record(bytes([n]) * n) for n in range(20)]
WHOLE = b"".join(RECORDS)


def test_raw_records_are_bytes() -> None:
    data = hr.stream(put(WHOLE, "0.tfrecord"), format=TFRecord(raw=True))
    assert [sample["record"] for sample in data] == [bytes([n]) * n for n in range(20)]
    assert [sample["__key__"] for sample in data][:2] == ["0", "1"]


def test_compressed_file_and_one_without_a_suffix_are_found() -> None:
    data = tfrecords.file_of([{"n": np.array([n])} for n in range(9)])
    for url in (put(gzip.compress(data), "0.tfrecords.gz"), put(data, "train-00000-of-00001")):
        assert [int(sample["n"][0]) for sample in hr.stream(url)] == list(range(9))


def test_whole_records_precede_the_error_of_a_damaged_one() -> None:
    ends = np.cumsum([0, *map(len, RECORDS)]).tolist()
    cases = [(WHOLE[: ends[k] + k % 5], k, k % 5 > 0) for k in range(20)]
    flipped = (WHOLE[:at] + bytes([WHOLE[at] ^ 0x40]) + WHOLE[at + 1 :] for at in range(ends[5], ends[5] + 12))
    cases += ((data, 5, True) for data in flipped)
    for data, whole, is_damaged in cases:
        found, error = scanned(TFRECORD, data, len(data) + 1)
        assert len(found) == whole
        assert (error is not None) == is_damaged
        assert error is None or f"record {whole}, byte {ends[whole]}" in error


def test_bytes_that_are_changed_are_an_error_of_their_sample() -> None:
    data = bytearray(tfrecords.file_of([SAMPLE] * 3))
    data[len(data) // 2] ^= 1
    with pytest.raises(DecodeError, match=r"sample .1. .*checksum"):
        list(hr.stream(put(bytes(data), "0.tfrecord")))


def test_record_over_the_limit_is_a_limit_error() -> None:
    length = struct.pack("<Q", 2**60)
    data = RECORDS[3] + length + tfrecords.masked(length)
    with pytest.raises(LimitError, match="1152921504606846976 bytes"):
        list(hr.stream(put(data, "0.tfrecord"), format=TFRecord(raw=True)))


def test_other_files_are_named() -> None:
    with pytest.raises(FormatError, match="no TFRecord file: it looks like"):
        list(hr.stream(put(gzip.compress(WHOLE), "0.tfrecord")))


@pytest.mark.parametrize("body", [b"", b"x" * 15, RECORDS[3] + b"x", RECORDS[3][:-1]])
def test_record_of_another_length_does_not_open(body: bytes) -> None:
    with pytest.raises(ValueError, match="states another size"):
        TFRECORD.open_block(Block("u", ("record",)), [body])


def test_scanner_refuses_buffers_out_of_order() -> None:
    with pytest.raises(ValueError, match="follow one another"):
        RecordScanner("u").feed(memoryview(b"abc"), 3, False)
