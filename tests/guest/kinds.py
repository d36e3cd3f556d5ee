"""Kinds of hostile days on the real guest: how each is set up, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from gpu_reclaim.errors import BadInput, GpusNotReclaimed
from gpu_reclaim.models import GOOD_VERDICTS, ReclaimPolicy, ReclaimReport, Verdict
from gpu_reclaim.reclaim import reclaim
from guest import ways, witness
from guest.witness import Identity
from lab.container import Container
from lab.guest_files import HOLDER
from lab.lab import Lab

FOLDER = "/run/gpu-reclaim-test"
"""In the guest; goes with `reset`."""


@dataclass
class Case:
    """One kind being played.

    Attributes:
        second: Boots (once) and gives the other guest on the same GPUs.
        policy: What differs in the policy; short waits unless said otherwise.
        session: What differs in the session.
        victims: Who is to be ended: (pid, start time).
        along: Who may be ended too, because systemd stops it along.
        says: What the summary has to say.
        advises: What the remedy has to say.
        meanwhile: Happens once, during the wait for free memory.
        cleanup: What ends with the case.
    """

    lab: Lab
    second: Callable[[], Container]
    policy: dict[str, Any] = field(default_factory=dict)
    session: dict[str, Any] = field(default_factory=dict)
    victims: set[Identity] = field(default_factory=set)
    along: set[Identity] = field(default_factory=set)
    says: list[str] = field(default_factory=list)
    advises: list[str] = field(default_factory=list)
    meanwhile: Callable[[], object] | None = None
    cleanup: ExitStack = field(default_factory=ExitStack)

    def hold(self, *arguments: str, victim: bool = True, **more: Any) -> int:
        """Start a holder in the guest; by default it is to be ended."""
        pid = self.lab.hold(*arguments, **more)
        if victim:
            self.victims.add(witness.identity(self.lab, pid))
        return pid

    def holder_called(self, name: str) -> str:
        """A copy of the holder under another name."""
        self.lab.do(f"mkdir -p {FOLDER}; cp {HOLDER} {FOLDER}/{name}")
        return f"{FOLDER}/{name}"

    def victims_of(self, unit: str) -> None:
        """All of a unit's processes are to be ended."""
        self.victims |= set(witness.of_unit(self.lab, unit))

    def reclaim(self) -> tuple[Verdict | None, ReclaimReport | None, str, str]:
        """Reclaim; verdict, report, summary and remedy, whatever comes of it."""
        quick = {"term_grace_s": 1, "settle_timeout_s": 2, "stable_samples": 2}
        policy = ReclaimPolicy.model_validate(quick | self.policy)
        changes = {name: value for name, value in self.session.items() if name != "other"}
        session = ways.session(self.lab, policy.via, **changes)
        sleep, rest = session.sleep, [self.meanwhile] if self.meanwhile else []

        def sleep_with_events(seconds: float) -> None:
            if rest:
                rest.pop()()
            sleep(seconds)

        session.sleep = sleep_with_events
        try:
            report = reclaim(session, policy)
        except GpusNotReclaimed as error:
            report = error.report
        except BadInput as error:
            return None, None, error.message, error.remedy
        return report.verdict, report, report.summary, report.remedy


@dataclass(frozen=True)
class Kind:
    """A kind of day.

    Attributes:
        group: As in the list of kinds.
        name: What is the matter.
        verdict: What must come of it; None: refused as bad input, before anything is touched.
        play: Sets it up.
    """

    group: str
    name: str
    verdict: Verdict | None
    play: Callable[[Case], None]


@dataclass(frozen=True)
class Played:
    """What came of it, seen from outside.

    Attributes:
        innocents: Titles of those who were ended and should not have been.
        missed: Victims that are still there.
        false_clean: It was called free, and the memory is in use or a victim is still there.
    """

    verdict: Verdict | None
    report: ReclaimReport | None
    said: str
    remedy: str
    innocents: list[str]
    missed: set[Identity]
    false_clean: bool


def play(kind: Kind, case: Case) -> Played:
    """Set a kind up, reclaim, and look at what happened."""
    lab = case.lab
    kind.play(case)
    before = people(case)
    verdict, report, said, remedy = case.reclaim()
    after = people(case)
    gone = {who: title for who, title in before.items() if who not in after}
    missed = case.victims & set(after)
    # Whatever the stand-in is told to print, its call log has what is really in use.
    lab.attach(witness.QUERY)
    used = lab.smi_calls()[-1].used_mib
    policy = ReclaimPolicy(**case.policy)
    wanted = [mib for gpu, mib in used.items() if not policy.gpus or gpu in policy.gpus]
    good = verdict in GOOD_VERDICTS
    return Played(
        verdict=verdict,
        report=report,
        said=said,
        remedy=remedy,
        innocents=sorted(
            title for who, title in gone.items() if who not in case.victims | case.along
        ),
        missed=missed,
        false_clean=good and (max(wanted) > policy.limit_mib or bool(missed)),
    )


def people(case: Case) -> dict[Identity, str]:
    """Everybody in the guest, and in the other one where it takes part."""
    found = witness.everybody(case.lab)
    other = case.session.get("other")
    for process in other.processes() if isinstance(other, Container) else ():
        if process.state != "Z":
            found[-process.pid, process.start] = process.title
    return found
