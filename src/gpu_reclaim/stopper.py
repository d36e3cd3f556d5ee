"""Ending a stage from another thread, at once: also where it sleeps or waits for a socket."""

from __future__ import annotations

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


class Stopped(BaseException):
    """The stage is over; a `BaseException`, so that no `except Exception` of a stage keeps it."""


class Stopper:
    """Around a stage: whoever calls `stop` ends it, and its error comes out of the block.

    In the main thread a signal does it, anywhere. In another thread the exception comes with the
    next line of Python: a blocking call there ends first.

    Attributes:
        error: Why the stage was stopped; None: it was not.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._armed = False
        self._lock = threading.Lock()
        self._thread = threading.current_thread()
        self._before: Callable[[int, FrameType | None], Any] | int | None = None

    @property
    def _main(self) -> bool:
        return self._thread is threading.main_thread()

    def __enter__(self) -> Self:
        if self._main:
            self._before = signal.signal(SIGNAL, self._on_signal)
        self._armed = True
        return self

    def stop(self, error: Exception) -> None:
        """End the stage with this error; the first one counts. Called from any thread."""
        with self._lock:
            if not self._armed or self.error is not None:
                return
            self.error = error
            if self._main:
                signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
            else:
                self._raise_later(ctypes.py_object(Stopped))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._armed and self.error is not None:
            raise Stopped
        if callable(self._before):
            # It is for a stage around this one.
            self._before(number, frame)

    def _raise_later(self, what: ctypes.py_object[type[Stopped]] | None) -> None:
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, what)

    def _disarm(self) -> None:
        self._armed = False
        with self._lock:
            pass  # whoever is just stopping us is through
        if self._main:
            signal.signal(SIGNAL, self._before or signal.SIG_DFL)
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
        # An error that the stage made of being stopped hides why it was.
        if self.error is not None and (error is None or isinstance(error, (Stopped, Exception))):
            raise self.error from (error if isinstance(error, Exception) else None)


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
