"""A descriptor that is readable from when it is set until it is cleared."""

from __future__ import annotations

import pytest

from headrace._util.wakeup import Wakeup, is_readable


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2, 4096, 200_000])
def test_wakeup_is_readable_until_it_is_cleared_however_often_it_was_set(times: int) -> None:
    wakeup = Wakeup()
    assert not is_readable(wakeup.fileno(), 0)
    for _ in range(2):
        for _ in range(times):
            wakeup.set()
        assert wakeup.wait(0)
        wakeup.clear()
        wakeup.clear()
        assert not wakeup.wait(0)
