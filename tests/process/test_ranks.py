"""Ranks that are processes, with torch's process group and its store between them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from process.waiting import wait_until

RANK = """
import json
import sys

import torch.distributed as dist
from headrace.torch_compat.ranks import find_ranks

rank, world, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, wait_for_workers=False)
print(store.port, flush=True)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
print("ready", flush=True)
for line in sys.stdin:
    task = json.loads(line)
    if task == "keys":
        answer = store.num_keys()
    elif task == "renew":
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
        answer = "ready"
    else:
        what, digest, options, timeout_s = task
        try:
            ranks = find_ranks(**options)
            ranks.agree(what, digest, timeout_s=timeout_s)
            answer = [ranks.rank, ranks.world]
        except BaseException as error:
            answer = [type(error).__name__, str(error), *getattr(error, "__notes__", [])]
    print(json.dumps(answer), flush=True)
"""


class Rank:
    """A process that answers tasks."""

    def __init__(self, rank: int, world: int, port: int) -> None:
        outside = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_ID")
        environment = {name: value for name, value in os.environ.items() if name not in outside}
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(world), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )

    def tell(self, task: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()

    def compare(self, digest: int, *, what: str = "the plan", timeout_s: float = 30.0, **options: Any) -> None:
        self.tell((what, digest, options, timeout_s))

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the process has ended"
        return line

    def answer(self) -> Any:
        return json.loads(self.line())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def ranks_of(world: int) -> Iterator[list[Rank]]:
    first = Rank(0, world, 0)  # it keeps the store
    ranks = [first]
    try:
        port = int(first.line())
        ranks += [Rank(rank, world, port) for rank in range(1, world)]
        for rank in ranks[1:]:
            rank.line()
        for rank in ranks:
            assert rank.line() == "ready"
        yield ranks
    finally:
        for rank in reversed(ranks):
            rank.end()


@pytest.fixture(scope="module")
def three() -> Iterator[list[Rank]]:
    """Three ranks for all tests of this module; a test leaves each of them waiting for its next task."""
    with ranks_of(3) as ranks:
        yield ranks


def answers(ranks: Sequence[Rank]) -> list[Any]:
    return [rank.answer() for rank in ranks]


def keys_seen_by(rank: Rank) -> Any:
    rank.tell("keys")
    return rank.answer()


@pytest.mark.slow
def test_ranks_agree_epoch_after_epoch_and_the_store_does_not_grow_when_digests_are_the_same(three: list[Rank]) -> None:
    keys = set()
    for epoch in range(20):
        for rank in three:
            rank.compare(2**63 + epoch)
        assert answers(three) == [[0, 3], [1, 3], [2, 3]]
        keys.add(keys_seen_by(three[0]))
    assert len(keys) == 1


def test_one_rank_goes_on_alone_when_ranks_are_local(three: list[Rank]) -> None:
    three[0].compare(7, ranks="local")
    assert three[0].answer() == [0, 3]


def test_ranks_compare_when_arguments_give_each_process_its_part(three: list[Rank]) -> None:
    for number, rank in enumerate(three):
        rank.compare(number // 2, rank=2 - number, world_size=3)
    assert {error for error, _ in answers(three)} == {"StateMismatchError"}
    for rank in three:
        rank.compare(7, rank=0, world_size=3)  # as when a rank is taken for a number of something else
    assert all("part 0 of 3 by 0-2" in text for _, text in answers(three))


def test_one_rank_goes_on_alone_when_arguments_speak_of_another_world(three: list[Rank]) -> None:
    three[2].compare(7, rank=0, world_size=1)
    assert three[2].answer() == [0, 1]


def test_waiting_ends_when_it_is_interrupted(three: list[Rank]) -> None:
    before = keys_seen_by(three[0])
    three[1].compare(7, what="another plan")
    wait_until(lambda: keys_seen_by(three[0]) > before + 1, "rank 1 has come")
    three[1].process.send_signal(signal.SIGINT)
    assert three[1].answer()[0] == "KeyboardInterrupt"


def test_ranks_compare_anew_when_the_process_group_is_made_anew(three: list[Rank]) -> None:
    """However often each has compared before."""
    for rank in three:
        rank.tell("renew")
    assert answers(three) == ["ready"] * 3
    for rank in three:
        rank.compare(7)
    assert answers(three) == [[0, 3], [1, 3], [2, 3]]


@pytest.mark.slow
def test_error_of_torch_says_what_was_under_way_when_the_process_that_keeps_the_store_has_ended() -> None:
    with ranks_of(2) as (first, second):
        first.end()
        second.compare(7)
        kind, _, note = second.answer()
    assert kind == "DistNetworkError"
    assert "headrace compared the plan among ranks" in note
