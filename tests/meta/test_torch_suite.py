"""How torch's own tests of its DataLoader are compared: all that fails with our class alone is listed, and fails."""

from __future__ import annotations

import re
import tomllib

import pytest
import torch_suite
from torch_suite import Result

PASSED, FAILED = Result("passed"), Result("failed", "line 5: so it is")


def compared(ours: dict[str, Result], departures: dict[str, str]) -> int:
    return torch_suite._compare(dict.fromkeys(ours, PASSED), ours, departures, show_all=False)


def test_comparison_succeeds_when_what_fails_is_what_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert compared({"A::one": PASSED, "A::two": FAILED}, {"A::two": "slabs are lent"}) == 0
    assert "on purpose: slabs are lent" in capsys.readouterr().out


def test_comparison_fails_when_another_test_fails() -> None:
    assert compared({"A::one": FAILED, "A::two": FAILED}, {"A::two": "slabs are lent"}) == 1


def test_comparison_fails_when_a_listed_test_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert compared({"A::one": PASSED, "A::two": PASSED}, {"A::two": "slabs are lent"}) == 1
    assert "A::two does not fail any more" in capsys.readouterr().out


def test_listed_test_that_was_not_run_changes_nothing() -> None:
    assert compared({"A::one": PASSED}, {"A::two": "slabs are lent"}) == 0


def test_test_that_fails_with_torchs_class_too_is_nobodys_fault() -> None:
    ours = {"A::one": FAILED}
    assert torch_suite._compare({"A::one": FAILED}, ours, {}, show_all=False) == 0


def test_list_names_tests_and_reasons() -> None:
    listed = tomllib.loads(torch_suite.DEPARTURES.read_text())
    assert all(re.fullmatch(r"\w+::\w+", name) and reason.strip() for name, reason in listed.items())
