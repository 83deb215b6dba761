"""What follows from the death of a worker: whether another one takes its place, and which batch is not tried again."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.drop_in.workers.messages import WorkerConfig, unpacked_index
from headrace.drop_in.workers.records import BatchTask, WorkerRecord
from headrace.errors import WorkerDiedError
from headrace.failures import PackedError
from headrace.torch_compat import serialize
from headrace.work.messages import DEATHS, exit_text


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker has ended.

    Attributes:
        pid: its process.
        code: its exit code, where that is known.
        how: what is known besides.
    """

    pid: int | None
    code: int | None
    how: str

    def error(self, text: str, batch: int | None = None) -> PackedError:
        """The error of it, packed."""
        return serialize.pack_error(
            WorkerDiedError(
                f"DataLoader worker (pid(s) {self.pid}) exited unexpectedly ({exit_text(self.code)}){text}",
                pid=self.pid or 0,
                exitcode=self.code,
                batch=batch,
            )
        )


def judge(
    worker: WorkerRecord, death: Death, config: WorkerConfig, running: int, sample: int
) -> tuple[int, PackedError] | None:
    """Count a death; where the worker is not to be started again, its `failure` says why.

    Args:
        worker: which one has died.
        death: how.
        config: what it worked on.
        running: the number of the task that it was at.
        sample: the index of the sample in that.

    Returns:
        The number of a task that is not to be tried again, and the error that is its answer.
    """
    if config.is_iterable:
        worker.failure = death.error(f"{death.how}; its place in the data set is lost with it")
    elif running in worker.tasks:
        task = worker.tasks[running]
        task.deaths[sample] = task.deaths.get(sample, 0) + 1
        if task.deaths[sample] >= DEATHS:
            which = _which(task, sample, config)
            return running, death.error(f"; {DEATHS} did so, all on {which}", task.batch)
    else:
        worker.idle_deaths += 1
        if worker.idle_deaths >= DEATHS:
            worker.failure = death.error(f"{death.how}; {DEATHS} did so before they made a batch")
    return None


def _which(task: BatchTask, sample: int, config: WorkerConfig) -> str:
    index = unpacked_index(task.index)
    if sample < 0:
        return f"batch {task.batch}, before or after its samples {index!r:.100}"
    key = list(index)[sample] if config.auto_collation else index
    return f"sample {key!r:.100} of batch {task.batch}"
