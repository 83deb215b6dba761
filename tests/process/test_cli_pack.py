"""`headrace inspect` and `headrace pack`: output, written files, and runs that resume after a kill."""

import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moto_s3 import client_of

import headrace as hr
from headrace.cli import main
from headrace.cli.pack import _PackJournal, _ParquetShard

ROWS = [{"text": f"ä{n}", "n": n, "list": [n, {"a": None}], "ok": n % 2 == 0, "x.y": n / 4} for n in range(25)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", ROWS)
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def pack(*arguments: str) -> None:
    assert main(["pack", *arguments, "--quiet"]) == 0


def rows_of(place: object, **options: Any) -> list[dict[str, Any]]:
    samples = hr.stream(str(place), **options).decode()
    return [{name.removesuffix(".json"): v for name, v in one.items() if name[:2] != "__"} for one in samples]


def test_packed_tar_has_the_samples_of_the_place_and_an_index_beside_each_shard(folder: Path) -> None:
    pack("rows.jsonl", "out", "--samples-per-shard", "10")
    assert rows_of("out/", index="beside") == ROWS
    assert len(hr.stream("out/", index="beside")) == 25
    assert sorted(path.name for path in (folder / "out").iterdir()) == [
        name for k in range(3) for name in (f"00000{k}.tar", f"00000{k}.tar.hri")
    ]
    first = (folder / "out" / "000000.tar").read_bytes()
    pack("rows.jsonl", "again", "--samples-per-shard", "10")
    assert (folder / "again" / "000000.tar").read_bytes() == first, "the same command writes the same bytes"


def test_packed_parquet_has_the_samples_of_the_place(folder: Path) -> None:
    pytest.importorskip("pyarrow")
    rows = [{"text": f"{n}", "n": n} for n in range(25)]
    write(folder / "plain.jsonl", rows)
    pack("plain.jsonl", "out", "--format", "parquet", "--samples-per-shard", "10")
    read = rows_of("out/")
    assert [{"text": row["text"], "n": row["n"]} for row in read] == rows
    assert [row["key"] for row in read] == [str(n) for n in range(1, 26)]


def test_shards_end_at_the_bytes_that_were_asked_for(folder: Path) -> None:
    pack("rows.jsonl", "out", "--shard-bytes", "20000")
    sizes = [path.stat().st_size for path in sorted((folder / "out").glob("*.tar"))]
    assert len(sizes) > 2
    assert rows_of("out/") == ROWS


def test_samples_keep_their_keys_where_an_archive_can_have_them(folder: Path) -> None:
    for name in ("cat/1.jpg", "cat/2.b.jpg", "dog/1.jpg"):
        (folder / "pets" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "pets" / name).write_bytes(b"\xff\xd8\xff" + name.encode())
    pack("pets/", "out")
    with tarfile.open(folder / "out" / "000000.tar") as tar:
        assert [name for name in tar.getnames() if name.endswith("jpg")] == [
            "cat/1.jpg", "000000000001.jpg", "dog/1.jpg",
        ]  # fmt: skip
    assert [row["label"] for row in rows_of("out/")] == [0, 0, 1]


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (b"{}\n", "no fields"),
        (b'{"a/b": 1}\n', "a/b"),
        (b'{"A": 1, "a": 2}\n', "alike"),
        (b'{"a": 1}\n{"a": \n', "sample '2' of odd.jsonl"),
    ],
)
def test_what_cannot_be_packed_is_said(folder: Path, rows: bytes, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "odd.jsonl").write_bytes(rows)
    assert main(["pack", "odd.jsonl", "out"]) == 1
    assert why in capsys.readouterr().err
    assert not list((folder / "out").glob("*.tar"))


def test_number_that_its_column_would_round_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cli.pack._ROWS_BYTES", 1)  # each row is written by itself
    shard = _ParquetShard(folder / "rows.parquet", _PackJournal(folder / "journal", ""))
    shard.add({"x": np.float32(0.1)}, 0)
    shard.add({"x": np.float64("nan")}, 1)
    with pytest.raises(hr.OptionError, match=r"'x' has .*0\.1.* would round to 0\.10000000149"):
        shard.add({"x": 0.1}, 2)
    shard.drop()


def test_place_that_has_shards_of_others_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "000000.tar").write_bytes(b"precious")
    assert main(["pack", "rows.jsonl", "out"]) == 1
    assert "is there already" in capsys.readouterr().err
    assert (folder / "out" / "000000.tar").read_bytes() == b"precious"


