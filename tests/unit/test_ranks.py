"""The part of the data that a process reads, and how ranks compare digests through a store."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from headrace.errors import OptionError, StateMismatchError
from headrace.options import Ranks
from headrace.torch_compat.ranks import RankShare, _compare, find_ranks

Setter = Callable[[str], None]
VARIABLES = (
    *("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
)


@pytest.fixture(autouse=True)
def set_environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def set_variables(text: str) -> None:
        for pair in text.split():
            monkeypatch.setenv(*pair.split("="))

    return set_variables


@contextmanager
def process_group(rank: int, world: int, backend: str = "fake") -> Iterator[None]:
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def terminal_as_input() -> Iterator[None]:
    ours, theirs = os.openpty()
    before = os.dup(0)
    os.dup2(theirs, 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        for descriptor in (before, ours, theirs):
            os.close(descriptor)


def place(mesh: Any = None, dims: Any = None) -> tuple[int, int]:
    found = find_ranks(Ranks(mesh=mesh, dims=dims))
    return found.rank, found.world


# The arguments and the environment


@pytest.mark.parametrize(("environment", "expected"), [
    ("", (0, 1)),
    ("RANK=2 WORLD_SIZE=3", (2, 3)),
    ("RANK=0 WORLD_SIZE=1", (0, 1)),
    ("WORLD_SIZE=1", (0, 1)),
    ("RANK= WORLD_SIZE=", (0, 1)),
    ("OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=3", (2, 3)),
    ("SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_NTASKS=3", (2, 3)),
    ("SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=3", (2, 3)),
    # A batch script, which is in no step; the shell of salloc; a step of one task.
    ("SLURM_PROCID=0 SLURM_NTASKS=8", (0, 1)),
    ("SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=1", (0, 1)),
    ("SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1", (0, 1)),
    # torchrun in each task; Open MPI starts its own by srun. The inner launcher counts.
    ("RANK=0 WORLD_SIZE=1 SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_NTASKS=3", (0, 1)),
    ("OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=2", (5, 8)),
])  # fmt: skip
def test_launcher_gives_the_part(environment: str, expected: tuple[int, int], set_environment: Setter) -> None:
    set_environment(environment)
    assert find_ranks(Ranks()) == RankShare(*expected, is_torch=False)


def test_shell_at_a_terminal_is_one_part(set_environment: Setter) -> None:
    set_environment("SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=4")
    assert place() == (0, 4)
    with terminal_as_input():
        assert place() == (0, 1)


def test_arguments_precede_environment_and_process_group(set_environment: Setter) -> None:
    set_environment("RANK=7 WORLD_SIZE=8")
    with process_group(1, 4):
        assert find_ranks(Ranks(rank=0, world_size=2)) == RankShare(0, 2)


@pytest.mark.parametrize(("environment", "arguments", "seen"), [
    ("RANK=one WORLD_SIZE=2", {}, "RANK='one'.* give ranks=hr"),
    ("RANK=-1 WORLD_SIZE=2", {}, "RANK='-1'.* give ranks=hr"),
    ("RANK=2 WORLD_SIZE=2", {}, "RANK=2 and WORLD_SIZE=2.* give ranks=hr"),
    ("RANK=1", {}, r"RANK=1 and WORLD_SIZE=\(unset\).* give ranks=hr"),
    ("WORLD_SIZE=2", {}, r"RANK=\(unset\) and WORLD_SIZE=2.* give ranks=hr"),
    ("SLURM_STEP_ID=0 SLURM_NTASKS=4", {}, r"SLURM_PROCID=\(unset\) and SLURM_NTASKS=4.* give ranks=hr"),
    ("", {"rank": 0}, "world_size=None: each"),
    ("", {"world_size": 2}, "rank=None, world_size=2"),
    ("", {"rank": 2, "world_size": 2}, "rank=2 .* less than world_size=2"),
    ("", {"rank": -1, "world_size": 2}, "rank=-1"),
    ("", {"rank": 0, "world_size": 0}, "world_size=0"),
    ("", {"rank": 0.0, "world_size": 2}, r"rank=0\.0 .* a whole number"),
    ("", {"compare": "some"}, "compare='some'"),
    ("", {"dims": ("dp",)}, "needs mesh="),
])  # fmt: skip
def test_part_that_makes_no_sense_is_refused(
    environment: str, arguments: dict[str, Any], seen: str, set_environment: Setter
) -> None:
    set_environment(environment)
    with pytest.raises(OptionError, match=seen):
        find_ranks(Ranks(**arguments))


# The process group


def test_part_is_that_of_the_process_group(set_environment: Setter) -> None:
    with process_group(1, 3):
        assert place() == (1, 3)
        set_environment("RANK=1 WORLD_SIZE=3")
        assert place() == (1, 3)
        for environment, variable in (("RANK=0 WORLD_SIZE=3", "RANK=0"), ("RANK=1 WORLD_SIZE=2", "WORLD_SIZE=2")):
            set_environment(environment)
            with pytest.raises(OptionError, match=f"rank 1 of 3, .* {variable}: unset"):
                find_ranks(Ranks())
    set_environment("RANK=0 WORLD_SIZE=3")
    assert place() == (0, 3)  # that of the environment


def test_nothing_is_compared_when_the_group_has_nobody_else() -> None:
    with process_group(1, 3):  # it simulates the others
        assert not find_ranks(Ranks()).is_torch
    with process_group(0, 1, "gloo"):
        assert find_ranks(Ranks()) == RankShare(0, 1, is_torch=False)
    for ranks in (RankShare(1, 3), RankShare(1, 3, is_torch=True)):  # the group is destroyed by now
        ranks.agree("the plan", 7)


# Meshes

SHAPE = {"pp": 2, "dp_replicate": 2, "dp_shard": 4, "tp": 4}


def mesh_of(shape: dict[Any, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=None if None in shape else tuple(shape))


def test_data_dimensions_make_the_part_and_others_are_replicas_on_each_of_64_ranks() -> None:
    found = Counter()
    for rank in range(64):
        with process_group(rank, 64):
            mesh = mesh_of(SHAPE)
            _, replicate, shard, _ = mesh.get_coordinate()
            ranks = find_ranks(Ranks(mesh=mesh))
            assert (ranks.rank, ranks.world) == (replicate * 4 + shard, 8)
            assert ranks.members == tuple(range(64))
            assert place(mesh=mesh["dp_replicate", "dp_shard"]) == (ranks.rank, 8)
            assert place(mesh=mesh["tp"]) == (0, 1)
            found[ranks.rank] += 1
    assert found == dict.fromkeys(range(8), 8)


@pytest.mark.parametrize(("rank", "shape", "data_dims", "expected"), [
    (62, SHAPE, ("dp_shard",), (3, 4)),  # its coordinate is (1, 1, 3, 2)
    (62, SHAPE, ("dp_shard", "dp_replicate"), (7, 8)),  # in the order of the mesh
    (62, SHAPE, "dp_replicate", (1, 2)),
    (62, SHAPE, ("pp", "tp"), (6, 8)),
    (62, SHAPE, (), (0, 1)),
    (3, {"dp": 4}, None, (3, 4)),
    (3, {None: 4}, None, (3, 4)),  # a mesh of one dimension without a name
    (3, {"dp": 4, "ep": 1}, None, (3, 4)),  # an unknown dimension of one member
    (5, {"dp": 4, "tp": 2}, None, (2, 4)),
])  # fmt: skip
def test_dimensions_make_the_part(
    rank: int, shape: dict[Any, int], data_dims: Any, expected: tuple[int, int], set_environment: Setter
) -> None:
    world = math.prod(shape.values())
    set_environment(f"RANK={rank} WORLD_SIZE={world}")
    with process_group(rank, world):
        assert place(mesh=mesh_of(shape), dims=data_dims) == expected


@pytest.mark.parametrize(("make", "data_dims", "seen"), [
    (lambda: mesh_of({"dp": 2, "ep": 2}), None, "dims="),
    (lambda: mesh_of({"x": 2, "y": 2}), None, "dims="),
    (lambda: mesh_of({"world": 4}), None, "dims="),
    (lambda: init_device_mesh("cpu", (2, 2)), None, "no names .*dims="),
    (lambda: init_device_mesh("cpu", (2, 2)), ("dp",), "no names .*dims="),
    (lambda: mesh_of({"dp": 2, "tp": 2}), ("dq",), r"'dq'.*\{'dp': 2, 'tp': 2\}"),
    (lambda: DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("dp",)), None, "not among ranks 0-2 of the mesh"),
])  # fmt: skip
def test_unknown_mesh_dimensions_are_refused(make: Callable[[], DeviceMesh], data_dims: Any, seen: str) -> None:
    with process_group(3, 4):
        mesh = make()
        with pytest.raises(OptionError, match=seen):
            find_ranks(Ranks(mesh=mesh, dims=data_dims))
        if seen == "dims=":
            assert place(mesh=mesh, dims=mesh.mesh_dim_names) == (3, 4)


# Comparison of digests


class Counted:
    """A store that counts its requests."""

    def __init__(self, store: Any) -> None:
        self.store, self.requests = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.requests[name] += 1
        return getattr(self.store, name)


def outcomes(
    digests: list[int],
    *,
    store: Any = None,
    parts: list[tuple[int, int]] | None = None,
    absent: tuple[int, ...] = (),
    timeout_s: float = 20.0,
) -> tuple[list[str], Any]:
    store, members = Counted(store or dist.HashStore()), list(range(len(digests)))
    parts = parts or [(rank, len(members)) for rank in members]

    def run(me: int) -> str:
        try:
            _compare(store, "the plan", members, me, (digests[me], *parts[me]), timeout_s)
        except (OptionError, StateMismatchError) as error:
            return f"{type(error).__name__}: {error}"
        return "agreed"

    with ThreadPoolExecutor(len(members)) as pool:
        got = {me: pool.submit(run, me) for me in members if me not in absent}
        ended = {me: future.result(30) for me, future in got.items()}
    return [ended[me] if me in ended else run(me) for me in members], store


@pytest.mark.parametrize("parts", [None, [(0, 2), (0, 2), (1, 2), (1, 2)]], ids=["parts", "replicas"])
def test_equal_digests_agree_and_leave_the_store_empty(parts: list[tuple[int, int]] | None, tmp_path: Path) -> None:
    got, store = outcomes([2**64 - 1] * 4, parts=parts)
    assert store.num_keys() == 0
    one_key_at_a_time = dist.FileStore(str(tmp_path / "ranks"), 4)
    assert got == outcomes([7] * 4, parts=parts, store=one_key_at_a_time)[0] == ["agreed"] * 4


@pytest.mark.parametrize(("digests", "options", "texts"), [
    ([7, 7, 9, 7, 7, 9], {}, ["StateMismatchError: the plan is not the same on all ranks: ",
                              "0000000000000007 on 0-1, 3-4", "0000000000000009 on 2, 5"]),
    ([*range(40)], {}, ["StateMismatchError: ", "and 32 more"]),
    ([7] * 6, {"absent": (3, 4), "timeout_s": 0.05}, ["OptionError: the plan is compared among 6 ranks",
                                                      'within 0.05 s: 3-4; give ranks=hr.Ranks(compare=False)']),
    ([7] * 4, {"parts": [(0, 2), (1, 2), (1, 2), (0, 3)]},
     ["OptionError: ranks do not read a whole: part 0 of 2 by 0; part 0 of 3 by 3; part 1 of 2 by 1-2; give"]),
    ([7] * 4, {"parts": [(0, 2)] * 4}, ["OptionError: ranks do not read a whole: part 0 of 2 by 0-3; give"]),
], ids=["digests", "every rank", "absent", "two worlds", "a part that nobody reads"])  # fmt: skip
def test_all_ranks_raise_the_same_short_error(digests: list[int], options: dict[str, Any], texts: list[str]) -> None:
    got, _ = outcomes(digests, **options)
    (text,) = set(got)
    assert text.startswith(texts[0])
    assert all(one in text for one in texts)
    assert len(text) < 500


def test_first_rank_leaves_last_as_it_may_keep_the_store_when_digests_differ() -> None:
    store = dist.HashStore()

    def second() -> None:
        with pytest.raises(StateMismatchError):
            _compare(store, "the plan", [0, 1], 1, (7, 1, 2), 20)

    thread = threading.Thread(target=second)
    thread.start()
    with pytest.raises(StateMismatchError):
        _compare(store, "the plan", [0, 1], 0, (8, 0, 2), 20)
    assert store.add("left", 0) == 2
    thread.join()


def test_requests_of_each_rank_are_as_many_when_there_are_more_ranks() -> None:
    """Requests that poll for the verdict are bounded in time, for all ranks together."""
    each = []
    for world in (8, 64):
        got, store = outcomes([7] * world)
        assert got == ["agreed"] * world
        assert store.requests.pop("check") + store.requests.pop("add") > 2 * world
        each.append(store.requests.total() / world)
    assert each[1] <= each[0] <= 5
