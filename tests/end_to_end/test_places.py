"""Streams of patterns, folders, tables and names without a suffix, and their descriptions."""

import bz2
import csv
import gzip
import io
import json
import lzma
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from builders import litdata, mds, token_files
from builders.loops import loaded, rest_of, state_after
from builders.tars import tar, zipped
from moto_s3 import client_of
from PIL import Image

import headrace as hr
from headrace.errors import FormatError, ObjectChangedError, ObjectMissingError, OptionError
from headrace.sources.entries import Entries, EntriesBuilder
from headrace.testing import FaultServer
from headrace.types import Listed


def texts(*keys: str) -> bytes:
    return tar([(key, {"txt": f"{key}.txt".encode()}) for key in keys])


@pytest.fixture
def train(put: Any) -> str:
    """A folder of three shards with other files beside them."""
    for k in (2, 0, 1):
        put(f"train/{k}.tar", texts(*(f"{k}-{n}" for n in range(3))))
        put(f"train/{k}.tar.crc")
    put("train/_SUCCESS", b"")
    put("train/README.md", b"# read me")
    return "memory://place/train"


def keys(data: Any) -> list[str]:
    return [sample["__key__"] for sample in data]


IN_ORDER = [f"{k}-{n}" for k in range(3) for n in range(3)]


def test_folder_and_pattern_are_their_shards_in_order(train: str) -> None:
    parts = [IN_ORDER[3 * k : 3 * k + 3] for k in range(3)]
    for place in (f"{train}/", train, "memory://place/*/*.tar", "memory://place/**"):
        assert keys(hr.stream(place)) == IN_ORDER
    assert keys(hr.stream(f"{train}/[01].tar")) == parts[0] + parts[1]
    assert keys(hr.stream([f"{train}/[12].tar", f"{train}/0.tar"])) == parts[1] + parts[2] + parts[0]
    assert keys(hr.stream("memory://place/tr*/{2,0}.tar")) == parts[2] + parts[0]


