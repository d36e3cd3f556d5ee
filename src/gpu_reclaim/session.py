"""One host, the ways to it, and the one look that every step begins with."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpu_reclaim import fuser, holding, nvidia_smi, processes, systemd
from gpu_reclaim.commands import Result, Script, Section
from gpu_reclaim.containers import pct_status, refusal
from gpu_reclaim.errors import BadAnswer, UnknownUnit
from gpu_reclaim.lease import HOST, Places
from gpu_reclaim.models import GpuReading, ProcessTable, Step, Survey, UnitState
from gpu_reclaim.processes import NVIDIA, DeviceSet
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.local import Family, family

TOOL_SHARE = 0.8
"""Part of a script's time limit that one tool in it may take."""

Run = Callable[[Script], Result]

IDENTITY = "\n".join(
    [
        'echo "hostname $(cat /proc/sys/kernel/hostname)"',
        '[ ! -r /etc/machine-id ] || echo "machine-id $(cat /etc/machine-id)"',
    ]
)


@dataclass
class Session:
    """A host while it is being worked on, by one thread.

    Attributes:
        host: Its name, as the user knows it.
        links: The ways to it.
        units: Full names of its units to be stopped.
        expected_gpus: How many GPUs it must have; None: as many as are seen first.
        protect: Names that are never signalled here, beside the built-in ones.
        vmid: Number of the LXC container on `links.node`, None if it is none.
        guest_name: Name the guest must have there; empty: any.
        devices: What counts as a GPU device.
        script_timeout_s: Limit of a script that only reads, in seconds.
        owners: Units, beside `units`, of which a process was ended, with the invocation that ran.
        left: Processes that were sent KILL and stayed, as (pid, start time).
        mps_left: Pid of an MPS server that did not quit to why.
        aliases: A unit's own name to all its names.
        named: Units that are in `units` because a policy named them.
        stopped: Units that were told to stop in this session.
        known_units: Units that systemd knew earlier: a transient one is gone once it is stopped.
        places: Where lease, lock and record are on the host.
        token: Names this session's claim on the host.
        lease_s: While it works, the host puts everything back after so many seconds without a
            sign of life; the policy's own limits come on top.
        locked: This session has the host's lease: other runs keep off.
        held: Units under a hold of this session; None: it holds nothing.
        on_trial: Held units that this session started with other flags.
        signed_s: When the lease was last prolonged, by `clock`.
        fit: Asks Proxmox whether a VM may be touched, where its API is known; raises if not.
        me: This process and its ancestors, never signalled.
        clock: Monotonic seconds (injectable).
        sleep: Waits for seconds (injectable).
    """

    host: str
    links: Links
    units: Sequence[str] = ()
    expected_gpus: int | None = None
    protect: Sequence[str] = ()
    vmid: int | None = None
    guest_name: str = ""
    devices: DeviceSet = NVIDIA
    script_timeout_s: float = 150
    owners: dict[str, str] = field(default_factory=dict)
    left: set[tuple[int, int]] = field(default_factory=set)
    mps_left: dict[int, str] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)
    known_units: set[str] = field(default_factory=set)
    places: Places = HOST
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    lease_s: float = 900
    locked: bool = False
    held: list[str] | None = None
    on_trial: set[str] = field(default_factory=set)
    signed_s: float = 0
    fit: Callable[[], object] | None = None
    me: Family = field(default_factory=family)
    clock: Callable[[], float] = field(default=time.monotonic)
    sleep: Callable[[float], None] = field(default=time.sleep)

    def __post_init__(self) -> None:
        """Bring unit names into their full form."""
        self.units = [systemd.unit_name(unit) for unit in self.units]


def look(
    session: Session,
    name: str,
    *,
    run: Run | None = None,
    gpus: bool = True,
    apps: bool = False,
    units: bool = True,
    everybody: bool = False,
    with_fuser: bool = False,
    wide: bool = False,
    lease: bool = False,
) -> Survey:
    """Read, in one round trip, who the host is, its GPUs, units and processes.

    Args:
        session: The host.
        name: The step's name.
        run: The way to use; the session's links by default.
        gpus: Read the GPUs' memory.
        apps: Ask nvidia-smi for its compute processes too.
        units: Show the session's units.
        everybody: Describe every process, for the policy's `match`.
        with_fuser: Ask fuser too, where it is installed.
        wide: Follow descriptors of files outside /dev too.
        lease: Read who holds the host.

    Raises:
        UnknownUnit: systemd does not know one of the session's units.
        BadAnswer: The host's answer makes no sense.
        TransportError: As `Transport.run`.
    """
    started = session.clock()
    parts = {
        "identity": IDENTITY,
        "processes": processes.scan(
            session.devices, units=session.units, everybody=everybody, wide=wide
        ),
    }
    # A tool must end before the script's own limit does: `timeout` inside is out of its reach.
    most = session.script_timeout_s * TOOL_SHARE
    smi_s = min(nvidia_smi.TIME_LIMIT_S, most)
    parts |= {"gpus": nvidia_smi.query_gpus(smi_s)} if gpus else {}
    parts |= {"apps": nvidia_smi.query_apps(smi_s)} if apps else {}
    parts |= {"units": systemd.show_tree(session.units)} if units and session.units else {}
    parts |= {"lease": holding.who(places=session.places)} if lease else {}
    parts |= (
        {"fuser": fuser.look(session.devices.nodes, min(fuser.TIME_LIMIT_S, most))}
        if with_fuser
        else {}
    )
    result = (run or session.links.run)(
        Script(name, parts, timeout_s=session.script_timeout_s, together=True)
    )
    survey = Survey(
        host=session.host,
        step=Step(name=name, via=result.where),
        hostname=result.section("identity").value("hostname"),
        machine_id=result.section("identity").value("machine-id"),
        reading=_reading(result, gpus=gpus, apps=apps),
        units=unit_states(session, result, session.units) if "units" in parts else [],
        table=_table(session, result, with_fuser=with_fuser),
        lease=holding.parse_lease(result.section("lease")) if lease else None,
    )
    survey.step.seconds = session.clock() - started
    real = list(dict.fromkeys(state.name for state in survey.units))
    if real and real != list(session.units):
        # An alias: control groups carry the unit's own name, so it is looked for by that.
        session.units = real
        return look(
            session,
            name,
            run=run,
            gpus=gpus,
            apps=apps,
            everybody=everybody,
            with_fuser=with_fuser,
            wide=wide,
            lease=lease,
        )
    if "units" in parts:
        survey.dependents = dependent_units(result.section("units"), session.units)
    return survey


