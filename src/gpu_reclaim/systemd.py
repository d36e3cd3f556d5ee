"""systemd: showing and stopping units.

Exit statuses of systemctl are not relied on (its manual says not to); states are read instead.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from gpu_reclaim.commands import Section
from gpu_reclaim.errors import BadInput
from gpu_reclaim.models import UnitState

PROPERTIES = (
    "Id",
    "Names",
    "LoadState",
    "ActiveState",
    "SubState",
    "InvocationID",
    "TriggeredBy",
    "RequiredBy",
    "BoundBy",
    "ConsistsOf",
    "RequisiteOf",
    "PropagatesStopTo",
    "WantedBy",
    "UpheldBy",
    "After",
    "ControlGroup",
    "CanStop",
    "SuccessAction",
    "FailureAction",
)
"""What is read of each unit; a systemd that does not know one of them leaves it out."""

STOPPED_ALONG = ("RequiredBy", "BoundBy", "ConsistsOf", "RequisiteOf", "PropagatesStopTo")
"""systemd stops these units along with the one they name (systemd.unit(5): Requires=, BindsTo=,
PartOf=, Requisite=, PropagatesStopTo=)."""

END_ACTIONS = ("SuccessAction", "FailureAction")
"""What systemd does to the machine (poweroff, reboot, exit) when the unit ends."""

STARTED_BY = ("RequiredBy", "BoundBy", "WantedBy", "UpheldBy")
"""These units start the one they name when they start, or, with Upholds=, whenever they run."""

UNIT_TYPES = ("service", "socket", "timer", "path", "target", "mount", "scope", "slice")

MAX_STOP_S = 600
"""No stop is waited for longer, whatever TimeoutStopSec says (it may be infinity)."""

_UNIT = re.compile(r"[A-Za-z0-9:_.@\\][A-Za-z0-9:_.@\\-]{0,255}")


def unit_name(name: str) -> str:
    """A unit's full name: `.service` is added where no type is given.

    Raises:
        BadInput: It is no unit name (systemctl would read wildcards and options in it).
    """
    if not _UNIT.fullmatch(name) or re.search(r"@(\.[a-z]+)?$", name):
        raise BadInput(
            f"{name!r} is no systemd unit name",
            remedy="give the unit as `systemctl status` names it, without wildcards",
        )
    return name if name.rpartition(".")[2] in UNIT_TYPES else f"{name}.service"


def show(units: Iterable[str]) -> str:
    """Shell text that prints the properties of each unit, in blocks."""
    names = " ".join(shlex.quote(unit) for unit in units)
    return f"{_SHOW} -- {names}"


_SHOW = f"systemctl show --no-pager -p {','.join(PROPERTIES)}"

REFUSED = 90
"""Exit status of `stop` when a unit is unknown or refuses to be stopped by hand."""

UNSAFE = 91
"""Exit status of `stop` when systemd cannot be kept from sending KILL; nothing was stopped."""

UNSHOWN = 92
"""Exit status when systemctl could not show units; nothing was stopped."""

_TREE = f"""
seen=" "; next="$*"
while [ -n "$next" ]; do
  out=$({_SHOW} -- $next); code=$?
  printf '%s\\n\\n' "$out"
  [ $code -eq 0 ] || exit {UNSHOWN}
  seen="$seen$next "
  more=$(printf '%s\\n' "$out" | sed -n -E 's/^({"|".join(("TriggeredBy", *STOPPED_ALONG))})=//p')
  next=
  for unit in $more; do case "$seen$next " in *" $unit "*) ;; *) next="$next $unit";; esac; done
done"""


def show_tree(units: Iterable[str]) -> str:
    """Shell text that prints units, all that systemd would stop along with them, and triggers."""
    names = " ".join(shlex.quote(unit) for unit in units)
    return f"set -f\nset -- {names}{_TREE}"


_NO_KILL = """
folders=$(printf '/run/systemd/system/%s.d\\n' @UNITS@)
kill_again() {
  for folder in $folders; do
    [ -d "$folder" ] || continue
    rm -f "$folder/gpu-reclaim-no-kill.conf"
    [ -n "$(ls -A "$folder")" ] || rmdir "$folder"
  done
  systemctl daemon-reload
}
trap kill_again EXIT
trap 'exit 143' HUP INT TERM
for folder in $folders; do
  mkdir -p "$folder" || exit @UNSAFE@
  printf '[Service]\\nSendSIGKILL=no\\n' >"$folder/gpu-reclaim-no-kill.conf" || exit @UNSAFE@
