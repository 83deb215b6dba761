"""Ranks that are processes, with torch's process group and its store between them."""

import os
import signal

import pytest
from gloo import ranks_of
from process.waiting import trainer

# Each rank gives its answers by the name of what is compared: its part, or the error.
RANK = """
import datetime, os, signal, time
import torch.distributed as dist
from headrace.options import Ranks
from headrace.torch_compat.ranks import find_ranks

def compare(digest, what="the plan", **options):
    try:
        ranks = find_ranks(Ranks(**options))
        ranks.agree(what, digest)
        return [ranks.rank, ranks.world]
    except BaseException as error:
        return [type(error).__name__, str(error)]

def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    pids, found = [None] * 3, {}
    dist.all_gather_object(pids, os.getpid())
    found["epochs"], found["keys"] = [], []
    for epoch in range(20):
        found["epochs"].append(compare(2**63 + epoch))
        dist.barrier()
        found["keys"].append(store.num_keys())
        dist.barrier()
    if rank == 0:
        found["local"] = compare(7, compare=False)
    found["other digest"] = compare(rank // 2, rank=2 - rank, world_size=3)
    found["same part"] = compare(7, rank=0, world_size=3)  # as when a rank is taken for a number of something else
    if rank == 2:
        found["another world"] = compare(7, rank=0, world_size=1)
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    if rank == 1:
        found["interrupted"] = compare(7, what="another plan")
    if rank == 0:
        while store.num_keys() <= before:
            time.sleep(0.005)
        os.kill(pids[1], signal.SIGINT)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=3)
    found["renewed"] = compare(7)
    return found
"""


@pytest.mark.slow
def test_ranks_compare_their_plans() -> None:
    found = ranks_of(3, RANK)
    of_all = {name: [rank[name] for rank in found] for name in ("epochs", "other digest", "same part", "renewed")}
    parts = [[0, 3], [1, 3], [2, 3]]
    assert of_all["epochs"] == [[part] * 20 for part in parts]
    assert len(set(found[0]["keys"])) == 1, "the store does not grow"
    assert found[0]["local"] == [0, 3], "local ranks wait for no other"
    assert found[2]["another world"] == [0, 1]
    assert {error for error, _ in of_all["other digest"]} == {"StateMismatchError"}
    assert all("part 0 of 3 by 0-2" in text for _, text in of_all["same part"])
    assert found[1]["interrupted"][0] == "KeyboardInterrupt"
    assert of_all["renewed"] == parts, "a new process group compares from the start"


WITH_A_STORE = """
import datetime, os, sys, time
import torch.distributed as dist
from headrace.options import Ranks
from headrace.torch_compat.ranks import find_ranks

rank, port, first = {rank}, {port}, {first}
limit = datetime.timedelta(seconds=30)
store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False, timeout=limit)
print(store.port, flush=True)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
print("ready", flush=True)
while os.path.exists(f"/proc/{{first}}"):
    time.sleep(0.005)
try:
    find_ranks(Ranks()).agree("the plan", 7)
except BaseException as error:
    print(type(error).__name__, *error.__notes__)
"""


@pytest.mark.slow
def test_error_of_torch_says_what_was_under_way_when_the_process_that_keeps_the_store_has_ended() -> None:
    with trainer(WITH_A_STORE.format(rank=0, port=0, first=os.getpid()), preamble="") as first:
        code = WITH_A_STORE.format(rank=1, port=first.line(), first=first.pid)
        with trainer(code, preamble="") as second:
            second.line()
            assert (first.line(), second.line()) == ("ready", "ready")
            os.kill(first.pid, signal.SIGKILL)
            first.process.wait()
            told = second.line()
    assert told.startswith("DistNetworkError while headrace compared the plan among ranks"), told
