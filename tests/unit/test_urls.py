"""Patterns of addresses: braces as in a shell, wildcards as in Python's glob."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace import OptionError
from headrace.sources.discovery import Pattern, expand, is_pattern
from headrace.sources.entries import listing_of

CASES: list[tuple[Any, list[str]]] = [
    ("a", ["a"]),
    ("a-{0..2}", ["a-0", "a-1", "a-2"]),
    ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
    ("a-{000..1}", ["a-000", "a-001"]),
    ("{2..0}", ["2", "1", "0"]),
    ("{0..6..3}", ["0", "3", "6"]),
    ("{0..7..3}", ["0", "3", "6"]),
    ("{6..0..2}", ["6", "4", "2", "0"]),
    ("{-1..1}", ["-1", "0", "1"]),
    ("{0..10..5}", ["0", "5", "10"]),
    ("{10..0..5}", ["10", "5", "0"]),
    ("{00..10..5}", ["00", "05", "10"]),
    ("{-02..2..2}", ["-02", "000", "002"]),
    ("{train,test}-{0..1}", ["train-0", "train-1", "test-0", "test-1"]),
    ("{a,}b", ["ab", "b"]),
    ("{one}", ["one"]),
    ("s3://b/{0..0}", ["s3://b/0"]),
    (["a-{0..1}", Path("/b/c.tar")], ["a-0", "a-1", "/b/c.tar"]),
    (Path("/x-{0..1}.tar"), ["/x-0.tar", "/x-1.tar"]),
    ((f"{k}.tar" for k in range(2)), ["0.tar", "1.tar"]),
]


@pytest.mark.parametrize(("pattern", "urls"), CASES)
def test_pattern_expands_to_its_addresses(pattern: Any, urls: list[str]) -> None:
    assert expand(pattern) == tuple(urls)


class Numbered:
    """A data set with samples by number, whose iterator never ends."""

    def __getitem__(self, number: int) -> int:
        return number


def samples() -> Iterator[int]:
    yield 1
    raise AssertionError("more of them were asked for")


REFUSED: list[tuple[Any, str]] = [
    *((urls, "must be an address, a pattern like") for urls in ("", [], ["a", ""], "{,}", ())),
    ("{0..5..0}", "step of 0"),
    *((urls, r"must be an address; .*from_map") for urls in (Numbered(), samples(), [b"a"], b"a", 3, None, ["a", 3])),
]


@pytest.mark.parametrize(("urls", "says"), REFUSED)
def test_invalid_address_is_refused_at_once(urls: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        expand(urls)


_NAMES = st.sampled_from(["a", "b", "ab", "a.tar", "b.tar", "a-b.tar", ".h.tar", "[a].tar", "a]", "-", "x!.tar"])
_PATHS = st.lists(_NAMES, min_size=1, max_size=3).map("/".join)
_PARTS = st.sampled_from([
    "*", "**", "?", "a*", "*.tar", "[ab]", "[!a]*", "[a-c]*.tar", "[]a]*", "[!]a]*", "[[]a].tar", "*-*", "[b-a]", "[a",
    ".*", "a-?.tar",
])  # fmt: skip
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
        with contextlib.suppress(FileExistsError, NotADirectoryError, IsADirectoryError):
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_bytes(b"x")
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
