"""What workers find around them: the process, its limits, its settings, and the modules' globals."""

from __future__ import annotations

import faulthandler
import gc
import locale
import logging
import multiprocessing
import multiprocessing.util
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info
from watching import Note, program, run


class Asking(Dataset[Any]):
    """What a function says, as it is."""

    def __init__(self, ask: Callable[[], Any], count: int = 2) -> None:
        self.ask, self.count = ask, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.ask()


def unchanged(sample: Any) -> Any:
    return sample


class Answers(Dataset[Any]):
    """What each of some functions says, twice in turn: each of two workers is asked all of them."""

    def __init__(self, questions: tuple[Callable[[], Any], ...]) -> None:
        self.questions = questions

    def __len__(self) -> int:
        return 2 * len(self.questions)

    def __getitem__(self, index: int) -> Any:
        return self.questions[index // 2]()


def ask(loader: Any, note: Note, *questions: Callable[[], Any]) -> None:
    """In the trainer, in the first worker, and in the second."""
    for question in questions:
        note("in the trainer", question())
    for number, answer in enumerate(loader(Answers(questions), None, num_workers=2, collate_fn=unchanged)):
        note("in worker", number % 2, answer)


@program
def names_of_processes(loader: Any, note: Note) -> None:
    def of_the_process() -> Any:
        process = multiprocessing.current_process()
        parent = multiprocessing.parent_process()
        return process.daemon, process.name.rstrip("0123456789"), parent is not None and parent.name

    def who() -> Any:
        parent = multiprocessing.parent_process()
        process = multiprocessing.current_process()
        return (
            parent and parent.pid,
            parent is not None and parent.is_alive(),
            process.pid == os.getpid(),
            process.is_alive(),
            process.exitcode,
            len(process.authkey),
            multiprocessing.active_children(),
        )

    ask(loader, note, of_the_process)
    trainer = os.getpid()
    told = list(loader(Asking(who), None, num_workers=2, collate_fn=unchanged))
    note([(parent == trainer, *rest) for parent, *rest in told])


@program
def names_of_threads(loader: Any, note: Note) -> None:
    ask(
        loader,
        note,
        lambda: threading.current_thread().name,
        lambda: threading.main_thread() is threading.current_thread(),
    )
    ask(loader, note, lambda: threading.current_thread().daemon)


@program
def numbers_of_processes(loader: Any, note: Note) -> None:
    trainer = os.getpid()
    told = list(loader(Asking(os.getpid, 6), None, num_workers=2, collate_fn=unchanged))
    note(len(set(told)), trainer in told, [pid == told[k % 2] for k, pid in enumerate(told)])
    groups = list(
        loader(
            Asking(lambda: (os.getpgrp(), os.getsid(0), os.getuid(), os.getgid())),
            None,
            num_workers=2,
            collate_fn=unchanged,
        )
    )
    note([group == (os.getpgrp(), os.getsid(0), os.getuid(), os.getgid()) for group in groups])


@program
def arguments_and_modules(loader: Any, note: Note) -> None:
    ask(
        loader,
        note,
        lambda: sys.argv[3:],
        lambda: Path(sys.argv[0]).name,
        lambda: sys.executable,
        lambda: sys.path,
        lambda: str(sys.flags),
        lambda: sys.warnoptions,
        lambda: __name__,
        lambda: "torch.utils.data" in sys.modules,
        lambda: Path(sys.modules["__main__"].__file__ or "").name,
    )


@program
def folders_and_environment(loader: Any, note: Note) -> None:
    os.environ["OF_THE_PROGRAM"] = "set"
    Path("inner").mkdir()
    before = Path.cwd()
    os.chdir("inner")
    try:
        ask(loader, note, lambda: os.environ.get("OF_THE_PROGRAM"), lambda: sorted(os.environ), lambda: Path.cwd().name)
        ask(loader, note, lambda: os.environ.get("OMP_NUM_THREADS"), lambda: time.tzname, lambda: tempfile.gettempdir())
    finally:
        os.chdir(before)
        del os.environ["OF_THE_PROGRAM"]
    ask(loader, note, lambda: os.environ.get("OF_THE_PROGRAM"), lambda: Path.cwd().name != "inner")


@program
def limits_and_priorities(loader: Any, note: Note) -> None:
    umask, affinity = os.umask(0o027), os.sched_getaffinity(0)
    files, core = resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files[0], 777), files[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, core[1]))
    os.sched_setaffinity(0, {min(affinity)})
    try:
        ask(
            loader,
            note,
            lambda: sorted(os.sched_getaffinity(0)),
            lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
            lambda: resource.getrlimit(resource.RLIMIT_CORE),
            lambda: resource.getrlimit(resource.RLIMIT_STACK),
            lambda: os.umask(os.umask(0o027)),
        )
    finally:
        os.umask(umask)
        os.sched_setaffinity(0, affinity)
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        resource.setrlimit(resource.RLIMIT_CORE, core)
    ask(loader, note, lambda: len(os.sched_getaffinity(0)), lambda: resource.getrlimit(resource.RLIMIT_NOFILE))


@program
def settings_of_torch(loader: Any, note: Note) -> None:
    ask(
        loader,
        note,
        torch.get_num_threads,
        torch.get_default_dtype,
        torch.is_grad_enabled,
        lambda: str(torch.get_default_device()),
        torch.is_inference_mode_enabled,
        torch.multiprocessing.get_sharing_strategy,
        lambda: get_worker_info() is None,
    )


