"""`hash` of text is one in all workers of a trainer, and where that can be had, the trainer's own."""

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

    class Hashes:
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return hash("text"), os.environ.get("PYTHONHASHSEED"), os.getppid()
    '''
    CODE = __import__("textwrap").dedent(CODE)
    exec(CODE)

    def answers(data, **options):
        with hr.DataLoader(data, None, num_workers=2, collate_fn=lambda sample: sample, **options) as loader:
            return sorted(set(loader))

    {change}
    all_answers = [answers(Hashes(), economic=True)]
    ForkServer.shut_down(only_if_idle=True)
    all_answers += [answers(hr.from_map(range(4)).map(lambda index: Hashes()[index]))]
    with tempfile.TemporaryDirectory() as folder:
        thread = "threading.Thread(target=threading.Event().wait, daemon=True).start()\\n"
        pathlib.Path(folder, "threaded.py").write_text(CODE + thread)
        sys.path.insert(0, folder)
        import threaded
        all_answers.append(answers(threaded.Hashes(), economic=True))
    ForkServer.shut_down(only_if_idle=True)
    print(json.dumps([hash("text"), all_answers]))
"""


def seen(options: tuple[str, ...] = (), change: str = "") -> tuple[int, set[int], set[Any], set[int]]:
    code, out, err = run_script(SCRIPT.format(change=change), options=options, timeout_s=120)
    assert code == 0, err
    ours, each = json.loads(out)
    hashes, seeds, servers = zip(*(entry for found in each for entry in found), strict=True)
    return ours, set(hashes), set(seeds), set(servers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "options", "change", "is_known", "seeds"),
    [
        pytest.param(None, (), "", False, {None}, id="no seed"),
        pytest.param("0", (), "", True, {"0"}, id="no random hashes"),
        pytest.param("7", (), 'os.environ["PYTHONHASHSEED"] = "8"', True, {"8"}, id="a seed that is changed too late"),
        pytest.param("0", ("-R",), "", False, {"0"}, id="a seed that -R ignores"),
        pytest.param("0", ("-E",), "", False, {"0"}, id="a seed that -E ignores"),
    ],
)
def test_hash_of_text_is_the_same_in_all_workers(
    monkeypatch: pytest.MonkeyPatch,
    seed: str | None,
    options: tuple[str, ...],
    change: str,
    is_known: bool,
    seeds: set[str | None],
) -> None:
    """It is the trainer's hash if the seed of that is known. The environment of workers is the trainer's."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    ours, hashes, found, servers = seen(options, change)
    assert len(hashes) == 1
    assert (ours in hashes) == is_known
    assert found == seeds
    assert len(servers) == 3, "the first has ended, and the second forks no more after a module that starts a thread"
