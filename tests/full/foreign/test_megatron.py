"""Token files that Megatron itself has written are read as they are: `nox -s foreign` installs it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import headrace as hr

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None,
    reason="megatron-core is not installed",
)

WRITE = Path(__file__).with_name("write_megatron.py")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[list[int]]]]:
    folder = tmp_path_factory.mktemp("megatron")
    subprocess.run([sys.executable, "-W", "ignore", str(WRITE), str(folder)], check=True, capture_output=True)
    return folder, json.loads((folder / "documents.json").read_text())


def test_windows_are_those_of_the_documents_that_were_written(written: tuple[Path, dict[str, list[list[int]]]]) -> None:
    folder, files = written
    assert len(files) == 10
    for name, documents in files.items():
        data = hr.tokens(str(folder / f"{name}.bin"), window=8)
        tokens = [token for document in documents for token in document]
        samples = [sample["tokens"] for sample in data]
        assert {str(sample.dtype) for sample in samples} == {name.partition("-")[0]}
        expected = [tokens[k : k + 8] for k in range(0, len(tokens) - 7, 8)]
        assert [sample.tolist() for sample in samples] == expected, name


def test_documents_are_those_that_were_written(written: tuple[Path, dict[str, list[list[int]]]]) -> None:
    folder, files = written
    for name, documents in files.items():
        data = hr.tokens(str(folder / f"{name}.bin"), window=4, documents="separate")
        expected = [tokens[k : k + 4] for tokens in documents for k in range(0, len(tokens) - 3, 4)]
        assert [sample["tokens"].tolist() for sample in data] == expected, name
