"""Sessions that a run has open: found again by host, way and thread, sharing what they took."""

from __future__ import annotations

import threading
from contextvars import copy_context

import pytest

from gpu_reclaim.models import Via
from gpu_reclaim.session import Session
from gpu_reclaim.tasks import host
from gpu_reclaim.tasks.host import open_host
from gpu_reclaim.transport.links import Links


class Block:
    """As much of a GpuHost as a session needs."""

    def session(self, name: str, *, via: Via = "auto") -> Session:
        return Session(name, Links(via=via))


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "load_host", lambda _: Block())


def test_a_host_is_opened_once() -> None:
    with open_host("a") as first, open_host("a") as second:
        assert second is first


def test_the_outer_of_two_hosts_is_found_again() -> None:
    with open_host("a") as outer, open_host("b") as inner, open_host("a") as again:
        assert (again is outer, again is inner) == (True, False)


def test_what_a_host_has_taken_another_way_or_thread_has_too() -> None:
    found: list[Session] = []

    def other() -> None:
        with open_host("a") as session:
            found.append(session)

    with open_host("a") as session, open_host("b"):
        session.locked, session.held = True, ["sglang.service"]
        with open_host("a", "ssh") as way:
            found.append(way)
        thread = threading.Thread(target=copy_context().run, args=(other,))
        thread.start()
        thread.join()
    assert [x is session for x in found] == [False, False]
    assert {(x.token, x.locked, *(x.held or [])) for x in found} == {
        (session.token, True, "sglang.service")
    }


def test_who_outlives_a_session_opens_its_own() -> None:
    with open_host("a") as session:
        session.locked = True
        copied = copy_context()

    def late() -> tuple[bool, bool]:
        with open_host("a") as mine:
            return mine is session, mine.locked

    assert copied.run(late) == (False, False)
