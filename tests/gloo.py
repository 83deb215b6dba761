"""Real ranks: processes with torch's process group over gloo, as torchrun would start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_OUTSIDE = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_ID", "PL_GLOBAL_SEED")
_SCRIPT = """
import json, sys
{body}
results = main(*json.loads(sys.argv[1]))
print("DONE " + json.dumps(results), flush=True)
"""


def ranks_of(
    world: int, body: str, arguments: Sequence[Any] = (), environment: Mapping[str, str] | None = None
) -> list[Any]:
    """The results of `main(*arguments)` on each rank; `body` defines `main`, which starts the process group.

    Raises:
        AssertionError: one has failed; it has what that has written. The others are ended.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {name: value for name, value in os.environ.items() if name not in _OUTSIDE}
    common |= {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here: nobody has to find a free port
        "TORCHELASTIC_RUN_ID": "test",
        "GROUP_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        **(environment or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, str(rank)) for rank in range(world)]
        processes = []
        try:
            for rank, path in enumerate(said):
                with path.open("w") as file:
                    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT.format(body=body), json.dumps(arguments)]
                    own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=own))
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [path.read_text() for path in said]
    del store
    assert not any(codes), "\n".join(f"rank {rank}: {codes[rank]}\n{text[-3000:]}" for rank, text in enumerate(texts))
    results = [[line for line in text.splitlines() if line.startswith("DONE ")] for text in texts]
    return [json.loads(lines[-1][5:]) for lines in results]
