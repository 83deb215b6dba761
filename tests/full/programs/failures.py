"""Errors of the user's functions: what arrives of them, when, and what comes after."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from watching import Asking, Note, attempt, described_error, program, read, run, tried


class Failing(Dataset[Any]):
    """At some of its samples, an error."""

    def __init__(self, error: Callable[[], BaseException], at: tuple[int, ...] = (5,)) -> None:
        self.error, self.at = error, at

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index in self.at:
            raise self.error()
        return index


class FailingStream(IterableDataset[Any]):
    def __init__(self, error: Callable[[], BaseException], first: bool = False) -> None:
        self.error, self.first = error, first

    def __iter__(self) -> Iterator[Any]:
        if self.first:
            raise self.error()
        return self._rest()

    def _rest(self) -> Iterator[int]:
        worker = get_worker_info()
        for k in range(7):
            if k == 4 and (worker is None or worker.id == 0):
                raise self.error()
            yield 100 * (worker.id if worker else 0) + k


class Own(Exception):
    """With an attribute, and text of its own."""

    def __init__(self, text: str = "none", code: int = 0) -> None:
        super().__init__(text)
        self.code = code

    def __str__(self) -> str:
        return f"own: {self.args[0]}"


class Message(Exception):
    """As some libraries' errors: with a message."""

    message = "of the class"

    def __init__(self, message: str) -> None:
        super().__init__(message)


def chained() -> BaseException:
    try:
        raise LookupError("the first")
    except LookupError as error:
        made = ValueError("the second")
        made.__cause__ = error
        return made


ERRORS: dict[str, Callable[[], BaseException]] = {
    "value": lambda: ValueError("of the sample"),
    "no text": lambda: ValueError(),
    "two arguments": lambda: ValueError("a", 2),
    "key": lambda: KeyError("missing"),
    "key that is no text": lambda: KeyError(("a", 5)),
    "index": lambda: IndexError("out of range"),
    "assertion": lambda: AssertionError("not so"),
    "attribute": lambda: AttributeError("no such attribute", name="x", obj=5),
    "not implemented": lambda: NotImplementedError(),
    "zero": lambda: ZeroDivisionError("division"),
    "recursion": lambda: RecursionError("too deep"),
    "memory": lambda: MemoryError(),
    "of the system": lambda: OSError("no number"),
    "time-out": lambda: TimeoutError("of the user"),
    "interrupted": lambda: InterruptedError("x"),
    "run time": lambda: RuntimeError("DataLoader worker"),
    "own": lambda: Own("text"),
    "message": lambda: Message("text"),
    "chained": chained,
    "many lines": lambda: ValueError("first\nsecond\n  third"),
    "percent": lambda: ValueError("100 % {} {0} %s"),
    "of torch": lambda: torch.cuda.OutOfMemoryError("none left"),
    "linear algebra": lambda: torch.linalg.LinAlgError("singular"),
    "warning": lambda: UserWarning("raised"),
    "import": lambda: ImportError("cannot import"),
}


@program
def errors_of_samples(loader: Any, note: Note) -> None:
    for name, error in ERRORS.items():
        note(name)
        read(loader, note, Failing(error), 4, workers=(0, 1))


@program
def errors_of_samples_that_torch_itself_raises(loader: Any, note: Note) -> None:
    acts: list[Callable[[int], Any]] = [
        lambda k: torch.ones(2)[k + 5],
        lambda k: torch.ones(2, 3) @ torch.ones(2, 3) * k,
        lambda k: [1][k + 5],
        lambda k: {"a": k}["b"],
        lambda k: None.shape,  # type: ignore[attr-defined]
        lambda k: int("x" * k or "y"),
        lambda k: open(f"/not/there/{k}"),  # noqa: PTH123, SIM115
        lambda k: unknown_name,  # type: ignore[name-defined]  # noqa: F821
        lambda k: next(iter([]), 5 / 0 if k else 1 / 0),
    ]

    read(loader, note, Asking(lambda _, index: acts[index](index), count=len(acts)))


@program
def several_errors_in_an_epoch(loader: Any, note: Note) -> None:
    for at in ((0,), (0, 1, 2, 3), tuple(range(12)), (3, 11)):
        read(loader, note, Failing(ERRORS["own"], at), 2, epochs=2)


@program
def errors_with_persistent_workers(loader: Any, note: Note) -> None:
    read(loader, note, Failing(ERRORS["value"], (3, 8)), 2, workers=(2,), epochs=3, persistent_workers=True)


