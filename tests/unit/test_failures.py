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


def test_origin_tells_in_words_what_is_known_and_nothing_else() -> None:
    whole = Origin("map(f)", 5, "'a'", "memory://a", 1)
    assert whole.note == "stage: map(f); sample 5 of the epoch; key 'a'; url memory://a; worker 1"
    assert Origin("fetch", 0, worker=0).note == "stage: fetch; sample 0 of the epoch; worker 0"
    assert NOWHERE.note == ""


def test_names_from_data_give_no_orders_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b]0;owned\x07\x9b2J\r\u202eb\tc\nd"
    plain = "a\\x1b]0;owned\\x07\\x9b2J\\r\\u202eb\tc\nd"
    error = FormatError(f"{name} is damaged", url=name)
    assert str(error) == f"{plain} is damaged"
    assert str(pickle.loads(pickle.dumps(error))) == f"{plain} is damaged"
    origin = note_origin(KeyError("x"), Step("map(f)", "map", abs), {"__key__": "k", "__url__": name}, 5, None)
    assert origin.url == plain
    say("inspect", name)
    assert capsys.readouterr().err == f"headrace inspect: {plain}\n"


def test_origin_that_is_noted_is_the_one_that_is_sent() -> None:
    error = KeyError("x")
    origin = note_origin(
        error,
        Step("map(f)", "map", abs, passed="FromMap → map(f)"),
        {"__key__": "a" * 300, "__url__": "s3://user:word@a/0.tar"},
        5,
        2,
    )
    assert error.__notes__ == [origin.note]
    assert len(origin.key) == 200
    assert origin.note.endswith("worker 2; operators: FromMap → map(f)")
    assert "word" not in origin.note


def test_error_is_widened_once_and_stays_the_same_otherwise() -> None:
    packed = pack_error(ValueError("x"), Origin("map(f)"))
    assert packed.scope is Scope.SAMPLE
    assert packed.widened() == packed.widened().widened() == PackedError(packed.blob, packed.origin, Scope.MORE)
    assert pickle.loads(pickle.dumps(packed.widened())) == packed.widened()


def test_bytes_of_a_users_exception_are_never_taken_for_a_mark() -> None:
    """Marks in front of the bytes once were; a user's own text may be anything."""
    error = unpack_error(pack_error(ValueError(b"nobody's caught failed ")))
    assert error.args == (b"nobody's caught failed ",)


def test_what_a_workers_function_raises_comes_as_torchs_loader_raises_it() -> None:
    raised = ValueError("x")
    raised.code = 7  # type: ignore[attr-defined]
    error = unpack_error(pack_worker_error(raised, "in DataLoader worker process 3", Origin("map(f)", 5)))
    assert str(error).startswith("Caught ValueError in DataLoader worker process 3.\nOriginal ")
    assert error.code == 7  # type: ignore[attr-defined]
    assert isinstance(error.__cause__, ValueError)
    assert error.__cause__.args == ("x",)


@pytest.mark.parametrize(("raised", "code"), [(SystemExit(3), 3), (SystemExit(), 0), (KeyboardInterrupt(), 0)])
def test_what_is_no_exception_comes_as_the_death_of_its_worker(raised: BaseException, code: int) -> None:
    error = unpack_error(pack_worker_error(raised, "in DataLoader worker process 3"))
    assert isinstance(error, WorkerDiedError)
    assert error.exitcode == code
