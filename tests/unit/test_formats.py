"""Zip, TFRecord, safetensors and Energon: samples are what was written; damage is an error with a name."""

from __future__ import annotations

import gzip
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from builders import energon, tfrecords
from builders.energon import INFO, SPLIT
from builders.numbers import saved
from builders.stored import put, put_folder, rows
from builders.tars import tar
from builders.tensor_files import DTYPES, file_of, whole
from builders.tfrecords import example, feature, features, field, record, sequence_example, varint

import headrace as hr
from headrace.errors import DecodeError, FormatError, LimitError, StageError
from headrace.formats.format import Block
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.safetensors import SafeTensors
from headrace.formats.tfrecord import TFRECORD, RecordScanner, TFRecord, integers_of, sample_of
from headrace.testing.decoders import same

FILES = {f"{n:03}.{field}": bytes([n]) * (n * size) for n in range(9) for field, size in (("bin", 40), ("cls", 1))}


class Pipe(io.BytesIO):
    """A file without places: sizes follow the data."""

    def tell(self) -> int:
        raise OSError("a pipe has no places")


def packed(
    files: dict[str, bytes], method: int = zipfile.ZIP_STORED, *, wide: bool = False, piped: bool = False
) -> bytes:
    with zipfile.ZipFile(out := Pipe() if piped else io.BytesIO(), "w", method) as archive:
        archive.comment = b"PK\5\6 is no end"
        for name, data in files.items():
            with archive.open(name, "w", force_zip64=wide) as file:
                file.write(data)
    return out.getvalue()


def read(data: bytes, name: str = "0.zip", **options: Any) -> list[dict[str, Any]]:
    return list(hr.stream(put(data, name), **options))


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("how", [{}, {"wide": True}, {"piped": True}, {"wide": True, "piped": True}], ids=str)
def test_samples_equal_the_written_ones(method: int, how: dict[str, bool]) -> None:
    samples = read(packed(FILES, method, **how))
    assert [sample["__key__"] for sample in samples] == [f"{n:03}" for n in range(9)]
    assert {f"{one['__key__']}.{name}": one[name] for one in samples for name in ("bin", "cls")} == FILES


def test_directory_that_is_long_or_wide_is_found() -> None:
    files = {f"folder/with/a/long/name/{n:06}.x": b"%d" % n for n in range(1500)}
    assert [sample["x"] for sample in read(packed(files))] == list(files.values())
    data = bytearray(packed(FILES))
    at = data.rfind(b"PK\5\6", 0, len(data) - 20)
    _, _, _, _, count, length, start, _ = struct.unpack_from("<4s4H2IH", data, at)
    wide = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, start)
    wide += struct.pack("<4sIQI", b"PK\6\7", 0, at, 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 2**16 - 1, 2**16 - 1, 2**32 - 1, 2**32 - 1, 0)
    assert len(read(bytes(data[:at]) + wide + end)) == 9


def test_folders_and_names_of_other_alphabets() -> None:
    (sample,) = read(packed({"a/": b"", "a/ü.x": b"1", "__MACOSX/._ü.x": b"", "note": b""}))
    assert sample["__key__"] == "a/ü"


def edited(data: bytes, what: bytes, at: int, value: bytes) -> bytes:
    changed, place = bytearray(data), data.find(what)
    while place >= 0:
        changed[place + at : place + at + len(value)] = value
        place = data.find(what, place + 4)
    return bytes(changed)


def renamed(name: str) -> bytes:
    return packed({name: b"x"})


ONE = packed({"a.x": b"some bytes" * 9}, zipfile.ZIP_DEFLATED)
TWO = packed({"a.x": b"1" * 50, "b.x": b"2" * 50})


