"""Ranks: this process's share of the data, and a check that all ranks use the same plan."""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from headrace._util import check
from headrace.errors import OptionError, StateMismatchError
from headrace.options import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store

# Usual names of mesh dimensions. Members of a data dimension read different samples, those of a replica dimension the
# same. A name used for both, such as "ep", is in neither set: the user must decide.
DATA_DIMS = {"dp", "dp_replicate", "dp_shard", "data", "ddp", "fsdp", "batch", "replicate", "shard"}
REPLICA_DIMS = {"tp", "tensor", "model", "sp", "sequence", "cp", "context", "pp", "pipe", "pipeline"}

_GIVE = "give ranks=hr.Ranks(rank=…, world_size=…)"
_CHECKS_PER_S = 4000  # requests to a store by all ranks together
_GRACE_S = 10.0
_AGREED = "agreed"

# Number of comparisons of each kind within a process group, so that epochs use different store keys. Kept by group, not
# by loader: a program may have many loaders, and makes the same ones on every rank.
_compared: WeakKeyDictionary[object, dict[str, itertools.count[int]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class RankShare:
    """The share of every step that this process reads.

    Attributes:
        rank: Data rank, the number of the share. Processes of one data rank read the same samples.
        world: Number of shares.
        is_torch: True if a torch process group has other processes to compare plans with.
        members: Ascending ranks of that group that compare. None: all.
    """

    rank: int = 0
    world: int = 1
    is_torch: bool = False
    members: Sequence[int] | None = None

    def agree(self, what: str, digest: int) -> None:
        """Wait for all ranks to call this for `what`. Compare their digests and shares.

        The call does not block other threads or interrupts. It is not a collective: each rank makes a few small
        requests to the process group's store, however many ranks there are. The entries are deleted when all have left.
        Every rank must make its calls for one `what` in the same order.

        Args:
            what: Name in errors, such as "the plan of the training data".
            digest: 64 bits.

        Raises:
            StateMismatchError: digests differ. The message names the ranks, and every rank raises the same.
            OptionError: some ranks did not call in time, or their shares do not form a whole. Every rank raises it.
        """
        import torch.distributed as dist

        if not (self.is_torch and dist.is_initialized()):
            return
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_group, _get_default_store

        members = list(range(dist.get_world_size()) if self.members is None else self.members)
        name = f"{blake2b(str(members).encode(), digest_size=8).hexdigest()}/{what}"
        number = next(_compared.setdefault(_get_default_group(), {}).setdefault(name, itertools.count()))
        store = PrefixStore(f"headrace/{name}/{number}", _get_default_store())
        timeout_s = float(store.timeout.total_seconds())  # type: ignore[attr-defined]
        try:
            _compare(store, what, members, dist.get_rank(), (digest, self.rank, self.world), timeout_s)
        except dist.DistError as error:
            error.add_note(f"while headrace compared {what} among ranks; has the process that keeps their store ended?")
            raise


def find_ranks(ranks: Ranks) -> RankShare:
    """Return this process's share, from the first source that gives it.

    Sources are, in order: the option; the data dimensions of its mesh; torch's default process group; RANK and
    WORLD_SIZE, as torchrun sets them; Open MPI's variables; a task of Slurm's `srun`. Otherwise there is one share.

    Raises:
        OptionError: a mesh or a variable cannot be used, or two sources disagree. The message names what to give.
    """
    comparing = _comparing() if ranks.compare else 0
    if ranks.rank is not None and ranks.world_size is not None:
        number, world = int(ranks.rank), int(ranks.world_size)
        # With another world size than the group's, it is unknown which processes read.
        return RankShare(number, world, is_torch=comparing == world > 1)
    if ranks.mesh is not None:
        number, world, members = _place_in(ranks.mesh, ranks.dims)
        return RankShare(number, world, comparing > 1 and len(members) > 1, members)
    group = _of_group()
    if group is not None:
        return RankShare(*group, is_torch=comparing > 1)
    # Before Slurm: Open MPI may start its daemons by srun, one per node, and Slurm's variables then describe these.
    return RankShare(
        *(
            _of_environment("RANK", "WORLD_SIZE")
            or _of_environment("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
            or _of_slurm()
            or (0, 1)
        )
    )


def _unclear(why: str) -> OptionError:
    return OptionError(f"{why}, or {_GIVE}")


def _comparing() -> int:
    """Return the default process group's size if it has a store, else 0."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_backend() == "fake":  # simulates others
        return 0
    from torch.distributed.distributed_c10d import _get_default_store

    return dist.get_world_size() if _get_default_store() is not None else 0  # the MPI backend has none


def _place_in(mesh: DeviceMesh, data_dims: Sequence[str] | None) -> tuple[int, int, tuple[int, ...]]:
    """Return (data rank, number of data ranks, the mesh's ranks in the process group)."""
    sizes = list(mesh.mesh.shape)
    are_data = _are_data(mesh.mesh_dim_names, sizes, data_dims)
    place = mesh.get_coordinate()
    members = tuple(sorted(mesh.mesh.flatten().tolist()))
    if place is None:
        raise _unclear(f"this process is not among ranks {_listed(members)} of the mesh: give the mesh it is in")
    rank, world = 0, 1
    for at, size, is_data in zip(place, sizes, are_data, strict=True):
        if is_data:  # row-major: the last data dimension varies fastest
            rank, world = rank * size + at, world * size
    return rank, world, members


def _are_data(names: Sequence[str] | None, sizes: list[int], data_dims: Sequence[str] | None) -> list[bool]:
    if not names:
        if data_dims is not None or len(sizes) > 1:
            raise _unclear(
                f"the dimensions of the mesh, {sizes}, have no names by which hr.Ranks(dims=…) could select "
                "those that are data parallel: make it with mesh_dim_names="
            )
        return [True]
    shape = dict(zip(names, sizes, strict=True))
    if data_dims is None:
        unknown = [name for name in names if shape[name] > 1 and name not in DATA_DIMS | REPLICA_DIMS]
        if unknown:
            raise OptionError(
                f"do samples differ along {unknown} of the mesh {shape}? Name all dimensions along which they "
                'do by dims=, as in hr.Ranks(mesh=mesh, dims=("dp_replicate", "dp_shard"))'
            )
        return [name in DATA_DIMS for name in names]
    wanted = {data_dims} if isinstance(data_dims, str) else set(data_dims)
    for name in sorted(wanted):
        check.one_of("Ranks: dims", name, names, f", the dimensions of the mesh {shape}")
    return [name in wanted for name in names]


def _of_group() -> tuple[int, int] | None:
    """Return rank and size in the default process group. A launcher must not contradict."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, number in (("RANK", rank), ("WORLD_SIZE", world)):
        if _number(name) not in (None, number):
            raise _unclear(
                f"for torch.distributed this is rank {rank} of {world}, but the environment has "
                f"{name}={_number(name)}: unset RANK and WORLD_SIZE"
            )
    return rank, world


def _of_slurm() -> tuple[int, int] | None:
    """Return rank and size of a Slurm step.

    Batch scripts and shells of `salloc` see the job's variables but are one process: in no step, or in a step with one
    task. A shell of `srun --pty` may be one of several tasks, and is the only one with a terminal.
    """
    if "SLURM_STEP_ID" not in os.environ or os.isatty(0):
        return None
    return _of_environment(
        "SLURM_PROCID", "SLURM_STEP_NUM_TASKS" if _number("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    )


def _of_environment(rank_name: str, world_name: str) -> tuple[int, int] | None:
    rank, world = _number(rank_name), _number(world_name)
    if rank is None and world in (None, 1):
        return None
    if rank is None or world is None or rank >= world:
        raise _unclear(
            f"the environment has {rank_name}={'(unset)' if rank is None else rank} and "
            f"{world_name}={'(unset)' if world is None else world}, which do not go together: mend both"
        )
    return rank, world


def _number(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if text and not (text.isascii() and text.isdecimal()):
        raise _unclear(f"the environment has {name}={text!r}, which is no rank or size: unset it")
    return int(text) if text else None


def _compare(
    store: Store, what: str, members: list[int], me: int, entry: tuple[int, int, int], timeout_s: float
) -> None:
    """Compare (digest, data rank, world) of all members, through a store used only once.

    Each member writes its entry. One member judges: the last to arrive, or the first whose time is up. The others wait
    for its verdict. So all continue or all raise, late members too, and only the judge reads all entries.
    """
    longest_s = max(0.01, len(members) / _CHECKS_PER_S)
    store.set(f"entry/{me}", " ".join(map(str, entry)))
    is_last = store.add("came", 1) == len(members)
    if is_last or not _becomes(lambda: store.check(["verdict"]), timeout_s, longest_s):
        if store.add("judges", 1) == 1:
            store.set("verdict", _verdict(store, what, members, timeout_s))
        if not _becomes(lambda: store.check(["verdict"]), _GRACE_S, longest_s):
            raise OptionError(f"{what}: the rank that compared it for all has ended meanwhile")
    verdict = store.get("verdict").decode()
    is_agreed = verdict == _AGREED
    with suppress(RuntimeError, NotImplementedError):  # the store is gone, or cannot delete
        if is_agreed:
            store.delete_key(f"entry/{me}")
        store.add("left", 1)
        # The first member usually hosts the store. If it ended now, the others would get a connection error and no
        # verdict. An error's verdict stays for late members.
        if me == members[0]:
            all_left = _becomes(lambda: store.add("left", 0) >= store.add("came", 0), _GRACE_S, longest_s)
            for key in ("came", "judges", "verdict", "left") if all_left and is_agreed else ():
                store.delete_key(key)
    if not is_agreed:
        kind, _, text = verdict.partition(": ")
        raise (StateMismatchError if kind == StateMismatchError.__name__ else OptionError)(text)


def _becomes(condition: Callable[[], bool], timeout_s: float, longest_s: float) -> bool:
    """Poll a condition, with growing pauses up to `longest_s`. Return False when time is up.

    The store's own `wait` is not used. It blocks the process's only connection, which torch's watchdogs share, cannot
    be interrupted, and writes to stderr on a timeout.
    """
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while not condition():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, longest_s)
    return True


def _verdict(store: Any, what: str, members: list[int], timeout_s: float) -> str:
    """Return `_AGREED`, or the name and text of the error that all members raise."""
    keys = {f"entry/{member}": member for member in members}
    if store.add("came", 0) < len(members):
        absent = _listed([member for key, member in keys.items() if not store.check([key])])
        return (
            f"OptionError: {what} is compared among {len(members)} ranks, and these have not come to iterate within "
            f"{timeout_s:g} s: {absent}; give ranks=hr.Ranks(compare=False) to loaders that not all ranks iterate over"
        )
    answers = store.multi_get(list(keys)) if store.has_extended_api() else [store.get(key) for key in keys]
    digests, parts = defaultdict(list), defaultdict(list)
    for member, answer in zip(members, answers, strict=True):
        digest, rank, world = map(int, answer.split())
        digests[digest].append(member)
        parts[rank, world].append(member)
    worlds = {world for _, world in parts}
    if len(worlds) > 1 or {rank for rank, _ in parts} != set(range(*worlds)):
        seen = _few([f"part {rank} of {world} by {_listed(parts[rank, world])}" for rank, world in sorted(parts)])
        return f"OptionError: ranks do not read a whole: {seen}; give all the same mesh, or {_GIVE}"
    if len(digests) > 1:
        seen = _few([f"{digest:016x} on {_listed(digests[digest])}" for digest in digests])
        mend = (
            "give all the same data, seed, options and state, and have them iterate over their loaders in the same "
            "order; hr.Ranks(compare=False) is for loops that not all ranks run"
        )
        return f"StateMismatchError: {what} is not the same on all ranks: {seen}; {mend}"
    return _AGREED


def _listed(numbers: Sequence[int]) -> str:
    """Format ascending numbers, with runs such as "3-7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return _few(["-".join(map(str, run)) for run in runs], ", ")


def _few(texts: list[str], between: str = "; ") -> str:
    return between.join(texts[:8]) + (f"{between}and {len(texts) - 8} more" if len(texts) > 8 else "")
