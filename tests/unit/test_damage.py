"""Damaged archives give their whole samples first, and then one error with its place."""

from __future__ import annotations

import pytest
from corpus import CASES, GROUPS, Case
from unit.tar_scans import URL, Found, OneByOne, scan

from headrace.errors import FormatError


def check(case: Case, found: Found, error: FormatError | None) -> None:
    samples = [
        (key.decode("utf-8", "surrogateescape"), {field: case.data[at : at + size] for field, at, size in members})
        for key, members in found
    ]
    assert samples == list(case.samples), case.name
    if case.damage is None:
        assert error is None, case.name
        return
    assert error is not None, case.name
    where = type(error).__name__, error.key, error.offset
    assert where == (case.damage.error, case.damage.key, case.damage.offset), case.name
    assert case.damage.text in str(error), case.name
    assert (error.url, error.stage) == (URL, "scan")
    assert f"({URL}, byte {case.damage.offset})" in str(error)


def test_corpus_has_every_case_once() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 165
    data = [case.data for case in CASES]
    assert len(set(data)) == len(data)


@pytest.mark.parametrize("group", GROUPS)
def test_scanner_gives_what_is_whole_and_then_the_error(group: str) -> None:
    for case in GROUPS[group]:
        check(case, *scan(case.data, len(case.data) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_scanner_gives_the_same_whichever_way_it_is_fed(group: str) -> None:
    for case in GROUPS[group]:
        whole = len(case.data) + 1
        few = 1 + whole // 200_000  # of the largest ones, larger pieces
        check(case, *scan(case.data, whole, kind=OneByOne))
        check(case, *scan(case.data, 512 * few, carry=True))
        check(case, *scan(case.data, 1536 * few, carry=True))
        check(case, *scan(case.data, 512 * few, hop=True))
