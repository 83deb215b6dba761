"""Names from data give no orders to a terminal, wherever headrace shows them."""

import logging
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from builders.tars import tar
from builders.videos import named

import headrace as hr
from headrace.cli import main

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
