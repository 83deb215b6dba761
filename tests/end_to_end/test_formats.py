"""Lines of JSON and MDS are streams as tar shards are: order, ranks, random access, checks, and what is read."""

import gzip
import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard
from builders import mds, parquet
from builders.loops import flat, given
from builders.seekable import in_frames

import headrace as hr
from headrace.cli import main
from headrace.errors import OptionError
from headrace.fetch.stores import memory
from headrace.formats.delimited import Csv
from headrace.formats.lines import JsonLines
from headrace.testing import FaultServer

pytestmark = pytest.mark.usefixtures("warm_server")

COLUMNS = {"n": "int", "text": "str"}
COUNTS = [40, 0, 23, 60]


def numbered(counts: Sequence[int] = COUNTS) -> list[list[dict[str, Any]]]:
    samples = iter([{"n": n, "text": "ü" * (n % 7 * 40)} for n in range(sum(counts))])
    return [list(itertools.islice(samples, count)) for count in counts]


def lines(samples: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(sample).encode() + b"\n" for sample in samples)


def seen(data: Any, **options: Any) -> list[int]:
    return [sample["n"] for sample in flat(given(data, 7, **options))]


def test_format_can_be_given_itself_with_options_of_its_own() -> None:
    memory.put("memory://given/0.txt", lines([{"n": 3}, {"n": 4}]))
    assert seen(hr.stream("memory://given/0.txt", format=JsonLines()), num_workers=2) == [3, 4]
    with pytest.raises(OptionError, match="format=7 must be one of"):
        hr.stream("memory://given/0.txt", format=7)  # type: ignore[arg-type]


@pytest.fixture
def indexed(server: FaultServer, tmp_path: Path) -> Callable[..., tuple[str, hr.Stream]]:
    """Puts a shard on the server and makes its index. Returns its address and the stream."""

    def put(name: str, body: bytes, **options: Any) -> tuple[str, hr.Stream]:
        url = server.add(name, body)
        assert main(["index", url, "--output", str(tmp_path / "a.hri"), "--quiet"]) == 0
        server.log.clear()
        return url, hr.stream(url, index=str(tmp_path / "a.hri"), **options)

    return put


def ranges(server: FaultServer) -> list[str]:
    return [request.headers["range"] for request in server.log]


def test_line_is_got_by_one_request_for_its_bytes_and_checked(server: FaultServer, indexed: Any) -> None:
    body = lines(numbered([50])[0])
    _, data = indexed("a.jsonl", body)
    assert data[44]["n"] == 44
    starts = [0, *(k + 1 for k, byte in enumerate(body) if byte == 10)]
    assert ranges(server) == [f"bytes={starts[44]}-{starts[45] - 2}"]
    server.add("a.jsonl", body.replace(b'"n": 44', b'"n": 99'))
    with pytest.raises(hr.errors.ChecksumError):
        data[44]


def test_record_is_read_by_one_request_and_has_its_columns(server: FaultServer, tmp_path: Path, indexed: Any) -> None:
    url, data = indexed("a.csv", b'name,n\r\n"A, ""b""\n",1\r\n\r\nc,2\r\n')
    assert [data[k]["name"] for k in (1, 0)] == ["c", 'A, "b"\n']
    assert data.keys() == ["2", "5"]
    assert ranges(server) == ["bytes=25-28", "bytes=8-21"]
    other = hr.stream(url, index=str(tmp_path / "a.hri"), format=Csv(header=False, columns=["name", "n"]))
    with pytest.raises(hr.DecodeError, match="its index is of"):
        other[0]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "Git LFS pointer"),
        ("a\nb\n".encode("utf-16"), "UTF-16"),
        (gzip.compress(b"a\n"), "gzip data"),
        (b"%PDF-1.7\n", "a PDF"),
    ],
    ids=["pointer", "utf-16", "gzip", "pdf"],
)
def test_objects_without_text_are_refused(data: bytes, why: str) -> None:
    memory.put("memory://text/none.txt", data)
    with pytest.raises(hr.errors.FormatError, match=f"memory://text/none.txt is no text.*{why}"):
        list(hr.text("memory://text/none.txt", index=None))


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_text_is_read_by_lines_by_paragraphs_and_whole(ending: str) -> None:
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[ending]
    urls = [f"memory://text/{k}.txt{ending}" for k in range(2)]
    memory.put(urls[0], pack(b"one\r\n\nthree\n"))
    memory.put(urls[1], pack(b"\n four\nfive\n \n\nsix"))
    for by, expected in {
        "line": ["one", "", "three", "", " four", "five", " ", "", "six"],
        "paragraph": ["one", "three", " four\nfive", "six"],
        "file": ["one\r\n\nthree\n", "\n four\nfive\n \n\nsix"],
    }.items():
        for index in (None, "build"):
            data = hr.text(urls, by=by, index=index)  # type: ignore[arg-type]
            assert [sample["text"] for sample in data] == expected
    assert [sample["text"] for sample in hr.stream(urls)] == [sample["text"] for sample in hr.text(urls)]
    if not ending:
        assert hr.text(urls, by="paragraph", index="build")[2]["text"] == " four\nfive"


