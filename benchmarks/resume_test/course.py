"""The resume test: what is lost, what comes twice and what comes in another order after a resume in a new process.

A trainer makes two epochs without interruption, and saves its state on the way. New processes resume from those states,
some with other settings, and what they get is compared with what the uninterrupted trainer got.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from resume_test.contestants import Setting
from resume_test.phase import size_of

SAMPLES = 2400  # so that no batch, rank or worker gets fewer than another
STOPPED = 37  # batches before the interruption
STOPPED_AHEAD = 45
STOPPED_AGAIN = 21  # batches after the first resume
LIMIT_S = 180.0  # for the processes of a trainer

Batches = list[list[int]]


@dataclass(frozen=True)
class Scenario:
    """How the trainer that resumes differs from the one that was interrupted."""

    told: str
    state: str = "middle"  # which of the saved states
    num_workers: int = 2
    batch_size: int = 8
    world: int = 1
    epochs: tuple[int, ...] = (0,)  # that the trainer iterates over
    is_about_next_epoch: bool = False  # else the rest of the state's own epoch is compared


SCENARIOS = {
    "same": Scenario("same settings", epochs=(0, 1)),
    "next_epoch": Scenario("the epoch after that", epochs=(0, 1), is_about_next_epoch=True),
    "twice": Scenario("resumed twice", state="again"),
    "ahead": Scenario("state while workers are ahead", state="ahead"),
    # Some have an empty rest of the old epoch first, others begin the next one at once.
    "end": Scenario("state after the last batch", state="end", epochs=(1, 1), is_about_next_epoch=True),
    "more_workers": Scenario("workers 2 → 3", num_workers=3),
    "no_workers": Scenario("workers 2 → 0", num_workers=0),
    "batch_size": Scenario("batch size 8 → 16", batch_size=16),
    "ranks": Scenario("ranks 2 → 3, global batch 24", state="ranks", batch_size=8, world=3),
}
SAVED = {"middle": STOPPED, "ahead": STOPPED_AHEAD, "end": 0}  # after so many batches


@dataclass(frozen=True)
class Verdict:
    """The result of a resume, and of the uninterrupted run."""

    lost: int = 0
    doubled: int = 0
    order: str = "same"  # or "batches": the same global batches, in them another order; or "other"
    failure: str = ""  # why there is nothing to compare
    message: str = field(default="", compare=False)  # of that failure

    def __str__(self) -> str:
        if self.failure:
            return self.failure
        if self.lost or self.doubled:
            return f"{self.lost} lost, {self.doubled} twice"
        return {"same": "exact", "batches": "exact, other order in batches", "other": "none lost, other order"}[
            self.order
        ]


class Failure(Exception):
    """A library did not do what it was asked for; the text is for the table, the message is the library's."""

    def __init__(self, text: str, message: str = "") -> None:
        super().__init__(text)
        self.message = message


