"""Texts and files have no secrets of addresses, and names from data give no orders to a terminal."""

import json
import logging
import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from builders.loops import given_later, loaded
from builders.tars import numbered_samples, tar
from builders.videos import named

import headrace as hr
from headrace.cli import main
from headrace.testing import FaultServer

SECRET = "hush7531"
KEYS = [f"{n:06d}" for n in range(12)]
ADDRESSES = [
    "http://me:{secret}@{host}/{name}?n=1&code={secret}&%74oken={secret};sas={secret}&u=https://me:{secret}@h/#{secret}",
    "http://{host}/{name}?X-Amz-Credential=me&X-Amz-Signature={secret}",
]


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer() as server:
        for n in range(2):
            server.add(f"{n}.tar", tar(numbered_samples(6 * n, 6)))
        server.add("broken.tar", tar(numbered_samples(0, 2))[:2000])
        yield server


@pytest.fixture(params=ADDRESSES, ids=["everywhere", "signature"])
def urls(request: pytest.FixtureRequest, server: FaultServer) -> list[str]:
    host = server.url.removeprefix("http://")
    return [request.param.format(secret=SECRET, host=host, name=f"{n}.tar") for n in range(2)]


def words_of(error: BaseException) -> str:
    return "".join([repr(error), repr(pickle.loads(pickle.dumps(error))), *traceback.format_exception(error)])


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("index", [None, "build"])
def test_samples_states_and_reports_contain_no_secret(urls: list[str], num_workers: int, index: str | None) -> None:
    data = hr.stream(urls, format="tar", index=index).shuffle(seed=2)
    with hr.DataLoader(data, batch_size=5, num_workers=num_workers, collate_fn=list) as loader:
        samples, states = [], []
        for batch in loader:
            samples += batch
            states.append(json.dumps(loader.state_dict()))
        assert sorted(sample["__key__"] for sample in samples) == KEYS
        places = {sample["__url__"].partition("?")[0].rpartition("/")[2] for sample in samples}
        assert places == {"0.tar", "1.tar"}
        told = [repr(samples), *states, loader.report(), repr(loader.stats()), repr(loader), repr(data)]
    assert SECRET not in " ".join(told)


@pytest.mark.slow
def test_samples_by_number_and_files_contain_no_secret(urls: list[str]) -> None:
    shards = hr.stream(urls, format="tar", index="build")
    samples = [sample for data in (shards, hr.files(urls)) for sample in given_later(data, None, collate_fn=None)]
    assert len(samples) == 14
    assert SECRET not in repr([sample["__url__"] for sample in samples])


@pytest.mark.slow
def test_errors_and_their_notes_contain_no_secret(urls: list[str], caplog: pytest.LogCaptureFixture) -> None:
    def fail(sample: dict[str, Any]) -> None:
        raise ValueError(f"no luck with {sample['__key__']} of {sample['__url__']}")

    broken, gone = (urls[0].replace("0.tar", name) for name in ("broken.tar", "gone.tar"))
    ways = [
        hr.stream(urls, format="tar").map(fail),
        hr.stream(urls, format="tar").to_tuple("none"),
        hr.stream(urls, format="tar").decode(bin="l8"),
        hr.stream(broken, format="tar"),
        hr.stream(gone, format="tar"),
        hr.stream(gone, format="tar", index="build"),
        hr.files(gone),
    ]
    for data in ways:
        for num_workers in (0, 1):
            with hr.DataLoader(data, batch_size=5, num_workers=num_workers, collate_fn=list) as loader:
                with pytest.raises(Exception) as caught:
                    list(loader)
                assert SECRET not in words_of(caught.value) + loader.report() + repr(loader.stats())
        with hr.DataLoader(data, batch_size=5, errors=hr.Skip(), collate_fn=list) as loader, suppress(Exception):
            list(loader)
    assert SECRET not in caplog.text


