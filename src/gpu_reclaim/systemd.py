"""systemd: showing and stopping units.

Exit statuses of systemctl are not relied on (its manual says not to); states are read instead.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from gpu_reclaim.commands import Section
from gpu_reclaim.errors import BadInput
from gpu_reclaim.models import UnitState

PROPERTIES = (
    "Id",
    "Names",
    "LoadState",
    "ActiveState",
    "SubState",
    "TriggeredBy",
    "ControlGroup",
    "TimeoutStopUSec",
    "CanStop",
)

UNIT_TYPES = ("service", "socket", "timer", "path", "target", "mount", "scope", "slice")

DEFAULT_STOP_TIMEOUT_S = 90
"""systemd's DefaultTimeoutStopSec (systemd-system.conf)."""

STOP_MARGIN_S = 15
"""After TimeoutStopSec systemd still sends KILL and waits for the processes to go."""

MAX_STOP_S = 600
"""No stop is waited for longer, whatever TimeoutStopSec says (it may be infinity)."""

_UNIT = re.compile(r"[A-Za-z0-9:_.@\\][A-Za-z0-9:_.@\\-]{0,255}")
_SPAN = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|month|min|h|d|w|y)")
_SECONDS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1,
    "min": 60,
    "h": 3600,
    "d": 86400,
    "w": 604800,
    "month": 2629800,
    "y": 31557600,
}
"""systemd's own lengths (src/basic/time-util.h); it prints fractions too: `1.500000s`."""


def unit_name(name: str) -> str:
    """A unit's full name: `.service` is added where no type is given.

    Raises:
        BadInput: It is no unit name (systemctl would read wildcards and options in it).
    """
    if not _UNIT.fullmatch(name):
        raise BadInput(
            f"{name!r} is no systemd unit name",
            remedy="give the unit as `systemctl status` names it, without wildcards",
        )
    return name if name.rpartition(".")[2] in UNIT_TYPES else f"{name}.service"


def show(units: Iterable[str]) -> str:
    """Shell text that prints the properties of each unit, in blocks."""
    names = " ".join(shlex.quote(unit) for unit in units)
    return f"systemctl show --no-pager -p {','.join(PROPERTIES)} -- {names}"


def stop(units: Iterable[str]) -> str:
    """Shell text that stops units, triggers first, and waits for it."""
    names = " ".join(shlex.quote(unit) for unit in units)
    return f"systemctl --no-ask-password stop -- {names}"


def parse_show(section: Section) -> list[UnitState]:
    """The blocks that `show` printed; blocks that lack a state are left out."""
    states = []
    for block in re.split(r"\n\s*\n", section.text.strip()):
        values = dict(line.split("=", 1) for line in block.split("\n") if "=" in line)
        if values.get("Id") and values.get("LoadState") and values.get("ActiveState"):
            states.append(_state(values))
    return states


def _state(values: dict[str, str]) -> UnitState:
    return UnitState(
        name=values["Id"],
        names=values.get("Names", "").split(),
        load_state=values["LoadState"],
        active_state=values["ActiveState"],
        sub_state=values.get("SubState", ""),
        triggered_by=values.get("TriggeredBy", "").split(),
        control_group=values.get("ControlGroup", ""),
        stop_timeout_s=seconds(values.get("TimeoutStopUSec", "")),
        can_stop=values.get("CanStop", "yes") != "no",
    )


def seconds(span: str) -> float:
    """A time span as systemd prints it (`1min 30s`), in seconds.

    0 for none; infinity counts as MAX_STOP_S, as nothing is waited for longer.
    """
    if span == "infinity":
        return MAX_STOP_S
    return sum(float(number) * _SECONDS[unit] for number, unit in _SPAN.findall(span))


def stop_limit_s(states: Iterable[UnitState]) -> float:
    """How long stopping these units may take, in seconds."""
    limits = [state.stop_timeout_s or DEFAULT_STOP_TIMEOUT_S for state in states]
    return min(max(limits, default=DEFAULT_STOP_TIMEOUT_S) + STOP_MARGIN_S, MAX_STOP_S)
