"""How the interpreter of the fork server is started: as this one was, and with one seed of hashes for good."""

from __future__ import annotations

import functools
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import OptionError

_SEED = "PYTHONHASHSEED"
_NAMES = re.compile(r"python|pypy", re.IGNORECASE)  # of interpreters
_MOST = 2**32 - 1  # that Python takes


def executable() -> str:
    """The Python interpreter that starts other processes: what `multiprocessing.set_executable` was told, if anything.

    Raises:
        OptionError: this process is a program that embeds Python, and there is no interpreter beside it.
    """
    from multiprocessing import spawn

    told = os.fsdecode(spawn.get_executable() or b"")
    if told and told != sys.executable:
        return told
    if not getattr(sys, "frozen", False):  # a program that is one file, with no interpreter
        ours = sys.executable or ""
        if any(_NAMES.match(Path(path).name) for path in (ours, os.path.realpath(ours))):
            return ours
        for folder in (sys.prefix, sys.exec_prefix, sys.base_exec_prefix):
            if os.access(beside := f"{folder}/bin/python{sys.version_info[0]}.{sys.version_info[1]}", os.X_OK):
                return beside
    raise OptionError(
        f"workers need a Python interpreter, and sys.executable is {sys.executable!r}: call "
        "multiprocessing.set_executable('/path/to/python') before the loader is used"
    )


def stream(fd: int) -> int | None:
    """What `subprocess.Popen` is to give another process as stdout (1) or stderr (2).

    A stream that is closed here would be the first file or socket that the other process opens.
    """
    return None if _is_inherited(fd) else subprocess.DEVNULL


def _is_inherited(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)  # what Python opened itself is not: it was closed, and this took its number
    except OSError:
        return False


def flags() -> list[str]:
    """The options that this process's interpreter was started with, for another one: -O, -X utf8, …

    Not those that make errors of warnings: what is imported for workers is not to fail by them; workers are told.
    """
    given: Any = subprocess
    return [flag for flag in given._args_from_interpreter_flags() if not flag.startswith("-W")]


def boot() -> tuple[list[str], dict[str, str]]:
    """Options and environment for the interpreter of a fork server.

    `hash` of text gives the same in all workers of all loaders of this process, and where that can be had, what it
    gives here. Workers get the environment of this process back.
    """
    options, environment = flags(), dict(os.environ)
    if sys.flags.ignore_environment:  # and with the rest of it the seed would be ignored
        environment = {name: value for name, value in environment.items() if not name.startswith("PYTHON")}
        options = [option for option in options if option not in ("-E", "-I")]
        options += ["-s", "-P"] if sys.flags.isolated else []
    return options, {**environment, _SEED: hash_seed()}


@functools.cache
def hash_seed() -> str:
    """This process's own, where it was told one; else one that is drawn, as nobody can be asked for it."""
    if not sys.flags.hash_randomization:
        return "0"
    seed = "" if sys.flags.ignore_environment else _environment_at_start().get(_SEED, "")
    if seed.isdecimal() and 0 < int(seed) <= _MOST:  # with -R 0 is none
        return seed
    return str(1 + secrets.randbelow(_MOST))


def _environment_at_start() -> Mapping[str, str]:
    """What was set before this process began: only that has had a say in its hashes."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return os.environ
    return dict(os.fsdecode(entry).partition("=")[::2] for entry in entries)
