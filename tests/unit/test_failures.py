"""Errors in transit keep what the stages must know of them."""

from __future__ import annotations

import pickle

import pytest

from headrace.cli.settings import say
from headrace.errors import FormatError, WorkerDiedError
from headrace.torch_compat.errors import pack_worker_error, unpack_error
from headrace.torch_compat.serialize import pack_error
from headrace.workers.error_notes import note_origin
from headrace.workers.failures import NOWHERE, Origin, PackedError, Scope
from headrace.workers.tasks import Step


def test_note_of_an_origin_has_what_is_known() -> None:
    whole = Origin("map(f)", 5, "'a'", "memory://a", 1)
    assert whole.note == "stage: map(f); sample 5 of the epoch; key 'a'; url memory://a; worker 1"
    assert Origin("fetch", 0, worker=0).note == "stage: fetch; sample 0 of the epoch; worker 0"
    assert NOWHERE.note == ""


def test_control_characters_of_names_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b]0;owned\x07\x9b2J\r\u202eb\tc\nd"
    plain = "a\\x1b]0;owned\\x07\\x9b2J\\r\\u202eb\tc\nd"
    error = FormatError(f"{name} is damaged", url=name)
    assert str(error) == f"{plain} is damaged"
    assert str(pickle.loads(pickle.dumps(error))) == f"{plain} is damaged"
    origin = note_origin(KeyError("x"), Step("map(f)", "map", abs), {"__key__": "k", "__url__": name}, 5, None)
    assert origin.url == plain
    say("inspect", name)
    assert capsys.readouterr().err == f"headrace inspect: {plain}\n"


def test_noted_origin_is_the_one_that_is_sent() -> None:
    error, sample = KeyError("x"), {"__key__": "a" * 300, "__url__": "s3://user:word@a/0.tar"}
    origin = note_origin(error, Step("map(f)", "map", abs, passed="FromMap → map(f)"), sample, 5, 2)
    assert error.__notes__ == [origin.note]
    assert len(origin.key) == 200
    assert origin.note.endswith("worker 2; operators: FromMap → map(f)")
    assert "word" not in origin.note


def test_widened_error_differs_in_its_scope_only() -> None:
    packed = pack_error(ValueError("x"), Origin("map(f)"))
    assert packed.scope is Scope.SAMPLE
    assert packed.widened() == packed.widened().widened() == PackedError(packed.blob, packed.origin, Scope.MORE)
    assert pickle.loads(pickle.dumps(packed.widened())) == packed.widened()


def test_error_of_a_worker_is_raised_as_by_torchs_loader() -> None:
    raised = ValueError("x")
    raised.code = 7  # type: ignore[attr-defined]
    error = unpack_error(pack_worker_error(raised, "in DataLoader worker process 3", Origin("map(f)", 5)))
    assert str(error).startswith("Caught ValueError in DataLoader worker process 3.\nOriginal ")
    assert error.code == 7  # type: ignore[attr-defined]
    assert isinstance(error.__cause__, ValueError)
    assert error.__cause__.args == ("x",)


@pytest.mark.parametrize(("raised", "code"), [(SystemExit(3), 3), (SystemExit(), 0), (KeyboardInterrupt(), 0)])
def test_exit_of_a_worker_is_raised_as_its_death(raised: BaseException, code: int) -> None:
    error = unpack_error(pack_worker_error(raised, "in DataLoader worker process 3"))
    assert isinstance(error, WorkerDiedError)
    assert error.exitcode == code
