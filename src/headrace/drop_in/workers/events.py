"""What the trainer's side of the workers waits for."""

from __future__ import annotations

import selectors
from collections.abc import Callable

from headrace.drop_in.workers.starter import WorkerStarter
from headrace.processes.stopped import PATIENCE
from headrace.wakeup import Wakeup


class PoolEvents:
    """Sockets of workers, news of who starts them, and the end. Each event is a function to call.

    Args:
        starter: who starts them.

    Attributes:
        selector: where links to workers are registered, with what is to be called.
    """

    def __init__(self, starter: WorkerStarter) -> None:
        self._starter = starter
        self.selector = selectors.DefaultSelector()
        self._wakeup = Wakeup()
        self.selector.register(self._wakeup, selectors.EVENT_READ, self._wakeup.clear)
        self._listened_to = -1, 0  # the starter's descriptor, and what for
        self._is_waited_for = self._is_closed = False

    def fileno(self) -> int:
        """What to wait on; `PATIENCE.each_s` long, for somebody to look after workers."""
        descriptor: int = self.selector.fileno()
        return descriptor

    def listen_to_starter(self, on_news: Callable[[], None]) -> None:
        """Hear of news from whoever starts workers, and of room for what it could not be told yet."""
        fd = self._starter.fileno()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._starter.awaits_writing else 0)
        if (fd, events) != self._listened_to:
            if self._listened_to[0] >= 0:
                self.selector.unregister(self._listened_to[0])
            if fd >= 0:
                self.selector.register(fd, events, on_news)
            self._listened_to = fd, events

    def __enter__(self) -> None:
        """Within, somebody waits."""
        self._is_waited_for = True

    def __exit__(self, *_: object) -> None:
        self._is_waited_for = False
        self._close_unless_waited_for()

    def wait(self, timeout_s: float | None) -> list[Callable[[], None]]:
        """What has come after that time, and no later than after `PATIENCE.each_s`."""
        each_s = PATIENCE.each_s
        events = self.selector.select(each_s if timeout_s is None else min(timeout_s, each_s))
        return [key.data for key, _ in events]

    def close(self) -> None:
        """Wake up who waits; nothing comes any more."""
        self._is_closed = True
        self._wakeup.set()
        self._close_unless_waited_for()

    def _close_unless_waited_for(self) -> None:
        if self._is_closed and not self._is_waited_for:
            self.selector.close()