def dependent_units(section: Section, units: Sequence[str]) -> list[UnitState]:
    """Units that systemd stops along with some, and their live triggers."""
    states = systemd.live_triggers(systemd.parse_show(section))
    triggers = {x for state in states if state.name in units for x in state.triggered_by}
    shown = triggers.union(systemd.dependents(states, units))
    return [state for state in states if state.name in shown]


def _reading(result: Result, *, gpus: bool, apps: bool) -> GpuReading:
    reading = nvidia_smi.parse_gpus(result.section("gpus")) if gpus else GpuReading()
    if not apps:
        return reading
    section = result.section("apps")
    known = section.code in nvidia_smi.WARNING_CODES
    listed = nvidia_smi.parse_apps(section) if known else []
    return reading.model_copy(update={"apps": listed, "apps_known": known})


def seen_processes(session: Session, result: Result) -> ProcessTable:
    """The processes in an answer; this process counts as ourselves where it runs on the host."""
    table = processes.parse_scan(result, result.section("processes"), session.devices)
    if runs_here(session, table):
        table.ourselves += session.me.pids
    return table


def runs_here(session: Session, table: ProcessTable) -> bool:
    """This process runs on the host itself, and its pids are those of the table."""
    me = session.me
    here = (me.boot_id, me.namespace) == (table.boot_id, table.pid_namespace)
    return bool(me.boot_id) and here


def _table(session: Session, result: Result, *, with_fuser: bool) -> ProcessTable:
    table = seen_processes(session, result)
    if not with_fuser:
        return table
    seen = {process.pid for process in table.holders}
    named = [pid for pid in fuser.parse(result.section("fuser")) if pid not in seen]
    return table.model_copy(update={"fuser_only": named})


def unit_states(
    session: Session, result: Result, units: Sequence[str], *, part: str = "units"
) -> list[UnitState]:
    """The states of units, in their order, from the blocks in a part of the answer.

    Raises:
        UnknownUnit: systemd does not know one of them.
        BadAnswer: There is no systemctl, or it failed altogether.
    """
    section = result.section(part)
    states = systemd.live_triggers(systemd.parse_show(section))
    if not states and section.code != 0:
        raise BadAnswer(
            f"{result.where}: units {', '.join(units)} cannot be shown by systemctl",
            remedy="check that the host runs systemd, and the units in the GpuHost block",
            result=result,
        )
    return [_state_of(unit, states, session, result) for unit in units]


def _state_of(
    unit: str, states: Sequence[UnitState], session: Session, result: Result
) -> UnitState:
    for state in states:
        # A unit whose file was removed while it runs is "not found" too.
        there = state.load_state != "not-found" or state.active
        if unit in (state.name, *state.names) and there:
            session.known_units |= {unit, state.name}
            session.aliases[state.name] = state.names
            return state
    if unit in session.known_units:
        return UnitState(name=unit, load_state="not-found", active_state="inactive")
    raise UnknownUnit(
        f"{session.host}: systemd there knows no unit {unit}; nothing was touched",
        remedy="see `systemctl list-units --all`, and correct the units in the GpuHost block",
    )


def check_node(session: Session) -> None:
    """Ask the node whether the container is there, running, unlocked and of the right name.

    Raises:
        GuestRefused: It is not; nothing was touched.
        TransportError: As `Transport.run`.
    """
    if session.fit is not None:
        session.fit()
    node = session.links.node
    if session.vmid is None or node is None:
        return
    body = pct_status(session.vmid, session.guest_name)
    result = node.run(Script(f"look at container {session.vmid}", {"pct": body}))
    error = refusal(node.name, session.vmid, session.guest_name, result.section("pct"))
    if error is not None:
        raise error
