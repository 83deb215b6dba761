"""`memory_budget="auto"` is the narrowest control group of the process, at any depth."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace._util.file_limits import memory_bytes

MIB = 2**20


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("files", [
    {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{64 * MIB}\n"},
    {
        "proc/self/cgroup": "0::/slurm/job/step\n",
        "sys/fs/cgroup/slurm/job/step/memory.max": "max\n",
        "sys/fs/cgroup/slurm/job/memory.max": f"{64 * MIB}\n",
        "sys/fs/cgroup/slurm/memory.max": f"{256 * MIB}\n",
    },
    {
        "proc/self/cgroup": "5:cpu,cpuacct:/other\n4:memory:/slurm/job\n0::/\n",
        "sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes": f"{64 * MIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    },
    {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{64 * MIB}\n"},
], ids=["root of a namespace", "a group above its own", "version 1", "no groups"])  # fmt: skip
def test_limit_is_that_of_the_narrowest_group_when_groups_are_nested(tmp_path: Path, files: dict[str, str]) -> None:
    assert memory_bytes(put(tmp_path, files)) == 64 * MIB


def test_limit_is_the_machines_memory_when_no_group_has_one(tmp_path: Path) -> None:
    assert memory_bytes(put(tmp_path, {"proc/self/cgroup": "0::/a\n"})) > 64 * MIB