def test_commands_print_no_secret(urls: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    gone = urls[0].replace("0.tar", "gone.tar")
    for command in ("inspect", "index"):
        assert main([command, "--format", "tar", *urls]) == 0
        assert main([command, "--format", "tar", gone]) == 1
        assert main([command, gone]) == 1
    said = capsys.readouterr()
    assert "0.tar" in said.out
    assert "gone.tar" in said.err
    assert SECRET not in said.out + said.err


@pytest.mark.slow
def test_index_and_cache_store_no_secret(urls: list[str], tmp_path: Path, cache: Path) -> None:
    fetch = hr.Fetch(cache_dir=tmp_path)
    for index in (None, "build"):
        data = hr.stream(urls, format="tar", index=index).shuffle("global" if index else "window", seed=1)
        assert sum(map(len, loaded(data, batch_size=5, fetch=fetch, collate_fn=list))) == 12
    for folder in (tmp_path, cache):
        kept = [path for path in folder.rglob("*") if path.is_file()]
        assert kept
        for path in kept:
            assert SECRET not in str(path)
            assert SECRET.encode() not in path.read_bytes()


ESCAPE = "\x1b[31m"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose name, and whose keys, fields and files have an order to a terminal in their names."""
    folder = tmp_path / f"p{ESCAPE}"
    folder.mkdir()
    samples = [(f"k{ESCAPE}{n}", {f"f{ESCAPE}": b"1", "json": b"{" if n else b"1"}) for n in range(3)]
    (folder / f"s{ESCAPE}.tar").write_bytes(tar(samples))
    (folder / f"v{ESCAPE}.mp4").write_bytes(named("h264").replace(b"avc1", b"\x1b[3m"))
    (folder / f"w{ESCAPE}.mp4").write_bytes(b"\x00\x00\x00\x18ftyp\x1b[31m")
    return folder


def described(folder: Path) -> str:
    data = hr.stream(f"{folder}/*.tar", index="build")
    return f"{data!r}\n{data.describe()}\n{data.describe(samples=2)}\n{data.zip(data).describe()}"


def of_labels(folder: Path) -> str:
    for label in ("a", f"b{ESCAPE}"):
        (folder / "labelled" / label).mkdir(parents=True)
        (folder / "labelled" / label / f"x{ESCAPE}.jpg").write_bytes(b"")
    return hr.folder(folder / "labelled").describe()


def reported(folder: Path) -> str:
    def fail(sample: object) -> object:
        raise ValueError(f"k{ESCAPE} is wrong")

    with hr.DataLoader(hr.stream(folder / f"s{ESCAPE}.tar").map(fail), batch_size=2, errors=hr.Skip()) as loader:
        assert list(loader) == []
        return f"{loader!r}\n{loader.report()}"


def skipped_damage(folder: Path) -> str:
    path = folder / f"s{ESCAPE}.tar"
    path.write_bytes(path.read_bytes()[:2000])
    with hr.DataLoader(hr.stream(path), batch_size=2, errors=hr.Skip()) as loader:
        list(loader)
        return loader.report()


def raised(folder: Path) -> str:
    data = hr.stream(folder / f"s{ESCAPE}.tar")
    texts = []
    for stream in (data.decode(), data.select("missing"), data.to_tuple("missing"), data.map(float)):
        with pytest.raises(Exception) as caught:
            list(hr.DataLoader(stream, batch_size=2))
        texts += traceback.format_exception(caught.value)
    return "".join(texts)


def command(*arguments: str) -> Callable[[Path], str]:
    return lambda folder: str(main([argument.replace("FOLDER", str(folder)) for argument in arguments]))


SHOWN: list[Callable[[Path], str]] = [
    *(described, of_labels, reported, skipped_damage, raised),
    command("inspect", "FOLDER/*.tar"),
    command("inspect", "--check", f"FOLDER/s{ESCAPE}.tar"),
    command("inspect", f"FOLDER/none{ESCAPE}.tar"),
    command("inspect", "FOLDER/v*.mp4"),
    command("inspect", "--check", "FOLDER/w*.mp4"),
    command("index", "FOLDER/*.tar", "--output", f"FOLDER/i{ESCAPE}.hri"),
    command("pack", "FOLDER/*.tar", f"FOLDER/o{ESCAPE}", "--format", "parquet"),
]


@pytest.mark.parametrize("show", SHOWN)
def test_names_from_data_give_no_orders_to_a_terminal(
    show: Callable[[Path], str], folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        text = show(folder)
    out, err = capfd.readouterr()
    text = f"{text}{out}{err}{caplog.text}"
    assert "[3" in text
    assert "\x1b" not in text