@pytest.mark.parametrize(("data", "why"), [
    (edited(ONE, b"PK\1\2", 8, b"\1"), "'a.x' is encrypted"),
    (edited(ONE, b"PK\1\2", 10, b"\x0c"), "'a.x' is packed by"),
    (edited(ONE, b"PK\1\2", 10, b"\0"), "stored as"), (edited(ONE, b"PK\1\2", 42, b"\xff\xff\1"), "would end after"),
    (renamed("/etc/a.x"), "is outside"), (renamed("a/../../b.x"), "is outside"),
    (renamed("a\\b.x"), "is outside"),
    (edited(packed({"a.x": b"1", "b.x": b"2"}), b"b.x", 0, b"a.x"), "two members called"),
    (packed({"a.x": b"1", "b.x": b"2", "a.y": b"3"}), "are not stored together"), (ONE + b"x", "does not end as"),
    (packed({"a.x": b"1", "a.X": b"2"}), "second field"), (ONE[:30], "cut off"), (b"x" + ONE, "before its end"),
    (edited(TWO, b"PK\1\2", 42, struct.pack("<I", 10)), "overlaps what follows it"),
    (edited(ONE, b"PK\1\2", 0, b"PK\1\3"), "entry 0"), (edited(ONE, b"PK\1\2", 28, b"\xff\xff"), "cut off in entry 0"),
])  # fmt: skip
def test_unreadable_archive_is_an_error_with_its_reason(data: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=rf"memory://stored/\d+/0.zip.*{why}"):
        read(data)


@pytest.mark.parametrize("data", [
    edited(ONE, b"PK\3\4", 14, b"\0\1\2\3"), edited(ONE, b"PK\3\4", 22, b"\1\0"), edited(ONE, b"PK\3\4", 30, b"b.y"),
    edited(ONE, b"PK\3\4", 0, b"PK\3\5"), edited(ONE, b"PK\3\4", 26, b"\xff\xff"),
    edited(ONE, b"PK\3\4", 35, b"\xff\xff"),
    edited(packed({"a.x": b"abc"}, piped=True), b"PK\7\x08", 4, b"\0\0"),
    edited(packed({"a.x": b"abc"}), b"abc", 0, b"abd"),
])  # fmt: skip
def test_member_that_is_damaged_is_an_error_of_its_sample(data: bytes) -> None:
    with pytest.raises(DecodeError, match=r"sample 'a' of memory://stored/\d+/0.zip.*field 'x'"):
        read(data)


