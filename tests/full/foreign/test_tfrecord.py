"""Files of the packages `tfrecord` and protobuf are read as they read them: `nox -s foreign` installs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.testing.decoders import same

writer = pytest.importorskip("tfrecord.writer")

SAMPLES: list[dict[str, Any]] = [
    {"b": bytes([n]) * n, "f": np.arange(n, dtype=np.float32) / 3, "i": np.arange(-n, n * n) << n} for n in range(1, 30)
]


def test_samples_equal_the_written_ones(tmp_path: Path) -> None:
    file = writer.TFRecordWriter(str(tmp_path / "0.tfrecord"))
    for one in SAMPLES:
        file.write({"b": (one["b"], "byte"), "f": (one["f"].tolist(), "float"), "i": (one["i"].tolist(), "int")})
    file.close()
    data = hr.stream(str(tmp_path / "0.tfrecord"), index="build")
    got = [{name: one[name] for name in ("b", "f", "i")} for one in data]
    assert all(map(same, got, SAMPLES))
    assert len(got) == len(SAMPLES)