LINES = b'{"n": 1, "text": "%s"}\n{"n": 2}\n' % (b"x" * 9000)
PRETTY = b'{\n  "n": 1\n}\n'
MEMBERS = texts("a")


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
def test_first_bytes_give_the_format_of_addresses_patterns_and_folders(
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


def test_description_names_skipped_objects_and_the_reason_for_the_format(train: str) -> None:
    text = hr.stream(f"{train}/").shuffle().describe(samples=1)
    for line in (
        "3 objects in memory://place/train/",
        "3 beside data",
        "1 marks of other programs",
        "format: tar, by the names of 3 objects",
        ".shuffle(auto)  [plan]",
        "txt: 7 bytes",
    ):
        assert line in text


def test_place_with_several_kinds_is_an_error_that_counts_them(put: Any, train: str) -> None:
    put("train/more.jsonl", b'{"a": 1}\n')
    with pytest.raises(OptionError, match=r"3 tar, 1 jsonl.*pattern such as memory://place/train/\*\*/\*\.tar"):
        hr.stream(f"{train}/")
    assert keys(hr.stream(f"{train}/", format="tar")) == IN_ORDER


def test_tables_beside_shards_with_their_names_are_skipped(put: Any, train: str) -> None:
    for k in range(3):
        put(f"train/{k}_stats.json", b"{}")
        put(f"train/{k}.jsonl", b"{}\n")
    data = hr.stream(f"{train}/")
    assert keys(data) == IN_ORDER
    assert "6 objects" in data.describe()


@pytest.mark.parametrize("name", ["part-000", "part-000.json", "part-000.cls", "part-000.lz4"])
@pytest.mark.parametrize(("ending", "pack"), [
    ("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress), ("zst", zstandard.compress)
])  # fmt: skip
def test_compressed_objects_need_a_suffix(put: Any, name: str, ending: str, pack: Callable[[bytes], bytes]) -> None:
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
    ("read", "place", "match"),
    [
        (hr.stream, "memory://place/odd/x.bin", r"hr\.tokens"),
        (hr.stream, "memory://place/odd/x.h5", r"hr\.hdf5"),
        (hr.stream, "memory://place/odd/x.npy", r"hr\.arrays"),
        (hr.stream, "memory://place/odd/x.rar", "unpack"),
        (hr.stream, "memory://place/odd/x.pkl", r"hr\.files"),
        (hr.stream, "memory://place/odd/x.jpg", r"hr\.files"),
        (hr.stream, "FOLDER/missing", "missing is missing: there is no file or folder FOLDER/missing$"),
        (hr.stream, "FOLDER/missing/", "missing/ is missing: there is no file or folder FOLDER/missing$"),
        (hr.stream, "FOLDER/empty", "has no object to read"),
        (hr.stream, "org/name", "hf://datasets/org/name"),
        (hr.stream, "memory://place/train/*.zst", "place/train/ has no object like memory://place/train/.*zst"),
        (hr.files, "unlisted://shelf/a/*.jpg", r"cannot be listed.*list"),
        (hr.files, "memory://place/train/{0*,*}.tar", "meant by two"),
    ],
)
def test_place_that_cannot_be_read_is_refused_with_a_remedy(
    put: Any, train: str, read: Any, place: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hr.plugins.register_store("unlisted", lambda root, storage_options: Unlisted())
    for ending in ("bin", "h5", "npy", "rar", "pkl", "jpg"):
        put(f"odd/x.{ending}", b"\x00\x01\x02")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=match.replace("FOLDER", str(tmp_path))):
        read(place.replace("FOLDER", str(tmp_path)))


class Unlisted:
    async def get(self, path: str, *_: Any, **__: Any) -> Any:
        raise AssertionError

    async def aclose(self) -> None:
        pass


def test_kept_list_is_used_until_it_is_made_anew(put: Any, train: str, cache: Path) -> None:
    place = f"{train}/*.tar"
    assert keys(hr.stream(place, listing="kept")) == IN_ORDER
    put("train/3.tar", texts("3-0"))
    again = hr.stream(place, listing="kept")
    assert keys(again) == IN_ORDER
    assert isinstance(again.source.urls, Entries)
    assert list(pickle.loads(pickle.dumps(again.source.urls))) == list(again.source.urls)
    assert keys(hr.stream(place)) == [*IN_ORDER, "3-0"]
    (kept,) = (cache / "headrace" / "manifests").iterdir()
    whole = kept.read_bytes()
    for at in (5, -9, -40):
        kept.write_bytes(whole[:at])
        with pytest.raises(FormatError, match="remove it"):
            hr.stream(place, listing="kept")


def test_state_of_a_kept_list_is_that_of_the_same_list_given(put: Any) -> None:
    for k in range(10):
        put(f"many/{k}.txt", b"%d" % k)
    given = hr.files([f"memory://place/many/{k}.txt" for k in range(10)]).shuffle()
    kept = hr.files("memory://place/many/*", listing="kept").shuffle()
    state = state_after(hr.DataLoader(given, batch_size=2), 2)
    assert rest_of(hr.DataLoader(kept, batch_size=2), state) == loaded(given, batch_size=2)[2:]


def test_listing_of_an_s3_server_that_fails_goes_on(server: FaultServer) -> None:
    for k in range(1500):
        server.add(f"bucket/n/{k:04d}.txt", b"x", "slowdown:times=1")
    data = hr.files("s3://bucket/n/*.txt", storage_options={"endpoint": server.url, "skip_signature": True})
    assert len(data) == 1500
    assert data[7]["__key__"] == "0007"


def commit_at(hub: FaultServer, revision: str, commit: str, lines: bytes, name: str = "a.jsonl") -> None:
    """Have a data set on a hub whose revision is a commit with one file."""
    hub.add(f"api/datasets/o/n/revision/{revision}", json.dumps({"sha": commit}).encode())
    hub.add(f"datasets/o/n/resolve/{commit}/d/{name}", lines)
    page = [{"type": "directory", "path": "d"}, {"type": "file", "path": f"d/{name}", "size": len(lines)}]
    page.append({"type": "file", "path": ".gitattributes", "size": 9})
    hub.add(f"api/datasets/o/n/tree/{commit}", json.dumps(page).encode())


def test_repository_of_the_hub_is_read_at_the_commit_that_its_revision_was_when_listed(server: FaultServer) -> None:
    old, new = "a" * 40, "b" * 40
    for revision in ("main", "v1"):
        commit_at(server, revision, old, b'{"n": 1}\n{"n": 2}\n')
    options = {"endpoint": server.url, "token": False}

    def read(at: str = "", **more: Any) -> hr.Stream:
        return hr.stream(f"hf://datasets/o/n{at}", storage_options=options, **more)

    def loader(data: hr.Stream) -> hr.DataLoader[Any]:
        return hr.DataLoader(data, batch_size=1, num_workers=0)

    streams = [*map(read, ("", "/", "@v1", "@main/**/*.jsonl", f"@{old}/")), read(listing="kept")]
    state = state_after(loader(streams[0]), 1)
    commit_at(server, "main", new, b'{"n": 3}\n{"n": 4}\n')
    for data in (*streams, read(listing="kept")):
        assert [sample["n"] for sample in data] == [1, 2]
        assert f"revision: hf://datasets/o/n@{old}/, as it was when it was listed" in data.describe()
    assert [sample["n"] for sample in read()] == [3, 4]
    with pytest.raises(hr.StateMismatchError, match=f"the state has '.*n@{old}/', this loader '.*n@{new}/'"):
        rest_of(loader(read()), state)
    for same in (streams[-1], read(f"@{old}")):
        assert [batch["n"].tolist() for batch in rest_of(loader(same), state)] == [[2]]


def test_hub_without_commits_of_revisions_is_listed_as_it_was_named(server: FaultServer) -> None:
    server.add("datasets/o/n/resolve/v2/d/a.jsonl", b'{"n": 1}\n')
    server.add("api/datasets/o/n/tree/v2", json.dumps([{"type": "file", "path": "d/a.jsonl", "size": 9}]).encode())
    data = hr.stream("hf://datasets/o/n@v2", storage_options={"endpoint": server.url, "token": False})
    assert [sample["n"] for sample in data] == [1]
    assert "revision" not in data.describe()


def test_folder_of_this_machine_follows_links_and_no_circle(tmp_path: Path) -> None:
    inside = tmp_path / "data" / "deep"
    inside.mkdir(parents=True)
    (inside / "0.tar").write_bytes(texts("0"))
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three objects of each of three formats."""
    (tmp_path / "data").mkdir()
    for k in range(3):
        for ending, body in (("txt", b"old %d" % k), ("tar", texts(f"{k}")), ("zip", zipped({f"{k}.txt": b"1"}))):
            (tmp_path / "data" / f"{k}.{ending}").write_bytes(body)
    return tmp_path / "data"


def test_object_that_changed_since_it_was_listed_is_an_error_that_names_it(folder: Path) -> None:
    kept = hr.files(f"{folder}/*.txt", listing="kept")
    streams = [hr.files(f"{folder}/*.txt"), hr.folder(f"{folder}/*.txt"), kept]
    streams += [hr.stream(f"{folder}/*.tar"), hr.stream(f"{folder}/*.zip")]
    for name in ("1.txt", "1.tar", "1.zip"):
        (folder / name).write_bytes((folder / name).read_bytes().replace(b"1", b"9"))  # of the same size
    for data in (*streams, hr.files(f"{folder}/*.txt", listing="kept")):
        with pytest.raises(ObjectChangedError, match=r"than was listed.*/1\.[tz]"):
            loaded(data, batch_size=1, num_workers=0)
    assert [sample["txt"] for sample in hr.files(f"{folder}/*.txt")] == [b"old 0", b"old 9", b"old 2"]


def test_files_with_other_inodes_are_those_that_were_listed(folder: Path, tmp_path: Path) -> None:
    streams = [hr.stream(f"{folder}/*.{end}") for end in ("txt", "zip", "tar")]
    kept = hr.files(f"{folder}/*.txt", listing="kept")
    for path in folder.iterdir():  # as a bucket that is mounted again
        shutil.copy2(path, tmp_path / "other")
        (tmp_path / "other").replace(path)
    for data in (*streams, kept, hr.files(f"{folder}/*.txt", listing="kept")):
        assert len(list(data)) == 3


def test_versions_that_a_bucket_listed_are_compared_without_a_request_more() -> None:
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


def test_all_constructors_take_patterns_and_folders(tmp_path: Path) -> None:
    for k, inner in enumerate(("", "deep/")):
        for kind in ("ids", "texts", "rows"):
            (tmp_path / kind / inner).mkdir(parents=True, exist_ok=True)
        np.arange(8 * k, 8 * k + 8, dtype="<u2").tofile(tmp_path / f"ids/{inner}{k}.bin")
        (tmp_path / f"texts/{inner}{k}.txt").write_bytes(b"line %d\n" % k)
        np.save(tmp_path / f"rows/{inner}{k}.npy", np.arange(2) + k)
    (tmp_path / "ids/README.md").write_bytes(b"#")
    (tmp_path / "ids/words.json").write_bytes(b"{}")

    def tokens(place: Any) -> hr.Stream:
        return hr.tokens(place, "uint16", 4)

    pattern = f"{tmp_path}/ids/**/*.bin"
    for place in (tmp_path / "ids", f"{tmp_path}/ids/", pattern, [f"{tmp_path}/ids/[0-9].*", f"{tmp_path}/ids/deep"]):
        assert [sample["tokens"].tolist()[0] for sample in tokens(place)] == [0, 4, 8, 12], place
    assert "2 objects in" in tokens(pattern).describe()
    assert "listed: 3 objects in" in tokens(tmp_path / "ids").describe()
    for place in (tmp_path / "texts", f"{tmp_path}/texts/**/*.txt"):
        assert [sample["text"] for sample in hr.text(place, listing="kept")] == ["line 0", "line 1"]
        assert [sample["txt"] for sample in hr.files(place)] == [b"line 0\n", b"line 1\n"]
    for place in (tmp_path / "rows", f"{tmp_path}/rows/**/*.npy"):
        assert [int(sample["value"]) for sample in hr.arrays(place)] == [0, 1, 1, 2]
    with pytest.raises(OptionError, match="none/ is missing"):
        tokens(f"{tmp_path}/none/")
    ids, rows = tokens(tmp_path / "ids"), hr.arrays(tmp_path / "rows")
    np.arange(8, 24, dtype="<u2").tofile(tmp_path / "ids/deep/1.bin")
    np.save(tmp_path / "rows/0.npy", np.arange(3))
    for data, name in ((ids, "1.bin"), (rows, "0.npy")):
        with pytest.raises(ObjectChangedError, match=f"than was listed.*{name}"):
            list(data)


FOLDERS: dict[str, tuple[dict[str, bytes], str, Callable[[str], object]]] = {
    "mds": (mds.folder({"x": "int"}, [[{"x": k}] for k in range(3)], "gz"), "shards", hr.stream),
    "litdata": (litdata.folder([[{"n": k}] for k in range(3)]), "chunks", hr.stream),
    "tokens": (token_files.litdata([[np.arange(2)]] * 3), "chunks", lambda url: hr.tokens(url, window=1)),
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


def test_folders_are_classes_and_files_of_one_name_are_one_sample(put: Any) -> None:
    for name in ("dog/2.txt", "cat/1.jpg", "cat/1.json", "cat/1.b.jpg", "cat/1-a.jpg", "bird/x/9.jpg"):
        put(name, b'{"of": 1}' if name.endswith("json") else name.encode())
    data = hr.folder("memory://place")
    assert data.source.classes == ("bird", "cat", "dog")
    assert len(data) == 5
    samples = {sample["__key__"]: sample for sample in data.decode()}
    assert {key: sample["label"] for key, sample in samples.items()} == {
        "bird/x/9": 0, "cat/1-a": 1, "cat/1.b": 1, "cat/1": 1, "dog/2": 2,
    }  # fmt: skip
    assert samples["cat/1"]["json"] == {"of": 1}
    assert samples["cat/1"]["image"] == b"cat/1.jpg"
    assert "3 classes, by the first folder's name: bird, cat, dog" in data.describe()
    assert data[4]["__key__"] == "dog/2"


def test_images_of_a_folder_are_one_field_whatever_their_format(put: Any) -> None:
    for name, kind in (("cat/1.jpg", "JPEG"), ("cat/2.png", "PNG"), ("dog/3.JPEG", "JPEG"), ("dog/3.txt", None)):
        picture = io.BytesIO(b"text")
        if kind is not None:
            Image.new("RGB", (8, 6)).save(picture, kind)
        put(name, picture.getvalue())
    data = hr.folder("memory://place")
    ((images, labels),) = hr.DataLoader(data.decode("rgb8").to_tuple("image", "label"), batch_size=3)
    assert images.shape == (3, 6, 8, 3)
    assert labels.tolist() == [0, 0, 1]
    assert "image: field of the files in jpeg, jpg, png" in data.describe()
    with pytest.raises(FormatError, match="has no field 'jpg' or 'png'; its fields are: image, label"):
        list(data.to_tuple("jpg;png"))

    put("dog/3.png")  # a mask, which would be the same field
    assert {*hr.folder("memory://place")[2]} == {"__key__", "__url__", "label", "jpeg", "png", "txt"}


def test_place_with_pictures_is_a_folder(put: Any) -> None:
    for k in range(3):
        put(f"{'ab'[k % 2]}/{k}.jpg")
        put(f"{'ab'[k % 2]}/{k}.txt", b"caption")
    data = hr.stream("memory://place/")
    assert [sample["label"] for sample in data] == [0, 0, 1]
    assert {sample["txt"] for sample in data.decode()} == {"caption"}


def test_pattern_gives_fields_of_names(put: Any) -> None:
    for name in ("train/cat_01.png", "train/dog_2.png", "test/cat_3.png"):
        put(name)
    data = hr.folder("memory://place/", pattern="{split}/{label}_{id:d}.png")
    said = [(sample["split"], sample["label"], sample["id"]) for sample in data]
    assert said == [("test", 0, 3), ("train", 0, 1), ("train", 1, 2)]
    put("train/odd.png")
    with pytest.raises(OptionError, match=r"1 of 4 files.*train/odd\.png"):
        hr.folder("memory://place/", pattern="{split}/{label}_{id:d}.png")
    data = hr.folder("memory://place/*/*_*.png", pattern="{split}/{label}_{id:d}.png")
    assert len(data) == 3
    for wrong in ("{a}{a}", "x", "{a:f}", "{}"):
        with pytest.raises(OptionError, match="pattern="):
            hr.folder("memory://place/", pattern=wrong)


def test_folders_that_may_be_classes_or_splits_are_refused(put: Any) -> None:
    for name in ("train/cat/1.jpg", "test/cat/2.jpg"):
        put(name)
    with pytest.raises(OptionError, match=r"the folders test, train.*memory://place/test/"):
        hr.folder("memory://place/")
    assert hr.folder("memory://place/train").source.classes == ("cat",)
    assert hr.folder("memory://place/", labels=True).source.classes == ("test", "train")
    put("3.jpg")
    with pytest.raises(OptionError, match="1 files beside 2 folders"):
        hr.folder("memory://place/")
    assert len(hr.folder("memory://place/", labels=False)) == 3


@pytest.mark.parametrize(
    ("place", "pattern"), [("", None), ("/*/*.txt", None), ("/**/*", None), ("", "{label}/{id}.txt")]
)
def test_empty_folder_is_a_class(tmp_path: Path, place: str, pattern: str | None) -> None:
    for name in ("bird", "cat", "dog", ".hidden"):
        (tmp_path / name).mkdir()
    for name in ("bird", "dog"):
        (tmp_path / name / "1.txt").write_bytes(b"x")
    data = hr.folder(f"{tmp_path}{place}", pattern=pattern)
    assert data.source.classes == ("bird", "cat", "dog")
    assert [sample["label"] for sample in data] == [0, 2]
    assert "3 classes (1 of them without files)" in data.describe()


def test_classes_set_the_numbers_of_labels(put: Any) -> None:
    put("train/cat/1.txt")
    put("train/dog/2.txt")
    put("rows.csv", b"path,kind\ntrain/cat/1.txt,cat\ntrain/dog/2.txt,dog\n")
    classes = ("dog", "bird", "cat")

    def data_with(classes: Any) -> list[Any]:
        return [
            hr.folder("memory://place/train/", classes=classes),
            hr.folder("memory://place/train/", pattern="{label}/{id}.txt", classes=classes),
            hr.table("memory://place/rows.csv", label_column="kind", classes=classes),
        ]

    for data, other in zip(data_with(classes), data_with(sorted(classes)), strict=True):
        assert data.source.classes == classes
        assert [sample["label"] for sample in data] == [2, 0]
        with hr.DataLoader(data, batch_size=None) as loader, pytest.raises(hr.StateMismatchError):
            hr.DataLoader(other, batch_size=None).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("error", "options"),
    [
        ("has classes that classes= does not list: 'dog'", {"classes": ["cat"]}),
        ("a list of different names", {"classes": ["cat", "dog", "cat"]}),
        ("a list of different names", {"classes": "cat"}),
        ("labels=False, so that there are no classes", {"classes": ["cat", "dog"], "labels": False}),
        ("has no {label}", {"classes": ["cat", "dog"], "pattern": "{kind}/{id}.txt"}),
    ],
)
def test_classes_are_refused_when_they_do_not_fit(put: Any, error: str, options: dict[str, Any]) -> None:
    put("cat/1.txt")
    put("dog/2.txt")
    with pytest.raises(OptionError, match=error):
        hr.folder("memory://place/", **options)


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_table_lists_its_objects(put: Any, kind: str) -> None:
    for k in range(5):
        put(f"images/{k}.jpg", b"%d" % k)
    rows = [{"file_name": f"images/{k}.jpg", "breed": "ab"[k % 2], "text": 'a "b",\nc'} for k in range(5)]
    out = io.StringIO("".join(json.dumps(row) + "\n" for row in rows) if kind == "jsonl" else "")
    if kind != "jsonl":
        writer = csv.DictWriter(out, rows[0], dialect="excel" if kind == "csv" else "excel-tab")
        writer.writeheader()
        writer.writerows(rows)
    put(f"metadata.{kind}", out.getvalue().encode())
    data = hr.table(f"memory://place/metadata.{kind}", label_column="breed")
    assert len(data) == 5
    assert dict(data[1]) == {
        "__key__": "images/1.jpg", "__url__": "memory://place/images/1.jpg", "file_name": "images/1.jpg", "breed": "b",
        "text": 'a "b",\nc', "label": 1, "jpg": b"1",
    }  # fmt: skip
    assert {sample["jpg"] for sample in hr.stream("memory://place/").shuffle()} == {b"0", b"1", b"2", b"3", b"4"}


def test_table_names_several_objects_of_a_row_and_elsewhere(put: Any) -> None:
    put("elsewhere/1.jpg", b"one")
    put("masks/1.png", b"mask")
    put("t/rows.csv", b"a,b\nmemory://place/elsewhere/1.jpg,masks/1.png\n")
    (sample,) = hr.table("memory://place/t/rows.csv", url_column=["a", "b"], base="memory://place")
    assert (sample["a.jpg"], sample["b.png"]) == (b"one", b"mask")


@pytest.mark.parametrize(
    ("text", "kind", "why"),
    [
        (b"x,y\n1,2\n", OptionError, "url_column="),
        (b"path,url\n1,2\n", OptionError, r"'path', 'url' may"),
        (b"path,path\n1,2\n", FormatError, "there twice"),
        (b"path,__key__\n1,2\n", FormatError, "taken"),
        (b"", OptionError, "no rows"),
        (b"path\n", OptionError, "no rows"),
        (b"path,n\na,1,2\n", FormatError, "3 fields"),
        (b"path\n/etc/passwd\n", FormatError, "file of this machine"),
        (b'path,n\n"",1\n', FormatError, "names no object"),
        (b"path\nmissing.jpg\n", ObjectMissingError, "missing.jpg"),
    ],
)
def test_table_that_is_damaged_is_an_error(put: Any, text: bytes, kind: type[Exception], why: str) -> None:
    put("rows.csv", text)
    with pytest.raises(kind, match=why):
        list(hr.table("memory://place/rows.csv"))


def test_row_without_a_label_is_an_error_that_names_it(put: Any) -> None:
    put("rows.jsonl", b'{"path": "a", "y": 1}\n{"path": "b"}\n')
    with pytest.raises(FormatError, match="row 1 has no column 'y'"):
        hr.table("memory://place/rows.jsonl", label_column="y")
