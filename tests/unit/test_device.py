"""When a slab is reusable, on a device whose copies end when the test completes them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from unit.fake_device import FakeBackend, FakeEvent, Slabs, address_of, is_full_of

from headrace.delivery.device import Backend, Mover, Moving, mover_to
from headrace.errors import OptionError


@pytest.fixture
def slabs() -> Iterator[Slabs]:
    made = Slabs()
    yield made
    made.close()


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def mover(backend: FakeBackend) -> Iterator[Mover]:
    made = Mover(backend)
    yield made
    made.close()


@pytest.mark.parametrize("end", ["batch is dropped", "later copy fails"])
def test_slab_is_not_reusable_before_its_copies_end(slabs: Slabs, backend: FakeBackend, mover: Mover, end: str) -> None:
    copy = torch.full((1,), 7)
    if end == "batch is dropped":
        copy = mover.finish(mover.start(slabs.batch(7)))["x"]
    else:
        backend.copies_left = 1
        with pytest.raises(MemoryError, match="the device is full"):
            mover.start(slabs.batch(7))
    gc.collect()
    mover.let_go()
    assert slabs.returned == []
    backend.events[0].complete()
    mover.let_go()
    assert slabs.returned == [1]
    assert bool((copy == 7).all())


def test_slab_is_reusable_when_the_device_fails(
    slabs: Slabs, backend: FakeBackend, mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = mover.start(slabs.batch(7))
    with monkeypatch.context() as patch:
        patch.setattr(backend, "synchronize", Mock(side_effect=RuntimeError("the device has fallen off the bus")))
        with pytest.raises(RuntimeError, match="off the bus"):
            mover.drain()
    assert slabs.returned == [1]
    assert moving.host is None


def test_slab_is_not_reusable_while_views_of_it_exist(slabs: Slabs, backend: FakeBackend, mover: Mover) -> None:
    host = slabs.batch(7)
    batch = mover.finish(mover.start({"x": host["x"], "array": host["x"].numpy()}))
    del host
    backend.events[0].complete()
    mover.let_go()
    assert slabs.returned == []
    del batch
    assert slabs.returned == [1]


@pytest.mark.parametrize("end", ["drain", "unlock", "close", "collected"])
def test_slabs_and_pages_are_free_when_their_copies_end(slabs: Slabs, backend: FakeBackend, end: str) -> None:
    mover = Mover(backend)
    moving = [mover.start(slabs.batch(number, number)) for number in (1, 2, 3)]
    mover.lock_pages(1, slabs.memory())
    batches = [mover.finish(each) for each in moving]
    if end == "collected":
        del mover, moving
    elif end == "unlock":
        mover.unlocker()(1)  # the fake asserts that nothing is copied from there
        mover.drain()
    else:
        getattr(mover, end)()
    assert sorted(slabs.returned) == [1, 2, 3]
    assert len(backend.registered) == (end == "drain")
    assert all(is_full_of(batch, number) for number, batch in enumerate(batches, 1))


@settings(max_examples=60)
@given(st.data())
def test_no_slab_is_reused_before_its_copies_end_in_any_order_of_events(data: st.DataObject) -> None:
    slabs, backend = Slabs(), FakeBackend()
    mover = Mover(backend)
    free, out = {1, 2, 3}, dict[int, FakeEvent]()
    begun: list[tuple[Moving, int]] = []
    had: list[tuple[Any, int]] = []
    for value in range(1, data.draw(st.integers(1, 30))):
        step = data.draw(st.sampled_from(["start", "finish", "complete", "let_go", "drop"]))
        done = {n for n, event in out.items() if event.is_done}
        if step == "start" and free:
            number = data.draw(st.sampled_from(sorted(free)))
            free.remove(number)
            begun.append((mover.start(slabs.batch(value, number)), value))
            out[number] = backend.events[-1]
        elif step == "finish" and begun:
            moving, of = begun.pop(0)
            had.append((mover.finish(moving), of))
        elif step == "drop" and begun:
            begun.pop(data.draw(st.integers(0, len(begun) - 1)))
        elif step == "complete" and backend.events:
            data.draw(st.sampled_from(backend.events)).complete()
        else:
            mover.let_go()
            step = "let_go"
        assert step in ("drop", "complete") or done <= set(slabs.returned)
        for number in slabs.returned:
            assert out.pop(number).is_done
            free.add(number)
        slabs.returned.clear()
    mover.close()
    assert set(slabs.returned) == set(out)
    assert all(is_full_of(batch, of) for batch, of in had)
    slabs.close()


def test_receiving_stream_waits_for_the_batchs_own_copies(slabs: Slabs, backend: FakeBackend, mover: Mover) -> None:
    first, second = mover.start(slabs.batch(1, 1)), mover.start(slabs.batch(2, 2))
    batch = mover.finish(second)
    mover.finish(first)
    (event, tensors), (other, _) = backend.received
    assert (event, other) == (backend.events[1], backend.events[0])
    assert [id(tensor) for tensor in tensors] == [id(batch["x"]), id(batch["y"][0])]


def test_copies_are_freed_with_the_batch(slabs: Slabs, backend: FakeBackend, mover: Mover) -> None:
    batch = mover.finish(mover.start(slabs.batch(7)))
    backend.received.clear()
    backend.events[0].complete()
    backend.events[0]._copies.clear()
    tensor = weakref.ref(batch["x"])
    del batch
    assert tensor() is None


class Graph:
    def __init__(self, device: str) -> None:
        self.device = device

    def to(self, device: str) -> Graph:
        return Graph(device)


def test_values_without_host_tensors_are_moved_by_their_own_method_or_stay(mover: Mover, backend: FakeBackend) -> None:
    there, words, sparse = torch.empty(2, device="meta"), pack_sequence([torch.ones(2)]), torch.eye(3).to_sparse()
    batch = mover.finish(mover.start([there, 1, "text", Graph, Graph("cpu"), words, sparse]))
    assert batch[0] is there
    assert batch[1:4] == [1, "text", Graph]
    assert batch[4].device == "meta"
    assert batch[5].data.device.type == batch[6].device.type == "meta"
    assert batch[6].layout is torch.sparse_coo
    assert backend.received[0][1] == []


@pytest.mark.parametrize("can_register", [True, False])
def test_pages_are_locked_once_for_each_slab(slabs: Slabs, can_register: bool) -> None:
    backend = FakeBackend(can_register)
    mover = Mover(backend)
    slabs.batch(7)
    for _ in range(3):
        mover.lock_pages(1, slabs.memory())
    assert backend.asked == [address_of(slabs.memory())]
    assert backend.registered == backend.asked * can_register
    mover.unlock_pages(1)  # the fake refuses pages that it does not know
    mover.close()


def test_pages_stay_mapped_until_they_are_unlocked(slabs: Slabs, backend: FakeBackend, mover: Mover) -> None:
    slabs.batch(7)
    memory = slabs.memory()
    mapping = weakref.ref(memory.obj)
    mover.lock_pages(1, memory)
    slabs.close()
    del memory
    assert mapping() is not None
    mover.unlock_pages(1)
    assert mapping() is None
    assert backend.registered == []


def test_closed_mover_still_moves_and_locks_no_more_pages(slabs: Slabs, backend: FakeBackend, mover: Mover) -> None:
    mover.close()
    host = slabs.batch(7)
    mover.lock_pages(1, slabs.memory())
    batch = mover.finish(mover.start(host))
    backend.events[-1].complete()
    assert backend.registered == []
    assert is_full_of(batch, 7)


def test_cpu_gives_the_batch_itself_and_keeps_nothing(slabs: Slabs) -> None:
    mover, batch = mover_to("cpu"), slabs.batch(7)
    batch["graph"] = [pack_sequence([torch.ones(2)])]
    assert mover.finish(mover.start(batch)) is batch
    del batch
    assert slabs.returned == [1]
    mover.lock_pages(1, memoryview(bytearray(8)))
    mover.let_go()
    mover.drain()
    mover.close()


def test_device_without_streams_is_copied_to_at_once(slabs: Slabs) -> None:
    mover = Mover(Backend(torch.device("meta")))
    batch = mover.finish(mover.start(slabs.batch(7)))
    assert batch["x"].device.type == "meta"
    assert slabs.returned == [1]


def test_copy_wants_gradients_when_the_original_does() -> None:
    leaf = torch.ones(2, requires_grad=True)
    copy = Backend(torch.device("meta")).copy(leaf)
    assert copy.requires_grad
    assert copy.is_leaf


@pytest.mark.parametrize("device", ["nonsense", "meta:x", "cuda:4711", 1.5], ids=str)
def test_missing_device_is_refused_by_name(device: Any) -> None:
    with pytest.raises(OptionError, match=f"device={device!r} cannot be used here: "):
        mover_to(device)
