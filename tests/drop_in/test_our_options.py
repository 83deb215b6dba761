"""The arguments that torch's loader does not have: refusals, effects, and the repr."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders.numbers import Numbers
from drop_in.acting import Made, read_all
from drop_in.stateful_data import Stream

import headrace as hr
from headrace.delivery.device import Backend, Mover

NUMBERS = list(range(8))

REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (NUMBERS, {"workers": "fibre"}, r"workers='fibre'.*'process', 'thread'"),
    (NUMBERS, {"economic": True}, "economic=True needs workers"),
    (Stream(4), {"economic": True, "num_workers": 1}, "economic=True needs a data set with __getitem__, and Stream"),
    (NUMBERS, {"economic": True, "num_workers": 1, "multiprocessing_context": "fork"}, "multiprocessing_context"),
    (NUMBERS, {"economic": True, "num_workers": 1, "num_batch_workers": 0}, "num_batch_workers=0 must be"),
    (NUMBERS, {"economic": True, "num_workers": 1, "num_workers_batches": "2"}, "num_batch_workers='2' must be"),
    (NUMBERS, {"economic": True, "num_workers": 1, "num_batch_workers": 1, "num_workers_batches": 1}, "exclude each"),
    (NUMBERS, {"economic": True, "num_workers": 1, "memory_budget": "much"}, "memory_budget='much'"),
    (NUMBERS, {"num_batch_workers": 2, "num_workers": 1}, "num_batch_workers=2 needs economic=True"),
    (NUMBERS, {"seed": 3}, "seed=3 needs economic=True"),
    (NUMBERS, {"memory_budget": "1GiB"}, "memory_budget='1GiB' needs economic=True"),
    (NUMBERS, {"fetch": hr.Fetch()}, r"fetch=.*needs a data set of headrace, and list"),
    (NUMBERS, {"fetch": hr.Fetch(concurrency=3)}, "fetch= needs a data set of headrace"),
    (NUMBERS, {"workers": "thread", "num_workers": 1, "multiprocessing_context": "fork"}, "and workers='thread'"),
    (Numbers(4), {"economic": True}, "economic=True needs a data set of torch"),
    (Numbers(4), {"economic": True, "num_workers_batches": 2}, "economic=.* needs a data set of torch"),
    (NUMBERS, {"tail": 1}, r"tail=1 must be given as ranks=hr\.Ranks\(last_batch=…\)"),
    (NUMBERS, {"rank": 1}, r"rank=1 must be given as ranks=hr\.Ranks\(rank=…\)"),
    (NUMBERS, {"on_error": 1}, r"on_error=1 must be given as errors=hr\.Skip\(\)"),
    (NUMBERS, {"compare": 1}, r"compare=1 must be given as ranks=hr\.Ranks\(compare=…\)"),
]


@pytest.mark.parametrize(("dataset", "options", "told"), REFUSED)
def test_wrong_options_are_errors_that_name_them(dataset: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(hr.OptionError, match=told):
        hr.DataLoader(dataset, **options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_workers": 1.5}, TypeError),
        ({"collate_fn": 5}, TypeError),
        ({"sampler": 5}, TypeError),
        ({"batch_sampler": 5}, TypeError),
        ({"prefetch_factor": 0, "num_workers": 1}, ValueError),
        ({"timeout": 1}, ValueError),
        ({"taill": 1}, TypeError),
    ],
)
def test_constructor_refuses_what_torch_refuses_later(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))) as caught:
        hr.DataLoader(NUMBERS, **options)
    assert error is TypeError or isinstance(caught.value, AssertionError), "code catches ours as torch's"


@pytest.mark.parametrize(
    ("options", "name", "value", "text"),
    [
        ({}, "timeout", 1, "_SingleProcessDataLoaderIter requires timeout == 0"),
        ({"num_workers": 1}, "prefetch_factor", 0, "prefetch_factor must be greater than 0"),
    ],
)
def test_iter_refuses_later_set_options_as_torch(options: dict[str, Any], name: str, value: int, text: str) -> None:
    loader = hr.DataLoader(NUMBERS, **options)
    setattr(loader, name, value)
    with pytest.raises(AssertionError, match=text):
        iter(loader)


@pytest.mark.usefixtures("accelerator")
def test_device_that_is_not_there_is_an_error_that_names_it() -> None:
    with pytest.raises(hr.OptionError, match="device='cuda:99' cannot be used here"):
        iter(hr.DataLoader(NUMBERS, num_workers=1, device="cuda:99"))


@pytest.mark.parametrize(("options", "expected"), [({"num_workers_batches": 2}, 2), ({}, 3)], ids=["RFC", "default"])
def test_batch_workers_have_the_rfcs_name_and_a_default(options: dict[str, Any], expected: int) -> None:
    with hr.DataLoader(NUMBERS, 4, num_workers=1, economic=True, prefetch_factor=3, **options) as loader:
        assert loader.options["num_batch_workers"] == expected


@pytest.mark.parametrize("economic", [False, True])
def test_batch_comes_without_waiting_once_it_is_ready(economic: bool) -> None:
    with hr.DataLoader(NUMBERS, 4, num_workers=1, economic=economic) as loader:
        iterator: Any = iter(loader)
        first, polls = None, 0
        while first is None:
            try:
                first = iterator.try_next()
            except hr.errors.NotReady:
                polls += 1
                assert polls < 10_000_000
        assert [first.tolist(), *read_all(iterator)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"num_workers": 2, "economic": True}, {"num_workers": 2, "workers": "thread"}],
    ids=["no workers", "workers", "economic", "threads"],
)
def test_batches_of_all_workers_go_through_the_mover(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []

    class Noting(Mover):
        def start(self, batch: Any) -> Any:
            moved.append(int(batch.sum()))
            return super().start(batch)

    monkeypatch.setattr("headrace.delivery.device.mover_to", lambda device: Noting(Backend(torch.device("cpu"))))
    loader = hr.DataLoader(NUMBERS, 2, device="fake", **options)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert moved == [1, 5, 9, 13]
    loader.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_seed_gives_other_random_numbers_each_epoch_and_the_same_for_the_same_epoch(persistent: bool) -> None:
    data = Made(lambda _: float(hr.rng().random()), 8)
    options: dict[str, Any] = {"num_workers": 2, "economic": True, "persistent_workers": persistent}
    with hr.DataLoader(data, 4, seed=5, **options) as loader:
        epochs = [read_all(iter(loader)) for _ in range(3)]
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
        loader.set_epoch(1)
        assert loader.epoch == 1
        assert read_all(iter(loader)) == epochs[1]
    with hr.DataLoader(data, 4, seed=6, **options) as loader:
        assert read_all(iter(loader)) != epochs[0]


class Wordy(Made):
    def __repr__(self) -> str:
        return "many\nlines"


class Own(hr.DataLoader[int]):
    pass


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: hr.DataLoader(Wordy(int), 2, num_workers=1),
            "DataLoader(Wordy(…), batch_size=2, num_workers=1, regime='torch')",
        ),
        (lambda: Own(Wordy(int)), "Own(Wordy(…), batch_size=1, num_workers=0, regime='torch')"),
        (lambda: hr.DataLoader(Numbers()), "DataLoader(Numbers(…), batch_size=1, num_workers=0, regime='headrace')"),
        (
            lambda: hr.DataLoader(Numbers().map(len)),
            "DataLoader(Numbers(…).map(len), batch_size=1, num_workers=0, regime='headrace')",
        ),
        (
            lambda: hr.DataLoader(Wordy(int), 2, num_workers=2, economic=True),
            "DataLoader(Wordy(…), batch_size=2, num_workers=2, regime='economic')",
        ),
    ],
)
def test_repr_has_class_data_and_options(make: Callable[[], hr.DataLoader[Any]], text: str) -> None:
    assert repr(make()) == text


def test_repr_of_a_stream_has_no_secrets() -> None:
    data = hr.stream("https://me:secret@host/a-{0..3}.tar?sig=secret", format="tar").decode("l8").to_tuple("png")
    text = repr(hr.DataLoader(data, batch_size=8))
    assert text.startswith("DataLoader(stream(https://host/a-0.tar?sig=*** and 3 more).decode(")
    assert text.endswith("batch_size=8, num_workers=0, regime='headrace')")
    assert "\n" not in text


def test_repr_of_a_long_chain_is_short_and_of_an_unmade_loader_no_error() -> None:
    data = hr.stream("a.tar")
    for _ in range(200):
        data = data.map(len)
    assert len(repr(hr.DataLoader(data))) < 300
    assert repr(hr.DataLoader.__new__(hr.DataLoader)).startswith("DataLoader(")
