"""Needs of operators that earlier ones may not meet, and the error for each."""

from __future__ import annotations

from headrace.errors import OptionError

_BEFORE = "put {call} before {cause}"
_BOUND = "bound it first, by .take(n) or .epoch(samples=N)"

NEEDS = {  # need: why the operator needs it, and what to do
    "aligned branches": ("branches of .fork() have the same samples", "put {cause} before .fork(), or after {call}"),
    "batches of lists": ("{call} makes batches of lists", "put {call} right after .batch()"),
    "documents": ("each row of a batch has one sequence", _BEFORE),
    "documents of this rank": ("the documents would depend on those of all ranks", _BEFORE),
    "end": ("{cause} has no end", _BOUND),
    "fixed groups": ("batches that time cuts differ in each run", ".map() may follow; put all else before it"),
    "global batches": ("it is about a whole epoch, and an input is a part of it", "put it after {call}"),
    "known number": ("the number of samples is known only after they are read", "put it after {call}"),
    "numbers": ("samples have no numbers before they are read", "make an index: headrace index URL…"),
    "positions": ("samples would have other positions in the epoch", _BEFORE),
    "random access": ("samples are read in another order than they are stored in", _BEFORE),
    "same documents": ("each epoch would have other documents, or another number of sequences", _BEFORE),
    "single samples": ("{call} takes single samples", _BEFORE),
    "stored order": ("its inputs alternate, and documents are packed in their stored order", _BEFORE),
    "stream": ("{cause} counts the results of the stream", "put {cause} last"),
}


def refusal(need: str, call: str, cause: str, *, of: str = "", remedy: str = "") -> OptionError:
    """Return the error of an operator that cannot follow another.

    Args:
        need: What `call` needs and does not get: a key of `NEEDS`.
        call: The operator, as the user wrote it.
        cause: The earlier operator or source that does not provide it.
        of: The input that `cause` belongs to.
        remedy: What to do, if the table does not know it.
    """
    why, usual = (text.format(call=call, cause=cause) for text in NEEDS[need])
    return OptionError(f"{call} cannot follow {cause}{of and f' of {of}'}: {why}; {remedy or usual}")
