"""Messages to workers, and the error of a task that ends workers."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from headrace.formats.tar.scanner import TarScanner
from headrace.workers.messages import PlaceMessage, TaskMessage, died, exit_text
from headrace.workers.sample_chunks import ListPart
from headrace.workers.tasks import Finish, Reply, Task
from headrace.workers.wire_chunks import SentApart, SentObjects, SentPickle, SentRows


@pytest.mark.parametrize("kind", [TaskMessage, PlaceMessage, Reply, SentRows, SentPickle, SentApart, SentObjects])
def test_messages_arrive_with_all_of_their_fields_and_without_their_names(kind: type) -> None:
    names = [field.name for field in dataclasses.fields(kind)]
    sent = kind(*[f"value {k}" for k in range(len(names))])
    packed = pickle.dumps(sent, protocol=5)
    come = pickle.loads(packed)
    assert type(come) is kind
    assert [getattr(come, name) for name in names] == [f"value {k}" for k in range(len(names))]
    assert max(names, key=len).encode() not in packed


def test_death_in_the_search_for_samples_names_the_shard() -> None:
    task = Task(0, 0, 5, Finish.SCAN, [], scan=(TarScanner("s3://bucket/a-5.tar"), 0, True))
    error = died(task, -1, 17, -9)
    assert str(error).startswith("DataLoader worker (pid(s) 17) exited unexpectedly (killed by SIGKILL)")
    assert "s3://bucket/a-5.tar" in str(error)
    assert error.url == "s3://bucket/a-5.tar"
    assert "batch 5" not in str(error)


def test_death_on_a_sample_names_its_position() -> None:
    task = Task(1, 0, 2, Finish.SLOTS, [ListPart([1, 2])], position=8)
    assert "sample 9 of the epoch" in str(died(task, 1, 17, 3))
    assert exit_text(3) == "exit code 3"
