"""Listing in ranges gives each key once; the survey of very many names equals that of each name by itself."""

from __future__ import annotations

import asyncio
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BadResponseError
from headrace.fetch.stores.key_ranges import list_in_ranges
from headrace.formats.registry import format_of
from headrace.sources import kinds
from headrace.sources.kinds import (
    MEDIA,
    Survey,
    extension_of,
    kept_survey,
    kind_in,
    stem_of,
    survey_to_keep,
    surveyed,
)
from headrace.types import Listed


class Bucket:
    """Gives its keys in pages. Counts the requests, and how many are open at once."""

    def __init__(
        self, keys: Sequence[str], size: int, *, knows_after: bool = True, entry: Callable[[str], Listed] = Listed
    ) -> None:
        self.keys, self.size, self.knows_after, self.entry = keys, size, knows_after, entry
        self.requests = self.at_once = self.most = 0

    async def pages(self, after: str | None) -> AsyncGenerator[list[Listed], None]:
        first = 0 if after is None or not self.knows_after else bisect_right(self.keys, after)
        for at in range(first, max(len(self.keys), first + 1), self.size):
            self.requests += 1
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            try:
                for _ in range(3):
                    await asyncio.sleep(0)
            finally:
                self.at_once -= 1
            if page := self.keys[at : at + self.size]:
                yield [self.entry(key) for key in page]

    def listed(self) -> list[str]:
        async def collect() -> list[str]:
            async with aclosing(list_in_ranges(self.pages, self.size)) as pages:
                return [one.path async for page in pages for one in page]

        return asyncio.run(collect())


def with_folders(key: str) -> Listed:
    """An object for a folder is empty and without its slash, as obstore lists it."""
    return Listed(key.removesuffix("/"), int(not key.endswith("/")))


_KEYS = st.lists(st.text("059afzAZ/-.é~", min_size=1, max_size=8), unique=True, max_size=200).map(sorted)


@given(keys=_KEYS, size=st.integers(1, 4))
def test_listing_in_ranges_has_each_key_once(keys: list[str], size: int) -> None:
    assert sorted(Bucket(keys, size).listed()) == keys


@given(
    keys=st.lists(st.text("01/-.", min_size=1, max_size=5).map(lambda text: f"{text}1"), unique=True, max_size=99),
    size=st.integers(1, 4),
)
def test_objects_for_folders_are_skipped(keys: list[str], size: int) -> None:
    keys = [key for key in keys if "//" not in key and key[0] != "/"]
    folders = {key[: at + 1] for key in keys for at, sign in enumerate(key) if sign == "/"}
    assert sorted(Bucket(sorted({*keys, *folders}), size, entry=with_folders).listed()) == sorted(keys)


def test_folder_names_that_sort_before_a_slash_are_listed_in_ranges() -> None:
    keys = [f"class{k}{end}/{n:02d}" for k in range(90) for n in range(20) for end in ("", "-big", " x")]
    folders = {f"{key.partition('/')[0]}/" for key in keys}
    bucket = Bucket(sorted({*keys, *folders}), 20, entry=with_folders)
    assert sorted(bucket.listed()) == sorted(keys)
    assert bucket.most >= 8


@pytest.mark.parametrize(
    "name", ["photo-{:010d}.jpg", "{:x}", "class-{0:.1}/photo-{0}.jpg", "2024/{:06d}/a", "é{:05d}"]
)
def test_many_keys_are_listed_concurrently(name: str) -> None:
    keys = sorted({name.format(k if "." not in name[:12] else str(k)) for k in range(20_000)})
    bucket = Bucket(keys, 20)
    assert sorted(bucket.listed()) == keys
    assert bucket.most >= 8
    assert bucket.requests < 2.5 * len(keys) / 20


def test_few_keys_and_empty_objects_are_listed_without_more_requests() -> None:
    bucket = Bucket([f"{k:04d}" for k in range(380)], 100)
    assert bucket.listed() == bucket.keys
    assert bucket.requests == 4
    empty = Bucket([f"{k:04d}" for k in range(2000)], 10, entry=lambda key: Listed(key, 0))
    assert sorted(empty.listed()) == empty.keys


