"""One process of the resume test: `python -m resume_test.phase JOB ANSWER`, both files of JSON.

It iterates, saves states on the way, and ends; or it begins with states that other processes have saved.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

from cpu import cpu_s
from resume_test.contestants import ALL, Contestant, NoStateError, Setting

READ_AHEAD_S = 10.0


def main() -> None:
    job, answer = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    try:
        found = play(job)
    except NoStateError:
        found = {"no_state": True}
    except Exception as error:
        found = {"error": type(error).__name__, "message": str(error)}
    answer.write_text(json.dumps(found))


def play(job: dict[str, Any]) -> dict[str, Any]:
    made = ALL[job["contestant"]].load()
    setting = Setting(**job["setting"])
    started, before_s = time.perf_counter(), cpu_s()
    contestant = made(setting)
    if job["states"]:
        contestant.load([unpacked(state) for state in job["states"]])
    epochs: list[list[list[int]]] = []
    states: dict[str, str] = {}
    first: dict[str, float] = {}
    for number in job["epochs"]:
        epochs.append([])
        with contextlib.closing(contestant.epoch(number)) as batches:
            for batch in batches:
                if not first:
                    first["wall_s"] = time.perf_counter() - started
                    first["cpu_s"] = cpu_s() - before_s
                    first["reads"] = reads(setting)
                epochs[-1].append(batch)
                if len(epochs) == 1:
                    states |= states_now(job["save"], contestant, setting, len(epochs[0]))
                if len(epochs[-1]) == job["stop_after"]:
                    break
        if len(epochs) == 1 and "end" in job["save"]:
            states["end"] = packed(contestant.state())
    return {"epochs": epochs, "states": states, "first": first}


def states_now(save: dict[str, int], contestant: Contestant, setting: Setting, received: int) -> dict[str, str]:
    """The states that are to be saved after so many batches."""
    found = {}
    for name, after in save.items():
        if after == received:
            if name == "ahead":
                wait_for_reads(setting, (received + 1) * setting.batch_size)
            found[name] = packed(contestant.state())
    return found


def wait_for_reads(setting: Setting, samples: int) -> None:
    """Until workers have read more than was received, which those of some libraries never do."""
    deadline = time.monotonic() + READ_AHEAD_S
    while reads(setting) < samples and time.monotonic() < deadline:
        time.sleep(0.01)


def reads(setting: Setting) -> int:
    path = Path(setting.reads)
    return path.stat().st_size if path.exists() else 0


def packed(state: Any) -> str:
    """JSON where that gives the same state back, else a pickle, as text."""
    with contextlib.suppress(TypeError, ValueError):
        text = json.dumps(state)
        if _is_same(json.loads(text), state):
            return "json:" + text
    kept = state if isinstance(state, bytes) else pickle.dumps(state)
    return ("bytes:" if isinstance(state, bytes) else "pickle:") + base64.b64encode(kept).decode()


def unpacked(text: str) -> Any:
    kind, _, rest = text.partition(":")
    if kind == "json":
        return json.loads(rest)
    kept = base64.b64decode(rest)
    return kept if kind == "bytes" else pickle.loads(kept)


def size_of(text: str) -> int:
    kind, _, rest = text.partition(":")
    return len(rest.encode()) if kind == "json" else len(base64.b64decode(rest))


def _is_same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


if __name__ == "__main__":
    main()