def test_bomb_is_an_error_by_its_entry_and_by_its_content() -> None:
    low = Limits(unpacked_free_bytes=1000, unpacked_ratio=20)
    bomb = packed({"a.x": bytes(10**6)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(LimitError, match=r"'a.x' of .* unpacks to 1000000"):
        read(bomb, limits=low)
    with pytest.raises(DecodeError, match="unpacks to more than"):
        read(edited(bomb, b"PK\1\2", 24, struct.pack("<I", 100)), limits=low)


def arrays(n: int) -> dict[str, Any]:
    return {"a": np.arange(n), "b": np.ones((2, n), np.float32)}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_file_is_one_sample(save: Callable[..., None]) -> None:
    files = {}
    for n in range(4):
        files[f"{n}.npz"] = saved(save, **arrays(n))
    data = hr.stream(put_folder(files) + "/{0..3}.npz")
    assert len(data) == 4
    samples = list(hr.DataLoader(data.shuffle("global"), batch_size=None, collate_fn=dict))
    for sample in samples:
        assert same({name: sample[name] for name in "ab"}, arrays(int(sample["__key__"])))
    assert sorted(sample["__key__"] for sample in samples) == list("0123")


def test_npz_that_is_damaged_is_an_error_of_its_sample() -> None:
    whole = saved(np.savez, **arrays(50))
    for data in (whole[:-30], whole[:200] + b"\xff" + whole[201:], zlib.compress(b"x")):
        with pytest.raises(DecodeError, match="does not open as npz"):
            read(data, "0.npz")
    with pytest.raises(LimitError):
        read(whole, "0.npz", limits=Limits(member_bytes=100))


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


def test_bytes_that_are_changed_are_an_error_of_their_sample() -> None:
    data = bytearray(tfrecords.file_of([SAMPLE] * 3))
    data[len(data) // 2] ^= 1
    with pytest.raises(DecodeError, match=r"sample .1. .*checksum"):
        list(hr.stream(put(bytes(data), "0.tfrecord")))


def test_record_over_the_limit_is_a_limit_error() -> None:
    length = struct.pack("<Q", 2**60)
    data = RECORDS[3] + length + tfrecords.masked(length)
    with pytest.raises(LimitError, match="1152921504606846976 bytes") as caught:
        list(hr.stream(put(data, "0.tfrecord"), format=TFRecord(raw=True)))
    assert f"record 1, byte {len(RECORDS[3])}" in str(caught.value)


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


def stream(data: bytes, is_by_row: bool = False, limits: Limits = DEFAULTS) -> hr.Stream:
    return hr.stream(put(data, "some.safetensors"), format=SafeTensors(rows=is_by_row), limits=limits)


ALL = {str(dtype): (torch.arange(12).reshape(4, 3) % 2).to(dtype) for dtype in DTYPES}


def test_file_is_a_sample_with_its_tensors() -> None:
    more = {"point": torch.tensor(1.5), "none": torch.zeros(0, 3)}
    data = stream(file_of({**ALL, **more}))
    assert same(rows(data), [{**ALL, **more}])
    assert data.keys() == ["some"]


def test_files_of_the_library_are_read() -> None:
    library = pytest.importorskip("safetensors.torch")
    (sample,) = stream(library.save(ALL))
    assert same({name: sample[name] for name in ALL}, ALL)


def test_rows_option_makes_each_row_a_sample() -> None:
    data = stream(file_of(ALL), True)
    assert same(rows(data), [{name: tensor[k] for name, tensor in ALL.items()} for k in range(4)])
    assert len(data) == 4
    assert same(data[2]["torch.int64"], ALL["torch.int64"][2])
    assert list(stream(file_of({"a": torch.zeros(0, 5)}), True)) == []


@pytest.mark.parametrize("tensors", [{"a": torch.zeros(3), "b": torch.zeros(2)}, {"a": torch.tensor(1)}])
def test_rows_of_tensors_that_share_no_dimension_are_refused(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(FormatError, match="do not share their first dimension"):
        list(stream(file_of(tensors), True))


def entry(shape: Any = (2,), places: Any = (0, 2), dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": places}


@pytest.mark.slow
@pytest.mark.parametrize("data", [
    b"", b"\1\2\3", whole(b"[]"), whole(b"{"), whole(b"[" * 1000), whole({"a": 1}, b"ab"), whole({"a": entry()}, b"a"),
    whole({"a": entry()}, b"abc"), whole({"a": entry((3,))}, b"ab"), whole({"a": entry(places=(2, 0))}, b"ab"),
    whole({"a": entry(places=(0, 2)), "b": entry(places=(1, 3))}, b"abc"), whole({"a": entry((-1, -2))}, b"ab"),
    whole({"a": entry(places=(1, 3))}, b"abc"), whole({"a": entry(dtype="F4")}, b"ab"),
    whole({"a": entry(dtype=5)}, b"ab"),
    whole({"a": entry((2**60, 0), (0, 0))}), whole({"a": entry([1.5], (0, 2))}, b"ab"),
    whole({"a": entry(places=(0,))}, b"ab"),
    whole(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    struct.pack("<Q", 2**63) + b"{}", file_of(ALL)[:-1], file_of(ALL)[:40], whole({"__a": entry()}, b"ab"),
])  # fmt: skip
def test_file_that_is_damaged_is_an_error(data: bytes) -> None:
    for is_by_row in (False, True):
        with pytest.raises(StageError, match=r"memory://stored/\d+/some.safetensors"):
            list(stream(data, is_by_row))


@pytest.mark.parametrize("limits", [Limits(member_bytes=100), Limits(header_bytes=50), Limits(fields=3)])
def test_file_over_a_limit_is_a_limit_error(limits: Limits) -> None:
    for is_by_row in (False, True):
        with pytest.raises(LimitError):
            list(stream(file_of(ALL), is_by_row, limits))


def test_rows_without_bytes_are_not_counted() -> None:
    with pytest.raises(FormatError, match="rows have no bytes"):
        list(stream(whole({"a": entry((2**50, 0), (0, 0))}), True))
    with pytest.raises(LimitError, match="500 rows"):
        list(stream(file_of({"a": torch.zeros(500, dtype=torch.uint8)}), True, Limits(member_bytes=2000)))


Sample = tuple[str, dict[str, bytes]]


def some(first: int, count: int, size: int = 100) -> list[Sample]:
    return [
        (f"a/{n:03}", {"jpg": bytes([n]) * (size + n), "txt": str(n).encode()}) for n in range(first, first + count)
    ]


SPLITS = energon.folder({"train": [some(0, 4), some(4, 5)], "val": [some(20, 2)]})
SINGLE = energon.folder({"train": [some(0, 4)]})


def numbers(data: hr.Stream) -> list[int]:
    return [int(sample["txt"]) for sample in data]


def test_split_is_chosen_by_its_name() -> None:
    place = put_folder(SPLITS)
    assert numbers(hr.energon(place)) == numbers(hr.stream(place)) == list(range(9))
    assert numbers(hr.energon(place + "/", split="val")) == [20, 21]
    assert numbers(hr.energon(f"{place}/{SPLIT}", split="val")) == [20, 21]
    assert "split: 'val'; there are 'train'" in hr.energon(place, split="val").describe()


def test_one_sample_reads_only_its_own_shard() -> None:
    files = {name: data for name, data in SPLITS.items() if name not in ("shard_000.tar", "shard_000.tar.idx")}
    data = hr.energon(put_folder(files))
    assert len(data) == 9
    assert data[5] == {"__key__": "1", "__url__": data.source.urls[1], **some(5, 1)[0][1]}


def test_shards_with_indexes_are_read_without_the_folder() -> None:
    place = put_folder(SPLITS)
    data = hr.stream([f"{place}/shard_001.tar", f"{place}/shard_002.tar"], format="energon")
    assert sorted(numbers(data.shuffle("global"))) == [4, 5, 6, 7, 8, 20, 21]


def test_older_folders_and_patterns_are_read() -> None:
    files = dict(SPLITS)
    counts = json.loads(files.pop(INFO))["shard_counts"]
    files[".nv-meta/.info.yaml"] = "".join(["shard_counts:\n", *(f"  {k}: {n}\n" for k, n in counts.items())]).encode()
    files[SPLIT] = b"split_parts:\n  train:\n  - shard_{000..002}.tar\n  val: []\nexclude:\n- shard_00{1,1}.tar\n"
    assert numbers(hr.energon(put_folder(files))) == [0, 1, 2, 3, 20, 21]


@pytest.mark.parametrize(("rest", "text"), [
    (b"sample_loader: loader.py:load\npart_filter: loader.py:parts\n", "loader.py:load is not run"),
    (b"field_map:\n  image: jpg\n  caption: txt\n", "field_map (image=jpg, caption=txt) is not applied"),
])  # fmt: skip
def test_description_names_ignored_settings_of_dataset_yaml(rest: bytes, text: str) -> None:
    head = b"sample_type:\n  __module__: megatron.energon\n  __class__: CaptioningSample\n"
    described = hr.energon(put_folder({**SINGLE, ".nv-meta/dataset.yaml": head + rest})).describe()
    assert "not as CaptioningSample" in described
    assert text in described


def split(**changes: Any) -> dict[str, bytes]:
    return {SPLIT: json.dumps({**json.loads(SINGLE[SPLIT]), **changes}).encode()}


def train(*names: str) -> dict[str, bytes]:
    return split(split_parts={"train": names})


def only(name: str) -> dict[str, bytes]:
    return {INFO: json.dumps({"shard_counts": {name: 1}}).encode(), **train(name)}


PLACES = energon.offsets(SINGLE["shard_000.tar"])
OTHER = r"shard_000\.tar\.idx is damaged, or of another archive: .*"


def indexed(places: list[int]) -> dict[str, bytes]:
    return {"shard_000.tar.idx": struct.pack(f"<{len(places)}Q", *places)}


@pytest.mark.parametrize(("files", "why"), [
    (train("shard_007.tar"), "'shard_007.tar', which .*info.json does not"),
    (train("shard_000.tar", "shard_000.tar"), "entries 0 and 1 both name .*shard_000.tar"),
    (train("x{"), "which .*info.json does not count|braces"),
    (split(split_parts={"train": "shard_000.tar"}), "not lists"),
    (split(split_parts=[]), "not lists"),
    (split(exclude=["shard_000.tar/3"]), "single samples are not"),
    ({SPLIT: b"split_parts: ["}, "split.yaml is damaged: it is no YAML"),
    ({SPLIT: b"split_parts"}, "split.yaml is damaged: it is no object"),
    ({SPLIT: b"!!python/object/apply:os.getcwd []\nsplit_parts: {}"}, "no YAML"),
    ({INFO: b"{"}, "info.json is damaged: it cannot be parsed"),
    ({INFO: b"{}"}, "info.json is damaged: it has no shard_counts"),
    ({INFO: b'{"shard_counts": {"shard_000.tar": -1}}'}, "counts no samples of 'shard_000.tar'"),
    (only("../x.tar"), "outside"),
    (only("x.tar.gz"), "plain archives"),
    (indexed([]), f"{OTHER}0 bytes"),
    (indexed([*PLACES[:2], PLACES[1], *PLACES[3:]]), f"{OTHER}entry 2 does not"),
    (indexed([*PLACES[:2], PLACES[2] + 1, *PLACES[3:]]), f"{OTHER}entry 2 is no multiple of 512"),
    (indexed([*PLACES[:4], 2**60]), f"{OTHER}entry 4 is"),
    (indexed([*PLACES[:4], 2**40]), f"{OTHER}its samples end at byte"),
    (indexed(PLACES[:4]), f"{OTHER}it has 3 samples, and 4 are counted"),
    (indexed([*PLACES[:4], PLACES[4] - 512]), f"{OTHER}there is no end mark"),
])  # fmt: skip
def test_damaged_metadata_or_index_is_an_error_that_names_it(files: dict[str, bytes], why: str) -> None:
    with pytest.raises(hr.errors.FormatError, match=why):
        list(hr.energon(put_folder({**SINGLE, **files})))


def test_missing_split_folder_and_files_are_named() -> None:
    def without(ending: str) -> str:
        return put_folder({name: data for name, data in SINGLE.items() if not name.endswith(ending)})

    with pytest.raises(hr.OptionError, match="split='test' must be one of 'train'"):
        hr.energon(put_folder(SINGLE), split="test")
    with pytest.raises(hr.errors.ObjectMissingError, match=r"nowhere/\.nv-meta/split\.yaml"):
        hr.energon("memory://energon/nowhere")
    with pytest.raises(hr.errors.FormatError, match=r"neither \.info\.json nor \.info\.yaml"):
        hr.energon(without(INFO))
    with pytest.raises(hr.errors.ObjectMissingError, match=r"shard_000\.tar\.idx"):
        list(hr.energon(without(".idx")))
    with pytest.raises(hr.errors.FormatError, match=r"shard_000\.tar\.idx .* 39 bytes"):
        list(hr.energon(put_folder({**SINGLE, "shard_000.tar.idx": SINGLE["shard_000.tar.idx"][:-1]})))


def test_index_that_splits_a_sample_is_refused() -> None:
    """Each half has members of one sample alone."""
    places = [*PLACES[:2], PLACES[1] + 1024, *PLACES[2:]]
    info = json.dumps({"shard_counts": {"shard_000.tar": 5}}).encode()
    data = hr.energon(put_folder({**SINGLE, **indexed(places), INFO: info}))
    assert int(data[0]["txt"]) == 0
    with pytest.raises(hr.DecodeError, match=r"shard_000\.tar\.idx are not one sample, all of it"):
        data[1]


def test_index_of_an_older_archive_is_an_error() -> None:
    for samples in (some(0, 4, 600), some(0, 3), [*some(0, 4), *some(9, 1)]):
        with pytest.raises(hr.errors.StageError, match=r"shard_000\.tar"):
            list(hr.energon(put_folder({**SINGLE, "shard_000.tar": tar(samples)})))


def test_members_of_no_sample_are_skipped() -> None:
    archive = tar([("__meta__/a", {"x": b"1"}), *some(0, 2), ("", {"hidden": b""}), *some(2, 1), ("", {"hidden": b""})])
    starts = [archive.index(f"a/{n:03}.jpg".encode()) for n in range(3)]
    index = struct.pack("<4Q", *starts, energon.offsets(archive)[-1])
    place = put_folder({"0.tar": archive, "0.tar.idx": index})
    assert numbers(hr.stream(f"{place}/0.tar", format="energon")) == [0, 1, 2]
