"""While a stage runs on freed GPUs: its hold is renewed, and whoever else comes is named."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import datetime

from gpu_reclaim import hold
from gpu_reclaim.errors import GpuReclaimError, HoldLost, Intruded
from gpu_reclaim.models import Intruder, Process, ReclaimPolicy, Survey
from gpu_reclaim.owners import in_unit, owner
from gpu_reclaim.restoring import STAGE, STAGE_COMMAND
from gpu_reclaim.session import Session, look, runs_here
from gpu_reclaim.victims import choose

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""How often the host is looked at during a stage, in seconds."""

SHORTEST_S = 5
"""Least time that a look at the host is given, in seconds."""

SHARE = 4
"""So many signs of life fit into the time that the host waits for one."""


class Keeper:
    """Keeps a host that a session took; for one thread, with connections of its own.

    Attributes:
        every_s: How often `beat` is to be called, in seconds.
    """

    def __init__(
        self,
        taken: Session,
        reopen: Callable[[], Session],
        policy: ReclaimPolicy,
        tell: Callable[[Intruder], object],
    ) -> None:
        """Begins to count; nothing is sent yet.

        Args:
            taken: The session that took the host.
            reopen: Makes another session on the same host.
            policy: `hold_minutes` is how long the host waits for a sign of life.
            tell: Called with each intruder, once.
        """
        self._taken = taken
        self._reopen = reopen
        self._policy = policy
        self._tell = tell
        self._hold_s = policy.hold_minutes * 60
        self._session: Session | None = None
        self._reached = taken.clock()
        self._missing = False
        self._here = False
        self._known: set[tuple[int, int, str]] = set()
        self.every_s = min(EVERY_S, self._hold_s / SHARE)

    def beat(self) -> None:
        """Give a sign of life, and look who holds the GPUs.

        Raises:
            HoldLost: The hold is over, or will be before the host can be reached.
            Intruded: Somebody else uses the GPUs, and the policy says to fail then.
        """
        started = self._taken.clock()
        try:
            session = self._opened()
            hold.renew(session, self._hold_s, session.script_timeout_s)
            self._reached = started
            seen = self._look(session)
        except HoldLost:
            raise
        except GpuReclaimError as error:
            # Not to be reached, or an odd answer: the next beat may do better.
            self._missed(error)
            return
        if self._missing:
            log.info("%s: looked at again", self._taken.host)
        self._missing = False
        self._name(self._intruders(seen))

    def close(self) -> None:
        """Close the connections. Never raises."""
        if self._session is not None:
            self._session.links.close()
            self._session = None

    def _opened(self) -> Session:
        if self._session is None:
            self._session = self._reopen()
            self._session.token, self._session.held = self._taken.token, self._taken.held
            # A transient unit is gone since it was stopped, and only who saw it before knows it.
            self._session.known_units = set(self._taken.known_units)
            # A script that hangs must not outlast what is left of the hold.
            most = max(SHORTEST_S, self._hold_s / SHARE)
            self._session.script_timeout_s = min(self._session.script_timeout_s, most)
        return self._session

    def _look(self, session: Session) -> Survey:
        partly = bool(self._policy.gpus)
        seen = look(session, "watch", gpus=partly, apps=partly, everybody=self._here)
        if not self._here and runs_here(session, seen.table):
            # This very machine: who is a child of ours is seen among all processes alone.
            self._here = True
            return self._look(session)
        return seen

    def _missed(self, error: GpuReclaimError) -> None:
        self.close()
        silent_s = self._taken.clock() - self._reached
        # One more attempt may take as long as the last one; the host must not be first.
        if silent_s > self._hold_s * (1 - 1 / SHARE):
            raise HoldLost(
                f"{self._taken.host}: could not be reached for {silent_s:.0f} s, so it puts back "
                "what was stopped",
                remedy=f"see why it could not be reached ({error.message}), and run it again",
            ) from error
        if not self._missing:
            log.warning("%s: the hold is not watched: %s", self._taken.host, error.message)
        self._missing = True

    def _intruders(self, seen: Survey) -> list[Intruder]:
        at = f"{datetime.now():%H:%M:%S}"
        trials = frozenset(self._taken.on_trial)
        rows = [
            Intruder(
                at=at,
                pid=x.pid,
                start_time=x.start_time,
                name=x.name,
                owner=str(owner(x.cgroups)),
                devices=x.devices,
            )
            for x in strangers(seen, self._policy, self._taken.protect, here=self._here)
            if not any(in_unit(x.cgroups, unit) for unit in trials)
        ]
        held = set(self._taken.held or []) - trials
        return rows + [
            Intruder(at=at, name=x.name, owner=f"unit {x.name}")
            for x in seen.units
            if x.active and x.name in held
        ]

    def _name(self, intruders: list[Intruder]) -> None:
        fresh = [x for x in intruders if (x.pid, x.start_time, x.name) not in self._known]
        for row in fresh:
            self._known.add((row.pid, row.start_time, row.name))
            log.warning("%s: an intruder: %s", self._taken.host, row)
            self._tell(row)
        if fresh and self._policy.on_intruder == "fail":
            raise Intruded(
                f"{self._taken.host}: {fresh[0]} came while the GPUs were held",
                remedy="end it and run this again; if it is the stage's own, start it on the host "
                f"with `{' '.join(STAGE_COMMAND[:-1])}`",
            )


def strangers(
    seen: Survey, policy: ReclaimPolicy, protect: Sequence[str] = (), *, here: bool = False
) -> list[Process]:
    """Unprotected holders of wanted GPUs that are neither the stage's nor ours.

    Args:
        seen: With every process, where this process is on the same machine.
        policy: Which GPUs are wanted, and whom it protects.
        protect: The host's own protected names.
        here: This process is on the same machine, so who descends from it is the stage's.
    """
    policy = policy.model_copy(update={"match": []})
    choice = choose(seen.table, seen.reading, policy, protect=protect)
    parents = {x.pid: x.ppid for x in seen.table.processes}
    ours = {os.getpid()} if here else set()
    return [
        x
        for x in choice.victims
        if x.devices and not _of_stage(x) and not ours & _line(x.pid, parents)
    ]


def _of_stage(process: Process) -> bool:
    return any(f"/{STAGE}/" in f"{group}/" for group in process.cgroups)


def _line(pid: int, parents: dict[int, int]) -> set[int]:
    """A process and its ancestors."""
    found: set[int] = set()
    while pid and pid not in found:
        found.add(pid)
        pid = parents.get(pid, 0)
    return found
