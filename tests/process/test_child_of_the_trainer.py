"""Workers are as children of the trainer that start now: beside torch's own, their hashes, and without torch."""

import json
import multiprocessing
import sys
from pathlib import Path

import pytest
from process.waiting import output_of

import headrace as hr
from headrace.workers.forkserver import client as boot

pytestmark = pytest.mark.timeout(180)  # some start interpreters several times

# The fork server is started first, by the loader; then the trainer changes what its children inherit.
SIDE_BY_SIDE = """
import json, locale, multiprocessing, resource, warnings
from multiprocessing import parent_process, current_process, Process

warnings.simplefilter("ignore")
locale.setlocale(locale.LC_ALL, "C")
resource.setrlimit(resource.RLIMIT_NOFILE, (900, 1000))

def started() -> str:
    try:
        Process(target=print).start()
    except AssertionError as error:
        return str(error)
    return "a child"

class Facts(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        parent, own = parent_process(), current_process()
        return {
            "class": type(own).__name__,
            "parent": [parent.name, parent.pid, parent.is_alive()],
            "child": started(),
            "daemon": own.daemon,
            "children": multiprocessing.active_children(),
            "authkey": own.authkey == KEY,
            "locale": locale.setlocale(locale.LC_ALL),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "arguments": sys.argv,
            "recursion": sys.getrecursionlimit(),
            "utf8": sys.flags.utf8_mode,
            "dtype": str(torch.get_default_dtype()),
            "process": open("/proc/self/comm").read(),
            "name": own.name,
        }

def facts(index):
    return Facts()[index]

def first(samples):
    return samples[0]

KEY = b"a key of the program's"
loaders = {
    "economic": hr.DataLoader(Facts(), collate_fn=first, num_workers=1, economic=True),
    "streaming": hr.DataLoader(hr.from_map(range(1)).map(facts), collate_fn=first, num_workers=1),
}
current_process().authkey = KEY
current_process().name = "the trainer"
locale.setlocale(locale.LC_ALL, "C.UTF-8")
sys.argv = ["train.py", "--fast"]
sys.setrecursionlimit(2345)
torch.set_default_dtype(torch.float64)
loaders["torch"] = torch.utils.data.DataLoader(Facts(), collate_fn=first, num_workers=1)
for name, loader in loaders.items():
    for sample in loader:
        print(json.dumps([name, sample]))
for name in ("economic", "streaming"):
    loaders[name].close()
"""


@pytest.mark.slow
def test_worker_has_what_a_child_of_the_trainer_has_though_the_fork_server_was_started_earlier() -> None:
    out = output_of(SIDE_BY_SIDE, options=("-X", "utf8"))
    facts = dict(json.loads(line) for line in out.splitlines())
    assert facts.keys() == {"torch", "economic", "streaming"}
    numbers = {name: sample.pop("name") for name, sample in facts.items()}
    assert facts["torch"]["child"] == "daemonic processes are not allowed to have children"
    for name in ("economic", "streaming"):
        assert facts[name] == facts["torch"], name
    assert sorted(numbers.values()) == [f"Process-{number}" for number in (1, 2, 3)], "as one program's children"


@pytest.mark.slow
def test_workers_have_streams_to_write_to_when_the_trainer_has_closed_its_own(tmp_path: Path) -> None:
    output_of(
        f"""
        class Written:
            def __len__(self):
                return 1
            def __getitem__(self, index):
                return os.write(1, b"text"), os.write(2, b"text"), os.read(0, 1)

        notes = os.dup2(os.open({str(tmp_path / "notes")!r}, os.O_WRONLY | os.O_CREAT), 50)
        os.closerange(0, 3)
        loader = hr.DataLoader(Written(), None, num_workers=1, collate_fn=str, economic=True)
        os.write(notes, next(iter(loader)).encode())
        """
    )
    assert (tmp_path / "notes").read_text() == "(4, 4, b'')"