@pytest.mark.slow
def test_killed_run_goes_on_and_writes_what_one_run_writes(folder: Path) -> None:
    command = [sys.executable, "-m", "headrace.cli", "pack", "rows.jsonl", "out", "--samples-per-shard", "5"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as run:
        assert run.stderr is not None
        assert "000000.tar: 5 samples" in run.stderr.readline()
        run.send_signal(signal.SIGKILL)
        run.stderr.read()
    left = len(list((folder / "out").glob("*.tar")))
    assert 1 <= left <= 5
    other = ["pack", "rows.jsonl", "out", "--samples-per-shard", "3", "--quiet"]
    assert main(other) == 1, "it is another run"
    before = (folder / "out" / "000000.tar").stat().st_mtime_ns
    pack("rows.jsonl", "out", "--samples-per-shard", "5")
    assert (folder / "out" / "000000.tar").stat().st_mtime_ns == before, "a finished shard is kept"
    assert rows_of("out/") == ROWS
    assert not (folder / "out" / ".headrace-pack.json").exists()


@pytest.mark.slow
def test_place_and_shards_may_lie_in_a_bucket(folder: Path) -> None:
    with client_of("pack") as client:
        client.put_object(Bucket="pack", Key="in/rows.jsonl", Body=(folder / "rows.jsonl").read_bytes())
        settings = {"endpoint": client.meta.endpoint_url, "access_key_id": "a", "secret_access_key": "b"}
        settings["region"] = "us-east-1"
        given = [part for name, value in settings.items() for part in ("--storage-option", f"{name}={value}")]
        pack("s3://pack/in/", "s3://pack/out", "--samples-per-shard", "10", *given)
        assert rows_of("s3://pack/out/*.tar", index="beside", storage_options=settings) == ROWS


def test_inspect_tells_what_a_place_is_and_finds_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "rows.jsonl", "--samples", "1", "--check"]) == 0
    said = capsys.readouterr().out
    for part in ("format: jsonl, by the names", "text: 'ä0'", "no damage: 25 samples were read"):
        assert part in said
    assert said.count("\nsample ") == 1
    with (folder / "rows.jsonl").open("ab") as file:
        file.write(b'{"text": "\x1b[31m", \n')
    assert main(["inspect", "rows.jsonl", "--check"]) == 1
    said = capsys.readouterr().out
    assert "damage: after 25 samples" in said
    assert main(["inspect", "nothing.bin"]) == 1
    assert "hr.tokens" in capsys.readouterr().err


def test_inspect_counts_what_objects_say_of_themselves(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "rows.jsonl", [{"text": row["text"], "n": row["n"]} for row in ROWS])
    pack("rows.jsonl", "out", "--format", "parquet", "--samples-per-shard", "10")
    assert main(["inspect", "out/"]) == 0
    assert "\n  samples: 25\n" in capsys.readouterr().out
    damaged = next(iter(sorted((folder / "out").glob("*.parquet"))))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert main(["inspect", "out/"]) == 1
    said = capsys.readouterr()
    assert "format: parquet" in said.out
    assert "000000.parquet is damaged" in said.err


@pytest.mark.slow
def test_inspect_ends_where_nobody_reads_what_it_says() -> None:
    command = [sys.executable, "-m", "headrace.cli", "inspect", "rows.jsonl", "--samples", "25"]
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_what_terminals_obey_is_not_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "rows.jsonl", [{"a\x1b[2J": "\x1b]0;x\x07", "n": "x" * 10**6}])
    assert main(["inspect", "rows.jsonl"]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "(1,000,000 characters)" in said
    assert max(map(len, said.splitlines())) < 200


def test_index_takes_patterns_and_folders(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack("rows.jsonl", "out", "--samples-per-shard", "10")
    for place in ("out/", "out/*.tar"):
        assert main(["index", place]) == 0
        assert "3 shards" in capsys.readouterr().out
        assert len(hr.stream(place)) == 25


def test_arrays_are_packed_as_such() -> None:
    from headrace.cli.pack import members_of

    members = members_of({"a": np.arange(3), "b": b"x", "cls": 4, "f": np.float32(0.5)}, 0)
    (sample,) = hr.from_map([members]).decode()
    assert sample["a.npy"].tolist() == [0, 1, 2]
    assert (sample["b"], sample["cls"], sample["f.json"]) == (b"x", 4, 0.5)
