"""States and epochs at moments when few ask for them."""

from __future__ import annotations

from typing import Any

import pytest
from builders.loops import lists, saved, state_after
from builders.numbers import Counting, Numbers, is_odd

import headrace as hr


def loader(data: Any = None, **options: Any) -> hr.DataLoader[Any]:
    return hr.DataLoader(Numbers() if data is None else data, **{"batch_size": 4, **options})


def test_states_and_epochs_go_on_when_another_iterator_is_looked_into() -> None:
    with loader(Numbers().shuffle()) as some:
        epochs = [lists(some) for _ in range(3)]
    with loader(Numbers().shuffle()) as some:
        batches = iter(some)
        next(batches)
        assert some.peek().tolist() == epochs[1][0]  # as `iter` would begin now
        assert saved(some)["position"] == 4
        with pytest.raises(hr.errors.LoaderBusyError):
            some.load_state_dict(saved(some))
        assert lists(batches) == epochs[0][1:]
        assert some.peek().tolist() == epochs[1][0]
        assert saved(some) == {**saved(some), "epoch": 1, "position": 0}
        assert [lists(some), lists(some)] == epochs[1:]
        assert some.peek().tolist() != epochs[2][0]


def test_epoch_that_was_looked_into_before_another_one_ended_is_not_given_again() -> None:
    with loader(Numbers().shuffle()) as some:
        first = lists(some)
    with loader(Numbers().shuffle()) as some:
        for _ in some:
            some.peek()
        assert lists(some) != first
        assert some.epoch == 2


def test_end_of_an_epoch_is_not_consumed_by_looking_for_a_batch() -> None:
    state = state_after(loader(), 10)
    with loader() as some:
        some.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(StopIteration):
                some.peek()
        assert saved(some) == state
        assert lists(some) == []
        assert some.epoch == 1
        assert len(lists(some)) == 10


def test_state_is_refused_while_any_iterator_is_in_use() -> None:
    with loader() as some:
        first = iter(some)
        next(first)
        state = saved(some)
        second = iter(some)
        next(second)
        second.close()  # type: ignore[attr-defined]
        with pytest.raises(hr.errors.LoaderBusyError, match="load_state_dict"):
            some.load_state_dict(state)
        first.close()  # type: ignore[attr-defined]
        some.load_state_dict(state)
        assert len(list(some)) == 9


def test_refused_state_leaves_the_loader_where_it_was() -> None:
    with loader() as some, loader(Numbers(50)) as other:
        next(iter(some))
        before = saved(some)
        next(iter(other))
        with pytest.raises(hr.StateMismatchError):
            some.load_state_dict(saved(other))
        assert saved(some) == before


def test_state_of_other_data_becomes_one_of_these_when_it_is_forced() -> None:
    with loader() as some:
        some.load_state_dict(state_after(loader(Numbers(60)), 1), force=True)
        own = saved(some)
    with loader() as some:
        some.load_state_dict(own)
        assert lists(some)[0] == [4, 5, 6, 7]


def test_global_batch_of_a_state_is_forgotten_when_another_state_is_loaded() -> None:
    states = [
        state_after(loader(batch_size=size, rank=0, world_size=world, ranks="local"), 1)
        for size, world in ((4, 2), (2, 1))
    ]
    with loader() as some:
        some.load_state_dict(states[0])
        assert len(some.peek()) == 8
        some.load_state_dict(states[1])
        assert len(some.peek()) == 4


def test_batches_are_skipped_in_the_epoch_that_comes_whichever_is_told_first() -> None:
    with loader() as some:
        some.skip(5)
        some.set_epoch(3)
        assert lists(some) == [[*range(k, k + 4)] for k in range(20, 40, 4)]
        assert some.epoch == 4


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_epoch_that_is_told_within_another_comes_after_that(epoch: int) -> None:
    with loader(Numbers().shuffle()) as some:
        list(some)
        for number, _ in enumerate(some, 1):
            if number == 2:
                some.set_epoch(epoch)
            assert some.state_dict()["batches"] == number
            assert some.state_dict()["epoch"] == 1
        assert some.epoch == some.state_dict()["epoch"] == epoch
        list(some)
        assert some.epoch == epoch + 1


def test_batches_that_are_skipped_behind_a_filter_are_refused_when_batches_have_another_size() -> None:
    data = Numbers(60).filter(is_odd)
    with loader(data) as some:
        some.skip(3)
        state = saved(some)
    with loader(data, batch_size=8) as some, pytest.raises(hr.StateMismatchError) as caught:
        some.load_state_dict(state)
    assert caught.value.field == "step"


def test_iterable_data_set_is_not_looked_into_while_an_iterator_reads_it() -> None:
    with loader(Counting(200), prefetch_factor=0) as some:
        batches = iter(some)
        got = next(batches).tolist()
        with pytest.raises(hr.errors.LoaderBusyError, match="peek"):
            some.peek()
        assert got + [number for batch in batches for number in batch.tolist()] == [*range(200)]
        assert some.peek().tolist() == [0, 1, 2, 3]


def test_bounded_part_of_a_mixture_without_end_is_repeated_for_an_epoch_behind_a_filter() -> None:
    data = hr.mix({"a": Numbers(30), "b": Numbers(50)}, weights={"a": 1, "b": 2}, until="forever")
    for rank in range(2):
        with loader(data.take(60).filter(is_odd).epoch(samples=70), rank=rank, world_size=2, ranks="local") as some:
            assert sum(map(len, some)) == 35


def test_only_the_iterator_that_was_begun_last_advances_the_epoch() -> None:
    with loader(Numbers().shuffle()) as some:
        list(some)
        first = iter(some)
        next(first)
        some.set_epoch(0)
        second = iter(some)
        next(second)
        list(first)
        assert some.epoch == 0
        list(second)
        assert some.epoch == 1
