"""Batches on a real device: what arrives, from which memory, and when slabs come back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data._utils.pin_memory import pin_memory
from unit.fake_device import Slabs, is_full_of

from headrace.delivery.device import CudaBackend, Mover, mover_to
from headrace.delivery.staging import PinStage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU that CUDA or ROCm can use"),
    pytest.mark.usefixtures("accelerator"),
]

SIZE = 4 * 2**20
LONG = 1_000_000_000  # cycles: half a second and more, in which the test's few calls are made
DEADLINE_S = 20.0


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


def test_leaf_that_wants_gradients_arrives_as_one(mover: Mover) -> None:
    (copy,) = mover.finish(mover.start([torch.ones(2, requires_grad=True)]))
    copy.sum().backward()
    assert torch.equal(copy.grad.cpu(), torch.ones(2))


def test_values_that_move_themselves_arrive(mover: Mover) -> None:
    words = pack_sequence([torch.ones(3), torch.ones(2)])
    batch = mover.finish(mover.start({"words": words, "sparse": torch.eye(3).to_sparse()}))
    assert batch["words"].data.device.type == "cuda"
    assert batch["words"].batch_sizes.device.type == "cpu"
    assert torch.equal(batch["sparse"].to_dense().cpu(), torch.eye(3))


def test_batches_may_be_started_in_a_thread_and_finished_here(slabs: Slabs, mover: Mover) -> None:
    stage = PinStage(mover.start, torch.accelerator.current_device_index())
    try:
        for value in range(1, 6):
            stage.put(partial(in_slab, slabs, mover, value, value))
            assert is_full_of(mover.finish(stage.take(DEADLINE_S)()), value)
    finally:
        stage.close()


def test_pin_thread_pins_as_torch_does() -> None:
    stage = PinStage(pin_memory, torch.accelerator.current_device_index())
    stage.put(lambda: {"x": torch.arange(1000)})
    try:
        batch = stage.take(DEADLINE_S)()
    finally:
        stage.close()
    assert batch["x"].is_pinned()
    assert torch.equal(batch["x"], torch.arange(1000))


def test_pin_threads_error_names_the_device() -> None:
    class Odd:
        def pin_memory(self) -> None:
            raise ValueError("odd")

    index = torch.accelerator.current_device_index()
    stage = PinStage(pin_memory, index)
    stage.put(Odd)
    try:
        with pytest.raises(
            ValueError, match=rf"^Caught ValueError in pin memory thread for device {index}\.\nOriginal"
        ):
            stage.take(DEADLINE_S)()
    finally:
        stage.close()


@pytest.mark.parametrize("device", ["cuda", 0, torch.device("cuda", 0)], ids=str)
def test_device_is_known_by_any_of_its_names(device: Any) -> None:
    mover = mover_to(device)
    (copy,) = mover.finish(mover.start([torch.ones(2)]))
    assert copy.device == torch.device("cuda", 0)
    mover.close()