def start(command: list[str], folder: Path, rank: int = 0, world: int = 1, port: int = 0) -> subprocess.Popen[bytes]:
    """A process with the environment that torchrun gives, in a session of its own."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    if world > 1:
        values = (rank, rank, world, world, 0, "127.0.0.1", port)
        environment |= {name: str(value) for name, value in zip(names, values, strict=True)}
    # Nothing is fetched from the hub, and threads of arithmetic are of no use.
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
    path = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with (folder / "errors").open("ab") as errors:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment | {"PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )


def finish(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return when all have ended.

    Raises:
        Failure: they have not ended in LIMIT_S seconds.
    """
    deadline = time.monotonic() + LIMIT_S
    try:
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise Failure(f"hangs for {LIMIT_S:.0f} s") from None
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):  # what outlived it, workers of a library
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Course:
    """One contestant and its data; uninterrupted runs are made once, for all scenarios.

    Args:
        contestant: the name it has in the list of contestants.
        folder: an empty folder, which is left to the caller.
        samples: in the data set.
    """

    def __init__(self, contestant: str, folder: Path, samples: int = SAMPLES) -> None:
        self.contestant, self.samples = contestant, samples
        self.folder = folder
        self._data = folder / "data"
        self._runs: dict[tuple[Setting, str], list[dict[str, Any]]] = {}

    def write(self) -> None:
        self._data.mkdir()
        code = "import sys; from pathlib import Path; from resume_test.contestants import ALL"
        call = f"ALL[{self.contestant!r}].load().write(Path({str(self._data)!r}), {self.samples})"
        writer = start([sys.executable, "-c", f"{code}; {call}"], self.folder)
        finish([writer])
        if writer.returncode:
            raise Failure("writes no data", self._errors())

    def verdict(self, name: str) -> Verdict:
        scenario = SCENARIOS[name]
        try:
            return self._compared(scenario)
        except Failure as failure:
            return Verdict(failure=str(failure), message=failure.message)

    def uninterrupted(self, world: int = 1) -> list[dict[str, Any]]:
        save = SAVED if world == 1 else {"ranks": STOPPED}
        setting = self._setting(batch_size=8 if world == 1 else 12, world=world)
        return self._once(setting, epochs=(0, 1) if world == 1 else (0,), save=save)

    def state_bytes(self) -> int:
        """The size of one rank's state in the middle of an epoch."""
        return size_of(self._states(1, "middle")[0])

    def first_batch(self, batches: int, num_workers: int = 2, batch_size: int = 64, runs: int = 3) -> dict[str, Any]:
        setting = self._setting(batch_size=batch_size, num_workers=num_workers)
        [before] = self._played(setting, save={"far": batches}, stop_after=batches)
        states = [before["states"]["far"]]
        fresh = [self._played(setting, stop_after=1)[0]["first"] for _ in range(runs)]
        resumed = [self._played(setting, states=states, stop_after=1)[0]["first"] for _ in range(runs)]
        return {"fresh": _medians(fresh), "resumed": _medians(resumed), "state": states[0]}

    def _compared(self, scenario: Scenario) -> Verdict:
        world = 2 if scenario.state == "ranks" else 1
        whole = _global([run["epochs"][0] for run in self.uninterrupted(world)])
        resumed = self._once(
            self._setting(batch_size=scenario.batch_size, num_workers=scenario.num_workers, world=scenario.world),
            states=self._states(world, scenario.state),
            epochs=scenario.epochs,
        )
        if scenario.is_about_next_epoch:
            wanted = _global([run["epochs"][1] for run in self.uninterrupted(world)])
            first, second = (_global([run["epochs"][k] for run in resumed]) for k in (0, 1))
            return compared(wanted, first if first and scenario.state == "end" else second)
        got = _global([run["epochs"][0] for run in resumed])
        if scenario.state == "again":
            got = _global([run["epochs"][0] for run in self._resumed_once()])[:STOPPED_AGAIN] + got
        return compared(whole[SAVED.get(scenario.state, STOPPED) :], got)

    def _states(self, world: int, name: str) -> list[str]:
        runs = self._resumed_once() if name == "again" else self.uninterrupted(world)
        return [run["states"][name] for run in runs]

    def _resumed_once(self) -> list[dict[str, Any]]:
        save = {"again": STOPPED_AGAIN}
        return self._once(self._setting(), states=self._states(1, "middle"), epochs=(0,), save=save)

    def _setting(self, *, batch_size: int = 8, num_workers: int = 2, world: int = 1) -> Setting:
        return Setting(str(self._data), self.samples, batch_size, num_workers, reads="", world=world)

    def _once(self, setting: Setting, **options: Any) -> list[dict[str, Any]]:
        key = (setting, json.dumps(options))
        if key not in self._runs:
            self._runs[key] = self._play(setting, **options)
        return _checked(self._runs[key])

    def _played(self, setting: Setting, **options: Any) -> list[dict[str, Any]]:
        return _checked(self._play(setting, **options))

    def _play(
        self,
        setting: Setting,
        *,
        states: Sequence[str] = (),
        epochs: Sequence[int] = (0,),
        save: dict[str, int] | None = None,
        stop_after: int = 0,
    ) -> list[dict[str, Any]]:
        """A trainer's processes, one for each rank; what each answers."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder, socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
            found.close()
            answers, processes = [], []
            for rank in range(setting.world):
                job = {
                    "contestant": self.contestant,
                    "setting": asdict(replace(setting, rank=rank, reads=f"{folder}/reads.{rank}")),
                    "states": list(states),
                    "epochs": list(epochs),
                    "save": save or {},
                    "stop_after": stop_after,
                }
                place, answer = Path(folder, f"job.{rank}"), Path(folder, f"answer.{rank}")
                place.write_text(json.dumps(job))
                command = [sys.executable, "-m", "resume_test.phase", str(place), str(answer)]
                processes.append(start(command, self.folder, rank, setting.world, port))
                answers.append(answer)
            finish(processes)
            return [json.loads(place.read_text()) if place.exists() else {"died": self._errors()} for place in answers]

    def _errors(self) -> str:
        return (self.folder / "errors").read_text(errors="replace")[-2000:]


def compared(wanted: Batches, got: Batches) -> Verdict:
    flat, got_flat = [list(itertools.chain.from_iterable(batches)) for batches in (wanted, got)]
    counts, got_counts = Counter(flat), Counter(got_flat)
    if counts != got_counts:
        return Verdict((counts - got_counts).total(), (got_counts - counts).total(), "other")
    if flat == got_flat:
        return Verdict()
    return Verdict(order="batches" if _have_same_batches(wanted, got) else "other")


def _have_same_batches(wanted: Batches, got: Batches) -> bool:
    ends, got_ends = [set(itertools.accumulate(map(len, batches))) for batches in (wanted, got)]
    flat, got_flat = [list(itertools.chain.from_iterable(batches)) for batches in (wanted, got)]
    common = sorted((ends & got_ends) | {0})
    return all(set(flat[a:b]) == set(got_flat[a:b]) for a, b in itertools.pairwise(common))


def _global(ranks: Sequence[Batches]) -> Batches:
    """The batches of all ranks, step by step, one rank's after the other's."""
    return [list(itertools.chain.from_iterable(step)) for step in itertools.zip_longest(*ranks, fillvalue=[])]


def _checked(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for answer in answers:
        if answer.get("no_state"):
            raise Failure("no state")
        if "died" in answer:
            raise Failure("dies", answer["died"])
        if "error" in answer:
            raise Failure(f"raises {answer['error']}", answer["message"])
    return answers


def _medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sorted(row[name] for row in rows)[len(rows) // 2] for name in rows[0]}
