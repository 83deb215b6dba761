"""Output of shell commands, where the user has allowed them."""

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

from headrace.errors import ObjectChangedError, OptionError, StorageError, masked_text
from headrace.fetch.stores.local import answer_from
from headrace.fetch.threads import Threads, retrieved
from headrace.types import Answer

_COMMANDS = 16  # run at once, and as many outputs are kept
_READERS = 4
_PIECE_BYTES = 1024 * 1024
_ERROR_BYTES = 4096
_ERROR_LINES = 5


# Runs a command beside a watcher, which ends the whole process group once its input ends: that is when this process is
# gone. PR_SET_PDEATHSIG would reach the shell alone, and needs code of ours between fork and exec.
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
    """What shell commands write; the path is the command.

    A command runs once for all ranges of its output, which lies in a temporary file without a name; the latest 16 are
    kept. A command that nobody waits for any more is killed, with its process group.
    """

    is_local = True

    def __init__(self) -> None:
        self._runners = Threads("headrace-pipe", _COMMANDS)
        self._readers = Threads("headrace-pipe-files", _READERS)
        self._runs: OrderedDict[str, _Run] = OrderedDict()

    async def get(
        self, path: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None
    ) -> Answer:
        """See `Store.get`. The answer comes when the command has ended; its version is made of the output.

        Raises:
            StorageError: the exit status is not 0; the message has the last lines of the command's errors.
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
        self._drop_oldest()
        return await answer_from(self._readers, run.opened, start, stop, if_match)

    async def aclose(self) -> None:
        """See `Store.aclose`."""
        for run in self._runs.values():
            run.kill()
        self._runs.clear()
        self._runners.close()
        self._readers.close()

    def _drop_oldest(self) -> None:
        idle = [path for path, run in self._runs.items() if not run.waiting]
        for path in idle[:-_COMMANDS]:
            del self._runs[path]


class _Run:
    """One run of a command, and its output; that goes with the last reference, which an answer may have.

    Attributes:
        ended: done when the command has ended, with its error if it has failed.
        waiting: how many reads wait for that.
    """

    def __init__(self, command: str, threads: Threads) -> None:
        if not command.strip():
            raise OptionError("pipe: is followed by no command")
        self._url = f"pipe:{command}"
        self._command, self._etag = command, ""
        self._output = tempfile.TemporaryFile(prefix="headrace-pipe-")  # noqa: SIM115
        weakref.finalize(self, self._output.close)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False
        self._reaping = threading.Lock()  # held where the process must not be reaped, or is
        self.waiting = 0
        self.ended = threads.call(self._spool)
        self.ended.add_done_callback(retrieved)

    def opened(self, if_match: str | None) -> tuple[int, int, str]:
        if if_match is not None and if_match != self._etag:
            raise ObjectChangedError(f"the output changed: its version was {if_match}, now {self._etag}", url=self._url)
        descriptor = os.dup(self._output.fileno())
        return descriptor, os.fstat(descriptor).st_size, self._etag

    def kill(self) -> None:
        """End the command and all that it has started, if it runs; it will not be started any more."""
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
                stdin=subprocess.PIPE,  # which ends with this process, however that ends
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
        """Take what the command writes, until nobody can write any more; gives the end of its errors."""
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
    """The last lines of what the command wrote to its standard error, without what looks like a secret."""
    lines = errors.decode(errors="replace").strip().splitlines()[-_ERROR_LINES:]
    return f": {masked_text('; '.join(lines))}" if lines else ""
