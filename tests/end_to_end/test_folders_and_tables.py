"""Folders and tables of files: fields of samples from their paths, names or rows."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from builders.loops import resumed_anywhere
from PIL import Image

import headrace as hr
from headrace.errors import FormatError, ObjectMissingError, OptionError


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


def test_folder_and_table_resume_anywhere(put: Any) -> None:
    for k in range(13):
        put(f"all/{k}.txt", b"%d" % k)
    put("rows.jsonl", b"".join(json.dumps({"path": f"all/{k}.txt"}).encode() + b"\n" for k in range(13)))
    for data in (hr.folder("memory://place/all/"), hr.table("memory://place/rows.jsonl")):
        bodies = data.shuffle().to_tuple("txt")
        (whole,) = resumed_anywhere(lambda bodies=bodies: hr.DataLoader(bodies, batch_size=2, seed=3))
        assert sorted(body for (batch,) in whole for body in batch) == sorted(b"%d" % k for k in range(13))


def test_folder_of_this_machine_reads_by_paths(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a b#%20.txt").write_bytes(name.encode())
    assert [sample["txt"] for sample in hr.folder(tmp_path)] == [b"cat", b"dog"]
