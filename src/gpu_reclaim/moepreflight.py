"""MoE kernel configs as arms of a tuning: what each gives the server, and how it is proven."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpu_reclaim import logbook, overlays
from gpu_reclaim.finding import changed, text
from gpu_reclaim.lease import MOE_FILE
from gpu_reclaim.moeconfigs import GRID, Table, filled, text_of
from gpu_reclaim.moefound import PRESENT, TUNED, MoeFound
from gpu_reclaim.moelooks import read_lookups
from gpu_reclaim.preflight import Preflight
from gpu_reclaim.session import Session
from gpu_reclaim.tuning import TunedSize

LOG_TRIES = 5
"""So often a log is looked at that lacks a rank's line: the journal may lag behind."""

LOG_PAUSE_S = 2.0
"""Pause between two looks, in seconds."""


@dataclass(frozen=True)
class MoePreflight(Preflight):
    """A server before other kernel configs are tried.

    Attributes:
        moe: What was found.
        tables: The configs of each arm but the present one.
        folders: Their overlays on the host.
    """

    winner_file = MOE_FILE
    proof = "/server_info, and the log of every rank,"

    moe: MoeFound
    tables: Mapping[str, Table] = field(repr=False)
    folders: Mapping[str, str]

    @property
    def trial_flags(self) -> dict[str, list[str]]:
        """The variable that is different from trial to trial, by arm."""
        sets = {arm: [f"{overlays.VARIABLE}={path}"] for arm, path in self.folders.items()}
        return {arm: sets.get(arm, []) for arm in self.arms}

    def drop_in(self, arm: str) -> str:
        """Text of the drop-in that gives the unit that arm's configs."""
        if arm == PRESENT:
            return "[Service]\n"
        return overlays.drop_in(self.server.unit, self.folders[arm])

    def wrong_on_trial(self, session: Session, arm: str) -> list[str]:
        """Where the server differs from before, or a rank uses another file than the arm's."""
        return changed(session, self.found) + self._not_loaded(session, arm)

    def wrong_now(self, session: Session, arm: str) -> list[str]:
        """The same: nothing but the file may be another."""
        return self.wrong_on_trial(session, arm)

    def _not_loaded(self, session: Session, arm: str) -> list[str]:
        wanted = self.expected(arm)
        for again in range(LOG_TRIES):
            seen = read_lookups(session, self.server.unit)
            said = {(x.rank, x.wanted, x.used) for x in seen if x.name == self.moe.name}
            if said == wanted:
                return []
            if again < LOG_TRIES - 1:
                session.sleep(LOG_PAUSE_S)
        return [_told(rank, said) for rank in sorted({x[0] for x in wanted ^ said})]

    def expected(self, arm: str) -> set[tuple[str, str, str]]:
        """What each rank must say: the file that it looks for, and the one that it uses."""
        if arm == PRESENT:
            return {(x.rank, x.wanted, x.used) for x in self.moe.lookups}
        version = self.moe.triton.replace(".", "_")
        path = f"{self.folders[arm]}/configs/triton_{version}/{self.moe.name}"
        return {(x.rank, path, path) for x in self.moe.lookups}


def _told(rank: str, said: set[tuple[str, str, str]]) -> str:
    who = f"rank {rank}" if rank else "its log"
    uses = sorted(used or f"no file, looking for {wanted}" for x, wanted, used in said if x == rank)
    return f"{who} tells of {' and '.join(uses) or 'no config file'}"


def tuned_table(moe: MoeFound, sizes: Sequence[TunedSize]) -> Table:
    """The rows that were found, and for all other sizes what the server uses now.

    Empty where none was found.
    """
    found = {size.tokens: size.row for size in sizes if size.row and size.tokens in moe.sizes}
    return filled(found, moe.row_before, {*GRID, *moe.before}) if found else {}


def moe_trials(moe: MoeFound, sizes: Sequence[TunedSize]) -> MoePreflight:
    """The arms, by what is tuned so far."""
    tuned = tuned_table(moe, sizes)
    given = {TUNED: tuned, **moe.candidates}
    tables = {arm: table for arm, table in given.items() if table and table != moe.before}
    keys = {arm: _key(moe, table) for arm, table in tables.items()}
    parts = dict(moe.found.parts) | {
        "launch": logbook.key_of({"command": text(moe.found.info.get("launch_command"))}),
        "name": str(moe.name),
        "triton": moe.triton,
        "present": _key(moe, moe.before),
        "arms": keys,
    }
    unit = moe.found.server.unit
    return MoePreflight(
        found=moe.found,
        arms=(PRESENT, *tables),
        refused=moe.refused,
        parts=parts,
        place=f"{moe.place.rpartition('/')[0]}/{logbook.key_of({**parts, 'unit': unit})}",
        files=moe.files,
        moe=moe,
        tables=tables,
        folders={arm: f"{moe.overlays}/{key}" for arm, key in keys.items()},
    )


def _key(moe: MoeFound, table: Table) -> str:
    """A name for all that is in an overlay."""
    what = {"base": moe.base, "sglang": moe.facts.sglang, "triton": moe.triton}
    return logbook.key_of({**what, "name": str(moe.name), "text": text_of(table)})


def overlay_script(before: MoePreflight, arm: str) -> str:
    """Shell text that makes an arm's overlay on the host."""
    moe = before.moe
    table = text_of(before.tables[arm])
    return overlays.build(before.folders[arm], moe.base, moe.triton, moe.name, table)
