"""The environment of workers: process, limits, settings and globals of modules."""

from __future__ import annotations

import faulthandler
import gc
import locale
import logging
import multiprocessing
import multiprocessing.util
import os
import random
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
from torch.utils.data import get_worker_info
from watching import Asking, Note, program, read, run, unchanged


def answers(loader: Any, question: Callable[[], Any], count: int = 2, **options: Any) -> list[Any]:
    data = Asking(lambda *_: question(), count=count)
    return list(loader(data, None, num_workers=2, collate_fn=unchanged, **options))


def shown_warnings() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("never mind this", UserWarning, stacklevel=1)
        warnings.warn("but this", UserWarning, stacklevel=1)
    return [str(warning.message) for warning in caught]


def name_of_the_process() -> Any:
    process, parent = multiprocessing.current_process(), multiprocessing.parent_process()
    is_alive = (parent is None or parent.is_alive(), process.is_alive(), process.exitcode)
    return process.daemon, process.name.rstrip("0123456789"), parent and (parent.name, parent.pid), is_alive


WHERE: dict[str, Any] = {"set": "when imported"}
GROUP = os.getpgrp()

QUESTIONS: list[Callable[[], Any]] = [
    name_of_the_process,
    lambda: (multiprocessing.current_process().authkey, multiprocessing.active_children()),
    lambda: (threading.current_thread().name, threading.main_thread() is threading.current_thread()),
    lambda: (os.getpgrp() == GROUP, os.getsid(0), os.getuid(), os.getgid()),
    lambda: (Path(sys.argv[0]).name, sys.argv[3:], sys.executable, sys.path, str(sys.flags), sys.warnoptions),
    lambda: (__name__, sys.modules["__main__"].__file__, "torch.utils.data" in sys.modules),
    lambda: (sorted(os.environ.items()), time.tzname, tempfile.gettempdir(), str(Path.cwd())),
    lambda: (sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0), os.umask(os.umask(0o027))),
    lambda: [resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in ("NOFILE", "CORE", "STACK")],
    lambda: (torch.get_num_threads(), torch.get_default_dtype(), str(torch.get_default_device())),
    lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.multiprocessing.get_sharing_strategy()),
    lambda: (gc.isenabled(), gc.get_threshold(), sys.getswitchinterval(), sys.getrecursionlimit(), sys.gettrace()),
    lambda: (faulthandler.is_enabled(), locale.setlocale(locale.LC_ALL), sys.getfilesystemencoding()),
    lambda: (sys.stdin.read(), sys.stdin.closed, sys.stdout.fileno(), sys.stderr.fileno()),
    lambda: [str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGUSR1)],
    lambda: sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    lambda: (shown_warnings(), logging.getLogger("users.part").getEffectiveLevel(), WHERE),
]


@program
def everything_that_can_be_asked(loader: Any, note: Note) -> None:
    Path("inner").mkdir()
    before = Path.cwd(), os.umask(0o027), os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.chdir("inner")
    os.environ["OF_THE_PROGRAM"] = WHERE["set"] = "by the program"
    os.sched_setaffinity(0, {min(before[2])})
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[3][0], 777), before[3][1]))
    logging.getLogger("users").setLevel(logging.DEBUG)
    warnings.filterwarnings("ignore", "never mind")
    try:
        for number, question in enumerate(QUESTIONS):
            found = [str(question()), *answers(loader, lambda: str(question()))]  # noqa: B023 (asked at once)
            note(number, [mentioning_no_side(answer) for answer in found])
    finally:
        os.chdir(before[0])
        os.umask(before[1])
        os.sched_setaffinity(0, before[2])
        resource.setrlimit(resource.RLIMIT_NOFILE, before[3])
        del os.environ["OF_THE_PROGRAM"]
    note(answers(loader, lambda: ("OF_THE_PROGRAM" in os.environ, Path.cwd() == before[0])))


def mentioning_no_side(text: str) -> str:
    """Without what differs between the two runs of a script: its folder, its number, its key."""
    key = str(multiprocessing.current_process().authkey)
    for own in (str(Path.cwd().parent), f", {os.getpid()})", key):
        text = text.replace(own, "…")
    return text


@program
def worker_info(loader: Any, note: Note) -> None:
    def ask() -> Any:
        info = get_worker_info()
        return info and (info.id, info.num_workers, info.seed, type(info.dataset).__name__, str(type(info)))

    def drawn() -> Any:
        return torch.initial_seed(), torch.rand(1).item(), random.random(), np.random.rand()  # noqa: NPY002

    data = Asking(lambda *_: (ask(), drawn()), count=6)
    read(loader, note, data, None, workers=(0, 1, 3), collate_fn=unchanged)
    read(loader, note, data, None, workers=(2,), epochs=2, collate_fn=unchanged, persistent_workers=True)
    note(torch.initial_seed())


@program
def init_function(loader: Any, note: Note) -> None:
    def begin(worker: int) -> None:
        WHERE["init"] = (worker, get_worker_info().id, torch.initial_seed() == get_worker_info().seed)
        torch.set_num_threads(2)
        torch.manual_seed(worker)
        get_worker_info().dataset.count = 50

    def found() -> Any:
        return WHERE["init"], torch.get_num_threads(), torch.rand(1).item(), get_worker_info().dataset.count

    note(answers(loader, found, 4, worker_init_fn=begin), "init" in WHERE)


if __name__ == "__main__":
    run()
