"""The chains of one loader, as its workers receive them."""

from __future__ import annotations

import io
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace._util.functions import is_async
from headrace._util.shared_memory import Segment, close_all, sending_descriptors
from headrace.errors import CannotCarryError, LoaderClosedError
from headrace.torch_compat import serialize
from headrace.torch_compat.picklers import OutwardPacker
from headrace.torch_compat.serialize import cannot_carry, packed_size
from headrace.types import Buffer
from headrace.workers.tasks import CHAINS, Chain, ChainsMessage, SpecMessage, Step, StreamChains

if TYPE_CHECKING:
    from headrace.workers.executor import WorkerLink


class PackedChains:
    """Chains of a stream in shared memory, for all workers, with the descriptors that they need.

    Workers without shared memory receive the bytes of `message`.
    """

    def __init__(self, parts: list[Buffer], descriptors: list[int]) -> None:
        self.segment = Segment.create(serialize.packed_size(parts))
        self.lengths, self.descriptors = serialize.write(parts, self.segment.view), descriptors

    def load(self) -> StreamChains:
        chains: StreamChains = serialize.unpack_in_worker(self.segment.view, self.lengths, list(self.descriptors))
        return chains

    def message(self, stream: int) -> ChainsMessage:
        return ChainsMessage(stream, bytes(self.segment.view), self.lengths)

    def is_of(self, parts: Sequence[Buffer], descriptors: Sequence[int]) -> bool:
        """True if chains that were pickled again are equal to these."""
        return are_same(descriptors, self.descriptors) and is_written(parts, self.lengths, self.segment.view)

    def close(self) -> None:
        self.segment.close()
        close_all(self.descriptors)

    __del__ = close


class KnownChains:
    """A weak reference to chains, for threads of this process. Their functions may refer to the loader."""

    def __init__(self, chains: StreamChains) -> None:
        self._chains = weakref.ref(chains)

    def load(self) -> StreamChains:
        found = self._chains()
        if found is None:
            raise LoaderClosedError("the loader is gone")
        return found

    def is_of(self, chains: StreamChains) -> bool:
        return self._chains() is chains

    def close(self) -> None: ...


SharedChains = PackedChains | KnownChains
"""Chains of a stream in the form that an executor's workers can receive."""


class Chains:
    """The chains that workers receive when they start, and when chains of a stream change.

    `pack` and `pack_changed` may be called in any thread, all other methods on the engine's loop. `modules` is filled
    with the module files that chains need, and their modification times.
    """

    def __init__(
        self,
        links: Callable[[], Iterable[WorkerLink]],
        *,
        shares_memory: bool,
        shares_objects: bool,
        modules: dict[str, int],
    ) -> None:
        self._links, self._modules = links, modules
        self._shares_memory, self._shares_objects = shares_memory, shares_objects
        self._streams: dict[int, SharedChains] = {}
        self._specs: dict[int, bytes] = {}

    def pack(self, chains: StreamChains) -> SharedChains:
        """Convert chains for `learn`, or raise CannotCarryError."""
        return KnownChains(chains) if self._shares_objects else PackedChains(*self._parts(chains))

    def pack_changed(self, chains: StreamChains) -> SharedChains | None:
        """Pickle chains again, as their functions may refer to changed objects. None: no change.

        Large arrays are not copied for this, only compared.
        """
        match self._streams.get(chains.stream):
            case KnownChains() as known:  # the functions are shared with the trainer
                return None if known.is_of(chains) else KnownChains(chains)
            case PackedChains() as known:
                parts, descriptors = self._parts(chains)
                if known.is_of(parts, descriptors):
                    close_all(descriptors)
                    return None
                return PackedChains(parts, descriptors)
        return self.pack(chains)

    def _parts(self, chains: StreamChains) -> tuple[list[Buffer], list[int]]:
        descriptors: list[int] = []
        try:
            modules: set[str] = set()
            parts = serialize.pack_for_workers(chains, descriptors, modules)
            if descriptors and not self._shares_memory:
                close_all(descriptors)
                raise CannotCarryError(
                    "they refer to memory, files or connections that workers are to share with this "
                    "process, and these workers share nothing with it"
                )
        except Exception as error:
            refusal = cannot_carry(error, _named(chains.values()), 'or give workers="thread"')
            refusal.add_note("stage: work")
            raise refusal from error
        self._modules |= serialize.files_of(modules)
        return parts, descriptors

    def learn(self, stream: int, chains: SharedChains) -> None:
        """Register chains of a stream with current and future workers. They replace older ones."""
        if stream in self._streams:
            self._streams[stream].close()
        self._streams[stream] = chains
        self._specs = {number: spec for number, spec in self._specs.items() if number // CHAINS != stream}
        for link in self._links():
            link.learn(stream, chains)

    def learn_changed(self, stream: int, chains: SharedChains, *, is_in_use: bool) -> None:
        """Register changed chains, which a running epoch will use too."""
        specs = self._specs
        self.learn(stream, chains)
        for number in specs.keys() - self._specs.keys() if is_in_use else ():
            self.learn_spec(number, specs[number])  # the running epoch needs it, and collates other samples

    def learn_spec(self, number: int, spec: bytes) -> None:
        """Register the spec of a chain's samples with all workers. Empty: discard it."""
        self._specs[number] = spec
        for link in self._links():
            link.send(SpecMessage(number, spec))

    def tell(self, link: WorkerLink) -> None:
        """Send all chains and specs to a new worker."""
        for stream, chains in self._streams.items():
            link.learn(stream, chains)
        for number, spec in self._specs.items():
            link.send(SpecMessage(number, spec))

    def close(self) -> None:
        for chains in self._streams.values():
            chains.close()


def _named(chains: Iterable[Chain]) -> dict[str, object]:
    """Return the objects of chains by names that the user knows."""
    from headrace.workers.map_dataset_steps import Begin

    steps, others = dict[str, object](), dict[str, object]()
    for chain in chains:
        if isinstance(chain.begin, Begin):
            return {**chain.begin.named, "collate_fn": chain.collate}
        for step in (*chain.steps, *chain.after):
            steps |= getattr(step.fn, "named", {step.name: step.fn})
        others |= {"collate_fn": chain.collate, "worker_init_fn": chain.init}
    return steps | others


_STEP_BYTES = 2**20  # fits into the processor's cache


def is_written(parts: Sequence[Buffer], lengths: Sequence[int], target: memoryview) -> bool:
    """True if `serialize.write(parts, target)`, which returned `lengths`, would change nothing."""
    if tuple(map(len, parts)) != tuple(lengths):
        return False
    offset = 0
    for part in parts:
        if not _are_equal(memoryview(part), target[offset : offset + len(part)]):
            return False
        offset += packed_size([part])
    return True


def are_same(descriptors: Sequence[int], others: Sequence[int]) -> bool:
    """True if the descriptors refer to the same files, shared memory and connections."""
    return [_identity(fd) for fd in descriptors] == [_identity(fd) for fd in others]


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _are_equal(one: memoryview, other: memoryview) -> bool:
    a, b, step = np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8), _STEP_BYTES
    return all(np.array_equal(a[at : at + step], b[at : at + step]) for at in range(0, len(a), step))


