"""Units that stop along with others, units that run again, and who may have started them."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_reclaim import systemd
from gpu_reclaim.commands import Script
from gpu_reclaim.models import StoppedUnit, UnitState
from gpu_reclaim.session import Session


def running_again(session: Session, after: Sequence[UnitState]) -> dict[str, list[str]]:
    """Those of the units that run, each with the live units that may have started it."""
    active = [state for state in after if state.active]
    if not active:
        return {}
    sources = {state.name: _sources(state) for state in active}
    asked = sorted({name for names in sources.values() for name in names})
    live = set(asked)
    if asked:
        script = Script("look at what starts units", {"units": systemd.show(asked)})
        states = systemd.parse_show(session.links.run(script).section("units"))
        # Of whom systemd says nothing, it is not known that it is down.
        live -= {state.name for state in states if not state.active}
    return {unit: [name for name in names if name in live] for unit, names in sources.items()}


def _sources(state: UnitState) -> list[str]:
    # A target wants half the system, and was reached long ago.
    names = dict.fromkeys([*state.triggered_by, *state.wanted_by])
    return [name for name in names if not name.endswith(".target")]


def stopped_along(state: UnitState, because: str) -> StoppedUnit:
    """The report's line about a unit that systemd stops along with another."""
    why = f"systemd stops it along with {because}"
    return StoppedUnit(unit=state.name, triggered_by=state.triggered_by, because=why)
