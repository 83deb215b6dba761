"""A format of another package: registered by a call or an entry point, it keeps the contract."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from builders.loops import flat, given
from full.contributed import row_groups
from full.contributed.row_groups import RowGroups

import headrace as hr
from headrace.fetch.stores import memory
from headrace.formats import registry
from headrace.formats.format import Block, Format
from headrace.testing import FormatContract

SAMPLES = [{"n": n, "text": "ü" * n} for n in range(30)]


PLACE = "full.contributed.row_groups:RowGroups"
Install = Callable[..., None]


class TestRowGroups(FormatContract):
    samples = SAMPLES

    @pytest.fixture(autouse=True, params=["call", "entry point"])
    def registered(self, install: Install, request: pytest.FixtureRequest) -> None:
        if request.param == "call":
            hr.plugins.register_format(RowGroups())
        else:
            install(registry, ("any", PLACE))

    def open_format(self) -> Format:
        return RowGroups()

    def write(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        return {"0.rowg": row_groups.write(samples)}


class Counting(RowGroups):
    """Adds to each sample the count of blocks opened in its process."""

    name = "counting"
    suffixes = (".counted",)
    opened = 0

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, Any]]:
        type(self).opened += 1
        return [{**row, "opened": type(self).opened} for row in super().open_block(block, bodies)]


@pytest.mark.parametrize("workers", [0, 1])
def test_block_is_opened_once_for_all_of_its_rows(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "opened", 0)
    hr.plugins.register_format(Counting())
    memory.put("memory://rowg/0.counted", row_groups.write(SAMPLES, 10))
    samples = flat(given(hr.stream("memory://rowg/0.counted").shuffle(), batch_size=2, num_workers=workers))
    got = [(sample["n"], sample["opened"]) for sample in samples]
    assert sorted(n for n, _ in got) == list(range(30))
    assert {k for _, k in got} == {1, 2, 3}
    assert len({(n // 10, k) for n, k in got}) == 3


def test_format_is_found_by_suffix_by_sniff_and_in_compressed_shards() -> None:
    hr.plugins.register_format(RowGroups())
    data = row_groups.write(SAMPLES)
    for name, body in (("a.rowg", data), ("a.rowg.gz", gzip.compress(data)), ("of_no_known_kind.b", data)):
        memory.put(f"memory://rowg/{name}", body)
        assert [sample["n"] for sample in hr.stream(f"memory://rowg/{name}")] == list(range(30))


def test_damage_in_a_block_fails_its_rows_only() -> None:
    hr.plugins.register_format(RowGroups())
    data = bytearray(row_groups.write(SAMPLES, 10))
    second = data.index(b"x\x9c", data.index(b"x\x9c") + 20)
    data[second + 9] ^= 1
    memory.put("memory://rowg/damaged.rowg", bytes(data))
    stream = hr.stream("memory://rowg/damaged.rowg")
    samples = given(stream, batch_size=None, errors=hr.Skip(), num_workers=1, collate_fn=None)
    assert [int(sample["n"]) for sample in samples] == [*range(10), *range(20, 30)]
    with pytest.raises(hr.DecodeError, match=r"sample '10' of memory://rowg/damaged.rowg.*checksum"):
        list(stream)


@pytest.mark.parametrize(
    ("name", "suffixes"),
    [("tar", (".x",)), ("jsonl", (".x",)), ("a b", (".x",)), ("", (".x",)), ("x", ("x",)), ("x", (".tar",)),
     ("x", (".gz",)), ("x", (".X",)), ("x", (".mds",))],
)  # fmt: skip
def test_built_in_or_invalid_name_is_refused(name: str, suffixes: tuple[str, ...]) -> None:
    form = RowGroups()
    form.name, form.suffixes = name, suffixes
    with pytest.raises(hr.OptionError, match="must be"):
        hr.plugins.register_format(form)


class Others(RowGroups):
    name = "others"


def test_suffix_that_another_format_has_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = r"suffix '.rowg' of others is one of rowgroups's: leave it out.*format='others'"
    hr.plugins.register_format(RowGroups())
    with pytest.raises(hr.OptionError, match=refusal):
        hr.plugins.register_format(Others())
    hr.plugins.register_format(RowGroups())  # again, as a notebook's cell is run again
    monkeypatch.setattr(registry, "_registered", {})
    install(registry, ("any", PLACE))
    with pytest.raises(hr.OptionError, match=refusal):
        hr.plugins.register_format(Others())


def test_suffix_that_two_installed_formats_have_is_refused_where_it_is_used(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups, "Others", Others, raising=False)
    install(registry, ("any", PLACE), ("any", "full.contributed.row_groups:Others"))
    memory.put("memory://rowg/two.rowg", row_groups.write(SAMPLES))
    refusal = r"two.rowg may be of the formats rowgroups and others: name it by format="
    with pytest.raises(hr.OptionError, match=refusal):
        hr.stream("memory://rowg/two.rowg")
    assert len(list(hr.stream("memory://rowg/two.rowg", format="others"))) == 30


def test_shards_of_several_formats_are_refused_by_name() -> None:
    with pytest.raises(hr.OptionError, match=r"b.tar .* tar, and memory://x/a.jsonl .* jsonl"):
        hr.stream(["memory://x/a.jsonl", "memory://x/b.tar"])
    with pytest.raises(hr.OptionError, match="format='rowg' must be one of"):
        hr.stream("memory://x/a.rowg", format="rowg")
