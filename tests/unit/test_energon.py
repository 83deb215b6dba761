"""Energon folders: the shards of a split, their description, and damaged metadata and indexes."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from builders import energon
from builders.energon import INFO, SPLIT
from builders.stored import put_folder as put
from builders.tars import tar

import headrace as hr

Sample = tuple[str, dict[str, bytes]]


def some(first: int, count: int, size: int = 100) -> list[Sample]:
    return [
        (f"a/{n:03}", {"jpg": bytes([n]) * (size + n), "txt": str(n).encode()}) for n in range(first, first + count)
    ]


FILES = energon.folder({"train": [some(0, 4), some(4, 5)], "val": [some(20, 2)]})
ONE = energon.folder({"train": [some(0, 4)]})


def numbers(data: hr.Stream) -> list[int]:
    return [int(sample["txt"]) for sample in data]


def test_split_is_chosen_by_its_name() -> None:
    place = put(FILES)
    assert numbers(hr.energon(place)) == numbers(hr.stream(place)) == list(range(9))
    assert numbers(hr.energon(place + "/", split="val")) == [20, 21]
    assert numbers(hr.energon(f"{place}/{SPLIT}", split="val")) == [20, 21]
    assert "split: 'val'; there are 'train'" in hr.energon(place, split="val").describe()


def test_one_sample_reads_only_its_own_shard() -> None:
    files = {name: data for name, data in FILES.items() if name not in ("shard_000.tar", "shard_000.tar.idx")}
    data = hr.energon(put(files))
    assert len(data) == 9
    assert data[5] == {"__key__": "1", "__url__": data.source.urls[1], **some(5, 1)[0][1]}


def test_shards_with_indexes_are_read_without_the_folder() -> None:
    place = put(FILES)
    data = hr.stream([f"{place}/shard_001.tar", f"{place}/shard_002.tar"], format="energon")
    assert sorted(numbers(data.shuffle("global"))) == [4, 5, 6, 7, 8, 20, 21]


def test_older_folders_and_patterns_are_read() -> None:
    files = dict(FILES)
    counts = json.loads(files.pop(INFO))["shard_counts"]
    files[".nv-meta/.info.yaml"] = "".join(["shard_counts:\n", *(f"  {k}: {n}\n" for k, n in counts.items())]).encode()
    files[SPLIT] = b"split_parts:\n  train:\n  - shard_{000..002}.tar\n  val: []\nexclude:\n- shard_00{1,1}.tar\n"
    assert numbers(hr.energon(put(files))) == [0, 1, 2, 3, 20, 21]


@pytest.mark.parametrize(("rest", "text"), [
    (b"sample_loader: loader.py:load\npart_filter: loader.py:parts\n", "loader.py:load is not run"),
    (b"field_map:\n  image: jpg\n  caption: txt\n", "field_map (image=jpg, caption=txt) is not applied"),
])  # fmt: skip
def test_description_names_ignored_settings_of_dataset_yaml(rest: bytes, text: str) -> None:
    head = b"sample_type:\n  __module__: megatron.energon\n  __class__: CaptioningSample\n"
    described = hr.energon(put({**ONE, ".nv-meta/dataset.yaml": head + rest})).describe()
    assert "not as CaptioningSample" in described
    assert text in described


def split(**changes: Any) -> dict[str, bytes]:
    return {SPLIT: json.dumps({**json.loads(ONE[SPLIT]), **changes}).encode()}


def train(*names: str) -> dict[str, bytes]:
    return split(split_parts={"train": names})


def only(name: str) -> dict[str, bytes]:
    return {INFO: json.dumps({"shard_counts": {name: 1}}).encode(), **train(name)}


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
])  # fmt: skip
def test_damaged_metadata_is_an_error_that_names_it(files: dict[str, bytes], why: str) -> None:
    with pytest.raises(hr.errors.FormatError, match=why):
        hr.energon(put({**ONE, **files}))


def test_missing_split_folder_and_files_are_named() -> None:
    def without(ending: str) -> str:
        return put({name: data for name, data in ONE.items() if not name.endswith(ending)})

    with pytest.raises(hr.OptionError, match="split='test' must be one of 'train'"):
        hr.energon(put(ONE), split="test")
    with pytest.raises(hr.errors.ObjectMissingError, match=r"nowhere/\.nv-meta/split\.yaml"):
        hr.energon("memory://energon/nowhere")
    with pytest.raises(hr.errors.FormatError, match=r"neither \.info\.json nor \.info\.yaml"):
        hr.energon(without(INFO))
    with pytest.raises(hr.errors.ObjectMissingError, match=r"shard_000\.tar\.idx"):
        list(hr.energon(without(".idx")))
    with pytest.raises(hr.errors.FormatError, match=r"shard_000\.tar\.idx .* 39 bytes"):
        list(hr.energon(put({**ONE, "shard_000.tar.idx": ONE["shard_000.tar.idx"][:-1]})))


PLACES = energon.offsets(ONE["shard_000.tar"])


def with_index(places: list[int], **more: bytes) -> str:
    return put({**ONE, "shard_000.tar.idx": struct.pack(f"<{len(places)}Q", *places), **more})


@pytest.mark.parametrize(("places", "why"), [
    ([], "0 bytes"),
    ([*PLACES[:2], PLACES[1], *PLACES[3:]], "entry 2 does not"),
    ([*PLACES[:2], PLACES[2] + 1, *PLACES[3:]], "entry 2 is no multiple of 512"),
    ([*PLACES[:4], 2**60], "entry 4 is"),
    ([*PLACES[:4], 2**40], "its samples end at byte"),
    (PLACES[:4], "it has 3 samples, and 4 are counted"),
    ([*PLACES[:4], PLACES[4] - 512], "there is no end mark"),
])  # fmt: skip
def test_damaged_index_is_an_error_that_names_it(places: list[int], why: str) -> None:
    with pytest.raises(hr.errors.FormatError, match=rf"shard_000\.tar\.idx is damaged, or of another archive: .*{why}"):
        list(hr.energon(with_index(places)))


def test_index_that_splits_a_sample_is_refused() -> None:
    """Each half has members of one sample alone."""
    places = [*PLACES[:2], PLACES[1] + 1024, *PLACES[2:]]
    info = json.dumps({"shard_counts": {"shard_000.tar": 5}}).encode()
    data = hr.energon(with_index(places, **{INFO: info}))
    assert int(data[0]["txt"]) == 0
    with pytest.raises(hr.DecodeError, match=r"shard_000\.tar\.idx are not one sample, all of it"):
        data[1]


def test_index_of_an_older_archive_is_an_error() -> None:
    for samples in (some(0, 4, 600), some(0, 3), [*some(0, 4), *some(9, 1)]):
        with pytest.raises(hr.errors.StageError, match=r"shard_000\.tar"):
            list(hr.energon(put({**ONE, "shard_000.tar": tar(samples)})))


def test_members_of_no_sample_are_skipped() -> None:
    archive = tar([("__meta__/a", {"x": b"1"}), *some(0, 2), ("", {"hidden": b""}), *some(2, 1), ("", {"hidden": b""})])
    starts = [archive.index(f"a/{n:03}.jpg".encode()) for n in range(3)]
    index = struct.pack("<4Q", *starts, energon.offsets(archive)[-1])
    place = put({"0.tar": archive, "0.tar.idx": index})
    assert numbers(hr.stream(f"{place}/0.tar", format="energon")) == [0, 1, 2]
