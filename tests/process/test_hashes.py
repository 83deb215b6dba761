"""`hash` of text is one in all workers of a trainer, and where that can be had, the trainer's own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from process.waiting import run_script

pytestmark = pytest.mark.timeout(180)  # each starts an interpreter three times

SCRIPT = """
    import json, pathlib, tempfile
    from headrace.workers.forkserver.client import ForkServer

    CODE = '''
    import os, threading
    threading.Thread(target=threading.Event().wait, daemon=True).start()

    class Threaded:
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return hash("text"), os.environ.get("PYTHONHASHSEED"), os.getppid()
    '''

    class Hashes:
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return hash("text"), os.environ.get("PYTHONHASHSEED"), os.getppid()

    def told(data, **options):
        with hr.DataLoader(data, None, num_workers=2, collate_fn=lambda sample: sample, **options) as loader:
            return sorted(set(loader))

    {change}
    all_told = [told(Hashes(), economic=True)]
    ForkServer.shut_down(only_if_idle=True)
    all_told += [told(hr.from_map(range(4)).map(lambda index: Hashes()[index]))]
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "threaded.py").write_text(__import__("textwrap").dedent(CODE))
        sys.path.insert(0, folder)
        from threaded import Threaded
        all_told.append(told(Threaded(), economic=True))
    ForkServer.shut_down(only_if_idle=True)
    print(json.dumps([hash("text"), all_told]))
"""


def told(options: tuple[str, ...] = (), change: str = "") -> tuple[int, set[int], set[Any], set[int]]:
    code, out, err = run_script(SCRIPT.format(change=change), options=options, timeout_s=120)
    assert code == 0, err
    ours, each = json.loads(out)
    hashes, seeds, servers = zip(*(entry for found in each for entry in found), strict=True)
    return ours, set(hashes), set(seeds), set(servers)


@pytest.mark.slow
def test_hash_of_text_is_one_in_all_workers_also_of_fork_servers_that_are_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    ours, hashes, seeds, servers = told()
    assert len(servers) == 2, "the first has ended, and a module that starts a thread has the second begin again"
    assert len(hashes) == 1
    assert seeds == {None}, "the environment is the trainer's"
    assert ours not in hashes, "which nobody can be asked for"


@pytest.mark.slow
def test_hash_of_text_is_the_trainers_when_that_has_no_random_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    ours, hashes, seeds, _ = told()
    assert hashes == {ours}
    assert seeds == {"0"}


@pytest.mark.slow
def test_hash_of_text_is_the_trainers_when_that_was_told_a_seed_before_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    ours, hashes, seeds, _ = told(change='os.environ["PYTHONHASHSEED"] = "8"')
    assert hashes == {ours}
    assert seeds == {"8"}, "which came too late to say anything of hashes"


@pytest.mark.slow
@pytest.mark.parametrize("option", ["-R", "-E"])
def test_hash_of_text_is_one_in_all_workers_when_the_trainers_seed_was_ignored(
    monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    ours, hashes, seeds, _ = told((option,))
    assert len(hashes) == 1
    assert ours not in hashes
    assert seeds == {"0"}
