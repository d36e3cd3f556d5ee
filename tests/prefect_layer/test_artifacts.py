"""Artifacts are for people: the work does not depend on whether they can be written."""

from __future__ import annotations

import logging
import time

import httpx
import pytest

from gpu_reclaim.tasks import artifacts, host


@pytest.fixture(autouse=True)
def in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "in_a_run", lambda: True)
    monkeypatch.setitem(artifacts._away, "until", 0.0)


def test_a_dead_server_is_asked_once_and_harms_nobody() -> None:
    asked: list[str] = []

    def create() -> None:
        asked.append("once")
        raise httpx.ConnectError("all connection attempts failed")

    assert artifacts.write(create) is None
    assert artifacts.write(create) is None
    assert asked == ["once"]


def test_a_server_that_is_back_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise httpx.ReadTimeout("too slow")

    artifacts.write(fail)
    later = artifacts._away["until"] + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert artifacts.write(lambda: "written") == "written"


def test_a_fault_of_ours_is_not_hidden() -> None:
    def fail() -> None:
        raise TypeError("no such key")

    with pytest.raises(TypeError):
        artifacts.write(fail)


def test_outside_of_a_run_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "in_a_run", lambda: False)
    assert artifacts.write(lambda: "written") is None


def test_a_log_line_that_nobody_reads_does_not_end_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """rich raises SystemExit where its output is a broken pipe, as after the end of a worker."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise SystemExit(1)

    logger = logging.getLogger("a-run")
    logger.addHandler(Broken())
    monkeypatch.setattr(host, "get_run_logger", lambda: logger)
    logging.getLogger("gpu_reclaim").error("nobody reads this")