_SEARCHED_BYTES = 1 << 20
_OURS_WITHOUT_TORCH = {
    "headrace",
    "headrace.ops.batch",
    "headrace.ops.filter",
    "headrace.ops.flat_map",
    "headrace.ops.map",
    "headrace.ops.select",
    "headrace.ops.tokenize",
    "headrace._util.functions",
    "headrace.torch_compat.picklers",
    "headrace.workers.randomness",
}


def may_use_torch(steps: Iterable[Step], functions: Iterable[object]) -> bool:
    """True if steps, or other functions that workers call, mention torch.

    A wrong answer costs time only: a worker imports torch when it needs it.
    """
    called = [step.fn for step in steps if not step.is_without_torch and not is_async(step.fn)]
    descriptors: list[int] = []
    search = _Search()
    try:
        with sending_descriptors(descriptors):
            search.dump([*called, *functions])
    except Exception:  # too large to search, or not picklable, which is reported when it is sent
        return True
    finally:
        close_all(descriptors)
    return search.has_found or any(map(_names_torch, search.modules))


class _Search(OutwardPacker):
    """Pickles functions as for workers, and looks for torch in their modules and code."""

    def __init__(self) -> None:
        super().__init__(_Sink(), lambda _: None)
        self.has_found = False

    def reducer_override(self, obj: object) -> Any:
        code = obj.__code__ if isinstance(obj, FunctionType) else obj
        imports_torch = isinstance(code, CodeType) and "torch" in code.co_names
        self.has_found |= imports_torch or _top_of(type(obj)) == "torch"
        return super().reducer_override(obj)


class _Sink(io.BytesIO):
    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def write(self, piece: Any, /) -> int:
        self._count += len(piece)
        if self._count > _SEARCHED_BYTES:
            raise OverflowError
        return len(piece)


def _names_torch(module: str) -> bool:
    """True if a module is torch's, refers to torch, or is one of headrace's that may need torch."""
    top = module.partition(".")[0]
    if top in ("headrace", "__main__"):  # functions of a script are pickled by value, with their globals
        return top == "headrace" and module not in _OURS_WITHOUT_TORCH
    return top == "torch" or any(_top_of(value) == "torch" for value in vars(sys.modules.get(module, sys)).values())


def _top_of(value: object) -> str:
    is_module = isinstance(value, ModuleType)
    name = value.__name__ if is_module else getattr(value, "__module__", None)  # type: ignore[attr-defined]
    return name.partition(".")[0] if isinstance(name, str) else ""
