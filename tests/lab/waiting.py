"""Waiting for a condition, with a deadline."""

import time
from collections.abc import Callable

from lab.errors import LabError


def wait_until(
    what: str, condition: Callable[[], bool], timeout: float = 10, pause: float = 0.02
) -> None:
    """Polls a condition until it holds.

    Args:
        what: What is waited for, for the message.
        condition: Called again and again.
        timeout: Seconds after which to give up.
        pause: Seconds between two calls.

    Raises:
        LabError: It did not hold in time.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"waited {timeout:g} s in vain: {what}")
        time.sleep(pause)
