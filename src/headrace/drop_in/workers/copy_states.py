"""What the trainer's side knows of the states of workers' copies of the data set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.drop_in.workers.records import WorkerRecord
from headrace.errors import OptionError
from headrace.torch_compat.stateful import PackedStates, failed

LOST = (
    "the workers have ended, and with them what their copies of the data set carry from one epoch into the next: "
    "ask for a state before close()"
)

Answers = list[tuple[PackedStates | None] | None]
"""Of each worker, where it is known."""


class StateQuestion:
    """A question that workers are asked, also those that have taken the place of others meanwhile.

    Args:
        name: of the message.
        answers: those that are known so far; others are put here.
    """

    def __init__(self, name: str, answers: Answers) -> None:
        self.name, self.answers = name, answers

    def unanswered(self, workers: Sequence[WorkerRecord]) -> list[WorkerRecord]:
        """Those whose answer is not known."""
        return [worker for worker in workers if self.answers[worker.number] is None]


def answer_for_lost(workers: Iterable[WorkerRecord], answers: Answers) -> None:
    """Who cannot answer, and had a state to lose, is answered for by the error that it is lost."""
    for worker in workers:
        if answers[worker.number] is None and worker.start is not None:
            answers[worker.number] = (failed(OptionError(LOST), "raised where the state was asked for"),)
