"""Each format at each place, packed in each way: what can be done is done, and what cannot is refused by name."""

from __future__ import annotations

import itertools
import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Leaves
from full.matrix.kinds import ABILITIES, KINDS, PACKINGS, PLACES, Kind, Shards
from moto_s3 import client_of

import headrace as hr
from headrace.testing import FaultServer

COUNTS = (7, 0, 4, 6)
ALL = list(range(sum(COUNTS)))
CREDENTIALS = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}

Put = Callable[[dict[str, bytes]], tuple[list[str], dict[str, object]]]


def shards() -> Shards:
    numbers = iter(ALL)
    return [list(itertools.islice(numbers, count)) for count in COUNTS]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, leaves: Leaves) -> Iterator[dict[str, Put]]:
    leaves.allow(descriptors=r" tcp ", threads=".*", reason="the servers of the module")
    folder = tmp_path_factory.mktemp("matrix")

    def in_folder(files: dict[str, bytes]) -> tuple[list[str], dict[str, object]]:
        below = folder / uuid.uuid4().hex
        below.mkdir()
        for name, body in files.items():
            (below / name).parent.mkdir(exist_ok=True)
            (below / name).write_bytes(body)
        return [str(below / name) for name in files], {}

    with FaultServer() as server, client_of("matrix") as client:

        def over_http(files: dict[str, bytes]) -> tuple[list[str], dict[str, object]]:
            below = uuid.uuid4().hex
            return [server.add(f"{below}/{name}", body) for name, body in files.items()], {}

        def in_s3(files: dict[str, bytes]) -> tuple[list[str], dict[str, object]]:
            below = uuid.uuid4().hex
            for name, body in files.items():
                client.put_object(Bucket="matrix", Key=f"{below}/{name}", Body=body)
            urls = [f"s3://matrix/{below}/{name}" for name in files]
            return urls, {**CREDENTIALS, "endpoint": client.meta.endpoint_url}

        yield dict(zip(PLACES, (in_folder, over_http, in_s3), strict=True))


class Cell:
    """A data set of a kind at a place; its methods try its abilities."""

    def __init__(self, kind: Kind, put: Put, packing: str) -> None:
        self.kind, self.put, self.packing = kind, put, packing
        urls, self.options = put(kind.write(shards(), packing))
        self.urls = kind.given(urls)

    def data(self, index: str | None) -> hr.Stream:
        return self.kind.open(self.urls, index=index, storage_options=self.options)

    def seen(self, data: hr.Stream, state: dict[str, Any] | None = None, **options: Any) -> list[list[int]]:
        with hr.DataLoader(data, batch_size=3, collate_fn=list, **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            return [[self.kind.number(sample) for sample in batch] for batch in loader]

    def numbers(self, data: hr.Stream) -> list[int]:
        return [number for batch in self.seen(data) for number in batch]

    def streamed(self) -> None:
        assert self.numbers(self.data(None)) == ALL

    def by_number(self) -> None:
        data = self.data(self.kind.index)
        assert len(data) == len(ALL)
        assert [self.kind.number(data[k]) for k in (0, 6, 7, -1)] == [0, 6, 7, ALL[-1]]

    def global_shuffle(self) -> None:
        found = self.numbers(self.data(self.kind.index).shuffle("global", seed=1))
        assert sorted(found) == ALL
        assert found != ALL

    def ranks(self) -> None:
        data = self.data(self.kind.index).shuffle(seed=2)
        for world in (2, 3):
            ranks = [self.seen(data, ranks=hr.Ranks(rank=rank, world_size=world)) for rank in range(world)]
            assert len(set(map(len, ranks))) == 1, "as many steps on all"
            assert sorted(number for batches in ranks for batch in batches for number in batch) == ALL

    def resumed(self) -> None:
        for index in dict.fromkeys((None, self.kind.index)):
            whole = self.seen(self.data(index).shuffle(seed=3))
            with hr.DataLoader(self.data(index).shuffle(seed=3), batch_size=3, collate_fn=list) as loader:
                first = list(itertools.islice(loader, 2))
                state = loader.state_dict()
            rest = self.seen(self.data(index).shuffle(seed=3), state)
            assert [[self.kind.number(sample) for sample in batch] for batch in first] + rest == whole

    def damage_reported(self) -> None:
        files = self.kind.write(shards(), self.packing)
        name = max(name for name in files if not name.endswith(".json"))
        files[name] = files[name][: len(files[name]) // 3 + 1]  # not between two samples
        urls, options = self.put(files)
        data = self.kind.open(self.kind.given(urls), index=None, storage_options=options)
        found: list[int] = []
        with hr.DataLoader(data, batch_size=None) as loader, pytest.raises(hr.errors.StageError) as caught:
            found.extend(self.kind.number(sample) for sample in loader)
        assert name in str(caught.value)
        assert found == ALL[: len(found)], "whole samples alone, in their order"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("kind", "packing"), [pytest.param(k, p, id=f"{k.name}-{p}") for k in KINDS for p in k.packings]
)
def test_format_has_the_abilities_of_the_page(
    kind: Kind, place: str, packing: str, places: dict[str, Put], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cell = Cell(kind, places[place], packing)
    for ability in ABILITIES:
        reason, check = kind.cannot.get((packing, ability)), getattr(cell, ability.replace(" ", "_"))
        if reason is None:
            check()
        else:
            with pytest.raises((hr.OptionError, TypeError, pytest.fail.Exception), match=reason.error):
                check()


def table() -> str:
    """A row for each format and way of packing, and the reasons below."""
    notes: dict[str, int] = {}

    def note(text: str) -> str:
        return f"({notes.setdefault(text, len(notes) + 1)})"

    def row(kind: Kind, packing: str) -> str:
        if packing not in kind.packings:
            return f"| {kind.name} | {packing} |" + f" – {note(kind.absent)} |" * len(ABILITIES)
        reasons = [kind.cannot.get((packing, ability)) for ability in ABILITIES]
        cells = ["yes" if reason is None else f"no {note(reason.text)}" for reason in reasons]
        return f"| {kind.name} | {packing} | {' | '.join(cells)} |"

    lines = [f"| format | packed | {' | '.join(ABILITIES)} |", "|" + "---|" * (len(ABILITIES) + 2)]
    lines += [row(kind, packing) for kind in KINDS for packing in PACKINGS if packing in kind.packings or kind.absent]
    return "\n".join(["", *lines, "", *(f"{number}. {text}." for text, number in notes.items()), "", ""])


def test_page_has_the_tested_table() -> None:
    page = Path(__file__).parents[3] / "docs/reference/formats.md"
    begin, end = "<!-- the table begins -->\n", "<!-- the table ends -->\n"
    before, current, after = re.split(f"(?<={begin})(.*)(?={end})", page.read_text(), flags=re.DOTALL)
    if os.environ.get("HEADRACE_WRITE_PAGES"):
        page.write_text(before + table() + after)
    assert current == table(), f"{page} has another table: HEADRACE_WRITE_PAGES=1 and this test write it"
