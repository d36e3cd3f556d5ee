"""Ending a stage from another thread, wherever it is; and the thread that looks meanwhile."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import pytest

from gpu_reclaim.errors import HoldLost
from gpu_reclaim.stopper import SIGNAL, Pulse, Stopper
from unit.actors import LIMIT_S, in_a_thread, wait_for

LONG_S = 60
"""So long a stage goes on that nobody stops."""

SOON_S = 0.05
"""A stage that was begun is in its call by then; should it not be, it is ended all the same."""

LOST = HoldLost("llm: the hold is no longer ours")


@pytest.fixture(autouse=True)
def handler_of_before() -> Iterator[None]:
    before = signal.getsignal(SIGNAL)
    yield
    assert signal.getsignal(SIGNAL) == before
    signal.signal(SIGNAL, signal.SIG_DFL)


def sleep() -> None:
    time.sleep(LONG_S)


def read_a_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


def wait_for_a_child() -> None:
    child = subprocess.Popen(["sleep", str(LONG_S)])
    try:
        child.wait()
    finally:
        child.kill()
        child.wait()


def wait_for_an_event() -> None:
    threading.Event().wait(LONG_S)


def soon(do: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(SOON_S, do)
    timer.start()
    return timer


@contextlib.contextmanager
def not_yet() -> Iterator[None]:
    """The signal stays away meanwhile."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})


def stopped(stage: Callable[[Stopper], object]) -> HoldLost:
    """The error that comes out of a stage."""
    with pytest.raises(HoldLost) as caught, Stopper() as stopper:
        stage(stopper)
    return caught.value


def over_there(do: Callable[[], object]) -> Exception | None:
    """Do it in a thread, and give the error that comes out."""
    thread, found = in_a_thread(do)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    return next(iter(found), None)


@pytest.mark.parametrize("stage", [sleep, read_a_socket, wait_for_a_child, wait_for_an_event])
def test_a_stage_in_a_long_call_is_ended_at_once(stage: Callable[[], None]) -> None:
    began, reached = time.monotonic(), []

    def run(stopper: Stopper) -> None:
        soon(lambda: stopper.stop(LOST))
        stage()
        reached.append(stage)

    assert stopped(run) is LOST
    assert reached == []
    assert time.monotonic() - began < LONG_S / 4


def test_a_stage_that_nobody_stops_goes_through() -> None:
    with Stopper() as stopper:
        pass

    assert stopper.error is None


def test_a_stage_in_another_thread_is_ended_with_its_next_line() -> None:
    reached: list[str] = []

    def stage() -> None:
        with Stopper() as stopper:
            soon(lambda: stopper.stop(LOST))
            for _ in range(LONG_S * 100):
                time.sleep(0.01)
            reached.append("the end")

    assert over_there(stage) is LOST
    assert reached == []


def test_who_is_stopped_in_another_thread_with_the_last_line_still_gets_the_error_alone() -> None:
    """The exception that is under way must not come out later, elsewhere in that thread."""
    later: list[str] = []

    def stage() -> None:
        try:
            with Stopper() as stopper:
                stopper.stop(LOST)
        except HoldLost:
            for _ in range(1000):
                pass
            later.append("on its way")
            raise

    assert over_there(stage) is LOST
    assert later == ["on its way"]


def test_a_stop_that_comes_late_does_nothing() -> None:
    with Stopper() as stopper:
        pass
    stopper.stop(LOST)
    signal.raise_signal(SIGNAL)

    assert stopper.error is None


def test_a_stop_before_the_block_does_nothing() -> None:
    stopper = Stopper()
    stopper.stop(LOST)
    with stopper:
        pass

    assert stopper.error is None


def test_somebody_elses_signal_does_not_end_the_stage() -> None:
    reached = []
    with Stopper():
        signal.raise_signal(SIGNAL)
        reached.append("the end")

    assert reached == ["the end"]


def test_the_handler_of_before_is_back() -> None:
    seen: list[int] = []

    def theirs(number: int, _: object) -> None:
        seen.append(number)

    before = signal.signal(SIGNAL, theirs)
    try:
        with contextlib.suppress(HoldLost), Stopper() as stopper:
            stopper.stop(LOST)

        assert signal.getsignal(SIGNAL) is theirs
    finally:
        signal.signal(SIGNAL, before)


def test_the_first_error_counts() -> None:
    def stage(stopper: Stopper) -> None:
        with not_yet():
            stopper.stop(LOST)
            stopper.stop(HoldLost("the second"))

    assert stopped(stage) is LOST


def test_no_except_of_a_stage_keeps_it() -> None:
    """One that catches all exceptions goes on; one that catches whatever there is has ended."""
    tries: list[str] = []

    def stage(stopper: Stopper) -> None:
        soon(lambda: stopper.stop(LOST))
        while len(tries) < 3:
            tries.append("again")
            with contextlib.suppress(Exception):
                sleep()

    assert stopped(stage) is LOST
    assert tries == ["again"]


