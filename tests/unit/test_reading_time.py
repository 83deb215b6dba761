"""The time in which something is read is counted once, however many epochs of a loader read at once."""

from __future__ import annotations

import pytest

from headrace.observe import stats
from headrace.observe.stats import LoaderMeters


def test_reading_goes_on_when_one_of_two_epochs_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(stats.time, "perf_counter", lambda: now[0])
    meters, first, second = LoaderMeters(), object(), object()
    for at, epoch, is_reading in ((1, first, True), (2, second, True), (3, first, False), (7, second, False)):
        now[0] = float(at)
        meters.set_reading(epoch, is_reading)
    assert meters.reading_s == 6
