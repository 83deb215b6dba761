"""Workers are forked where torch's are; elsewhere a fork server has them, which takes lambdas and scripts' classes."""

import importlib
import multiprocessing
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drop_in.acting import Made
from drop_in.classes import IMPORTS, PREAMBLE, in_processes
from drop_in.stateful_data import Counted, begun, loader_of, resumed
from process.waiting import output_of

import headrace as hr


class Holding(Made):
    def __init__(self, make: Callable[[int], Any] = int, **things: Any) -> None:
        super().__init__(make, 4)
        vars(self).update(things)


SCRIPT = """
    import multiprocessing, threading
    import headrace as hr

    class Locked:
        lock = threading.Lock()
        def __len__(self):
            return 2
        def __getitem__(self, index):
            return index

    {before}
    try:
        print([batch.tolist() for batch in hr.DataLoader(Locked(), num_workers=1)])
    except hr.errors.CannotCarryError as error:
        print(str(error).partition(" cannot")[0])
"""


@pytest.mark.parametrize("method", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_workers_are_forked_where_torchs_would_be(method: str | None) -> None:
    before = f"multiprocessing.set_start_method({method!r})" if method else ""
    out = output_of(SCRIPT.format(before=before))
    would_fork = (method or multiprocessing.get_all_start_methods()[0]) == "fork"
    assert out.strip() == ("[[0], [1]]" if would_fork else "type(dataset).lock (a _thread.lock)")


COUNTS_ITS_IMPORTS = """
import os
from multiprocessing import parent_process

with open(os.environ["HEADRACE_TEST_IMPORTS"], "a") as file:
    file.write(f"{__name__} {'trainer or fork server' if parent_process() is None else 'worker'}\\n")

def light(sample):
    return sample
"""

STARTS_A_THREAD = """
import threading

LOCK = threading.Lock()
HELD, STOP = threading.Event(), threading.Event()

def hold():
    with LOCK:
        HELD.set()
        STOP.wait()

THREAD = threading.Thread(target=hold, daemon=True)
THREAD.start()
HELD.wait()

def locked(sample):
    # In a worker that imported this by itself the thread that holds the lock is there, and gives it up.
    STOP.set()
    with LOCK:
        return sample
"""


@pytest.mark.usefixtures("no_fork")
@pytest.mark.slow
def test_workers_import_only_modules_that_start_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TEST_IMPORTS", str(tmp_path / "imports"))
    monkeypatch.syspath_prepend(str(tmp_path))
    texts = {
        "users_first": COUNTS_ITS_IMPORTS,
        "users_threads": COUNTS_ITS_IMPORTS + STARTS_A_THREAD,
        "users_last": COUNTS_ITS_IMPORTS,
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    first, threads, last = (importlib.import_module(f"users_{name}") for name in ("first", "threads", "last"))
    try:
        for _ in range(2):
            data = Made(lambda index: last.light(threads.locked(first.light(index))), 2)
            assert [int(batch) for batch in hr.DataLoader(data, num_workers=2, timeout=60)] == [0, 1]
        lines = (tmp_path / "imports").read_text().splitlines()
        assert [line for line in lines if line.endswith(" worker")] == ["users_threads worker"] * 4
    finally:
        threads.STOP.set()
        threads.THREAD.join()
        for name in ("first", "threads", "last"):
            sys.modules.pop(f"users_{name}")


@pytest.mark.usefixtures("no_fork")
def test_what_cannot_be_sent_is_an_error_that_names_the_attribute(tmp_path: Path) -> None:
    with (tmp_path / "open.txt").open("w") as file:
        data = Holding(transforms=[None, {"log": file}])
        with pytest.raises(hr.errors.CannotCarryError, match=r"dataset\.transforms\[1\]\['log'\].*context=\"fork\""):
            iter(hr.DataLoader(data, num_workers=1))
    data = Holding(lock=threading.Lock())
    with pytest.raises(hr.errors.CannotCarryError, match=r"dataset\.lock \(a _thread\.lock\)"):
        iter(hr.DataLoader(data, num_workers=1))
    assert list(hr.DataLoader(data, None, num_workers=2, multiprocessing_context="fork")) == [0, 1, 2, 3]


def test_tensor_on_another_device_is_an_error_that_says_what_to_do() -> None:
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 0)  # as far as can be seen here

    data = Made(lambda _: torch.zeros(3).as_subclass(Elsewhere))
    with pytest.raises(TypeError, match=r"a tensor on cuda:0 cannot be sent to another process"):
        list(hr.DataLoader(data, None, num_workers=2))


@pytest.mark.parametrize("options", [{}, {"economic": True}], ids=["fork", "economic"])
def test_functions_share_their_variables_in_a_worker(options: dict[str, Any]) -> None:
    count = 0

    def sample(_: int) -> int:
        nonlocal count
        count += 1
        return count

    def begin(_: int) -> None:
        nonlocal count
        count += 10

    def collate(samples: list[int]) -> tuple[list[int], int]:
        return samples, count

    with hr.DataLoader(
        Made(sample, 4), 4, num_workers=1, collate_fn=collate, worker_init_fn=begin, **options
    ) as loader:
        assert list(loader) == [([11, 12, 13, 14], 14)]
    assert count == 0


class Locked(int):
    def __init__(self, _: int) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize("options", [{}, {"workers": "thread"}, {"economic": True}], ids=["fork", "thread", "economic"])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_index_that_cannot_be_sent_is_named(batch_size: int | None, options: dict[str, Any]) -> None:
    sampler = [Locked(number) for number in range(4)]
    is_single = batch_size is None or "economic" in options
    with (
        hr.DataLoader(Made(int), batch_size, sampler=sampler, num_workers=1, **options) as loader,
        pytest.raises(hr.errors.CannotCarryError) as caught,
    ):
        next(iter(loader))
    name = "sampler's index.lock" if is_single else "sampler's index[0].lock"
    assert str(caught.value).startswith(f"{name} (a _thread.lock) cannot be sent to a worker: cannot pickle")
    assert "numbers, texts or tuples" in str(caught.value)


def test_indices_of_batches_that_are_made_again_are_sent_as_the_others() -> None:
    class Own(int):
        """Only this function knows it."""

    def make() -> hr.DataLoader[Any]:
        sampler = [Own(number) for number in range(6)]
        return loader_of(Counted(6), None, sampler=sampler, num_workers=1, snapshot_every_n_steps=3)

    _, state, _ = begun(make(), 5)
    assert list(resumed(make(), state)) == [(5, 6)]


ASKING = """
changed_late = False

class Asking(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        parent = multiprocessing.parent_process()
        return (changed_late, os.getppid(), parent and parent.pid)

def as_is(samples):
    return samples[0]

if __name__ == "__main__":
    changed_late = True
    context = {context}
    for batch in DataLoader(Asking(), num_workers=1, collate_fn=as_is, multiprocessing_context=context):
        changed, parent, answer = batch
        print(changed, parent == os.getpid(), answer == os.getpid())
"""


@pytest.mark.slow
@in_processes
@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ("'fork'", "True True True"),
        ("multiprocessing.get_context('fork')", "True True True"),
        ("multiprocessing.get_context('spawn')", "False True True"),
        ("'forkserver'", "False False True"),
    ],
)
def test_named_start_method_is_used(loader_class: type[Any], context: str, expected: str) -> None:
    code = IMPORTS[loader_class] + ASKING.replace("{context}", context)
    assert output_of(code, preamble=PREAMBLE).splitlines() == [expected, expected]
