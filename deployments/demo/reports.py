"""A reclaim's report as plain text tables."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

import show

from gpu_reclaim.models import Ended, Gpu, ReclaimReport, Spared, StoppedUnit
from gpu_reclaim.victims import MAX_UNREAD_ROWS, UNREAD

HOW = {"KILL": "TERM, then KILL", "": "no signal"}

FEW = 2
"""More devices than these are counted."""


def gpus(report: ReclaimReport) -> None:
    """Memory of each GPU, and who holds it according to a plan."""
    holders: list[Ended | Spared] = [*report.ended, *report.spared]
    show.table(
        ["GPU", "used ", "total ", "held by"],
        [
            (str(gpu.index), _mib(gpu.memory_used_mib), _mib(gpu.memory_total_mib), who)
            for gpu in report.gpus_before
            for who in [", ".join(row.name for row in holders if _holds(row, gpu.index))]
        ],
    )


def before_and_after(report: ReclaimReport) -> None:
    """Memory of each GPU before and after."""
    late = {gpu.uuid: gpu for gpu in report.gpus_after}
    show.table(
        ["GPU", "used before ", "used after ", "name"],
        [
            (str(gpu.index), _mib(gpu.memory_used_mib), _after(late.get(gpu.uuid)), gpu.name)
            for gpu in report.gpus_before
        ],
    )


def _after(gpu: Gpu | None) -> str:
    return _mib(gpu.memory_used_mib) if gpu else "not seen"


def _mib(value: int | None) -> str:
    return "not known" if value is None else f"{value:,} MiB"


def _holds(row: Ended | Spared, index: int) -> bool:
    return any(re.search(rf"/nvidia{index}\b", device) for device in row.devices)


def units(rows: Sequence[StoppedUnit], verb: str) -> None:
    """The units that were, or would be, stopped."""
    for row in rows:
        triggers = f", with {', '.join(row.triggered_by)}" if row.triggered_by else ""
        show.say(f"  {verb}: {row.unit}{triggers}")


def planned(report: ReclaimReport) -> None:
    """Who would be ended, and who spared."""
    units(report.stopped, "would stop")
    rows = [("end", str(row.pid), row.name, devices(row)) for row in report.ended]
    rows += [("spare", str(row.pid), row.name, row.reason) for row in inspected(report.spared)]
    if rows:
        show.table(["would", "pid ", "process", "why"], rows)
    blind(report.spared)


def ended(report: ReclaimReport) -> None:
    """Who was ended: how, why and by which way."""
    rows = [
        (str(row.pid), row.name, f"{row.outcome} ({HOW.get(row.signal, row.signal)})", devices(row))
        for row in report.ended
    ]
    show.table(["pid ", "process", "what became of it", "why it"], rows)


def spared(report: ReclaimReport) -> None:
    """Who was left alone, and why."""
    rows = [(str(x.pid), x.name, devices(x), x.reason) for x in inspected(report.spared)]
    show.table(["pid ", "process", "although it", "because"], rows)
    blind(report.spared)


def steps(report: ReclaimReport) -> None:
    """What took how long."""
    show.table(
        ["step", "seconds ", "by way of"],
        [(step.name, f"{step.seconds:.2f}", step.via or "-") for step in report.steps],
    )


def outcome(report: ReclaimReport) -> None:
    """Verdict, summary and remedy."""
    show.field("verdict", report.verdict)
    show.field("summary", report.summary)
    if report.remedy:
        show.field("remedy", report.remedy)


def devices(row: Ended | Spared) -> str:
    """What a process holds, without folders; a mapping without a descriptor is named as one."""
    names: dict[str, set[str]] = {}
    for text in row.devices:
        path, _, way = text.rpartition(" ")
        names.setdefault(path.rpartition("/")[2], set()).add(way)
    if len(names) > FEW:
        return f"holds {len(names)} devices"
    held = [f"{name} (mapped)" if way == {"(map)"} else name for name, way in names.items()]
    return f"holds {', '.join(held)}" if held else "left of its unit, or named by match"


def inspected(rows: Iterable[Spared]) -> list[Spared]:
    """Without those of which nothing is known."""
    return [row for row in rows if row.reason != UNREAD]


def blind(rows: Iterable[Spared]) -> None:
    """How many processes could not be looked into."""
    unread = [row for row in rows if row.reason == UNREAD]
    # Those beyond a limit are counted in a row without a pid; each look of a run brings its own.
    more = [int(row.name.split()[0]) for row in unread if not row.pid]
    count = MAX_UNREAD_ROWS + max(more) if more else len(unread)
    why = " without root" if os.geteuid() else ""
    if count:
        what = "1 other process" if count == 1 else f"{count} other processes"
        show.say(f"  Could not be looked into{why}: {what}.")
