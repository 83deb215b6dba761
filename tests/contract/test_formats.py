"""Every format of ours keeps the contract of formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from end_to_end import mds
from end_to_end.tars import tar

from headrace.formats.format import Format
from headrace.formats.json_lines import JSON_LINES
from headrace.formats.mds.format import MDS
from headrace.formats.tar.format import TAR
from headrace.testing import FormatContract


class TestTar(FormatContract):
    samples = [{"bin": bytes([n]) * (7 * n), "cls": str(n).encode()} for n in range(30)]

    def open_format(self) -> Format:
        return TAR

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        return {"0.tar": tar([(f"{n:04}", dict(sample)) for n, sample in enumerate(samples)])}


class TestJsonLines(FormatContract):
    samples = [
        {"n": n, "text": "grüße\n\\u2028" * n, "list": [None, True, 1.5, {"a": []}], "": "x" * (40 * n)}
        for n in range(30)
    ]

    def open_format(self) -> Format:
        return JSON_LINES

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        lines = (json.dumps(sample, ensure_ascii=n % 2 == 0) for n, sample in enumerate(samples))
        return {"0.jsonl": "\n".join(lines).encode()}


COLUMNS = {"x": "int", "s": "str", "a": "ndarray"}


class TestMds(FormatContract):
    samples = [{"a": np.arange(n + 1, dtype=np.float32), "s": "ü" * n, "x": n} for n in range(30)]
    compression: str | None = None

    def open_format(self) -> Format:
        return MDS

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        return mds.folder(COLUMNS, [samples], self.compression)


class TestMdsInZstd(TestMds):
    compression = "zstd:7"
    finds_damage = True


class TestMdsAlone(TestMds):
    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        return {"shard.00000.mds": mds.shard(COLUMNS, samples)}
