"""Batches on a real device: what arrives, from which memory, and loaders in front of a GPU."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.loops import state_after
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset
from unit.fake_device import Slabs, is_full_of

import headrace as hr
from headrace.delivery.device import CudaBackend, Mover, mover_to

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that CUDA or ROCm can use"),
    pytest.mark.usefixtures("accelerator"),
]

SIZE = 4 * 2**20
LONG = 1_000_000_000  # cycles: half a second and more, in which the test's few calls are made


@pytest.fixture
def slabs() -> Iterator[Slabs]:
    made = Slabs(SIZE)
    yield made
    made.close()


@pytest.fixture
def backend() -> CudaBackend:
    return CudaBackend(torch.device("cuda"))


@pytest.fixture
def mover(backend: CudaBackend) -> Iterator[Mover]:
    made = Mover(backend)
    yield made
    made.close()


def hold(backend: CudaBackend) -> None:
    with backend.copying():
        torch.cuda._sleep(LONG)


def in_slab(slabs: Slabs, mover: Mover, value: int, number: int = 1) -> dict[str, Any]:
    batch = slabs.batch(value, number)
    mover.lock_pages(number, slabs.memory(number))
    return batch


def test_batch_arrives_from_a_locked_slab(slabs: Slabs, mover: Mover) -> None:
    host = in_slab(slabs, mover, 7)
    assert host["x"].is_pinned()
    assert host["y"][0].is_pinned()
    batch = mover.finish(mover.start(host))
    assert batch["x"].device == batch["y"][0].device == torch.device("cuda", torch.cuda.current_device())
    assert is_full_of(batch, 7)


def test_slab_is_not_reusable_while_it_is_copied(slabs: Slabs, backend: CudaBackend, mover: Mover) -> None:
    host = in_slab(slabs, mover, 7)
    hold(backend)
    batch = mover.finish(mover.start(host))
    del host
    mover.let_go()
    assert slabs.returned == []
    mover.drain()
    assert slabs.returned == [1]
    assert is_full_of(batch, 7)


def test_trainers_stream_waits_for_the_copies(slabs: Slabs, backend: CudaBackend, mover: Mover) -> None:
    host = in_slab(slabs, mover, 7)
    hold(backend)
    batch = mover.finish(mover.start(host))
    assert int(batch["x"].sum(dtype=torch.int64)) == 7 * SIZE // 2


def test_memory_of_a_dropped_batch_is_not_reused_while_the_trainer_computes(slabs: Slabs, mover: Mover) -> None:
    trainer = torch.cuda.Stream()
    host, other = in_slab(slabs, mover, 7, 1), in_slab(slabs, mover, 9, 2)
    batch = mover.finish(mover.start(host))  # its memory is known to the allocator from here on
    torch.cuda.synchronize()
    del batch
    with torch.cuda.stream(trainer):
        batch = mover.finish(mover.start(host))
        torch.cuda._sleep(LONG)
        result = batch["x"].clone()
        del batch
        later = mover.finish(mover.start(other))
    torch.cuda.synchronize()
    assert bool((result == 7).all())
    assert is_full_of(later, 9)


def test_many_batches_over_few_slabs_arrive_whole(slabs: Slabs, mover: Mover) -> None:
    free = [1, 2, 3]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(300):
        if not free:
            mover.drain()
        mover.let_go()
        free += slabs.returned
        slabs.returned.clear()
        host = in_slab(slabs, mover, step % 200, free.pop())
        batch = mover.finish(mover.start(host))
        wrong += (batch["x"] != step % 200).sum() + (batch["y"][0] != step % 200).sum()
        del host, batch
    assert int(wrong) == 0


def test_pages_are_unlocked_when_the_mover_closes(slabs: Slabs, backend: CudaBackend) -> None:
    mover = Mover(backend)
    host = in_slab(slabs, mover, 7)
    hold(backend)
    batch = mover.finish(mover.start(host))
    mover.close()
    assert not host["x"].is_pinned()
    assert is_full_of(batch, 7)


def test_batch_arrives_when_pages_cannot_be_locked(slabs: Slabs, backend: CudaBackend, mover: Mover) -> None:
    host = slabs.batch(7)
    memory = slabs.memory()
    assert backend.register(memory)
    try:
        assert not backend.register(memory)  # it is locked already
        torch.zeros(1, device="cuda").add_(1).item()  # the failure does not reach others
    finally:
        backend.unregister(memory)
    backend.unregister(memory)
    torch.zeros(1, device="cuda").add_(1).item()
    assert not host["x"].is_pinned()
    hold(backend)
    batch = mover.finish(mover.start(host))
    assert is_full_of(batch, 7)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(2, 3),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(12)[::2],
        torch.empty(0, 3),
        torch.tensor(5, dtype=torch.bfloat16),
        torch.ones(3).expand(4, 3),
        torch.ones(2, dtype=torch.complex64).conj(),
    ],
    ids=["plain", "transposed", "strided", "empty", "scalar", "expanded", "conjugate"],
)
def test_tensors_of_every_form_arrive_equal(mover: Mover, tensor: torch.Tensor) -> None:
    (copy,) = mover.finish(mover.start([tensor]))
    assert copy.device.type == "cuda"
    assert copy.dtype == tensor.dtype
    assert torch.equal(copy.cpu(), tensor)


def test_values_that_move_themselves_arrive(mover: Mover) -> None:
    words = pack_sequence([torch.ones(3), torch.ones(2)])
    batch = mover.finish(mover.start({"words": words, "sparse": torch.eye(3).to_sparse()}))
    assert batch["words"].data.device.type == "cuda"
    assert batch["words"].batch_sizes.device.type == "cpu"
    assert torch.equal(batch["sparse"].to_dense().cpu(), torch.eye(3))


@pytest.mark.parametrize("device", ["cuda", 0, torch.device("cuda", 0)], ids=str)
def test_device_is_known_by_any_of_its_names(device: Any) -> None:
    mover = mover_to(device)
    assert mover is not None
    (copy,) = mover.finish(mover.start([torch.ones(2)]))
    assert copy.device == torch.device("cuda", 0)
    mover.close()


SHAPE = (3, 64, 64)
BATCH = 32
BATCHES = 40
BUSY = 20_000_000  # cycles, some 10 ms: longer than a batch takes


class Filled(Dataset[dict[str, torch.Tensor]]):
    """Sample i is an image full of i, and i beside it."""

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": torch.full(SHAPE, float(index)), "index": torch.tensor(index)}


def image_of(index: int) -> dict[str, np.ndarray[Any, Any] | int]:
    return {"image": np.full(SHAPE, index, np.float32), "index": index}


def dying_once(index: int, marker: str) -> dict[str, np.ndarray[Any, Any] | int]:
    if index == 300 and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return image_of(index)


def stream() -> Any:
    return hr.from_map(range(BATCH * BATCHES)).map(image_of)


class Checker:
    """Looks at batches on the device, late, and counts what is wrong there: the host never waits."""

    def __init__(self) -> None:
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.indices: list[torch.Tensor] = []

    def look(self, batch: Any) -> None:
        assert batch["image"].device.type == batch["index"].device.type == "cuda"
        torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]
        self.wrong += (batch["image"] != batch["index"].view(-1, 1, 1, 1)).sum()
        self.indices.append(batch["index"].clone())

    def assert_all_came(self, first: int = 0) -> None:
        assert int(self.wrong) == 0
        assert torch.cat(self.indices).tolist() == list(range(first, BATCH * BATCHES))


def assert_whole(batches: Iterable[Any], first: int = 0) -> None:
    """Each batch is looked at when it comes."""
    checker = Checker()
    for batch in batches:
        checker.look(batch)
    checker.assert_all_came(first)


LOADERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "data set in this process": (Filled, {}),
    "data set in workers": (Filled, {"num_workers": 2}),
    "data set in persistent workers": (Filled, {"num_workers": 2, "persistent_workers": True}),
    "data set in threads": (Filled, {"num_workers": 2, "workers": "thread"}),
    "data set in forked workers": (Filled, {"num_workers": 2, "multiprocessing_context": "fork"}),
    "data set, economic": (Filled, {"num_workers": 2, "economic": True}),
    "stream in this process": (stream, {}),
    "stream in workers": (stream, {"num_workers": 2}),
    "stream in threads": (stream, {"num_workers": 2, "workers": "thread"}),
}
each_loader = pytest.mark.parametrize("kind", LOADERS)


def loader_of(kind: str) -> Any:
    make, options = LOADERS[kind]
    return hr.DataLoader(make(), batch_size=BATCH, device="cuda", **options)


@each_loader
def test_batches_arrive_whole_in_each_of_three_epochs(kind: str) -> None:
    with loader_of(kind) as loader:
        for _ in range(3):
            assert_whole(loader)


@each_loader
def test_batches_arrive_whole_on_the_trainers_own_stream(kind: str) -> None:
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), loader_of(kind) as loader:
        assert_whole(loader)


@each_loader
def test_batches_that_are_kept_stay_what_they_are(kind: str) -> None:
    with loader_of(kind) as loader:
        kept = list(loader)
    assert_whole(kept)


@each_loader
def test_loop_that_ends_while_copies_run_leaves_the_next_one_whole(kind: str) -> None:
    with loader_of(kind) as loader:
        for taken in (1, 3):
            for _, batch in zip(range(taken), loader, strict=False):
                torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]
                del batch
        assert_whole(loader)


def test_async_loop_gets_whole_batches() -> None:
    async def train() -> None:
        checker = Checker()
        async with hr.DataLoader(stream(), batch_size=BATCH, num_workers=2, device="cuda") as loader:
            async for batch in loader:
                checker.look(batch)
        checker.assert_all_came()

    asyncio.run(train())


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=["in this process", "workers"])
@pytest.mark.parametrize("data", [Filled, stream], ids=["data set", "stream"])
def test_pin_memory_gives_pinned_batches(data: Any, options: dict[str, Any]) -> None:
    def moved(batch: Any) -> Any:
        assert all(value.is_pinned() for value in batch.values())
        return {key: value.to("cuda", non_blocking=True) for key, value in batch.items()}

    with hr.DataLoader(data(), batch_size=BATCH, pin_memory=True, **options) as loader:
        assert_whole(map(moved, loader))


def test_killed_worker_costs_no_batch(tmp_path: Path) -> None:
    data = hr.from_map(range(BATCH * BATCHES)).map(partial(dying_once, marker=str(tmp_path / "died")))
    with hr.DataLoader(data, batch_size=BATCH, num_workers=2, device="cuda") as loader:
        assert_whole(loader)
    assert (tmp_path / "died").exists()


def test_state_counts_batches_that_the_trainer_has_had() -> None:
    state = state_after(loader_of("stream in workers"), 7)
    with loader_of("stream in workers") as loader:
        loader.load_state_dict(state)
        assert_whole(loader, first=7 * BATCH)


def test_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(hr.OptionError, match=r"^device='cuda:99' cannot be used here: "):
        next(iter(hr.DataLoader(stream(), batch_size=BATCH, device="cuda:99")))


class OnDevice(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.table = torch.arange(64.0, device="cuda")

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.table[index]


def test_data_on_the_device_come_from_a_loader_without_workers_and_are_an_error_with_workers() -> None:
    batches = list(hr.DataLoader(OnDevice(), batch_size=32))
    assert [batch.device.type for batch in batches] == ["cuda", "cuda"]
    assert torch.equal(torch.cat(batches).cpu(), torch.arange(64.0))
    with pytest.raises(RuntimeError, match="CUDA"):
        next(iter(hr.DataLoader(OnDevice(), batch_size=32, num_workers=1)))
