"""Workers are started without torch where nothing that they do needs it, and are none the worse where it was needed."""

import json
import textwrap
from typing import Any

import pytest
from process.waiting import output_of

# Whatever a sample is, it becomes what `helper` gives.
BEGIN = """
    import importlib, json, pathlib, tempfile

    folder = tempfile.TemporaryDirectory()
    pathlib.Path(folder.name, "x.jsonl").write_text('{"n": 1}\\n' * 8)

    def nothing(sample):
        return None

    def draws(sample):
        return torch.rand(1).item(), str(torch.get_default_dtype()), torch.get_num_threads()

    def hidden(sample):
        return importlib.import_module("tor" + "ch").rand(1).item()

    helper = nothing

    def made(sample):
        return helper(sample)

    def loader():
        data = hr.stream(folder.name + "/x.jsonl").map(made)
        return hr.DataLoader(data, 4, collate_fn=list, num_workers=1, seed=3)

    def epoch(loader):
        return [sample for batch in loader for sample in batch]

    def have_torch(loader):
        pids = loader._behind._runtime._workers.pids
        return ["libtorch" in pathlib.Path(f"/proc/{pid}/maps").read_text() for pid in pids]
"""


def _found(code: str) -> Any:
    return json.loads(output_of(textwrap.dedent(BEGIN) + textwrap.dedent(code)))


@pytest.mark.slow
def test_workers_have_no_torch_where_nothing_needs_it() -> None:
    assert _found("""
        found = []
        for helper in nothing, draws:
            with loader() as one:
                epoch(one)
                found.append(have_torch(one))
        print(json.dumps(found))
    """) == [[False], [True]]


@pytest.mark.slow
def test_torch_that_a_worker_loads_late_is_as_it_would_have_been() -> None:
    late, before, early = _found("""
        torch.set_default_dtype(torch.float64)
        with loader() as one:
            epoch(one)
            before = have_torch(one)
            helper = draws
            late = epoch(one)
        with loader() as one:
            epoch(one)
            early = epoch(one)
        print(json.dumps([late, before, early]))
    """)
    assert before == [False]
    assert late == early
    assert len({number for number, _, _ in late}) == 8
    assert {tuple(rest) for _, *rest in late} == {("torch.float64", 1)}


@pytest.mark.slow
def test_torch_that_a_function_imports_draws_the_samples_own_numbers() -> None:
    hidden, early = _found("""
        numbers = []
        for helper in hidden, draws:
            with loader() as one:
                numbers.append(epoch(one))
        print(json.dumps([numbers[0], [number for number, *_ in numbers[1]]]))
    """)
    assert hidden == early
