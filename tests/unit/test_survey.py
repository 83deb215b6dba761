"""The survey of very many names equals that of each name by itself."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