@pytest.mark.slow
def test_workers_are_started_by_the_interpreter_that_multiprocessing_was_told_of(tmp_path: Path) -> None:
    python = tmp_path / "interpreter"
    python.write_text(f'#!/bin/sh\ntouch {tmp_path}/started\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    out = output_of(f"""
        import multiprocessing
        multiprocessing.set_executable({str(python)!r})
        print(*hr.DataLoader(["sample"], num_workers=1, economic=True))
        """)
    assert out == "['sample']\n"
    assert (tmp_path / "started").exists()


def test_embedded_python_starts_workers_by_its_own_interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = sys.executable
    multiprocessing.set_executable(ours)
    for host in ("/opt/host/program", "", None):
        monkeypatch.setattr(sys, "executable", host)
        multiprocessing.set_executable(host)
        assert Path(boot.executable()).resolve() == Path(ours).resolve()
    for prefix in ("prefix", "exec_prefix", "base_exec_prefix"):
        monkeypatch.setattr(sys, prefix, str(tmp_path))
    with pytest.raises(hr.OptionError, match=r"sys.executable is None: call multiprocessing.set_executable"):
        boot.executable()
    multiprocessing.set_executable(ours)
    assert boot.executable() == ours


FINALIZERS = """
from multiprocessing.util import Finalize

class Kept:
    pass

def note(name):
    with open(os.path.join(os.environ["NOTES"], f"{name}-{os.getpid()}"), "x"):
        pass

KEPT = Kept()

def of_both(value):
    "Which worker takes a task is nobody's choice: the first waits until the other has started."
    while sum(name.startswith("started") for name in os.listdir(os.environ["NOTES"])) < 2:
        time.sleep(0.01)
    return value

def begin(number):
    import tempfile
    from multiprocessing import util
    note("started")
    Finalize(KEPT, note, ["finalized"], exitpriority=10)
    util.get_temp_dir()

class Items:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return of_both(index)

options = dict(num_workers=2, worker_init_fn=begin)
if {which} == "streaming":
    loader = hr.DataLoader(Numbers(4).map(of_both), **options)
else:
    loader = hr.DataLoader(Items(), **options, economic=True)
print(len([batch for batch in loader]))
loader.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("which", ["economic", "streaming"])
def test_finalizers_of_workers_run_at_their_end(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("notes", "temporary"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    assert output_of(FINALIZERS.replace("{which}", repr(which))) == "4\n"
    assert len(list((tmp_path / "notes").glob("finalized-*"))) == 2, "one of each worker"
    assert list((tmp_path / "temporary").glob("pymp-*")) == [], "folders that multiprocessing makes are gone"


@pytest.mark.slow
def test_worker_sees_that_its_parent_has_ended_and_ends_with_the_status_of_its_function() -> None:
    out = output_of("""
        import multiprocessing
        from headrace.workers.forkserver import inheritance as child
        read, write = os.pipe()  # in the place of the trainer's process descriptor: readable at its end
        pid = os.fork()
        if pid == 0:
            os.close(write)
            def run():
                parent = multiprocessing.parent_process()
                parent.join()
                raise SystemExit(40 + parent.is_alive())
            os._exit(child.live(child.capture(), child.next_number(), run, read))
        os.close(write)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """)
    assert out == "40\n"


SCRIPT = """
    import json, os, pathlib, tempfile
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

    os.environ.update({"PYTHONHASHSEED": "8"} if os.environ.get("PYTHONHASHSEED") == "7" else {})
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "options", "is_known", "seeds"),
    [
        pytest.param(None, (), False, {None}, id="no seed"),
        pytest.param("0", (), True, {"0"}, id="no random hashes"),
        pytest.param("7", (), True, {"8"}, id="a seed that is changed too late"),
        pytest.param("0", ("-R",), False, {"0"}, id="a seed that -R ignores"),
        pytest.param("0", ("-E",), False, {"0"}, id="a seed that -E ignores"),
    ],
)
def test_hash_of_text_is_the_same_in_all_workers(
    monkeypatch: pytest.MonkeyPatch, seed: str | None, options: tuple[str, ...], is_known: bool, seeds: set[str | None]
) -> None:
    """It is the trainer's hash if the seed of that is known. The environment of workers is the trainer's."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    ours, each = json.loads(output_of(SCRIPT, options=options, timeout_s=120))
    hashes, found, servers = map(set, zip(*(entry for answers in each for entry in answers), strict=True))
    assert len(hashes) == 1
    assert (ours in hashes) == is_known
    assert found == seeds
    assert len(servers) == 3, "the first has ended, and the second forks no more after a module that starts a thread"


# Whatever a sample is, it becomes what `helper` gives.
LATE_TORCH = """
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

    torch.set_default_dtype(torch.float64)
    with loader() as one:
        epoch(one)
        are_with_torch = have_torch(one)
        helper = draws
        late = epoch(one)
        are_with_torch += have_torch(one)
    epochs = []
    for helper in draws, hidden:
        with loader() as one:
            epoch(one)
            epochs.append(epoch(one))
    print(json.dumps([are_with_torch, late, *epochs]))
"""


@pytest.mark.slow
def test_torch_that_a_worker_loads_late_is_as_it_would_have_been() -> None:
    """Workers have no torch where nothing needs it."""
    are_with_torch, late, early, hidden_ones = json.loads(output_of(LATE_TORCH))
    assert are_with_torch == [False, True]
    assert late == early
    assert hidden_ones == [number for number, *_ in early]
    assert len({number for number, _, _ in late}) == 8
    assert {tuple(rest) for _, *rest in late} == {("torch.float64", 1)}
