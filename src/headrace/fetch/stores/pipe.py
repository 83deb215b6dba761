"""Output of shell commands, if the user allows them."""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import weakref
import zlib
from collections import OrderedDict

from headrace._util.reads import check_match
from headrace.errors import OptionError, StorageError, masked_text
from headrace.fetch.stores.local import answer_from
from headrace.fetch.threads import Threads, retrieved
from headrace.types import Answer

_COMMANDS = 16  # running at once; as many outputs are kept
_READERS = 4
_PIECE_BYTES = 1024 * 1024
_ERROR_BYTES = 4096
_ERROR_LINES = 5


# Runs a command and a watcher. The watcher kills the whole process group when its input ends, i.e. when this process is
# gone. PR_SET_PDEATHSIG would reach the shell only, and needs code between fork and exec.
_WATCHED = """\
exec 3<&0
{ read _; kill -KILL 0; } <&3 >/dev/null 2>&1 &
exec 3<&- </dev/null
/bin/sh -c "$1"
status=$?
{ kill -KILL $!; wait $!; } >/dev/null 2>&1
if [ $status -gt 128 ]; then kill -$((status - 128)) $$; fi >/dev/null 2>&1
exit $status
"""


class PipeStore:
    """Output of shell commands. The path is the command.

    A command runs once for all ranges of its output, which is stored in an unnamed temporary file. The latest 16
    outputs are kept. A command without waiting readers is killed, with its process group.
    """

    is_local = True

    def __init__(self) -> None:
        self._runners = Threads("headrace-pipe", _COMMANDS)
        self._readers = Threads("headrace-pipe-files", _READERS)
        self._runs: OrderedDict[str, _Run] = OrderedDict()

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        """See `Store.get`. Waits for the command's end. The version is made from the output.

        Raises:
            StorageError: the exit status is not 0. The message has the last lines of the command's errors.
        """
        run = self._runs.get(path) or _Run(path, self._runners)
        self._runs[path] = run
        self._runs.move_to_end(path)
        run.waiting += 1
        try:
            await asyncio.shield(run.ended)
        except BaseException:
            if run.waiting == 1:
                run.kill()
                self._runs.pop(path, None)
            raise
        finally:
            run.waiting -= 1
        for old in [path for path, run in self._runs.items() if not run.waiting][:-_COMMANDS]:
            del self._runs[old]
        return await answer_from(self._readers, run.opened, start, stop, if_match)

    async def aclose(self) -> None:
        for run in self._runs.values():
            run.kill()
        self._runs.clear()
        self._runners.close()
        self._readers.close()


class _Run:
    def __init__(self, command: str, threads: Threads) -> None:
        if not command.strip():
            raise OptionError("pipe: is followed by no command")
        self._url = f"pipe:{command}"
        self._command, self._etag = command, ""
        self._output = tempfile.TemporaryFile(prefix="headrace-pipe-")  # noqa: SIM115
        weakref.finalize(self, self._output.close)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False
        self._reaping = threading.Lock()  # held while the process is reaped, or must not be
        self.waiting = 0
        self.ended = threads.call(self._spool)
        self.ended.add_done_callback(retrieved)

    def opened(self, if_match: str | None) -> tuple[int, int, str]:
        check_match(if_match, self._etag, self._url)
        descriptor = os.dup(self._output.fileno())
        return descriptor, os.fstat(descriptor).st_size, self._etag

    def kill(self) -> None:
        """Kill the command's process group if it runs, and prevent a later start."""
        with self._reaping:
            self._is_killed = True
            if self._process is not None and self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _spool(self) -> None:
        with self._reaping:
            if self._is_killed:
                raise StorageError("nobody waits for the command any more", url=self._url)
            self._process = process = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHED, "sh", self._command],
                stdin=subprocess.PIPE,  # closed at the end of this process, whatever the reason
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        try:
            errors = self._pump(process)
        except BaseException:
            self.kill()
            raise
        finally:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            with self._reaping, process:
                process.wait()
        if process.returncode:
            raise StorageError(f"the command ended with {_status(process.returncode)}{_shown(errors)}", url=self._url)

    def _pump(self, process: subprocess.Popen[bytes]) -> bytes:
        """Store the command's output until it is closed. Return the end of its errors."""
        checksum, errors = 0, b""
        with selectors.DefaultSelector() as selector:
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    piece = os.read(key.fd, _PIECE_BYTES)
                    if not piece:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is process.stderr:
                        errors = (errors + piece)[-_ERROR_BYTES:]
                    else:
                        checksum = zlib.crc32(piece, checksum)
                        self._output.write(piece)
        self._output.flush()
        self._etag = f'"{checksum:x}-{self._output.tell():x}"'
        return errors


def _status(returncode: int) -> str:
    return f"exit status {returncode}" if returncode > 0 else f"signal {signal.Signals(-returncode).name}"


def _shown(errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()[-_ERROR_LINES:]
    return f": {masked_text('; '.join(lines))}" if lines else ""
