"""Every format of ours keeps the contract of formats."""

import csv
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from builders import arrows, energon, litdata, mds, parquet, tfrecords
from builders.tars import tar, zipped

from headrace.formats.format import Format
from headrace.formats.registry import known_formats
from headrace.testing import FormatContract


class OurContract(FormatContract):
    form: ClassVar[str]

    def open_format(self) -> Format:
        return known_formats()[self.form].load()


class TestTar(OurContract):
    samples = [{"bin": bytes([n]) * (7 * n), "cls": str(n).encode()} for n in range(30)]
    form = "tar"

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        return {"0.tar": tar([(f"{n:04}", dict(sample)) for n, sample in enumerate(samples)])}


class TestZip(TestTar):
    form = "zip"

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        files = {f"{n:04}.{field}": data for n, sample in enumerate(samples) for field, data in sample.items()}
        return {"0.zip": zipped(files, zipfile.ZIP_DEFLATED)}


class TestJsonLines(OurContract):
    samples = [
        {"n": n, "text": "grüße\n\\u2028" * n, "list": [None, True, 1.5, {"a": []}], "": "x" * (40 * n)}
        for n in range(30)
    ]
    form = "jsonl"

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        lines = (json.dumps(sample, ensure_ascii=n % 2 == 0) for n, sample in enumerate(samples))
        return {"0.jsonl": "\n".join(lines).encode()}


class TestCsv(OurContract):
    samples = [{"n": str(n), "text": 'grüße, "\n\r\n' * n, "": "x" * (40 * n), "last": ""} for n in range(30)]
    form, dialect = "csv", "excel"

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self.samples[0]), dialect=self.dialect)
        writer.writeheader()
        writer.writerows(samples)
        return {f"0.{self.form}": text.getvalue().encode()}


class TestTsv(TestCsv):
    form, dialect = "tsv", "excel-tab"


class TestText(OurContract):
    samples = [{"text": "grüße\u2028 " * (n % 7 * n)} for n in range(30)]
    form = "text"

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        return {"0.txt": "".join(sample["text"] + "\n" for sample in samples).encode()}

    def test_truncated_shard_is_an_error_or_a_part_of_the_samples(self) -> None:
        """A line that is cut off cannot be distinguished."""
        (data,) = self.write(self.samples).values()
        for k in range(9):
            got, _ = self._read(data[: len(data) * k // 9])
            self._same(got[:-1], self.samples[: max(0, len(got) - 1)])


COLUMNS = {"x": "int", "s": "str", "a": "ndarray"}


class TestMds(OurContract):
    samples = [{"a": np.arange(n + 1, dtype=np.float32), "s": "ü" * n, "x": n} for n in range(30)]
    compression: str | None = None
    form = "mds"

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        return mds.folder(COLUMNS, [samples], self.compression)


class TestMdsInZstd(TestMds):
    compression = "zstd:7"
    finds_damage = True


class TestMdsAlone(TestMds):
    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        return {"shard.00000.mds": mds.shard(COLUMNS, samples)}


class TestLitData(OurContract):
    samples = [
        {"a": np.arange(n + 1, dtype="f4"), "s": "ü" * n, "x": n, "t": torch.ones(2, n), "y": (n / 2, [n % 2 == 0])}
        for n in range(30)
    ]
    level: str | None = None
    form = "litdata"

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        return litdata.folder([samples], self.level)


class TestLitDataInChunks(TestLitData):
    level = "chunk"


class TestLitDataInFrames(TestLitData):
    level = "batch"

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        return litdata.folder([samples], self.level if samples else None)


class TestLitDataOfTables(OurContract):
    samples = [{"n": n, "s": "ü" * n, "body": bytes(n)} for n in range(30)]
    form = "litdata"

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        schema = pa.schema({"n": pa.int64(), "s": pa.string(), "body": pa.binary()})
        return litdata.of_tables({"0.parquet": (len(samples), parquet.written(samples, schema, row_group_size=7))})


class TestEnergon(OurContract):
    samples = [{"bin": bytes([n]) * (90 * n), "cls": str(n).encode()} for n in range(30)]
    form = "energon"

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        return energon.folder({"train": [[(f"{n:04}", dict(sample)) for n, sample in enumerate(samples)]]})


class TestTFRecord(OurContract):
    samples = [
        {"b": b"\xff" * n, "f": np.arange(n, dtype=np.float32), "i": np.arange(-n, n), "l": [b"", b"a" * n]}
        for n in range(30)
    ]
    form = "tfrecord"

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        return {"0.tfrecord": tfrecords.file_of(samples)}


class TestParquet(OurContract):
    samples = [
        {
            "n": n,
            "text": None if n == 3 else "ü" * n,
            "list": np.arange(n % 5, dtype=np.float32),
            "struct": {"a": n, "b": [str(n)] * (n % 3)},
            "body": bytes([n]) * n,
        }
        for n in range(30)
    ]
    form = "parquet"

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        return {"0.parquet": parquet.written(samples, parquet.SCHEMA, row_group_size=7)}


class TestArrow(TestParquet):
    form = "arrow"

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        return {"0.arrow": arrows.written(samples, parquet.SCHEMA, compression="zstd")}