def test_line_of_a_seekable_shard_is_got_by_the_bytes_of_its_frames_alone(server: FaultServer, indexed: Any) -> None:
    rows = [json.dumps({"n": n, "text": random.Random(n).randbytes(300).hex()}).encode() + b"\n" for n in range(80)]
    body = b"".join(rows)
    frame = 2 * len(rows[-1])  # a line spans one or two frames
    packed = in_frames(body, frame)
    sizes = [len(zstandard.compress(body[at : at + frame])) for at in range(0, len(body), frame)]
    frames_at, lines_at = ([0, *itertools.accumulate(some)] for some in (sizes, map(len, rows)))
    _, data = indexed("a.jsonl.zst", packed)
    assert len(data) == 80
    for row in (0, 1, 44, 79):
        server.log.clear()
        assert data[row]["n"] == row
        first, last = lines_at[row] // frame, (lines_at[row + 1] - 2) // frame
        start, stop = frames_at[first], frames_at[last + 1]
        assert ranges(server) == [f"bytes={start}-{stop - 1}"]
        with hr.DataLoader(data.slice(row, row + 1), batch_size=None) as loader:
            assert [sample["n"] for sample in loader] == [row]
        assert loader.stats().fetch.bytes == stop - start < len(packed) / 10


def test_mds_sample_is_got_by_one_request_after_the_table_of_its_shard(server: FaultServer) -> None:
    for name, data in mds.folder(COLUMNS, numbered()).items():
        server.add(f"d/{name}", data)
    server.log.clear()
    stream = hr.stream(f"{server.url}/d")
    assert len(stream) == sum(COUNTS)
    assert len(server.log) == 1, "the catalogue, which has counted them"
    assert stream[45]["n"] == 45
    first, _ = (request.headers["range"] for request in server.log[1:])
    assert first == f"bytes=0-{4 * (23 + 2) - 1}"


def test_catalogue_is_found_by_its_name_and_several_folders_are_one_stream() -> None:
    first, second = (mds.put(f"mds-many/{k}", mds.folder(COLUMNS, numbered([5]))) for k in range(2))
    assert seen(hr.stream(f"{first}/index.json")) == list(range(5))
    assert seen(hr.stream([first, f"{second}/"])) == [*range(5)] * 2
    with pytest.raises(hr.OptionError, match="bring their own index"):
        hr.stream(first, index="build")


def test_row_groups_are_read_by_the_wanted_columns_and_about_once(server: FaultServer) -> None:
    rows = [{"n": n, "text": "x", "body": random.Random(n).randbytes(9000)} for n in range(600)]
    schema = parquet.SCHEMA.remove(3).remove(2)
    body = parquet.written(rows, schema, row_group_size=50, compression="none", use_dictionary=False)
    server.log.clear()
    data = hr.stream(server.add("a.parquet", body))
    assert len(data) == 600
    assert [one.partition("=")[0] for one in ranges(server)] == ["bytes"], "its end"
    for stream, most in ((data, 1.2), (data.shuffle(window=200), 3), (data.select("n"), 0.1)):
        with hr.DataLoader(stream, batch_size=32, collate_fn=list) as loader:
            assert sorted(sample["n"] for batch in loader for sample in batch) == list(range(600))
        assert loader.stats().fetch.bytes <= most * 600 * 9004 + 70_000
    one = hr.stream(server.add("b.parquet", parquet.written(rows[:2], schema, row_group_size=50)))
    with hr.DataLoader(one.select("n").repeat(), batch_size=5) as loader:  # each pass starts in the same block
        assert next(iter(loader))["n"].tolist() == [0, 1, 0, 1, 0]