done
systemctl daemon-reload || exit @UNSAFE@"""

# Blocks are told apart by blank lines; of those that do not run, the trigger lines are left out.
_TRIGGERS_OF_RUNNING = r"""sed -n -e '/./{H;$!d;}' -e x -e '/\nActiveState=inactive/d' \
  -e '/\nActiveState=failed/d' -e 's/.*\nTriggeredBy=\([^\n]*\).*/\1/p'"""


def stop(
    units: Iterable[str], *, limit_s: float = MAX_STOP_S, never_kill: Iterable[str] = ()
) -> str:
    """Shell text that shows units and what goes with them, then stops triggers and units.

    Nothing is stopped, and the status is REFUSED, when one is unknown or has RefuseManualStop.

    Args:
        units: Full names.
        limit_s: Longest wait for the stop, in seconds; the job goes on afterwards.
        never_kill: Those of the units to which systemd must not send KILL after TimeoutStopSec.
    """
    names = " ".join(shlex.quote(unit) for unit in units)
    fill = {"@UNITS@": " ".join(map(shlex.quote, never_kill)), "@UNSAFE@": str(UNSAFE)}
    spare = _filled(_NO_KILL, fill) if fill["@UNITS@"] else ""
    return f"""set -f
own=$({_SHOW} -- {names})
refused=
case "$own" in
  *CanStop=no*) refused=1;;
  *LoadState=not-found*)
    # A unit whose file was removed while it runs is "not found" too, and can be stopped.
    for unit in {names}; do
      case "$({_SHOW} -- "$unit")" in
        *LoadState=not-found*ActiveState=inactive* | \\
        *LoadState=not-found*ActiveState=failed*) refused=1;;
      esac
    done;;
esac
[ -z "$refused" ] || {{ printf '%s\\n' "$own"; exit {REFUSED}; }}
shown=$(set -- {names}{_TREE}) || exit {UNSHOWN}
printf '%s\\n\\n' "$shown"{spare}
triggers=$({{ printf '%s\\n' "$own" | sed -n 's/^TriggeredBy=//p'
  printf '%s\\n' "$shown" | {_TRIGGERS_OF_RUNNING}; }} | tr ' ' '\\n' | sort -u)
if [ -n "$triggers" ]; then
  # A live socket, timer or path would start the unit again.
  timeout -k 1 {limit_s:g} systemctl --no-ask-password stop -- $triggers
fi
timeout -k 1 {limit_s:g} systemctl --no-ask-password stop -- {names}"""


def _filled(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def live_triggers(states: Sequence[UnitState]) -> list[UnitState]:
    """The same states, without those triggers that are shown beside them and do not run."""
    dead = {state.name for state in states if not state.active}
    return [
        state.model_copy(update={"triggered_by": [x for x in state.triggered_by if x not in dead]})
        for state in states
    ]


def dependents(states: Sequence[UnitState], units: Sequence[str]) -> dict[str, str]:
    """Units that systemd stops along with some, each with the one it is stopped because of.

    Their triggers are stopped too, so what is bound to one of those counts, and they do not.
    """
    known = {state.name: state for state in states}
    triggers = [x for unit in units if unit in known for x in known[unit].triggered_by]
    found: dict[str, str] = {}
    queue = [*units, *triggers]
    roots = set(queue)
    while queue:
        unit = queue.pop(0)
        for name in known[unit].required_by if unit in known else ():
            if name not in found and name not in roots:
                found[name] = unit
                queue.append(name)
    return found


def parse_show(section: Section) -> list[UnitState]:
    """The blocks that `show` printed; blocks that lack a state are left out."""
    states = []
    for block in re.split(r"\n\s*\n", section.text.strip()):
        pairs = [line.split("=", 1) for line in block.split("\n") if "=" in line]
        if len({value for name, value in pairs if name == "Id"}) > 1:
            continue  # two blocks run into one another: whose state is whose is not known
        values = dict(pairs)
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
        invocation=values.get("InvocationID", ""),
        triggered_by=values.get("TriggeredBy", "").split(),
        required_by=[name for key in STOPPED_ALONG for name in values.get(key, "").split()],
        after=values.get("After", "").split(),
        wanted_by=[name for key in STARTED_BY for name in values.get(key, "").split()],
        control_group=values.get("ControlGroup", ""),
        end_actions=[
            values[key] for key in END_ACTIONS if values.get(key, "none") not in ("", "none")
        ],
        can_stop=values.get("CanStop", "yes") != "no",
    )
