"""Whatever is wrong with an archive: the samples that are whole come first, then one error that says where."""

from __future__ import annotations

import contextlib
import pickle

import pytest
from corpus import CASES, GROUPS, Case, Sample

from headrace.errors import FormatError
from headrace.formats.tar.scanner import TarScanner

URL = "s3://bucket/train.tar"


class OneByOne(TarScanner):
    """The general way alone."""

    longest_run = 0


def scan(
    case: Case, piece: int, *, kind: type[TarScanner] = TarScanner, carry: bool = False, hop: bool = False
) -> tuple[list[Sample], FormatError | None]:
    """The samples and the error, of an archive that is fed in pieces.

    With `carry`, each piece is read by another process; with `hop`, what of a body lies behind a piece is left out.
    """
    data, scanner, found, start = case.data, kind(URL), list[Sample](), 0
    while not scanner.done:
        stop = min(start + piece, len(data))
        rows = scanner.feed(memoryview(data)[start:stop], start, stop == len(data))
        for k, key in enumerate(rows.keys.tolist()):
            fields = {
                rows.fields[rows.field[m]]: data[rows.offset[m] : rows.offset[m] + rows.size[m]]
                for m in range(rows.starts[k], rows.starts[k + 1])
            }
            found.append((key.decode("utf-8", "surrogateescape"), fields))
        if carry:
            scanner = pickle.loads(pickle.dumps(scanner))
        start = stop
        if hop and start < scanner.next_header:
            with contextlib.suppress(ValueError):  # of an extended header the body is needed
                scanner.skip(min(scanner.next_header, len(data)))
                start = min(scanner.next_header, len(data))
    return found, scanner.error


def check(case: Case, found: list[Sample], error: FormatError | None) -> None:
    assert found == list(case.samples), case.name
    if case.damage is None:
        assert error is None, case.name
        return
    assert error is not None, case.name
    where = type(error).__name__, error.key, error.offset
    assert where == (case.damage.error, case.damage.key, case.damage.offset), case.name
    assert case.damage.says in str(error), case.name
    assert (error.url, error.stage) == (URL, "scan")
    assert f"({URL}, byte {case.damage.offset})" in str(error)


def test_corpus_has_every_case_once() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 165
    data = [case.data for case in CASES]
    assert len(set(data)) == len(data)


@pytest.mark.parametrize("group", GROUPS)
def test_scanner_gives_what_is_whole_and_then_the_error(group: str) -> None:
    for case in GROUPS[group]:
        check(case, *scan(case, len(case.data) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_scanner_gives_the_same_whichever_way_it_is_fed(group: str) -> None:
    for case in GROUPS[group]:
        whole = len(case.data) + 1
        few = 1 + whole // 200_000  # of the largest ones, larger pieces
        check(case, *scan(case, whole, kind=OneByOne))
        check(case, *scan(case, 512 * few, carry=True))
        check(case, *scan(case, 1536 * few, carry=True))
        check(case, *scan(case, 512 * few, hop=True))
