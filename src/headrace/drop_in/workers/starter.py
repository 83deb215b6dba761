"""What starts the workers of the torch regime, and what people reach for a worker by.

Three kinds do: the fork server's (`forked`), a multiprocessing context's (`of_context`), and threads (`threads`). All
give the same: something with the face of a `multiprocessing.Process`, and our end of a socket pair to it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol


class WorkerHandle(Protocol):
    """A worker as people reach for it in `iterator._workers`; the names are multiprocessing's."""

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
        """A descriptor that is readable once it has ended; -1 while there is none."""
        ...


class WorkerStarter(Protocol):
    """Starts workers.

    Attributes:
        greeting: the messages, with descriptors that stay open until `close`, that a new worker is sent first.
    """

    @property
    def greeting(self) -> Sequence[tuple[object, Sequence[int]]]: ...

    def start(self, number: int, start: int) -> tuple[WorkerHandle, socket.socket]:
        """A new worker; `start` counts those that had its number before it."""
        ...

    def fileno(self) -> int:
        """What to wait on for news of workers, for `pump`; -1 where there are none."""
        ...

    @property
    def awaits_writing(self) -> bool:
        """Whether to wait there for room to write, too."""
        ...

    def pump(self) -> None:
        """Take in the news that have come, and send what could not be sent yet."""
        ...

    def look(self) -> list[WorkerHandle]:
        """Those of the workers that were asked for in vain, as whoever was to start them does nothing."""
        ...

    def close(self) -> None:
        """Let go of all workers: they end by themselves once their sockets are closed, or are made to."""
        ...
