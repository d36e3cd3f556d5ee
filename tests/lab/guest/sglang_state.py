"""What tests tell the stand-in server through files of the state folder, read anew as they change.

`speed.json`, all keys optional: a setting's name -> how its tokens a second compare with the
default's best, as a number or by requests in flight ({"NEXTN 2/1/3": {"1": 1.1, "64": 0.9}}: the
highest level that is not above the requests running counts); `tokens_per_s` at one request;
`noise_pct` (1) and its `seed`; `moe_gain_pct` (0): what the best rows of MoE kernel parameters gain
over those without a file, others in proportion to their quality (sglang_moe.py), at as many tokens
as requests run times draft tokens; `moe_garbage` (false): other texts wherever the row is not the
one without a file, no quicker for it.

`faults.json`: a setting's name, or "*" for all -> a fault or a list of them:

    dies at start               a traceback and exit status 1
    out of memory               the same, with PyTorch's error
    slow start N                serves after N seconds
    never ready                 /health answers 503 for ever
    hangs                       /health answers 200, nothing is generated
    hangs after N requests      the same, from then on
    health hangs after N requests
    half fail                   every other request answers 500
    garbage                     other texts than all other settings, and the fastest of all
    wrong flags                 /server_info has other numbers than the command line
    leaves workers              they outlive a SIGTERM of the main process

`server.starts` has one line for each start: the setting's name.
"""

import json
import re
from pathlib import Path
from typing import Any


class StateFile:
    """A JSON file that tests write; an absent one is empty."""

    def __init__(self, path: Path) -> None:
        """Reads nothing yet."""
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._content: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """Returns the content; a file that is being written keeps the former one."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._seen, self._content = None, {}
            return self._content
        seen = (status.st_mtime_ns, status.st_size)
        if seen != self._seen:
            try:
                self._content = json.loads(self._path.read_text())
            except ValueError:
                return self._content
            self._seen = seen
        return self._content


class Faults:
    """The faults of one setting."""

    def __init__(self, state: Path, name: str) -> None:
        """Reads nothing yet."""
        self._file = StateFile(state / "faults.json")
        self._name = name

    def has(self, fault: str) -> bool:
        """Whether it has a fault."""
        return fault in self._all()

    def number(self, pattern: str) -> float | None:
        """The number in a fault such as "slow start N"; none where it has no such fault."""
        wanted = re.compile(re.escape(pattern).replace("N", r"([0-9.]+)"))
        found = [match for each in self._all() if (match := wanted.fullmatch(each))]
        return float(found[0][1]) if found else None

    def _all(self) -> list[str]:
        faults: list[str] = []
        content = self._file.read()
        for key in (self._name, "*"):
            said = content.get(key, [])
            faults += [said] if isinstance(said, str) else said
        return faults


def note_start(state: Path, name: str) -> int:
    """Notes one more start; returns how many there were before."""
    path = state / "server.starts"
    before = len(path.read_text().splitlines()) if path.exists() else 0
    with path.open("a") as starts:
        starts.write(f"{name}\n")
    return before