@pytest.mark.parametrize(("factor", "requests"), [(1, 21), (7919, 20)], ids=["ordered", "without order"])
def test_store_without_order_is_listed_sequentially(factor: int, requests: int) -> None:
    bucket = Bucket([f"{k * factor % 2000:04d}" for k in range(2000)], 100, knows_after=False)
    assert bucket.listed() == bucket.keys
    assert bucket.most == 1
    assert bucket.requests == requests


def test_keys_that_are_out_of_order_later_are_an_error() -> None:
    keys = [f"{k:05d}" for k in range(5000)]
    keys[700], keys[790] = keys[790], keys[700]
    with pytest.raises(BadResponseError, match="out of order"):
        Bucket(keys, 10).listed()


def test_error_ends_the_listing_and_its_requests() -> None:
    class Failing(Bucket):
        async def pages(self, after: str | None) -> AsyncGenerator[list[Listed], None]:
            async for page in super().pages(after):
                if after is not None and page[-1].path > "00150":
                    raise OSError("no more")
                yield page

    bucket = Failing([f"{k:05d}" for k in range(5000)], 10)
    with pytest.raises(OSError, match="no more"):
        bucket.listed()
    assert bucket.at_once == 0


_LAST = st.sampled_from(
    [
        "a", "b", "a.jpg", "a.JPG", "a.json", "a.b.jpg", "b.tar", "b.tar.gz", "c.tgz", ".x", ".", "a.", "x.gz",
        "é.tar", "metadata.csv", "metadata.jsonl", "xmetadata.csv", "metadata.CSV", "a.longextension", "a.é",
        "part-0", "c.txt.zst", "c.json.gz", "c.00.GZ",
    ]
)  # fmt: skip
_PATHS = st.builds(
    lambda folders, last: "/".join([*folders, last]), st.lists(st.sampled_from(["d", "e.f", "é"])), _LAST
)


def one_by_one(names: list[str], start: int) -> Survey:
    forms = [format_of([name]) for name in names]
    paths = [name[start:] for name in names]
    return Survey(
        formats=Counter(form.name for form in forms if form is not None),
        others=Counter(kind_in(name) for name, form in zip(names, forms, strict=True) if form is None),
        extensions=Counter(map(extension_of, names)),
        media=sum(extension_of(name) in MEDIA for name in names),
        tables=[name for name in names if re.fullmatch(r"(.*/)?metadata\.(csv|jsonl|parquet)", name)],
        folders=sorted({path.partition("/")[0] for path in paths if "/" in path}),
        loose=sum("/" not in path for path in paths),
        is_single=all(stem_of(a) != stem_of(b) for a, b in pairwise(names)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["", "memory://place/ä/"])
@given(paths=st.lists(_PATHS, max_size=12), in_order=st.booleans())
def test_survey_equals_a_survey_of_each_name(folder: str, paths: list[str], in_order: bool) -> None:
    names = [folder + path for path in (sorted(paths) if in_order else paths)]
    found = surveyed(names, len(folder))
    expected = one_by_one(names, len(folder))
    expected.digest = found.digest
    found.tables.sort()
    expected.tables.sort()
    assert found == expected
    assert kept_survey(json.loads(json.dumps(survey_to_keep(found)))) == found


def test_survey_is_the_same_in_pieces_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"f/{k // 4}/{k // 2:03d}.{'jt'[k % 2]}" for k in range(40)]
    whole = surveyed(names, 2)
    assert not whole.is_single
    for size in (1, 2, 3, 7):
        monkeypatch.setattr(kinds, "_CHUNK", size)
        assert surveyed(names, 2) == whole


def test_digest_depends_on_relative_paths_and_their_order() -> None:
    here, there = (surveyed([f"{place}a/1", f"{place}b/2"], len(place)) for place in ("s3://x/", "/y/z/w/"))
    assert here.digest == there.digest
    assert len({surveyed(names, 0).digest for names in (["a", "b"], ["b", "a"], ["ab"], ["a", "b", ""])}) == 4


def test_survey_by_other_formats_is_not_used() -> None:
    stored = survey_to_keep(surveyed(["a.tar"], 0))
    assert stored is not None
    assert kept_survey({**stored, "by": "others"}) is None
    assert kept_survey(None) is None
