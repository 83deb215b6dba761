"""A format of another package: registered by a call or an entry point, it keeps the contract."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from full.contributed import documented
from full.contributed.documented import Records, write

import headrace as hr
from headrace.fetch.stores import memory
from headrace.formats import registry
from headrace.formats.format import Format
from headrace.testing import FormatContract

SAMPLES = [{"n": n, "text": "ü" * n} for n in range(30)]
BODY = write(SAMPLES)


PLACE = "full.contributed.documented:Records"
Install = Callable[..., None]


class TestRecords(FormatContract):
    samples = SAMPLES

    @pytest.fixture(autouse=True, params=["call", "entry point"])
    def registered(self, install: Install, request: pytest.FixtureRequest) -> None:
        if request.param == "call":
            hr.plugins.register_format(Records())
        else:
            install(registry, ("any", PLACE))

    def open_format(self) -> Format:
        return Records()

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        return {"0.rec": write(samples)}


class Sniffed(Records):
    def sniff(self, name: str, head: bytes) -> float:
        return float(head.startswith(BODY[:8]))


def test_format_is_found_by_suffix_by_sniff_and_in_compressed_shards() -> None:
    hr.plugins.register_format(Sniffed())
    for name, body in (("a.rec", BODY), ("a.rec.gz", gzip.compress(BODY)), ("of_no_known_kind.b", BODY)):
        memory.put(f"memory://records/{name}", body)
        assert [sample["n"] for sample in hr.stream(f"memory://records/{name}")] == list(range(30))


@pytest.mark.parametrize(
    ("name", "suffixes"),
    [("tar", (".x",)), ("jsonl", (".x",)), ("a b", (".x",)), ("", (".x",)), ("x", ("x",)), ("x", (".tar",)),
     ("x", (".gz",)), ("x", (".X",)), ("x", (".mds",))],
)  # fmt: skip
def test_built_in_or_invalid_name_is_refused(name: str, suffixes: tuple[str, ...]) -> None:
    form = Records()
    form.name, form.suffixes = name, suffixes
    with pytest.raises(hr.OptionError, match="must be"):
        hr.plugins.register_format(form)


class Others(Records):
    name = "others"


def test_suffix_that_another_format_has_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = r"suffix '.rec' of others is one of records's: leave it out.*format='others'"
    hr.plugins.register_format(Records())
    with pytest.raises(hr.OptionError, match=refusal):
        hr.plugins.register_format(Others())
    hr.plugins.register_format(Records())  # again, as a notebook's cell is run again
    monkeypatch.setattr(registry, "_registered", {})
    install(registry, ("any", PLACE))
    with pytest.raises(hr.OptionError, match=refusal):
        hr.plugins.register_format(Others())


def test_suffix_that_two_installed_formats_have_is_refused_where_it_is_used(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documented, "Others", Others, raising=False)
    install(registry, ("any", PLACE), ("any", "full.contributed.documented:Others"))
    memory.put("memory://records/two.rec", BODY)
    refusal = r"two.rec may be of the formats records and others: name it by format="
    with pytest.raises(hr.OptionError, match=refusal):
        hr.stream("memory://records/two.rec")
    assert len(list(hr.stream("memory://records/two.rec", format="others"))) == 30


def test_shards_of_several_formats_are_refused_by_name() -> None:
    with pytest.raises(hr.OptionError, match=r"b.tar .* tar, and memory://x/a.jsonl .* jsonl"):
        hr.stream(["memory://x/a.jsonl", "memory://x/b.tar"])
    with pytest.raises(hr.OptionError, match="format='rec' must be one of"):
        hr.stream("memory://x/a.rec", format="rec")