def test_a_stage_that_swallows_everything_fails_all_the_same() -> None:
    def stage(stopper: Stopper) -> None:
        with contextlib.suppress(BaseException):
            stopper.stop(LOST)
            sleep()

    assert stopped(stage) is LOST


def test_an_error_made_of_being_stopped_does_not_hide_why() -> None:
    own = ValueError("no result file")

    def stage(stopper: Stopper) -> None:
        try:
            stopper.stop(LOST)
            sleep()
        finally:
            raise own

    error = stopped(stage)

    assert error is LOST
    assert error.__cause__ is own


def test_an_interrupt_is_not_hidden_by_the_stop() -> None:
    def stage(stopper: Stopper) -> None:
        try:
            stopper.stop(LOST)
            sleep()
        finally:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Stopper() as stopper:
        stage(stopper)


def test_a_stages_own_error_comes_out_as_it_is() -> None:
    own = ValueError("bad flag")
    with pytest.raises(ValueError, match="bad flag") as caught, Stopper():
        raise own

    assert caught.value is own


class StoppedWhileLeaving(Stopper):
    """The stop comes when the stage has ended and is just being left."""

    def _disarm(self) -> None:
        self.stop(LOST)
        super()._disarm()


@pytest.mark.parametrize("run", [lambda do: do(), over_there], ids=["main thread", "another"])
def test_a_stop_while_leaving_is_no_stray_exception(
    run: Callable[[Callable[[], object]], object],
) -> None:
    def stage() -> None:
        with pytest.raises(HoldLost) as caught, StoppedWhileLeaving():
            pass
        assert caught.value is LOST
        for _ in range(1000):
            pass

    assert run(stage) is None


def test_a_stage_within_a_stage_is_ended_with_the_outer_one() -> None:
    """Two hosts: the signal is for whoever was stopped, not for the innermost."""
    reached = []

    def stage(outer: Stopper) -> None:
        with Stopper() as inner:
            soon(lambda: outer.stop(LOST))
            sleep()
            reached.append("the end")
        reached.append(f"after {inner}")

    assert stopped(stage) is LOST
    assert reached == []


# The pulse.


@contextlib.contextmanager
def pulse(
    check: Callable[[], None], failed: Callable[[Exception], object] = lambda _: None
) -> Iterator[Pulse]:
    made = Pulse("a pulse", check, 0.001, failed)
    made.start()
    try:
        yield made
    finally:
        made.end(LIMIT_S)


def test_a_pulse_calls_again_and_again_until_it_is_ended() -> None:
    calls: list[str] = []
    with pulse(lambda: calls.append(threading.current_thread().name)):
        wait_for(lambda: len(calls) > 2, "three calls")
    seen = len(calls)
    time.sleep(0.01)

    assert set(calls) == {"a pulse"}
    assert len(calls) == seen


def test_a_pulse_waits_before_its_first_call() -> None:
    calls: list[int] = []
    made = Pulse("a pulse", lambda: calls.append(1), LONG_S, lambda _: None)
    made.start()
    made.end(LIMIT_S)

    assert calls == []


def test_a_pulse_may_end_before_it_began() -> None:
    calls: list[int] = []
    made = Pulse("a pulse", lambda: calls.append(1), 0, lambda _: None)
    made.end(LIMIT_S)
    made.start()
    made.end(LIMIT_S)

    assert calls == []


def test_a_failure_is_told_once_and_ends_the_pulse() -> None:
    told: list[Exception] = []

    def fail() -> None:
        raise LOST

    with pulse(fail, told.append) as made:
        wait_for(lambda: bool(told), "the failure")
        made._thread.join(LIMIT_S)

        assert not made._thread.is_alive()
    assert told == [LOST]


def test_a_failure_after_the_end_is_nobodys_business() -> None:
    told: list[Exception] = []
    begun, ended = threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        ended.wait(LIMIT_S)
        raise LOST

    with pulse(fail, told.append) as made:
        assert begun.wait(LIMIT_S)
        made.end(0)  # the check is under way, and nobody waits for it
        assert made._thread.is_alive()
        ended.set()

    assert told == []


def test_a_pulse_sees_the_context_of_whoever_made_it() -> None:
    """A run's logger is found by it."""
    variable: ContextVar[str] = ContextVar("variable", default="nothing")
    seen: list[str] = []
    token = variable.set("the run")
    with pulse(lambda: seen.append(variable.get())):
        variable.reset(token)
        wait_for(lambda: bool(seen), "a call")

    assert set(seen) == {"the run"}


def test_a_pulse_does_not_keep_the_process_alive() -> None:
    assert Pulse("a pulse", lambda: None, LONG_S, lambda _: None)._thread.daemon
