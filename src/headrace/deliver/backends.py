"""Backends of the devices that batches can be moved to."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from headrace.deliver.device import Event, Movable, Mover, StillMover
from headrace.errors import OptionError

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device


def mover_to(device: torch.device | str | int) -> Mover:
    """Return a mover to a device.

    Args:
        device: An index, or a type without an index, refers to this thread's current accelerator.

    Raises:
        OptionError: there is no such device here.
    """
    try:
        target = torch.device(device)
        if target.type == "cpu":
            return StillMover(BlockingBackend(target))
        if target.type == "cuda":
            return Mover(CudaBackend(target))
        torch.empty(0, device=target)
    except (RuntimeError, TypeError, AssertionError) as error:  # torch asserts that it was built for the device
        reason = str(error).partition("\n")[0]
        raise OptionError(f"device={device!r} cannot be used here: {reason}") from error
    return Mover(BlockingBackend(target))


class CudaBackend:
    """An NVIDIA GPU, or an AMD GPU by the same API. Without an index, the current device.

    Raises:
        RuntimeError, AssertionError: torch cannot use the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = torch.empty(0, device=device).device  # with its index
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def copying(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.detach()
        if not source.is_pinned():  # not in a slab, or the slab's pages could not be locked
            source = torch.empty_like(source, pin_memory=True).copy_(source)  # pin_memory() refuses expanded ones
        return source.to(self.device, non_blocking=True).requires_grad_(tensor.requires_grad)

    def record(self) -> Event:
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def receive(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)  # type: ignore[arg-type]
        for tensor in tensors:
            tensor.record_stream(stream)

    def move(self, value: Movable) -> object:
        return value.to(self.device)

    def register(self, memory: memoryview) -> bool:
        with torch.cuda.device(self.device):
            if int(_cudart().cudaHostRegister(_address(memory), memory.nbytes, _PORTABLE)) == 0:
                return True
            self._forget_error()
            return False

    def unregister(self, memory: memoryview) -> None:
        with torch.cuda.device(self.device):  # else a thread without a device would initialize device 0
            if int(_cudart().cudaHostUnregister(_address(memory))):
                self._forget_error()

    def synchronize(self) -> None:
        self._stream.synchronize()

    def _forget_error(self) -> None:
        """Clear a failed registration's error. CUDA would report it with this thread's next kernel."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.device).add_(1)


class BlockingBackend:
    """Any device of torch without streams: a copy is done when the call returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def copying(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self.device).requires_grad_(tensor.requires_grad)

    def record(self) -> Event:
        return _Done()

    def receive(self, event: Event, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def move(self, value: Movable) -> object:
        return value.to(self.device)

    def register(self, memory: memoryview) -> bool:  # noqa: ARG002
        return False

    def unregister(self, memory: memoryview) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
