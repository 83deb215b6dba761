"""`prepare` gives Accelerate's loader with our engine in it; Accelerate alone would give torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from builders.numbers import Numbers
from full.frameworks.data import COUNT, TorchData, TorchIterable, assert_made_by_our_workers, data_of, keys_of
from torch.utils.data import DistributedSampler

import headrace as hr
from headrace.integrations import prepare

BOTH = pytest.mark.parametrize("regime", ["torch", "headrace"])


def loader_of(regime: str) -> hr.DataLoader[Any]:
    return hr.DataLoader(data_of(regime), batch_size=4, num_workers=2)


@BOTH
def test_prepared_loader_runs_our_engine_when_it_is_iterated(accelerator: Accelerator, regime: str) -> None:
    prepared = prepare(accelerator, loader_of(regime))
    assert type(prepared) is DataLoaderShard
    assert isinstance(prepared, torch.utils.data.DataLoader)
    assert len(prepared) == 3
    for _ in range(2):
        batches = list(prepared)
        assert [keys_of(batch) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert_made_by_our_workers(batches)


@BOTH
def test_prepare_of_accelerate_keeps_our_engine_and_sees_the_last_batch(accelerator: Accelerator, regime: str) -> None:
    prepared = prepare(accelerator, loader_of(regime))
    _model, again = accelerator.prepare(torch.nn.Linear(1, 1), prepared)
    assert again is prepared
    inside = prepared.base_dataloader
    assert prepare(accelerator, prepared).base_dataloader is inside
    assert accelerator._dataloaders == [prepared]
    assert_made_by_our_workers(again)
    assert [accelerator.gradient_state.end_of_dataloader for _ in prepared] == [False, False, True]


@BOTH
def test_prepared_loader_shuffles_again_when_an_epoch_begins(accelerator: Accelerator, regime: str) -> None:
    with hr.DataLoader(data_of(regime), batch_size=4, shuffle=True, num_workers=1) as loader:
        prepared = prepare(accelerator, loader)
        first, second = ([key for batch in prepared for key in keys_of(batch)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(COUNT))
    assert first != second


def test_batches_are_torchs_when_the_run_is_seeded(accelerator: Accelerator) -> None:
    def batches(kind: Any) -> list[list[int]]:
        torch.manual_seed(7)
        loader = kind(data_of("torch"), batch_size=5, shuffle=True, num_workers=1)
        return [keys_of(batch) for batch in prepare(accelerator, loader)]

    torch.manual_seed(7)
    by_torch = torch.utils.data.DataLoader(data_of("torch"), batch_size=5, shuffle=True)
    wanted = [keys_of(batch) for batch in accelerator.prepare(by_torch)]
    assert batches(hr.DataLoader) == batches(torch.utils.data.DataLoader) == wanted


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_gets_accelerates_share_when_the_data_is_torchs(accelerator: Accelerator, rank: int) -> None:
    loader: Any = hr.DataLoader(data_of("torch"), batch_size=3, num_workers=1)
    shared = prepare(accelerator, prepare_data_loader(loader, num_processes=2, process_index=rank))
    batches = list(shared)
    wanted = [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]
    assert [keys_of(batch) for batch in batches] == wanted[rank]
    assert_made_by_our_workers(batches)


@BOTH
def test_first_batches_can_be_skipped(accelerator: Accelerator, regime: str) -> None:
    loader = loader_of(regime)
    skipped = skip_first_batches(prepare(accelerator, loader), 2)
    assert [keys_of(batch) for batch in skipped] == [[8, 9, 10, 11]]
    batches = list(prepare(accelerator, skip_first_batches(prepare(accelerator, loader), 1)))
    assert [keys_of(batch) for batch in batches] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert_made_by_our_workers(batches)


def test_skipped_batches_are_not_even_asked_for(accelerator: Accelerator) -> None:
    data = Numbers(10**9)
    with hr.DataLoader(data, batch_size=100) as loader:
        skipped = skip_first_batches(prepare(accelerator, loader), 10**7 - 3)
        for _ in range(2):  # each pass skips, as Accelerate's do
            assert [batch[0].item() for batch in skipped] == [10**9 - 300, 10**9 - 200, 10**9 - 100]
            loader.set_epoch(0)
            skipped.set_epoch(0)
    assert sorted(data.asked) == sorted(2 * [*range(10**9 - 300, 10**9)])


def test_batches_are_skipped_in_every_way_after_a_filter_too(accelerator: Accelerator) -> None:
    data = hr.from_map(range(40)).filter(lambda number: number % 2 == 0)
    with hr.DataLoader(data, batch_size=4) as loader:
        prepared = prepare(accelerator, loader)
        first = iter(prepared)
        next(first)  # an iterator is in use: what comes first is taken, and dropped
        assert [batch[0].item() for batch in skip_first_batches(prepared, 3)] == [24, 32]
        del first
        loader.set_epoch(0)
        assert [batch[0].item() for batch in skip_first_batches(prepared, 3)] == [24, 32]


def test_our_options_survive_when_the_data_is_torchs(accelerator: Accelerator) -> None:
    with hr.DataLoader(data_of("torch"), batch_size=4, num_workers=1, economic=True) as loader:  # type: ignore[call-arg]
        with prepare(accelerator, loader).base_dataloader as inside:
            assert inside.economic is True


@pytest.mark.parametrize("options", [{"batch_size": None}, {"batch_size": 5, "drop_last": True}])
@BOTH
def test_prepared_loader_batches_as_ours_when_it_is_not_the_usual_way(
    accelerator: Accelerator, regime: str, options: dict[str, Any]
) -> None:
    with hr.DataLoader(data_of(regime), num_workers=1, **options) as loader:
        wanted = [keys_of(batch) for batch in loader]
        assert [keys_of(batch) for batch in prepare(accelerator, loader)] == wanted


def test_iterable_data_of_torchs_is_ours_to_run_when_prepared(accelerator: Accelerator) -> None:
    batches = list(prepare(accelerator, hr.DataLoader(TorchIterable(), batch_size=5, num_workers=1)))
    assert [keys_of(batch) for batch in batches] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert_made_by_our_workers(batches)


def test_loader_of_torchs_gets_our_engine_when_it_is_prepared_with_ours(accelerator: Accelerator) -> None:
    plain: Any = torch.utils.data.DataLoader(data_of("torch"), batch_size=4, num_workers=1)
    for loader in (plain, accelerator.prepare(plain)):
        prepared = prepare(accelerator, loader)
        assert type(prepared.base_dataloader) is hr.DataLoader
        assert_made_by_our_workers(prepared)


def test_error_names_our_prepare_when_accelerates_was_used(accelerator: Accelerator) -> None:
    with loader_of("headrace") as loader:
        prepared = accelerator.prepare(loader)
        with pytest.raises(hr.OptionError, match=r"headrace\.integrations\.prepare"):
            next(iter(prepared))


def test_torchdatas_engine_is_refused_when_ours_is_asked_for(accelerator: Accelerator) -> None:
    accelerator.dataloader_config = DataLoaderConfiguration(use_stateful_dataloader=True)
    with pytest.raises(hr.OptionError, match="use_stateful_dataloader"):
        prepare(accelerator, hr.DataLoader(data_of("torch")))


# States


def of_torch(num_workers: int = 1) -> hr.DataLoader[Any]:
    return hr.DataLoader(TorchData(), batch_size=2, shuffle=True, num_workers=num_workers)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_resumes_with_its_share_when_accelerate_divides(accelerator: Accelerator, rank: int) -> None:
    def make(ranks: int) -> Any:
        loader: Any = hr.DataLoader(TorchData(), batch_size=2, num_workers=1)
        return prepare(accelerator, prepare_data_loader(loader, num_processes=ranks, process_index=rank))

    prepared = make(2)
    for _ in prepared:
        state = prepared.state_dict()
        break
    expected = [[4, 5], [8, 9]] if rank == 0 else [[6, 7], [10, 11]]
    other = make(2)
    other.load_state_dict(state)
    assert [keys_of(batch) for batch in other] == expected
    with pytest.raises(hr.StateMismatchError, match=r"num_replicas: .*2 in the state, 3 in the loader"):
        make(3).load_state_dict(state)


def by_distributed_sampler() -> hr.DataLoader[Any]:
    sampler: Any = DistributedSampler(TorchData(), num_replicas=1, rank=0)
    return hr.DataLoader(TorchData(), batch_size=2, sampler=sampler, num_workers=1)


@pytest.mark.parametrize("sets_epoch", [True, False])
@pytest.mark.parametrize(
    ("make", "seeds"), [(by_distributed_sampler, {}), (of_torch, {"use_seedable_sampler": True, "data_seed": 5})]
)
def test_samplers_order_continues_after_a_resume(
    accelerator: Accelerator, make: Callable[[], Any], seeds: dict[str, Any], sets_epoch: bool
) -> None:
    accelerator.dataloader_config = DataLoaderConfiguration(**seeds)
    prepared = prepare(accelerator, make())
    list(prepared)
    head = keys_of(next(iter(prepared)))
    other = prepare(accelerator, make())
    other.load_state_dict(prepared.state_dict())
    if sets_epoch:
        other.set_epoch(1)
    assert sorted(head + [key for batch in other for key in keys_of(batch)]) == list(range(COUNT))


def test_prepare_of_accelerate_alone_leaves_no_state_when_the_data_is_torchs(accelerator: Accelerator) -> None:
    prepared = accelerator.prepare(of_torch())
    assert type(prepared.base_dataloader) is torch.utils.data.DataLoader
    next(iter(prepared))
    assert not hasattr(prepared.base_dataloader, "state_dict")
