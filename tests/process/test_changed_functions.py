"""Each epoch uses the current values of the variables of functions, as forked workers do."""

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.numbers import Numbers
from process.waiting import output_of

import headrace as hr

SCRIPT = """
    import torch
    import headrace as hr

    FACTOR = 1

    def factor():
        return FACTOR

    class Ours(hr.AsyncDataset):
        def __len__(self):
            return 6

        async def aget(self, index):
            return index

    class Torchs(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return index * factor()

    def scaled(x):
        return x * factor()

    if __name__ == "__main__":
        kind, num_workers = {kind!r}, {num_workers}
        options = dict(batch_size=3, num_workers=num_workers)
        if kind == "economic":
            options["economic"] = True
        data = Ours().map(scaled) if kind == "ours" else Torchs()
        loader = hr.DataLoader(data, **options)
        for FACTOR in (1, 10, 100):
            print([x for batch in loader for x in batch.tolist()])

        def factor():  # as a cell of a notebook that is run again
            return -1

        print([x for batch in loader for x in batch.tolist()])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_workers"), [("ours", 0), ("ours", 2), ("drop-in", 0), ("drop-in", 2), ("economic", 2)]
)
def test_global_of_a_script_that_changes_between_epochs_is_seen(kind: str, num_workers: int) -> None:
    rows = [[x * factor for x in range(6)] for factor in (1, 10, 100, -1)]
    out = output_of(SCRIPT.format(kind=kind, num_workers=num_workers), preamble="")
    assert out.splitlines() == [str(row) for row in rows]


GLOBALS = """
    import headrace as hr

    FACTOR, TABLE, CALLS = 1, None, []

    def begin(number):
        global TABLE
        TABLE = {n: FACTOR * n for n in range(8)}
        CALLS.append(number)

    def is_even(n):
        return TABLE[n] % 2 == 0

    def looked_up(n):
        return TABLE[n]

    def collated(samples):
        return [TABLE[0], len(CALLS), *samples]

    if __name__ == "__main__":
        data = hr.from_map(range(8))
        options = dict(collate_fn=collated, num_workers=1, worker_init_fn=begin)
        loader = hr.DataLoader(data.filter(is_even).map(looked_up), 2, **options)
        for FACTOR in (1, 10):
            print(list(loader))
        print(list(hr.DataLoader(data.filter(is_even).concat(data.map(looked_up)), 8, **options)))
"""


@pytest.mark.slow
def test_worker_init_fn_of_a_script_sets_globals_for_all_functions() -> None:
    out = output_of(GLOBALS, preamble="")
    first = [[0, 1, 0, 2], [0, 1, 4, 6]], [[0, 1, 0, 10], [0, 1, 20, 30], [0, 1, 40, 50], [0, 1, 60, 70]]
    both = [[0, 1, *range(8)], [0, 1, *range(0, 80, 10)]]
    assert out.splitlines() == [str(rows) for rows in (*first, both)]


@pytest.mark.slow
def test_worker_init_fn_of_a_module_runs_once_in_each_worker_when_other_functions_change(tmp_path: Path) -> None:
    factor, init = [1], functools.partial(os.mkdir, tmp_path / "made")  # a second call raises
    with hr.DataLoader(Numbers(6).map(lambda x: x * factor[0]), 3, num_workers=1, worker_init_fn=init) as loader:
        for factor[0] in (1, 10, 100):
            assert flat(loader) == [x * factor[0] for x in range(6)]


def flat(loader: Any) -> list[Any]:
    return [x for batch in loader for x in batch.tolist()]


@pytest.mark.slow
def test_what_has_not_changed_is_not_sent_again_and_what_has_is() -> None:
    table, step = np.arange(1_000_000), {"by": 1}

    def looked_up(x: int) -> int:
        return int(table[x]) + step["by"]

    with hr.DataLoader(Numbers(6).map(looked_up), batch_size=3, num_workers=2) as loader:
        workers = loader._behind._runtime._workers
        sent = []
        for change in (False, False, "in place", False, "small", False):
            if change == "in place":
                table[:] += 100
            elif change == "small":
                step["by"] = 2
            assert flat(loader) == [int(table[k]) + step["by"] for k in range(6)]
            sent.append(id(workers.chains._streams[0]))
    assert sent[0] == sent[1] != sent[2] == sent[3] != sent[4] == sent[5]


@pytest.mark.slow
def test_samples_may_have_another_form_in_the_next_epoch() -> None:
    form: list[Any] = [3, np.float32]

    def made(x: int) -> Any:
        return np.full(form[0], x, form[1])

    with hr.DataLoader(Numbers(6).map(made), batch_size=3, num_workers=2) as loader:
        for form[:] in ([3, np.float32], [50_000, np.float64], [2, np.int16], [2, np.int16]):
            batches = list(loader)
            assert [batch.numpy().dtype for batch in batches] == [np.dtype(form[1])] * 2
            assert [batch[:, -1].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 50_000])
def test_iterator_that_is_in_use_goes_on_when_functions_change(size: int) -> None:
    form: list[Any] = [size, np.float32, 1]

    def made(x: int) -> Any:
        return np.full(form[0], x * form[2], form[1])

    with hr.DataLoader(Numbers(300).map(made), batch_size=3, num_workers=2) as loader:
        before = iter(loader)
        first = [next(before) for _ in range(3)]
        form[:] = [size + 1, np.float64, 10]
        now = [batch[:, 0].tolist() for batch in loader]
        rest = [batch[:, 0].tolist() for batch in before]
    assert [batch[:, 0].tolist() for batch in first] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert now == [[10 * (n + k) for k in range(3)] for n in range(0, 300, 3)]
    assert len(rest) == 97
    for n, batch in enumerate(rest, 3):
        assert batch in ([3 * n, 3 * n + 1, 3 * n + 2], [30 * n, 30 * n + 10, 30 * n + 20])


def test_function_that_cannot_be_sent_any_more_is_an_error_of_the_next_epoch(tmp_path: Path) -> None:
    kept: list[Any] = []

    def made(x: int) -> int:
        return x + len(kept)

    with hr.DataLoader(Numbers(6).map(made), batch_size=3, num_workers=2) as loader:
        assert flat(loader) == list(range(6))
        with (tmp_path / "open").open("w") as file:
            kept.append(file)
            with pytest.raises(hr.errors.CannotCarryError, match="kept"):
                iter(loader)
            kept.clear()
        assert flat(loader) == list(range(6))
