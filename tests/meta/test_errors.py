"""Errors cross processes whole, and the tree in the docstring of `headrace.errors` is the real one."""

import copy
import inspect
import pickle
import re
from collections.abc import Iterator

import pytest

from headrace import errors

VALUES = {
    "message": "what happened",
    "what": "dataset.file (an open file) cannot be sent",
    "stage": "fetch",
    "url": "s3://bucket/train-0000.tar",
    "start": 512,
    "stop": 1024,
    "attempts": 3,
    "status": 503,
    "retry_after_s": 2.5,
    "key": ("a", 7),
    "batch": 11,
    "offset": 1536,
    "field": "jpg",
    "pid": 4242,
    "exitcode": -9,
}


def tree(top: type[errors.HeadraceError] = errors.HeadraceError) -> Iterator[type[errors.HeadraceError]]:
    yield top
    for child in top.__subclasses__():
        if child.__module__.startswith("headrace"):
            yield from tree(child)


CLASSES = list(dict.fromkeys(tree()))


def make(cls: type[errors.HeadraceError]) -> errors.HeadraceError:
    """An error of this class in which every attribute has a value that is not its default."""
    has_own = any("__init__" in vars(c) for c in cls.__mro__ if issubclass(c, errors.HeadraceError))
    named = inspect.signature(cls.__init__).parameters.keys() - {"self", "message", "args"} if has_own else set()
    error = cls(VALUES["message"], **{name: VALUES[name] for name in named})
    for name in named:
        assert getattr(error, name) == VALUES[name], f"{cls.__name__} does not keep {name}"
    error.add_note("sample a/7 of s3://bucket/train-0000.tar, in worker 1")
    return error


@pytest.mark.parametrize("cls", CLASSES)
def test_error_survives_copies_with_attributes_notes_and_cause(cls: type[errors.HeadraceError]) -> None:
    plain, full = cls("what happened"), make(cls)
    full.__cause__ = make(errors.StorageError)
    assert str(plain) == "what happened"
    for error in (plain, full):
        pickled = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
        for again in (*pickled, pickle.loads(pickle.dumps(pickled[-1])), copy.copy(error)):
            assert (type(again), str(again), again.args, vars(again)) == (cls, str(error), error.args, vars(error))
    for again in pickled:
        assert type(again.__cause__) is errors.StorageError
        assert vars(again.__cause__) == vars(full.__cause__)


def test_docstring_draws_the_tree() -> None:
    drawn: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for indent, name in re.findall(r"^( {4,})([A-Z]\w+)(?:\s|$)", errors.__doc__ or "", re.MULTILINE):
        while above and above[-1][0] >= len(indent):
            above.pop()
        drawn[name] = above[-1][1] if above else None
        above.append((len(indent), name))

    assert drawn == {cls.__name__: cls.__bases__[0].__name__ for cls in CLASSES} | {"HeadraceError": None}


def test_errors_have_docstrings_and_that_of_the_module_names_their_builtin_bases() -> None:
    for cls in CLASSES:
        assert vars(cls).get("__doc__"), cls
        for base in cls.__bases__[1:]:
            assert re.search(rf"^ +{cls.__name__} \({base.__name__}\)", errors.__doc__ or "", re.MULTILINE)