@program
def errors_of_streams(loader: Any, note: Note) -> None:
    for workers in (0, 1, 2):
        for first in (False, True):
            for size in (2, None):
                loading = loader(FailingStream(ERRORS["key"], first), size, num_workers=workers)
                # What comes after a worker that could not begin is, with torch's loader, an error of its own.
                note(workers, first, size, list(tried(loading, 1 if first else 50)))


def fail(*_: Any) -> Any:
    raise LookupError("of the function")


def fail_in_the_second(worker: int) -> None:
    if worker == 1:
        raise Own("of the second", 7)


@program
def errors_of_functions(loader: Any, note: Note) -> None:
    read(loader, note, range(6), 2, collate_fn=fail)
    read(loader, note, range(4), 2, collate_fn=lambda: 5)
    note("first of init", next(tried(loader(range(6), 2, num_workers=2, worker_init_fn=fail))))
    got = list(tried(loader(range(8), 2, num_workers=2, worker_init_fn=fail_in_the_second), 2))
    note("init of the second", got)
    note("no workers, no init", list(loader(range(4), 2, worker_init_fn=fail)))


@program
def errors_of_samplers(loader: Any, note: Note) -> None:
    def sampling(error: Callable[[], BaseException]) -> Iterator[int]:
        yield from range(5)
        raise error()

    for name, size in (("value", 2), ("key", 2), ("own", 2), ("two arguments", 2), ("own", 1)):
        for workers in (0, 2):
            loading = loader(range(20), size, sampler=sampling(ERRORS[name]), num_workers=workers)
            note(name, workers, list(tried(loading, 8)))


@program
def errors_of_length(loader: Any, note: Note) -> None:
    class NoLength(Dataset[Any]):
        def __getitem__(self, index: int) -> int:
            return index

    class Refusing(NoLength):
        def __len__(self) -> int:
            raise ValueError("not known")

    class Wrong(NoLength):
        def __len__(self) -> Any:
            return "ten"  # noqa: PLE0303

    class Negative(NoLength):
        def __len__(self) -> int:
            return -1  # noqa: PLE0303

    for data in (NoLength(), Refusing(), Wrong(), Negative(), 5, None, object):
        for workers in (0, 1):
            for shuffle in (False, True):
                made = attempt(loader, data, 2, shuffle, num_workers=workers)
                note(type(data).__name__, workers, shuffle, made if isinstance(made, str) else "made")
                if not isinstance(made, str):
                    note(attempt(len, made), list(tried(made, 1)))


@program
def attributes_of_an_error_in_the_process_itself(loader: Any, note: Note) -> None:
    try:
        list(loader(Failing(lambda: Own("text", 42)), 4))
    except Own as error:
        note(error.code, described_error(error), error.__cause__)
        frames = traceback.extract_tb(error.__traceback__)
        note([frame.line for frame in frames if frame.name == "__getitem__"])


@program
def the_trainers_own_errors(loader: Any, note: Note) -> None:
    for workers in (0, 2):
        for error in (ValueError("of the trainer"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()):
            loading = loader(range(8), 2, num_workers=workers)

            try:
                for batch in loading:
                    note(batch)
                    if batch[0] == 2:
                        raise error
            except BaseException as raised:
                note(raised)
            note([batch.tolist() for batch in loading])


@program
def options_that_are_wrong(loader: Any, note: Note) -> None:
    wrong: list[dict[str, Any]] = [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"num_workers": 1, "prefetch_factor": -1},
        {"persistent_workers": True},
        {"multiprocessing_context": "fork"},
        {"num_workers": 1, "multiprocessing_context": "none such"},
        {"num_workers": 1, "multiprocessing_context": 5},
        {"sampler": [1], "shuffle": True},
        {"batch_sampler": [[1]], "batch_size": 3},
        {"batch_sampler": [[1]], "shuffle": True},
        {"batch_sampler": [[1]], "drop_last": True},
        {"batch_sampler": [[1]], "sampler": [1]},
        {"batch_size": None, "drop_last": True},
        {"batch_size": 0},
        {"batch_size": -3},
        {"batch_size": 2.5},
        {"batch_size": True},
        {"batch_size": "4"},
        {"drop_last": 1},
        {"drop_last": "no"},
        {"generator": 5, "shuffle": True},
        {"no_such_option": 1},
        {"pin_memory_device": "cuda"},
        {"shuffle": "yes"},
        {"shuffle": 5},
    ]
    for options in wrong:
        for data in (list(range(6)), FailingStream(ERRORS["value"])):
            made = attempt(loader, data, **options)
            note(str(options).replace("<", ""), type(data).__name__, made if isinstance(made, str) else "made")
            if not isinstance(made, str):
                note(list(tried(made, 4)))


if __name__ == "__main__":
    run()
