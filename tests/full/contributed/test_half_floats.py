"""A decoder of another package: registered by a call or an entry point, it keeps the contract."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import numpy as np
import pytest
from end_to_end.tars import tar
from full.contributed import half_floats

import headrace as hr
from headrace.fetch.stores import memory
from headrace.formats import decoders
from headrace.testing import DecoderContract

VECTORS = [np.arange(n, dtype=np.float16) / 3 for n in (0, 1, 7)]


@pytest.fixture(autouse=True)
def only_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decoders, "_registered", {})
    decoders._installed.cache_clear()
    yield
    decoders._installed.cache_clear()


def by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("half", "full.contributed.half_floats:decode", "headrace.decoders")
    monkeypatch.setattr(decoders, "entry_points", lambda group: [entry])
    decoders._installed.cache_clear()


class TestHalfFloats(DecoderContract):
    extension = "half"
    examples = [(half_floats.encode(vector), vector) for vector in VECTORS]
    damaged = [
        b"",
        b"HALF",
        b"HALX\0\0\0\0",
        half_floats.encode(VECTORS[1])[:-1],
        half_floats.encode(VECTORS[1]) + b"!",
    ]

    @pytest.fixture(autouse=True, params=["call", "entry point"])
    def registered(self, only_here: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        if request.param == "call":
            hr.plugins.register_decoder("half", half_floats.decode)
        else:
            by_entry_point(monkeypatch)

    def decode(self, data: bytes) -> object:
        return half_floats.decode(data)


@pytest.mark.parametrize("way", ["call", "entry point", "lambda"])
@pytest.mark.parametrize("workers", [0, 1])
def test_registered_decoder_is_there_in_the_workers(workers: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "entry point":
        by_entry_point(monkeypatch)
    else:
        hr.plugins.register_decoder(
            "half", half_floats.decode if way == "call" else lambda data: half_floats.decode(data)
        )
    samples = [
        (str(n), {"x.half": half_floats.encode(VECTORS[2] + n), "y": half_floats.encode(VECTORS[0])}) for n in range(9)
    ]
    memory.put("memory://half/0.tar", tar(samples))
    data = hr.stream("memory://half/0.tar", index=None).decode(y="half").to_tuple("x.half", "y")
    with hr.DataLoader(data, batch_size=3, num_workers=workers, collate_fn=list) as loader:
        got = [sample for batch in loader for sample in batch]
    assert all(np.array_equal(x, VECTORS[2] + n) and x.dtype == np.float16 for n, (x, _) in enumerate(got))
    assert [len(y) for _, y in got] == [0] * 9


def test_registered_decoder_is_that_of_streams_made_afterwards() -> None:
    before = hr.from_map([{"half": half_floats.encode(VECTORS[1])}]).decode()
    hr.plugins.register_decoder("half", half_floats.decode)
    assert isinstance(before[0]["half"], bytes)
    assert isinstance(hr.from_map([{"half": half_floats.encode(VECTORS[1])}]).decode()[0]["half"], np.ndarray)


@pytest.mark.parametrize("extension", ["json", "jpg", "gz", "rgb8", "bytes", "", "A", "a.b", "a b", None])
def test_extension_that_is_ours_or_none_is_refused(extension: str) -> None:
    with pytest.raises(hr.OptionError, match="extension="):
        hr.plugins.register_decoder(extension, half_floats.decode)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(hr.OptionError, match="decode="):
        hr.plugins.register_decoder("half", b"")  # type: ignore[arg-type]


def test_what_packages_name_for_ours_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("json", "full.contributed.half_floats:decode", "headrace.decoders")
    monkeypatch.setattr(decoders, "entry_points", lambda group: [entry])
    decoders._installed.cache_clear()
    assert hr.from_map([{"json": b"[1]"}]).decode()[0]["json"] == [1]
