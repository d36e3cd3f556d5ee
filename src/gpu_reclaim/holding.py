"""The hold on a host: nobody starts GPU work meanwhile, and what was stopped is written down.

Builders of the scripts that take, prove, renew, read and end a hold, and the parsers of their
answers. What is where on the host, and how it is put back, is told in `restoring`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_reclaim.commands import Section, printable
from gpu_reclaim.lease import HOST, PRELUDE, Places
from gpu_reclaim.models import Lease, RestoredUnit, UnitState
from gpu_reclaim.restoring import (
    EVERY_S,
    filled,
    functions,
    parse_units,
    script_file,
)
from gpu_reclaim.taking import (
    LOST,
    ONLY_OURS,
    OURS,
    PROVE,
    READ,
    RELEASE,
    RENEW,
    TAKE,
    WHO,
)

TRY_S = 10
"""Longest wait for a start that must be refused, in seconds: refusing takes none."""


@dataclass(frozen=True)
class Claim:
    """Who takes a hold, and for how long.

    Attributes:
        token: Names the claim; whoever has it may renew and end it.
        owner: For people.
        url: Of the run, for people.
        ttl_s: Seconds until the host puts everything back by itself.
        runs: Ids of the Prefect run and of those that it is part of.
    """

    token: str
    owner: str = ""
    url: str = ""
    ttl_s: int = 0
    runs: Sequence[str] = ()

    def shell(self) -> str:
        """Shell variables."""
        values = {
            "TOKEN": self.token,
            "OWNER": self.owner,
            "URL": self.url,
            "TTL": str(self.ttl_s),
            "RUNS": " ".join(self.runs),
        }
        # One line each: a lease and a record are files of lines.
        return "\n".join(f"{name}={shlex.quote(printable(x))}" for name, x in values.items())


@dataclass(frozen=True)
class Answer:
    """What a script of the hold answered.

    Attributes:
        status: taken, held (by another), busy, unset, unshown, lost, broken; empty: not known.
        lease: Who holds the host; None when nobody does.
        found: What became of units that an earlier run had left stopped.
        left_by: Who that was.
        units: Held units whose start was refused.
        broken: Held units that could be started, with the state they were in.
        record: Units on the record.
        why: A tool's trouble, for people.
    """

    status: str
    lease: Lease | None = None
    found: Sequence[RestoredUnit] = ()
    left_by: str = ""
    units: Sequence[str] = ()
    broken: Sequence[str] = ()
    record: Sequence[str] = ()
    why: str = ""


def take(
    claim: Claim,
    own: Sequence[str],
    order: Sequence[str],
    rest: Sequence[tuple[str, int, int]] = (),
    *,
    places: Places = HOST,
) -> str:
    """Shell text that takes the host, writes down what runs, and sets the hold.

    Args:
        claim: Who, and for how long.
        own: Units to be stopped; they are held whether they run or not.
        order: Those and the units that systemd stops along, in the order of putting them back.
        rest: Unit, pid and start time of who is to be ended with it: should it outlive the stop,
            it is ended before the unit is started again.
        places: Where things are.
    """
    units = f"OWN={shlex.quote(' '.join(own))} ORDER={shlex.quote(' '.join(order))}"
    left = {unit: [f"{pid}:{at}" for of, pid, at in rest if of == unit] for unit in own}
    lines = [f"rest {unit} {' '.join(who)}" for unit, who in left.items() if who]
    units = f"{units} REST={shlex.quote(chr(10).join(lines))}"
    body = filled(TAKE, places).replace("@EVERY@", str(EVERY_S))
    body = body.replace("@SCRIPT@", script_file(places))
    return "\n".join([functions(places), claim.shell(), units, OURS, body])


def prove(claim: Claim, *, places: Places = HOST) -> str:
    """Shell text that tries to start every held unit, and renews the lease if none started."""
    body = filled(PROVE, places).replace("@TRY@", str(TRY_S))
    return "\n".join([functions(places), claim.shell(), OURS, body])


def renew(claim: Claim, *, places: Places = HOST) -> str:
    """Shell text that prolongs the lease, if it is still ours and the hold is set."""
    return "\n".join([functions(places), claim.shell(), OURS, RENEW])


def only_ours(token: str, body: str, *, places: Places = HOST) -> str:
    """Shell text that does something, and nothing where the host is not that claim's any more."""
    head = ONLY_OURS.replace("@PRELUDE@", filled(PRELUDE, places))
    head = head.replace("@TOKEN@", shlex.quote(token)).replace("@LOST@", str(LOST))
    return f"{head}{body}"


def release(claim: Claim, *, places: Places = HOST) -> str:
    """Shell text that gives up a lock which held no unit; starts nothing."""
    return "\n".join([functions(places), claim.shell(), OURS, RELEASE])


def restore(token: str, *, places: Places = HOST) -> str:
    """Shell text that puts everything back.

    Args:
        token: Of whose hold; `any`: whoever holds the host; `run:ID`: that Prefect run's.
        places: Where things are.
    """
    return f"{functions(places)}\nrestore {shlex.quote(token)}"


def read(*, places: Places = HOST) -> str:
    """Shell text that prints lease and record; touches nothing."""
    return functions(places) + READ


def who(*, places: Places = HOST) -> str:
    """Shell text that prints who holds the host at present; touches nothing."""
    return filled(PRELUDE, places) + WHO


def parse_lease(section: Section) -> Lease | None:
    """Who holds the host; None where nobody is named."""
    words = dict(line.split(" ", 1) for line in section.lines("lease") if " " in line)
    known = {key: value for key, value in words.items() if key in Lease.model_fields}
    return Lease.model_validate(known) if known else None


def parse(section: Section) -> Answer:
    """The answer of take, prove, renew and read."""
    return Answer(
        status=section.value("status"),
        lease=parse_lease(section),
        found=parse_units(section),
        left_by=section.value("owner"),
        units=section.lines("refused"),
        broken=section.lines("broken"),
        record=[line.split(" ")[0] for line in section.lines("record")],
        why=section.value("why"),
    )


def restore_order(states: Sequence[UnitState], own: Sequence[str]) -> list[str]:
    """Names of units in the order of starting them: the reverse of how systemd stops them.

    What systemd has no order for comes in the reverse of the host's own order, then what was
    stopped along.
    """
    known = {state.name: state for state in states}
    along = [state.name for state in states if state.name not in own]
    left = [name for name in [*reversed(own), *along] if name in known]
    needs = {name: _before(known[name], states, left) for name in left}
    order: list[str] = []
    while left:
        # In a circle nobody is first.
        free = next((x for x in left if not needs[x] & set(left) - {x}), left[0])
        order.append(free)
        left.remove(free)
    return order


def _before(state: UnitState, states: Sequence[UnitState], among: Sequence[str]) -> set[str]:
    required = {other.name for other in states if state.name in other.required_by}
    return (set(state.after) | required) & set(among)
