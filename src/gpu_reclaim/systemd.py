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
    "CanStop",
)

UNIT_TYPES = ("service", "socket", "timer", "path", "target", "mount", "scope", "slice")

MAX_STOP_S = 600
"""No stop is waited for longer, whatever TimeoutStopSec says (it may be infinity)."""

_UNIT = re.compile(r"[A-Za-z0-9:_.@\\][A-Za-z0-9:_.@\\-]{0,255}")


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


REFUSED = 90
"""Exit status of `stop` when a unit is unknown or refuses to be stopped by hand."""


def stop(units: Iterable[str]) -> str:
    """Shell text that shows units and their triggers, then stops triggers and units, and waits.

    Nothing is stopped, and the status is REFUSED, when one is unknown or has RefuseManualStop.
    """
    units = list(units)
    names = " ".join(shlex.quote(unit) for unit in units)
    return "\n".join(
        [
            "set -f",
            f"shown=$({show(units)})",
            "printf '%s\\n\\n' \"$shown\"",
            f'case "$shown" in *LoadState=not-found*|*CanStop=no*) exit {REFUSED};; esac',
            "triggers=$(printf '%s\\n' \"$shown\" | sed -n 's/^TriggeredBy=//p')",
            'if [ -n "$triggers" ]; then',
            f"  systemctl show --no-pager -p {','.join(PROPERTIES)} -- $triggers",
            # A live socket, timer or path would start the unit again.
            "  systemctl --no-ask-password stop -- $triggers",
            "fi",
            f"systemctl --no-ask-password stop -- {names}",
        ]
    )


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
        can_stop=values.get("CanStop", "yes") != "no",
    )
