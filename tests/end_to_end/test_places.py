"""Streams of patterns, folders and names without a suffix, and their descriptions."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from end_to_end import litdata, mds
from moto_s3 import client_of

import headrace as hr
from headrace.errors import FormatError, ObjectChangedError, OptionError
from headrace.fetch.stores import memory
from headrace.formats.registry import sniffed_by_end
from headrace.sources.discovery.entries import Entries, EntriesBuilder
from headrace.testing import FaultServer
from headrace.types import Listed


def tar_of(names: list[str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(name)
            archive.addfile(info, io.BytesIO(name.encode()))
    return out.getvalue()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def put() -> Iterator[Any]:
    written: list[str] = []

    def put(path: str, data: bytes) -> None:
        memory.put(f"memory://place/{path}", data)
        written.append(path)

    yield put
    for path in written:
        memory.remove(f"memory://place/{path}")


def fill(put: Any) -> None:
    for k in (2, 0, 1):
        put(f"train/{k}.tar", tar_of([f"{k}-{n}.txt" for n in range(3)]))
        put(f"train/{k}.tar.crc", b"x")
    put("train/_SUCCESS", b"")
    put("train/README.md", b"# read me")


def keys(data: Any) -> list[str]:
    return [sample["__key__"] for sample in data]


IN_ORDER = [f"{k}-{n}" for k in range(3) for n in range(3)]


def test_folder_and_pattern_are_their_shards_in_order(put: Any) -> None:
    fill(put)
    for place in ("memory://place/train/", "memory://place/train", "memory://place/*/*.tar", "memory://place/**"):
        assert keys(hr.stream(place)) == IN_ORDER
    assert keys(hr.stream("memory://place/train/[01].tar")) == IN_ORDER[:6]
    assert (
        keys(hr.stream(["memory://place/train/[12].tar", "memory://place/train/0.tar"])) == IN_ORDER[3:] + IN_ORDER[:3]
    )
    assert keys(hr.stream("memory://place/tr*/{2,0}.tar")) == IN_ORDER[6:] + IN_ORDER[:3]


LINES = b'{"n": 1, "text": "%s"}\n{"n": 2}\n' % (b"x" * 9000)
PRETTY = b'{\n  "n": 1\n}\n'
MEMBERS = tar_of(["a.txt"])


NAMED = [
    ("a.json", LINES, 2, "jsonl"),
    ("a.json.gz", gzip.compress(LINES), 2, "jsonl"),
    ("c4-train.00000-of-01024.json.gz", gzip.compress(LINES), 2, "jsonl"),
    ("a.json.bz2", bz2.compress(LINES), 2, "jsonl"),
    ("a.json.zst", zstandard.compress(LINES), 2, "jsonl"),
    ("part-0.gz", gzip.compress(MEMBERS), 1, "tar"),
    ("part-0", MEMBERS, 1, "tar"),
    ("a.json", PRETTY, 1, None),
    ("a.json.gz", gzip.compress(PRETTY), 1, None),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "body", "count", "format"), NAMED, ids=[f"{one[0]} of {one[3]}" for one in NAMED])
def test_address_pattern_and_folder_are_of_the_format_that_their_first_bytes_say(
    put: Any,
    name: str,
    body: bytes,
    count: int,
    format: str | None,  # noqa: A002 (the name that the field uses)
) -> None:
    put(f"named/{name}", body)
    for place in (f"named/{name}", f"named/*{name[-5:]}", "named/", "named"):
        if format is not None:
            data = hr.stream(f"memory://place/{place}")
            assert f"format: {format}, by the" in data.describe()
            assert len(list(data)) == count
        elif place == "named/a.json" or name.endswith("gz"):
            with pytest.raises(OptionError, match=r"it has no JSON object on each line; hr\.files"):
                hr.stream(f"memory://place/{place}")
        else:
            assert next(iter(hr.stream(f"memory://place/{place}")))["json"] == PRETTY


def test_what_is_left_out_is_said_and_why_a_format_was_taken(put: Any) -> None:
    fill(put)
    text = hr.stream("memory://place/train/").shuffle().describe(samples=1)
    assert "3 objects in memory://place/train/" in text
    assert "3 beside data" in text
    assert "1 marks of other programs" in text
    assert "format: tar, by the names of 3 objects" in text
    assert ".shuffle(auto)  [plan]" in text
    assert "txt: 7 bytes" in text


def test_place_with_several_kinds_is_an_error_that_counts_them(put: Any) -> None:
    fill(put)
    put("train/more.jsonl", b'{"a": 1}\n')
    with pytest.raises(OptionError, match=r"3 tar, 1 jsonl.*pattern such as memory://place/train/\*\*/\*\.tar"):
        hr.stream("memory://place/train/")
    assert keys(hr.stream("memory://place/train/", format="tar")) == IN_ORDER


def test_tables_beside_shards_and_named_as_these_are_left_out(put: Any) -> None:
    fill(put)
    for k in range(3):
        put(f"train/{k}_stats.json", b"{}")
        put(f"train/{k}.jsonl", b"{}\n")
    data = hr.stream("memory://place/train/")
    assert keys(data) == IN_ORDER
    assert "6 objects" in data.describe()


@pytest.mark.parametrize("name", ["part-000", "part-000.json", "part-000.cls", "part-000.lz4"])
@pytest.mark.parametrize(("ending", "pack"), [
    ("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress), ("zst", zstandard.compress)
])  # fmt: skip
def test_compressed_objects_whose_names_do_not_say_so_are_refused_with_the_way_round(
    put: Any, name: str, ending: str, pack: Callable[[bytes], bytes]
) -> None:
    put(f"packed/{name}", pack(b'{"n": 1}\n' * 9))
    for place in (f"packed/{name}", "packed/part-*", "packed/", "packed"):
        with pytest.raises(
            OptionError, match=rf"{name} is .* data, .*\.jsonl\.{ending}', or .*\.{ending}' and format="
        ):
            hr.stream(f"memory://place/{place}")
    put(f"named/part-000.{ending}", pack(b'{"n": 1}\n' * 9))
    for place in (f"named/part-000.{ending}", "named/part-*", "named/"):
        assert len(list(hr.stream(f"memory://place/{place}"))) == 9


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("x.bin", r"hr\.tokens"), ("x.h5", r"hr\.hdf5"), ("x.npy", r"hr\.arrays"), ("x.rar", "unpack")),
        *(("x.pkl", r"hr\.files"), ("x.jpg", r"hr\.files")),
    ],
)
def test_what_cannot_be_read_says_the_way_round(put: Any, name: str, way: str) -> None:
    put(f"odd/{name}", b"\x00\x01\x02")
    with pytest.raises(OptionError, match=way):
        hr.stream(f"memory://place/odd/{name}")


def test_folder_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in ("missing", "missing/"):
        with pytest.raises(OptionError, match=f"missing/? is missing: there is no file or folder {tmp_path}/missing$"):
            hr.stream(f"{tmp_path}/{place}")
    with pytest.raises(OptionError, match="nothing is there to be read"):
        hr.stream(tmp_path / "empty")


def test_repository_without_its_scheme_is_told_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="hf://datasets/org/name"):
        hr.stream("org/name")


class Unlisted:
    """A store that cannot be listed."""

    async def get(self, path: str, *_: Any, **__: Any) -> Any:
        raise AssertionError

    async def aclose(self) -> None:
        pass


def test_pattern_that_nothing_is_like_and_store_that_does_not_list_are_errors(put: Any) -> None:
    fill(put)
    with pytest.raises(OptionError, match=r"nothing there is like that; memory://place/train/ was listed"):
        hr.stream("memory://place/train/*.zst")
    hr.plugins.register_store("unlisted", lambda root, storage_options: Unlisted())
    with pytest.raises(OptionError, match=r"cannot be listed.*list"):
        hr.files("unlisted://shelf/a/*.jpg")
    with pytest.raises(OptionError, match="meant by two"):
        hr.files("memory://place/train/{0*,*}.tar")


def test_kept_list_is_taken_until_it_is_made_anew(put: Any, cache: Path) -> None:
    fill(put)
    place = "memory://place/train/*.tar"
    assert keys(hr.stream(place, listing="kept")) == IN_ORDER
    put("train/3.tar", tar_of(["3-0.txt"]))
    again = hr.stream(place, listing="kept")
    assert keys(again) == IN_ORDER
    assert isinstance(again.source.urls, Entries)
    assert list(pickle.loads(pickle.dumps(again.source.urls))) == list(again.source.urls)
    assert keys(hr.stream(place)) == [*IN_ORDER, "3-0"]
    (kept,) = (cache / "headrace" / "manifests").iterdir()
    for at in (5, -9, -40):
        data = bytearray(kept.read_bytes())
        whole = bytes(data)
        kept.write_bytes(bytes(data[:at]))
        with pytest.raises(FormatError, match="remove it"):
            hr.stream(place, listing="kept")
        kept.write_bytes(whole)


def test_state_of_a_kept_list_is_that_of_the_same_list_given(put: Any) -> None:
    for k in range(10):
        put(f"many/{k}.txt", b"%d" % k)
    given = hr.DataLoader(hr.files([f"memory://place/many/{k}.txt" for k in range(10)]).shuffle(), batch_size=2)
    kept = hr.DataLoader(hr.files("memory://place/many/*", listing="kept").shuffle(), batch_size=2)
    batches = iter(given)
    seen = [key for _ in range(2) for key in next(batches)["__key__"]]
    kept.load_state_dict(batches.state_dict())
    given.close()
    rest = [key for batch in kept for key in batch["__key__"]]
    assert sorted(seen + rest) == [str(k) for k in range(10)]


def test_listing_of_an_s3_server_that_fails_goes_on(cache: Path) -> None:
    with FaultServer() as server:
        for k in range(1500):
            server.add(f"bucket/n/{k:04d}.txt", b"x", "slowdown:times=1")
        options = {"endpoint": server.url, "skip_signature": True}
        data = hr.files("s3://bucket/n/*.txt", storage_options=options)
        assert len(data) == 1500
        assert data[7]["__key__"] == "0007"


def commit_at(hub: FaultServer, revision: str, commit: str, lines: bytes, name: str = "a.jsonl") -> None:
    """Have a data set on a hub whose revision is a commit with one file."""
    hub.add(f"api/datasets/o/n/revision/{revision}", json.dumps({"sha": commit}).encode())
    hub.add(f"datasets/o/n/resolve/{commit}/d/{name}", lines)
    page = [{"type": "directory", "path": "d"}, {"type": "file", "path": f"d/{name}", "size": len(lines)}]
    page.append({"type": "file", "path": ".gitattributes", "size": 9})
    hub.add(f"api/datasets/o/n/tree/{commit}", json.dumps(page).encode())


def test_repository_of_the_hub_is_read_at_the_commit_that_its_revision_was_when_listed(cache: Path) -> None:
    old, new = "a" * 40, "b" * 40
    with FaultServer() as hub:
        commit_at(hub, "main", old, b'{"n": 1}\n{"n": 2}\n')
        commit_at(hub, "v1", old, b'{"n": 1}\n{"n": 2}\n')
        options = {"endpoint": hub.url, "token": False}
        places = [f"hf://datasets/o/n{at}" for at in ("", "/", "@v1", "@main/**/*.jsonl", f"@{old}/")]
        streams = [hr.stream(place, storage_options=options) for place in places]
        kept = hr.stream(places[0], storage_options=options, listing="kept")
        loader = hr.DataLoader(streams[0], batch_size=1, num_workers=0)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        loader.close()
        commit_at(hub, "main", new, b'{"n": 3}\n{"n": 4}\n')
        for data in (*streams, kept, hr.stream(places[0], storage_options=options, listing="kept")):
            assert [sample["n"] for sample in data] == [1, 2]
            assert f"revision: hf://datasets/o/n@{old}/, as it was when it was listed" in data.describe()
        moved = hr.stream(places[0], storage_options=options)
        assert [sample["n"] for sample in moved] == [3, 4]
        with hr.DataLoader(moved, batch_size=1, num_workers=0) as later:
            with pytest.raises(hr.StateMismatchError, match=f"the state has '.*n@{old}/', this loader '.*n@{new}/'"):
                later.load_state_dict(state)
        for same in (kept, hr.stream(f"hf://datasets/o/n@{old}", storage_options=options)):
            with hr.DataLoader(same, batch_size=1, num_workers=0) as later:
                later.load_state_dict(state)
                assert [batch["n"].tolist() for batch in later] == [[2]]


def zip_of(texts: list[bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for k, text in enumerate(texts):
            archive.writestr(f"{k}.txt", text)
    return out.getvalue()


def test_hub_that_does_not_say_what_a_revision_is_is_listed_as_it_was_named(cache: Path) -> None:
    with FaultServer() as hub:
        hub.add("datasets/o/n/resolve/v1/d/a.jsonl", b'{"n": 1}\n')
        hub.add("api/datasets/o/n/tree/v1", json.dumps([{"type": "file", "path": "d/a.jsonl", "size": 9}]).encode())
        data = hr.stream("hf://datasets/o/n@v1", storage_options={"endpoint": hub.url, "token": False})
        assert [sample["n"] for sample in data] == [1]
        assert "revision" not in data.describe()


def test_folder_of_this_machine_follows_links_and_no_circle(tmp_path: Path, cache: Path) -> None:
    inside = tmp_path / "data" / "deep"
    inside.mkdir(parents=True)
    (inside / "0.tar").write_bytes(tar_of(["0.txt"]))
    (inside / "up").symlink_to(tmp_path / "data", target_is_directory=True)
    (tmp_path / "data" / "1.tar").symlink_to(inside / "0.tar")
    assert keys(hr.stream(tmp_path / "data")) == ["0", "0"]


def test_many_names_are_sorted_and_held_without_an_object_each(put: Any, cache: Path) -> None:
    for k in range(1000):
        put(f"n/{k * 7919 % 1000:04d}.txt", b"x")
    for listing in ("new", "kept", "kept"):
        data = hr.files("memory://place/n/*", listing=listing)
        assert isinstance(data.source.urls, Entries)
        assert list(data.source.urls) == [f"memory://place/n/{k:04d}.txt" for k in range(1000)]
    assert {path.suffix for path in (cache / "headrace" / "manifests").iterdir()} == {".names"}


def test_names_in_any_order_are_sorted_with_their_sizes_and_etags() -> None:
    listed = [Listed(f"é/{k}", k or None, f"e{k}" if k % 2 else None) for k in range(9)]
    for objects in (listed, listed[::-1], listed[4:] + listed[:4]):
        builder = EntriesBuilder()
        for k in range(0, 9, 2):
            builder.add(objects[k : k + 2])
        assert list(builder.as_added().listed()) == objects
        assert list(builder.in_order().listed()) == listed
    plain = EntriesBuilder()
    plain.add([Listed("b"), Listed("a")])
    assert (plain.in_order().sizes, plain.in_order().etags) == (None, None)


def test_object_that_changed_since_it_was_listed_is_an_error_that_names_it(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for k in range(3):
        (folder / f"{k}.txt").write_bytes(b"old %d" % k)
        (folder / f"{k}.tar").write_bytes(tar_of([f"{k}.txt"]))
        with zipfile.ZipFile(folder / f"{k}.zip", "w") as archive:
            archive.writestr(f"{k}.txt", b"1")
    kept = hr.files(f"{folder}/*.txt", listing="kept")
    streams = [hr.files(f"{folder}/*.txt"), hr.folder(f"{folder}/*.txt"), kept, hr.stream(f"{folder}/*.tar")]
    streams.append(hr.stream(f"{folder}/*.zip"))
    for name in ("1.txt", "1.tar", "1.zip"):
        (folder / name).write_bytes((folder / name).read_bytes().replace(b"1", b"9"))  # of the same size
    for data in streams:
        samples = hr.DataLoader(data, batch_size=1, num_workers=0)
        with pytest.raises(ObjectChangedError, match=r"than was listed.*/1\.[tz]"):
            list(samples)
    assert [sample["txt"] for sample in hr.files(f"{folder}/*.txt")] == [b"old 0", b"old 9", b"old 2"]
    with pytest.raises(ObjectChangedError, match=r"than was listed"):
        list(hr.files(f"{folder}/*.txt", listing="kept"))


def test_files_with_other_numbers_are_those_that_were_listed(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for k in range(2):
        (folder / f"{k}.txt").write_bytes(b"%d" % k)
        (folder / f"{k}.zip").write_bytes(zip_of([b"%d" % k]))
        (folder / f"{k}.tar").write_bytes(tar_of([f"{k}.txt"]))
    places = [f"{folder}/*.{end}" for end in ("txt", "zip", "tar")]
    streams = [hr.stream(place) for place in places]
    kept = hr.files(places[0], listing="kept")
    for path in folder.iterdir():  # as a bucket that is mounted again
        shutil.copy2(path, tmp_path / "other")
        (tmp_path / "other").replace(path)
    for data in (*streams, kept, hr.files(places[0], listing="kept")):
        assert len(list(data)) == 2


def test_what_a_bucket_told_of_its_objects_is_compared_without_a_request_more(cache: Path) -> None:
    with client_of("place") as client:
        for k in range(3):
            client.put_object(Bucket="place", Key=f"n/{k}.txt", Body=b"old %d" % k)
        options = {"endpoint": client.meta.endpoint_url, "access_key_id": "a", "secret_access_key": "b"}
        data = hr.files("s3://place/n/*.txt", storage_options={**options, "region": "us-east-1"})
        with hr.DataLoader(data, batch_size=1) as loader:
            assert [batch["txt"][0] for batch in loader] == [b"old 0", b"old 1", b"old 2"]
            assert loader.stats().fetch.requests == 3
            client.put_object(Bucket="place", Key="n/1.txt", Body=b"new 1")
            with pytest.raises(ObjectChangedError, match=r"than was listed.*s3://place/n/1\.txt"):
                list(loader)


def test_all_constructors_take_patterns_and_folders(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "data"
    for kind in ("ids", "texts", "rows"):
        (folder / kind / "deep").mkdir(parents=True)
    for k, inner in enumerate(("", "deep/")):
        np.arange(8 * k, 8 * k + 8, dtype="<u2").tofile(folder / f"ids/{inner}{k}.bin")
        (folder / f"texts/{inner}{k}.txt").write_bytes(b"line %d\n" % k)
        np.save(folder / f"rows/{inner}{k}.npy", np.arange(2) + k)
    (folder / "ids/README.md").write_bytes(b"#")
    (folder / "ids/words.json").write_bytes(b"{}")
    listed = [f"{folder}/ids/[0-9].*", f"{folder}/ids/deep"]
    for place in (folder / "ids", f"{folder}/ids/", f"{folder}/ids/**/*.bin", listed):
        data = hr.tokens(place, "uint16", 4)
        assert [sample["tokens"].tolist()[0] for sample in data] == [0, 4, 8, 12], place
    assert "2 objects in" in hr.tokens(f"{folder}/ids/**/*.bin", "uint16", 4).describe()
    assert "listed: 3 objects in" in hr.tokens(folder / "ids", "uint16", 4).describe()
    for place in (folder / "texts", f"{folder}/texts/**/*.txt"):
        assert [sample["text"] for sample in hr.text(place, listing="kept")] == ["line 0", "line 1"]
        assert [sample["txt"] for sample in hr.files(place)] == [b"line 0\n", b"line 1\n"]
    for place in (folder / "rows", f"{folder}/rows/**/*.npy"):
        assert [int(sample["value"]) for sample in hr.arrays(place)] == [0, 1, 1, 2]
    with pytest.raises(OptionError, match="none/ is missing"):
        hr.tokens(f"{folder}/none/", "uint16", 4)
    ids, rows = hr.tokens(folder / "ids", "uint16", 4), hr.arrays(folder / "rows")
    np.arange(8, 24, dtype="<u2").tofile(folder / "ids/deep/1.bin")
    np.save(folder / "rows/0.npy", np.arange(3))
    for data, name in ((ids, "1.bin"), (rows, "0.npy")):
        with pytest.raises(ObjectChangedError, match=f"than was listed.*{name}"):
            list(data)


def test_format_is_known_by_the_last_bytes_where_the_first_do_not_tell(put: Any) -> None:
    out = io.BytesIO(b"#!/bin/sh a program that unpacks what is behind it\n")
    with zipfile.ZipFile(out, "a") as archive:
        archive.writestr("a.txt", b"in it")
    for name in ("unzip-me", "parts/0", "parts/1"):
        put(name, out.getvalue())
    for place, first in (("unzip-me", "unzip-me"), ("parts/", "parts/0")):
        data = hr.stream(f"memory://place/{place}")
        assert {sample["txt"] for sample in data} == {b"in it"}
        assert f"format: zip, by the last bytes of memory://place/{first}" in data.describe()
    ends = {b"PAR1": "parquet", b"ARROW1": "arrow", out.getvalue()[-60:] + b"x": None, b"PK\5\6" + bytes(18): "zip"}
    for tail, name in ends.items():
        form = sniffed_by_end("x", b"first" + tail)
        assert (form and form.name) == name


FOLDERS: dict[str, tuple[dict[str, bytes], str, Callable[[str], object]]] = {
    "mds": (mds.folder({"x": "int"}, [[{"x": k}] for k in range(3)], "gz"), "shards", hr.stream),
    "litdata": (litdata.folder([[{"n": k}] for k in range(3)]), "chunks", hr.stream),
    "tokens": (
        {"index.json": json.dumps({"config": {"data_format": ["no_header_tensor:20"]}, "chunks": [
            {"filename": f"chunk-0-{k}.bin", "chunk_size": 1, "chunk_bytes": 2, "dim": 1} for k in range(3)
        ]}).encode()},
        "chunks", lambda url: hr.tokens(url, window=1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_catalogue_that_names_a_shard_twice_is_an_error_in_any_spelling(put: Any, kind: str) -> None:
    files, name, read = FOLDERS[kind]
    for file, body in files.items():
        put(file, body)
    said = json.loads(files["index.json"])
    shards = said[name]
    for spelling in ("", "./", ".//"):
        again = json.loads(json.dumps(shards[0]).replace('": "shard', f'": "{spelling}shard'))
        if "filename" in again:
            again["filename"] = spelling + again["filename"]
        put("index.json", json.dumps({**said, name: [shards[0], shards[1], again]}).encode())
        with pytest.raises(FormatError, match=r"place/index\.json.*: (entries 0 and 2 both|chunk 2 is called '\.)"):
            read("memory://place/index.json")


@pytest.mark.slow
def test_folders_with_a_scheme_are_those_without(tmp_path: Path) -> None:
    for name in ("zebra/0.txt", "cat %/1.txt", "cat %/2.txt"):
        (tmp_path / "a b" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a b" / name).write_text(name)
    plain, url = f"{tmp_path}/a b", f"file://{tmp_path}/a%20b"
    for below in ("/*/*.txt", "/**/*.txt"):
        assert len(list(hr.files(plain + below))) == 3
        assert list(hr.files(url + below)) == list(hr.files(plain + below))
    wanted = [{**sample} for sample in hr.folder(plain)]
    assert [sample["label"] for sample in wanted] == [0, 0, 1]
    assert [{**sample} for sample in hr.folder(url)] == wanted
