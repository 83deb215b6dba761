"""Patterns of addresses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import OptionError
from headrace.sources.discovery.urls import expand

CASES = {
    "a": ["a"],
    "a-{0..2}": ["a-0", "a-1", "a-2"],
    "a-{08..11}.tar": ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"],
    "a-{000..1}": ["a-000", "a-001"],
    "{2..0}": ["2", "1", "0"],
    "{0..6..3}": ["0", "3", "6"],
    "{0..7..3}": ["0", "3", "6"],
    "{6..0..2}": ["6", "4", "2", "0"],
    "{-1..1}": ["-1", "0", "1"],
    "{0..10..5}": ["0", "5", "10"],
    "{10..0..5}": ["10", "5", "0"],
    "{00..10..5}": ["00", "05", "10"],
    "{-02..2..2}": ["-02", "000", "002"],
    "{train,test}-{0..1}": ["train-0", "train-1", "test-0", "test-1"],
    "{a,}b": ["ab", "b"],
    "{one}": ["one"],
    "s3://b/{0..0}": ["s3://b/0"],
}


@pytest.mark.parametrize(("pattern", "urls"), CASES.items())
def test_a_pattern_stands_for_its_addresses(pattern: str, urls: list[str]) -> None:
    assert expand(pattern) == tuple(urls)


@given(st.integers(0, 500), st.integers(0, 30), st.integers(4, 7))
def test_counting_is_complete_and_keeps_the_width(first: int, more: int, width: int) -> None:
    got = expand(f"x{{{first:0{width}d}..{first + more:0{width}d}}}y")
    assert got == tuple(f"x{n:0{width}d}y" for n in range(first, first + more + 1))


def test_lists_and_paths_are_taken() -> None:
    assert expand(["a-{0..1}", Path("/b/c.tar")]) == ("a-0", "a-1", "/b/c.tar")
    assert expand(Path("/x-{0..1}.tar")) == ("/x-0.tar", "/x-1.tar")
    assert expand(f"{k}.tar" for k in range(2)) == ("0.tar", "1.tar")


class Numbered:
    """A data set whose samples are asked for by number, and of which Python makes an iterator without an end."""

    def __getitem__(self, number: int) -> int:
        return number


def samples() -> Iterator[int]:
    yield 1
    raise AssertionError("more of them were asked for")


REFUSED: list[tuple[Any, str]] = [
    *((urls, "names no object") for urls in ("", [], ["a", ""], "{,}", ())),
    ("{0..5..0}", "step of 0"),
    *((urls, r"is no address; .*from_map") for urls in (Numbered(), samples(), [b"a"], b"a", 3, None, ["a", 3])),
]


@pytest.mark.parametrize(("urls", "says"), REFUSED)
def test_what_is_no_address_is_refused_before_more_is_asked_for(urls: Any, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        expand(urls)
