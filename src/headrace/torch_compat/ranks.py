"""Which part of the data this process reads, among how many, and whether all of them read by the same plan."""

from __future__ import annotations

import itertools
import operator
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from headrace.errors import OptionError, StateMismatchError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store

# What those who make a mesh call its dimensions. Members of a data dimension read different samples, those of a replica
# dimension compute on the same ones. A name that is used for both, such as "ep", is in neither: the user has to say.
DATA_DIMS = {"dp", "dp_replicate", "dp_shard", "data", "ddp", "fsdp", "batch", "replicate", "shard"}
REPLICA_DIMS = {"tp", "tensor", "model", "sp", "sequence", "cp", "context", "pp", "pipe", "pipeline"}

_GIVE = "give rank= and world_size="
_CHECKS_PER_S = 4000  # that a store is asked for by all ranks together
_GRACE_S = 10.0
_AGREED = "agreed"

# How often each thing was compared within a process group, so that one epoch's entries are not another's. The group has
# it and not a loader: a program may have many loaders, and makes the same ones on every rank.
_compared: WeakKeyDictionary[object, dict[str, itertools.count[int]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Ranks:
    """The part of every step that this process reads.

    Attributes:
        rank: the number of its part, its data rank; processes of the same data rank read the same samples.
        world: how many parts there are.
        is_torch: whether there are other processes, of a process group of torch's, to compare plans with.
        members: the ranks in that group that compare, in ascending order; None: all of them.
    """

    rank: int = 0
    world: int = 1
    is_torch: bool = False
    members: Sequence[int] | None = None

    def agree(self, what: str, digest: int, *, timeout_s: float | None = None) -> None:
        """Return when all ranks have called this for `what` with the same digest, and make a whole world together.

        It blocks, but not other threads or interrupts, and is no collective: each rank makes some small requests to the
        process group's store, however many ranks there are, and what is kept there is deleted when all have left.
        Every rank has to make its calls for the same `what` in the same order.

        Args:
            what: named in errors, such as "the plan of the training data".
            digest: 64 bits.
            timeout_s: how long the other ranks are waited for; None: as long as the group's store waits by default.

        Raises:
            StateMismatchError: digests differ. It names the ranks, and every rank raises the same.
            OptionError: some ranks did not come in time, or they count themselves differently; on every rank, too.
        """
        import torch.distributed as dist

        if not (self.is_torch and dist.is_initialized()):
            return
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_group, _get_default_store

        members = list(range(dist.get_world_size()) if self.members is None else self.members)
        name = f"{blake2b(str(members).encode(), digest_size=8).hexdigest()}/{what}"
        number = next(_compared.setdefault(_get_default_group(), {}).setdefault(name, itertools.count()))
        store = PrefixStore(f"headrace/{name}/{number}", _get_default_store())
        if timeout_s is None:
            timeout_s = float(store.timeout.total_seconds())  # type: ignore[attr-defined]
        try:
            _compare(store, what, members, dist.get_rank(), (digest, self.rank, self.world), timeout_s)
        except dist.DistError as error:
            error.add_note(f"while headrace compared {what} among ranks; has the process that keeps their store ended?")
            raise


def find_ranks(
    *,
    rank: int | None = None,
    world_size: int | None = None,
    device_mesh: DeviceMesh | None = None,
    data_dims: Sequence[str] | None = None,
    ranks: Literal["all", "local"] = "all",
) -> Ranks:
    """This process's part, by the first of these that says it.

    The arguments; the data dimensions of the mesh; torch's default process group; RANK and WORLD_SIZE, as torchrun sets
    them; Open MPI's variables; a task of Slurm's `srun`. Else there is one part.

    Args:
        rank: the number of this process's part.
        world_size: how many parts there are.
        device_mesh: a DeviceMesh of torch's that this process is in.
        data_dims: the mesh's dimensions whose members read different samples; None: those with usual names.
        ranks: "local": plans are never compared, as not all ranks iterate.

    Raises:
        OptionError: an argument or a variable cannot be used, or two sources disagree; it says what to give.
    """
    if ranks not in ("all", "local"):
        raise OptionError(f"ranks={ranks!r} is neither 'all' nor 'local'")
    if data_dims is not None and device_mesh is None:
        raise OptionError(f"data_dims={data_dims!r} are dimensions of a mesh: give device_mesh=, too")
    comparing = _comparing() if ranks == "all" else 0
    if rank is not None or world_size is not None:
        number, world = _given(rank, world_size)
        # In another world than the group's, nobody knows which processes read.
        return Ranks(number, world, is_torch=comparing == world > 1)
    if device_mesh is not None:
        number, world, members = _place_in(device_mesh, data_dims)
        return Ranks(number, world, comparing > 1 and len(members) > 1, members)
    group = _of_group()
    if group is not None:
        return Ranks(*group, is_torch=comparing > 1)
    # Open MPI may start its own processes by srun, one on each node, which then says less than Open MPI does.
    return Ranks(
        *(
            _of_environment("RANK", "WORLD_SIZE")
            or _of_environment("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
            or _of_slurm()
            or (0, 1)
        )
    )


def _comparing() -> int:
    """How many processes there are to compare plans with: those of torch's default group, where it has a store."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_backend() == "fake":  # it only simulates others
        return 0
    from torch.distributed.distributed_c10d import _get_default_store

    return dist.get_world_size() if _get_default_store() is not None else 0  # MPI's has none


def _given(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if rank is None or world_size is None:
        raise OptionError(f"rank={rank!r} and world_size={world_size!r} go together: give both or none")
    try:
        number, world = operator.index(rank), operator.index(world_size)
    except TypeError:
        raise OptionError(f"rank={rank!r} and world_size={world_size!r} have to be whole numbers") from None
    if not 0 <= number < world:
        raise OptionError(f"rank={number} has to be at least 0 and less than world_size={world}")
    return number, world


def _place_in(mesh: DeviceMesh, data_dims: Sequence[str] | None) -> tuple[int, int, tuple[int, ...]]:
    """(data rank, number of data ranks, the mesh's ranks in the process group)."""
    sizes = list(mesh.mesh.shape)
    are_data = _are_data(mesh.mesh_dim_names, sizes, data_dims)
    place = mesh.get_coordinate()
    members = tuple(sorted(mesh.mesh.flatten().tolist()))
    if place is None:
        raise OptionError(
            f"this process is not among ranks {_listed(members)} of the device_mesh: give the mesh it is in, or {_GIVE}"
        )
    rank, world = 0, 1
    for at, size, is_data in zip(place, sizes, are_data, strict=True):
        if is_data:  # row-major: the last data dimension goes fastest
            rank, world = rank * size + at, world * size
    return rank, world, members


def _are_data(names: Sequence[str] | None, sizes: list[int], data_dims: Sequence[str] | None) -> list[bool]:
    """Whether members along each of the mesh's dimensions read different samples."""
    if not names:
        if data_dims is not None or len(sizes) > 1:
            raise OptionError(
                f"the dimensions of the device_mesh, {sizes}, have no names to say by data_dims= which are data "
                f"parallel: make it with mesh_dim_names=, or {_GIVE}"
            )
        return [True]
    shape = dict(zip(names, sizes, strict=True))
    if data_dims is None:
        unknown = [name for name in names if shape[name] > 1 and name not in DATA_DIMS | REPLICA_DIMS]
        if unknown:
            raise OptionError(
                f"do samples differ along {unknown} of the device_mesh {shape}? Name all dimensions along which they "
                'do by data_dims=, as in data_dims=("dp_replicate", "dp_shard")'
            )
        return [name in DATA_DIMS for name in names]
    wanted = {data_dims} if isinstance(data_dims, str) else set(data_dims)
    if not wanted <= set(names):
        raise OptionError(f"data_dims={data_dims!r}: the device_mesh has the dimensions {shape}")
    return [name in wanted for name in names]


def _of_group() -> tuple[int, int] | None:
    """The place in torch's default process group; a launcher that says another one is an error."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, number in (("RANK", rank), ("WORLD_SIZE", world)):
        if _number(name) not in (None, number):
            raise OptionError(
                f"torch.distributed says that this is rank {rank} of {world}, but the environment says "
                f"{name}={_number(name)}: unset RANK and WORLD_SIZE, or {_GIVE}"
            )
    return rank, world


def _of_slurm() -> tuple[int, int] | None:
    """The place among the tasks of a step of Slurm's.

    A batch script and the shells of `salloc` see the job's variables, but are one process: they are in no step, or in
    one of a single task. A shell of `srun --pty` may be one of several, and has a terminal, as no other task has.
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
        raise OptionError(
            f"the environment says {rank_name}={'(unset)' if rank is None else rank} and "
            f"{world_name}={'(unset)' if world is None else world}, which do not go together: mend both, or {_GIVE}"
        )
    return rank, world


def _number(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if text and not (text.isascii() and text.isdecimal()):
        raise OptionError(f"the environment says {name}={text!r}, which is no rank or size: unset it, or {_GIVE}")
    return int(text) if text else None


def _compare(
    store: Store, what: str, members: list[int], me: int, entry: tuple[int, int, int], timeout_s: float
) -> None:
    """Compare (digest, data rank, world) of all members through a store that is theirs for this once.

    Each leaves its entry. One of them judges: the last to come, or the first whose time is up. The others wait for its
    verdict, so all go on or all raise, those that come late too, and only the judge reads every entry.
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
    with suppress(RuntimeError, NotImplementedError):  # a store that is gone by now, or cannot delete
        if is_agreed:
            store.delete_key(f"entry/{me}")
        store.add("left", 1)
        # The first member is most often the process that keeps the store: were it to end now, the others would see that
        # and no verdict. An error's verdict stays for those that are late.
        if me == members[0]:
            all_left = _becomes(lambda: store.add("left", 0) >= store.add("came", 0), _GRACE_S, longest_s)
            for key in ("came", "judges", "verdict", "left") if all_left and is_agreed else ():
                store.delete_key(key)
    if not is_agreed:
        kind, _, text = verdict.partition(": ")
        raise (StateMismatchError if kind == StateMismatchError.__name__ else OptionError)(text)


def _becomes(condition: Callable[[], bool], timeout_s: float, longest_s: float) -> bool:
    """Whether the condition holds before the time is up; asked again and again, with pauses up to `longest_s`.

    The store's own `wait` keeps the process's only connection to itself, which torch's watchdogs use too, cannot be
    interrupted, and writes to stderr when its time is up.
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
    """What all members do: go on, or raise the error of this name with this text."""
    keys = {f"entry/{member}": member for member in members}
    if store.add("came", 0) < len(members):
        absent = _listed([keys[key] for key in _absent(store, list(keys))])
        return (
            f"OptionError: {what} is compared among {len(members)} ranks, and these have not come to iterate within "
            f'{timeout_s:g} s: {absent}; give ranks="local" to loaders that not all ranks iterate over'
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
        return f"OptionError: ranks do not read a whole: {seen}; give all the same device_mesh=, or {_GIVE}"
    if len(digests) > 1:
        seen = _few([f"{digest:016x} on {_listed(digests[digest])}" for digest in digests])
        mend = (
            "give all the same data, seed, options and state, and have them iterate over their loaders in the same "
            "order; ranks='local' is for loops that not all ranks run"
        )
        return f"StateMismatchError: {what} is not the same on all ranks: {seen}; {mend}"
    return _AGREED


def _absent(store: Store, keys: list[str]) -> Iterator[str]:
    """The keys that are not set, by halving: a thousand ranks of which one is missing take twenty requests."""
    if store.check(keys):
        return
    if len(keys) == 1:
        yield from keys
        return
    for half in (keys[: len(keys) // 2], keys[len(keys) // 2 :]):
        yield from _absent(store, half)


def _listed(numbers: Sequence[int]) -> str:
    """Ascending numbers as text, runs as "3-7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return _few(["-".join(map(str, run)) for run in runs], ", ")


def _few(texts: list[str], between: str = "; ") -> str:
    return between.join(texts[:8]) + (f"{between}and {len(texts) - 8} more" if len(texts) > 8 else "")
