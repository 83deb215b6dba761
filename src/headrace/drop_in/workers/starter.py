"""Protocols of the starters of workers, and of the handles by which users access workers.

Implementations: the fork server's (`forked`), a multiprocessing context's (`of_context`), and threads (`threads`). Each
returns a handle with the interface of `multiprocessing.Process`, and the trainer's end of a socket pair.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol


class WorkerHandle(Protocol):
    """A worker in `iterator._workers`, with multiprocessing's names."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    @property
    def sentinel(self) -> int:
        """A descriptor that is readable once the worker has ended. -1 if there is none."""
        ...


class WorkerStarter(Protocol):
    """Starts workers.

    Attributes:
        greeting: First messages to a new worker, with descriptors that stay open until `close`.
    """

    @property
    def greeting(self) -> Sequence[tuple[object, Sequence[int]]]: ...

    def start(self, number: int, start: int) -> tuple[WorkerHandle, socket.socket]:
        """Start a worker. `start` counts earlier workers with this number."""
        ...

    def fileno(self) -> int:
        """Return the descriptor to wait on before `pump`. -1 if there is none."""
        ...

    @property
    def awaits_writing(self) -> bool:
        """True to wait on the descriptor for writing too."""
        ...

    def pump(self) -> None:
        """Handle received messages, and send waiting ones."""
        ...

    def look(self) -> list[WorkerHandle]:
        """Return requested workers that will not start, as their starter is stopped."""
        ...

    def close(self) -> None:
        """Release all workers. They end once their sockets are closed, or are made to."""
        ...
