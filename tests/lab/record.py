"""The lab's lock, and the record by which it ends exactly what it started."""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from lab.errors import LabError
from lab.paths import LOCK, RECORD
from lab.processes import start_time

Record = dict[str, list[str]]
"""What was started, by kind: containers (vmid), devices (path), cgroups (folder), cuts
(network namespace)."""


def acquire_lock(timeout: float) -> int:
    """Takes the lock that only one process may hold; it ends with that process.

    Args:
        timeout: Seconds to wait for somebody else's lab to end.

    Returns:
        The descriptor that holds the lock.

    Raises:
        LabError: Another process still uses the lab; it is named.
    """
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                user = os.pread(lock, 100, 0).decode().strip()
                os.close(lock)
                raise LabError(f"the lab is in use by process {user}") from None
            time.sleep(0.2)
            continue
        os.truncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()} {start_time(os.getpid())}\n".encode(), 0)
        return lock


def user_of_lab() -> int | None:
    """Returns the process that uses the lab now, or none."""
    try:
        with LOCK.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return int(LOCK.read_text().split()[0])


def started(kind: str, what: str) -> None:
    """Writes down what is about to be started: before the act, so that nothing is missed."""
    record = recorded()
    record.setdefault(kind, []).append(what)
    _write(record)


def recorded() -> Record:
    """Returns all that was started and not yet forgotten."""
    if not RECORD.exists():
        return {}
    return cast(Record, json.loads(RECORD.read_text()))


@contextmanager
def ending(kind: str) -> Iterator[list[str]]:
    """Gives what was recorded of a kind, the newest first, and forgets it when all has gone."""
    record = recorded()
    yield record.get(kind, [])[::-1]
    record.pop(kind, None)
    _write(record)


def _write(record: Record) -> None:
    partial = RECORD.with_suffix(".new")
    partial.write_text(json.dumps(record))
    partial.replace(RECORD)
