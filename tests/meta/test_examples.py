"""Every example runs as a script, ends by itself and prints its results; shared code is tested by itself."""

import io
import os
import re
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWS = {
    "train_digits.py": r"accuracy on scans that were not trained on: 0\.9[4-9]",
    "stream_http.py": r"epoch 0: 1399 scans",
    "own_dataset.py": r"over HTTP: 200 scans[\s\S]*from files: 200 scans",
    "coco.py": r"epoch 1: 60 photographs, (\d+) of \1 boxes",
    "pretrain_packed.py": r"12 steps: loss 7\.\d+ to [567]\.\d+; \d\.\d% padding; prose 0\.[67]\d?, code 0\.[234]",
    "finetune_chat.py": r"12 steps: loss 7\.\d+ to [3456]\.\d+; \d\d?% padding",
    "image_text_pairs.py": r"epoch 1: 43 batches, (100|\d\d)% of the last named right",
    "video_clips.py": r"the last epoch: 120 clips of 20 stretches, (100|[5-9]\d)% .* right",
    "async_trainer.py": r"dashboard: [\s\S]*22 steps, the last loss \d",
}


def test_every_example_is_run() -> None:
    assert set(SHOWS) == {path.name for path in EXAMPLES.glob("*.py")} - {"digits.py"}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SHOWS)
def test_example_prints_its_results(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--quick"],
        capture_output=True, text=True, timeout=290, cwd=tmp_path, env=os.environ | {"PYTHONWARNINGS": "default"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(SHOWS[name], done.stdout), done.stdout + done.stderr
    assert not re.search(r"Traceback|headrace.*Warning", done.stderr), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_shards_hold_every_digit_once(digits: ModuleType) -> None:
    shards, keys = digits.make_shards(), []
    for data in shards.values():
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            names = tar.getnames()
        assert names[1::2] == [name.replace("png", "cls") for name in names[::2]]
        keys += [name.removesuffix(".png") for name in names[::2]]
    assert len(shards) == 9
    assert keys == [f"{key:06}" for key in range(1797)]


@pytest.mark.parametrize(("asked", "status", "expected", "span"), [
    (None, 200, slice(None), None),
    ("bytes=0-0", 206, slice(0, 1), "bytes 0-0/10"),
    ("bytes=3-5", 206, slice(3, 6), "bytes 3-5/10"),
    ("bytes=8-99", 206, slice(8, None), "bytes 8-9/10"),
    ("bytes=7-", 206, slice(7, None), "bytes 7-9/10"),
    ("bytes=-4", 206, slice(6, None), "bytes 6-9/10"),
    ("bytes=-99", 206, slice(None), "bytes 0-9/10"),
    ("bytes=10-", 416, slice(0, 0), "bytes */10"),
    ("bytes=-0", 416, slice(0, 0), "bytes */10"),
])  # fmt: skip
def test_web_server_answers_ranges(
    digits: ModuleType, asked: str | None, status: int, expected: slice, span: str | None
) -> None:
    data = b"0123456789"
    with digits.http_server({"a": data}) as address:
        headers = {"Connection": "close"} | ({"Range": asked} if asked else {})
        try:
            answer = urllib.request.urlopen(urllib.request.Request(f"{address}/a", headers=headers))
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            assert (answer.status, answer.read(), answer.headers["Content-Range"]) == (status, data[expected], span)
