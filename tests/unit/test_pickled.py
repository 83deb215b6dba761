"""Values that many messages share are pickled once, and loaded once."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import pytest

from headrace._util import pickled
from headrace._util.pickled import packed_once


@packed_once(tuple)
class Known(NamedTuple):
    number: int
    inner: Any = None


class _Counted:
    """Counts how often it is pickled."""

    times = 0

    def __reduce__(self) -> tuple[object, ...]:
        _Counted.times += 1
        return _Counted, ()


def test_value_of_many_messages_is_pickled_once_and_is_one_object_in_all_of_them() -> None:
    _Counted.times = 0
    known = Known(1, _Counted())
    messages = [pickle.loads(pickle.dumps((k, known))) for k in range(3)]
    assert [k for k, _ in messages] == [0, 1, 2]
    assert all(one is messages[0][1] for _, one in messages)
    assert type(messages[0][1]) is Known
    assert _Counted.times == 1


def test_nested_values_are_unchanged() -> None:
    known = Known(1, [Known(2), Known(3, "a")])
    assert pickle.loads(pickle.dumps(known)) == known


def test_equal_values_that_differ_in_kind_stay_what_they_are() -> None:
    for number in (1, True, 1.0):
        loaded = pickle.loads(pickle.dumps(Known(number)))  # type: ignore[arg-type]
        assert type(loaded.number) is type(number)


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, pickled._LATEST_BYTES // 10, 2 * pickled._LATEST_BYTES])
def test_values_that_are_not_among_the_latest_are_pickled_again_and_not_held(size: int) -> None:
    many = [Known(k, bytes(size)) for k in range(50)]
    for _ in range(2):
        assert [pickle.loads(pickle.dumps(one)) for one in many] == many
    for kept in (pickled._packed, pickled._unpacked):
        assert kept.nbytes <= max(pickled._LATEST_BYTES, size + 1000)
        assert kept.nbytes == sum(nbytes for _, nbytes in kept._kept.values())
