"""One helper process for all tests of this folder: it takes a second to start, its workers some milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.work.starter import Helper


@pytest.fixture(scope="session", autouse=True)
def helper() -> Iterator[Helper]:
    helper = Helper.acquire()
    yield helper
    helper.release()
