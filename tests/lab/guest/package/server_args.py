"""The server's arguments, as the rest of SGLang asks for them (0.5.9)."""

from typing import Any

_known: list[Any] = []


def set_global_server_args_for_scheduler(server_args: Any) -> None:
    """Makes them known in this process."""
    _known[:] = [server_args]


def get_global_server_args() -> Any:
    """Returns them.

    Raises:
        ValueError: Nobody made them known.
    """
    if not _known:
        raise ValueError("Global server args is not set yet!")
    return _known[0]
