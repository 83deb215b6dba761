"""Patterns mean what they mean to Python's glob; what lies beside data is left out, and counted."""

from __future__ import annotations

import fnmatch
import glob
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.sources.discovery.listing import listing_of
from headrace.sources.discovery.patterns import Pattern, is_pattern

_NAMES = st.sampled_from(["a", "b", "ab", "a.tar", "b.tar", "a-b.tar", ".h.tar", "[a].tar", "a]", "-", "x!.tar"])
_PATHS = st.lists(_NAMES, min_size=1, max_size=3).map("/".join)
_PARTS = st.sampled_from(
    [
        "*",
        "**",
        "?",
        "a*",
        "*.tar",
        "[ab]",
        "[!a]*",
        "[a-c]*.tar",
        "[]a]*",
        "[!]a]*",
        "[[]a].tar",
        "*-*",
        "[b-a]",
        "[a",
        ".*",
        "a-?.tar",
    ]
)
_PATTERNS = st.lists(_PARTS | _NAMES, min_size=1, max_size=3).map("/".join)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("patterns")


@settings(max_examples=60)
@given(paths=st.lists(_PATHS, max_size=8), pattern=_PATTERNS, number=st.integers(0, 2**62))
@example(paths=["a/b/a.tar"], pattern="**/*.tar", number=1)
@example(paths=["a/.h.tar", ".h.tar/b"], pattern="**", number=2)
def test_pattern_means_what_it_means_to_glob(root: Path, paths: list[str], pattern: str, number: int) -> None:
    place = root / str(number)
    for path in paths:
        try:
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            if not (place / path).exists():
                (place / path).write_bytes(b"x")
        except (FileExistsError, NotADirectoryError):
            continue
    url = f"{place}/{pattern}"
    if not is_pattern(url):
        return
    found = list(listing_of(url, Pattern(url), None, kept=False).urls)
    meant = {path for path in glob.glob(url, recursive=True) if Path(path).is_file()}  # noqa: PTH207 (as it has hidden names)
    assert found == sorted(meant)


@given(part=st.text("abc-![]*?.", min_size=1, max_size=8), name=st.text("abc-![].", min_size=1, max_size=5))
def test_part_of_a_pattern_means_what_it_means_to_fnmatch(part: str, name: str) -> None:
    if not re.search(r"[*?[]", part) or part == "**":
        return
    meant = fnmatch.fnmatchcase(name, part) and (not name.startswith(".") or part.startswith("."))
    assert Pattern(f"memory://x/{part}").matches(name) == meant


def test_address_is_a_pattern_only_where_its_path_can_be_one(tmp_path: Path) -> None:
    (tmp_path / "a[1].tar").write_bytes(b"x")
    assert not is_pattern(str(tmp_path / "a[1].tar")), "a file of that name is there"
    assert is_pattern(str(tmp_path / "b[1].tar"))
    assert not is_pattern("https://host/a.tar?signature=[x]&y=*")
    assert not is_pattern("pipe:cat *.tar")
    assert is_pattern("s3://bucket/a?.tar")
