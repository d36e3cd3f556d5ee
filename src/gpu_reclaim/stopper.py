"""Ending a stage from another thread, at once: also where it sleeps or waits for a socket."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SIGNAL = signal.SIGURG
"""Wakes the main thread out of any blocking call. Ignored by default (signal(7)), so that one that
comes late does no harm."""

AGAIN_S = 10.0
"""A stage that goes on all the same is stopped again after so many seconds: enough for tidying up
in the meantime."""


class Stopped(BaseException):
    """The stage is over; a `BaseException`, so that no `except Exception` of a stage keeps it."""


class Stopper:
    """Around a stage: whoever calls `stop` ends it, and its error comes out of the block.

    In the main thread a signal does it, anywhere; in a coroutine its task is cancelled, and only
    that one. In another thread the exception comes with the next line of Python: a blocking call
    there ends first. A stage that keeps it from itself is stopped again.

    Attributes:
        error: Why the stage was stopped; None: it was not.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._armed = False
        self._lock = threading.Lock()
        self._again = threading.Event()
        self._thread = threading.current_thread()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    @property
    def _main(self) -> bool:
        return self._thread is threading.main_thread()

    def __enter__(self) -> Self:
        self._thread = threading.current_thread()
        with contextlib.suppress(RuntimeError):  # no loop runs in this thread
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.current_task()
        if self._main and self._task is None:
            _watch_for(self)
        self._armed = True
        return self

    def stop(self, error: Exception) -> None:
        """End the stage with this error; the first one counts. Called from any thread."""
        with self._lock:
            if not self._armed or self.error is not None:
                return
            self.error = error
            self._strike()
        # A copy of the context that called is of no use to this thread.
        threading.Thread(target=self._strike_again, name="stopper", daemon=True).start()

    def _strike(self) -> None:
        if self._task is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        elif self._main:
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
        else:
            self._raise_later(ctypes.py_object(Stopped))

    def _strike_again(self) -> None:
        while not self._again.wait(AGAIN_S):
            with self._lock:
                if not self._armed:
                    return
                self._strike()

    def struck(self) -> bool:
        """It is to be stopped, and is not over yet."""
        return self._armed and self.error is not None

    def _raise_later(self, what: ctypes.py_object[type[Stopped]] | None) -> None:
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, what)

    def _disarm(self) -> None:
        self._armed = False
        self._again.set()
        with self._lock:
            pass  # whoever is just stopping us is through
        if self._task is not None:
            return
        if self._main:
            _forget(self)
        elif self.error is not None:
            self._raise_later(None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._disarm()
        except Stopped:
            with contextlib.suppress(Stopped):
                self._disarm()
        if self.error is None:
            return
        ours = error is None or isinstance(error, (Stopped, Exception))
        if self._task is not None and isinstance(error, asyncio.CancelledError):
            self._task.uncancel()
            ours = True
        # An error that the stage made of being stopped hides why it was.
        if ours:
            raise self.error from (error if isinstance(error, Exception) else None)


_watched: list[Stopper] = []
_before: list[Callable[[int, FrameType | None], Any] | int | None] = []
"""Stages in the main thread, the outermost first, and who had the signal before them. They may end
in any order."""


def _watch_for(stopper: Stopper) -> None:
    if not _watched:
        _before[:] = [signal.signal(SIGNAL, _on_signal)]
    _watched.append(stopper)


def _forget(stopper: Stopper) -> None:
    if stopper in _watched:
        _watched.remove(stopper)
        if not _watched:
            signal.signal(SIGNAL, _before.pop() or signal.SIG_DFL)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if any(stopper.struck() for stopper in _watched):
        raise Stopped
    if _before and callable(_before[0]):
        _before[0](number, frame)


class Pulse:
    """Calls a check again and again in a thread of its own, until it raises or is ended."""

    def __init__(
        self,
        name: str,
        check: Callable[[], None],
        every_s: float,
        failed: Callable[[Exception], object],
    ) -> None:
        self._check = check
        self._every_s = every_s
        self._failed = failed
        self._over = threading.Event()
        # Loggers and events of the run find it by context variables; each thread has its own copy.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                self._check()
            except Exception as error:
                if not self._over.is_set():
                    self._failed(error)
                return

    def end(self, wait_s: float) -> bool:
        """End it, begun or not; a check under way may go on for a while after `wait_s`.

        Returns:
            No check is under way any more.
        """
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(wait_s)
        return not self._thread.is_alive()