@program
def settings_of_python(loader: Any, note: Note) -> None:
    ask(
        loader,
        note,
        gc.isenabled,
        gc.get_threshold,
        sys.getswitchinterval,
        faulthandler.is_enabled,
        sys.gettrace,
        lambda: locale.setlocale(locale.LC_ALL),
        sys.getdefaultencoding,
        sys.getfilesystemencoding,
    )


@program
def streams_of_the_process(loader: Any, note: Note) -> None:
    ask(
        loader,
        note,
        lambda: sys.stdin.read(),
        lambda: sys.stdout.fileno(),
        lambda: sys.stderr.fileno(),
        lambda: sys.stdin.closed,
    )


@program
def signals(loader: Any, note: Note) -> None:
    ask(
        loader,
        note,
        *[lambda n=number: str(signal.getsignal(n)) for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGUSR1)],
    )
    ask(loader, note, lambda: sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))


@program
def worker_info(loader: Any, note: Note) -> None:
    def told() -> Any:
        info = get_worker_info()
        return info and (info.id, info.num_workers, info.seed, type(info.dataset).__name__, str(type(info)))

    for workers in (0, 1, 3):
        for row in loader(Asking(told, 4), None, num_workers=workers, collate_fn=unchanged):
            note(workers, row)
    note(torch.initial_seed())


@program
def seeds_in_workers(loader: Any, note: Note) -> None:
    import random

    def drawn() -> Any:
        return torch.initial_seed(), torch.rand(1).item(), random.random(), np.random.rand()  # noqa: NPY002

    for persistent in (False, True):
        loading = loader(Asking(drawn, 6), None, num_workers=2, collate_fn=unchanged, persistent_workers=persistent)
        for _ in range(2):
            note(list(loading))


WHERE: dict[str, Any] = {"init": None}


@program
def init_function(loader: Any, note: Note) -> None:
    def begin(worker: int) -> None:
        WHERE["init"] = (worker, get_worker_info().id, torch.initial_seed() == get_worker_info().seed)
        torch.set_num_threads(2)
        torch.manual_seed(worker)
        get_worker_info().dataset.count = 50

    def found() -> Any:
        return WHERE["init"], torch.get_num_threads(), torch.rand(1).item(), get_worker_info().dataset.count

    for row in loader(Asking(found, 4), None, num_workers=2, collate_fn=unchanged, worker_init_fn=begin):
        note(row)
    note(WHERE)


@program
def globals_of_the_script(loader: Any, note: Note) -> None:
    WHERE["later"] = "set by the program"
    ask(loader, note, lambda: WHERE.get("later"), lambda: len(WHERE))
    WHERE["later"] = "set again"
    ask(loader, note, lambda: WHERE.get("later"))
    del WHERE["later"]

    def change() -> Any:
        WHERE["in a worker"] = WHERE.get("in a worker", 0) + 1
        return WHERE["in a worker"]

    note(list(loader(Asking(change, 6), None, num_workers=2, collate_fn=unchanged)), WHERE)


@program
def filters_and_levels(loader: Any, note: Note) -> None:
    logging.getLogger("users").setLevel(logging.DEBUG)
    warnings.filterwarnings("ignore", "never mind")

    def shown() -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("never mind this", UserWarning, stacklevel=1)
            warnings.warn("but this", UserWarning, stacklevel=1)
        return [str(warning.message) for warning in caught], logging.getLogger("users.part").getEffectiveLevel()

    ask(loader, note, shown)


@program
def what_workers_print(loader: Any, note: Note) -> None:
    class Printing(Asking):
        def __getitem__(self, index: int) -> Any:
            sys.stdout.write(f"sample {index}\n")
            sys.stdout.flush()
            sys.stderr.write(f"error {index}\n")  # as one, so that what two write is not mixed
            os.write(1, f"written {index}\n".encode())
            return index

    note(list(loader(Printing(unchanged, 4), num_workers=2)))  # type: ignore[arg-type]


@program
def ends_of_workers(loader: Any, note: Note) -> None:
    """What is registered to run at the end of a process runs at the end of a worker."""

    class Ending(Asking):
        def __getitem__(self, index: int) -> Any:
            if not WHERE.get("registered"):
                WHERE["registered"] = True
                name = f"ended-{get_worker_info().id}"
                multiprocessing.util.Finalize(None, Path(name).write_text, args=("by Finalize",), exitpriority=10)
            return index

    iterator = iter(loader(Ending(unchanged, 4), num_workers=2))  # type: ignore[arg-type]
    note(list(iterator))
    del iterator
    for number in (0, 1):
        for _ in range(6000):
            if Path(f"ended-{number}").exists():
                break
            time.sleep(0.01)
        note(Path(f"ended-{number}").read_text() if Path(f"ended-{number}").exists() else "nothing")


@program
def processes_that_workers_start(loader: Any, note: Note) -> None:
    import subprocess

    def started() -> Any:
        told = subprocess.run([sys.executable, "-c", "print(5)"], capture_output=True, text=True, check=True).stdout
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        return told, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def refused() -> Any:
        process = multiprocessing.Process(target=print)
        try:
            process.start()
        except AssertionError as error:
            return str(error)
        process.join()
        return "started"

    for question in (started, refused):
        note(list(loader(Asking(question), None, num_workers=1, collate_fn=unchanged)))


@program
def threads_that_workers_start(loader: Any, note: Note) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def pooled() -> Any:
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(abs, [-1, -2]))

    def looped() -> Any:
        import asyncio

        return asyncio.run(asyncio.sleep(0, "slept"))

    ask(loader, note, pooled, looped)


if __name__ == "__main__":
    run()
