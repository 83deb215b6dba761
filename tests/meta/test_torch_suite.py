"""How the results of the DataLoader tests that torch has are compared."""

import re
import tomllib

import pytest
import torch_suite
from torch_suite import Result

PASSED, FAILED = Result("passed"), Result("failed", "line 5: so it is")


ON_PURPOSE = {"A::two": "slabs are lent"}


@pytest.mark.parametrize(("torchs", "ours", "departures", "status", "printed"), [
    ([PASSED, PASSED], [PASSED, FAILED], ON_PURPOSE, 0, "on purpose: slabs are lent"),
    ([PASSED, PASSED], [FAILED, FAILED], ON_PURPOSE, 1, "A::one"),
    ([PASSED, PASSED], [PASSED, PASSED], ON_PURPOSE, 1, "A::two does not fail any more"),
    ([PASSED], [PASSED], ON_PURPOSE, 0, ""),
    ([FAILED], [FAILED], {}, 0, ""),
], ids=["listed", "not listed", "passes again", "not run", "torch's own"])  # fmt: skip
def test_comparison_fails_unless_the_list_has_exactly_what_fails_with_our_class_alone(
    torchs: list[Result], ours: list[Result], departures: dict[str, str], status: int, printed: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    names = ("A::one", "A::two")
    results = [dict(zip(names, some, strict=False)) for some in (torchs, ours)]
    assert torch_suite._compare(*results, departures, show_all=False) == status
    assert printed in capsys.readouterr().out


def test_list_names_tests_and_reasons() -> None:
    listed = tomllib.loads(torch_suite.DEPARTURES.read_text())
    assert all(re.fullmatch(r"\w+::\w+", name) and reason.strip() for name, reason in listed.items())
