"""fuser: a second look at who holds the devices, where psmisc is installed.

fuser compares (device, inode) of a named node, so it misses holders of another node with the same
number, and answers 1 for "nobody" and for "I could not look" alike (psmisc 23.6). It can therefore
only add suspicion: whoever it alone names is reported, and never signalled on its word.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from gpu_reclaim.commands import Section

TIME_LIMIT_S = 20
"""fuser looks at every descriptor of the machine and may wait 5 s on one (psmisc src/fuser.c)."""


def look(prefixes: Iterable[str], limit_s: float = TIME_LIMIT_S) -> str:
    """Shell text that prints the pids fuser names for nodes whose path begins with a prefix."""
    globs = " ".join(f"{shlex.quote(prefix)}*" for prefix in prefixes)
    return "\n".join(
        [
            "command -v fuser >/dev/null || exit 0",
            "set --",
            # /dev/nvidia-caps is a folder: fuser would name whoever stands in it.
            f"for node in {globs}; do",
            '  [ -e "$node" ] && [ ! -d "$node" ] && set -- "$@" "$node"',
            "done",
            "[ $# -gt 0 ] || exit 0",
            f'echo "fuser $(timeout -k 1 {limit_s:g} fuser "$@")"',
        ]
    )


def parse(section: Section) -> list[int]:
    """The pids fuser named, in order, once each."""
    words = re.findall(r"[0-9]+", " ".join(section.lines("fuser")))
    return sorted({int(word) for word in words if re.fullmatch(r"[1-9][0-9]{0,9}", word)})
