"""Start options of the fork server's interpreter: those of this process, with one hash seed."""

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

GRACE_S = 5.0  # time for dismissed workers to end their current tasks
_SEED = "PYTHONHASHSEED"
_NAMES = re.compile(r"python|pypy", re.IGNORECASE)  # names of interpreters
_MOST = 2**32 - 1  # largest seed that Python accepts


def executable() -> str:
    """Return the Python interpreter for new processes. multiprocessing's setting has priority.

    Raises:
        OptionError: this process is a program that embeds Python, and no interpreter was found.
    """
    from multiprocessing import spawn

    told = os.fsdecode(spawn.get_executable() or b"")
    if told and told != sys.executable:
        return told
    if not getattr(sys, "frozen", False):  # a frozen program has no interpreter
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
    """Return the `subprocess.Popen` argument for stdout (1) or stderr (2).

    A stream that is closed here must not become the number of the first file that the new process opens.
    """
    return None if _is_inherited(fd) else subprocess.DEVNULL


def _is_inherited(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)  # False for files that Python opened under the number of a closed stream
    except OSError:
        return False


def flags() -> list[str]:
    """Return this interpreter's options for another one: -O, -X utf8, …

    Warning options are omitted: with errors from warnings, imports for workers could fail. Workers set them later.
    """
    given: Any = subprocess
    return [flag for flag in given._args_from_interpreter_flags() if not flag.startswith("-W")]


def boot() -> tuple[list[str], dict[str, str]]:
    """Return options and environment for the fork server's interpreter.

    `hash` of text is equal in all workers of all loaders of this process, and if possible equal to this process's.
    Workers later get this process's environment.
    """
    options, environment = flags(), dict(os.environ)
    if sys.flags.ignore_environment:  # the seed would be ignored too
        environment = {name: value for name, value in environment.items() if not name.startswith("PYTHON")}
        options = [option for option in options if option not in ("-E", "-I")]
        options += ["-s", "-P"] if sys.flags.isolated else []
    return options, {**environment, _SEED: hash_seed()}


@functools.cache
def hash_seed() -> str:
    """Return this process's hash seed if set, else a random one: the actual seed is unknown."""
    if not sys.flags.hash_randomization:
        return "0"
    seed = "" if sys.flags.ignore_environment else _environment_at_start().get(_SEED, "")
    if seed.isdecimal() and 0 < int(seed) <= _MOST:  # with -R, 0 means random
        return seed
    return str(1 + secrets.randbelow(_MOST))


def _environment_at_start() -> Mapping[str, str]:
    """Return the environment at the start of this process, which has set its hash seed."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return os.environ
    return dict(os.fsdecode(entry).partition("=")[::2] for entry in entries)
