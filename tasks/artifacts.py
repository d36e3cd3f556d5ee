"""What a person reads in Prefect's UI: tables and markdown made from the models."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from textwrap import wrap
from typing import Any, cast

from httpx import HTTPError
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.context import FlowRunContext, TaskRunContext

from gpu_reclaim.commands import printable
from gpu_reclaim.models import (
    Ended,
    Gpu,
    Outcome,
    ReclaimReport,
    RestoredUnit,
    RestoreReport,
    Settled,
    Spared,
    Survey,
    Verdict,
)

log = logging.getLogger(__name__)

Row = dict[str, str]

AWAY_S = 120
"""For so long no artifact is written after one could not be, in seconds."""

_away = {"until": 0.0}


def slug(*parts: str) -> str:
    """An artifact key: lower-case letters, digits and dashes only (Prefect refuses others)."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


def in_a_run() -> bool:
    """Artifacts belong to a run; outside of one nothing is written."""
    return FlowRunContext.get() is not None or TaskRunContext.get() is not None


def table(key: str, rows: Sequence[Row], description: str) -> None:
    """Write a table artifact, if there is a run to attach it to and anything to show."""
    # Called from an async pipeline, it would return a coroutine.
    if rows:
        create = cast("Any", create_table_artifact)
        write(lambda: create(table=list(rows), key=key, description=description, _sync=True))


def markdown(key: str, text: str, description: str) -> None:
    """Write a markdown artifact, if there is a run to attach it to."""
    create = cast("Any", create_markdown_artifact)
    write(lambda: create(markdown=text, key=key, description=description, _sync=True))


def write(create: Callable[[], object]) -> object:
    """Write an artifact, if there is a run to attach it to; None where it could not be written.

    A page is for people to read: without Prefect's server the work goes on, and the client's own
    patience (a minute) is tried once, not for each artifact.
    """
    if not in_a_run() or time.monotonic() < _away["until"]:
        return None
    try:
        return create()
    except HTTPError as error:
        log.warning("an artifact could not be written, nor will the next ones be: %s", error)
        _away["until"] = time.monotonic() + AWAY_S
        return None


def gpu_rows(before: Iterable[Gpu], after: Iterable[Gpu] = ()) -> list[Row]:
    """One row per GPU; memory in MiB, `?` where it is not known."""
    late = {gpu.uuid: gpu for gpu in after}
    rows = [_gpu_row(gpu, late.pop(gpu.uuid, None) if late else None) for gpu in before]
    return rows + [_gpu_row(None, gpu) for gpu in late.values()]


def _gpu_row(before: Gpu | None, after: Gpu | None) -> Row:
    gpu = after or before
    if gpu is None:
        return {}
    row = {"GPU": str(gpu.index), "name": gpu.name, "total (MiB)": _mib(gpu.memory_total_mib)}
    if before:
        row["used before (MiB)"] = _mib(before.memory_used_mib)
    if after:
        row["used after (MiB)"] = _mib(after.memory_used_mib)
    return row


def _mib(value: int | None) -> str:
    return "?" if value is None else f"{value}"


def process_rows(ended: Iterable[Ended], spared: Iterable[Spared]) -> list[Row]:
    """One row per process that was ended, then per process that was spared."""
    rows = [
        {
            "what": _what(row),
            "pid": str(row.pid),
            "name": row.name,
            "owner": row.owner,
            "why": _why(row),
            "by": row.via,
        }
        for row in ended
    ]
    rows += [
        {
            "what": "spared",
            "pid": str(row.pid),
            "name": row.name,
            "owner": row.owner,
            "why": row.reason,
            "by": "",
        }
        for row in spared
    ]
    return rows


def _why(row: Ended) -> str:
    """For example `held nvidia0, nvidiactl (mapped)`."""
    devices = row.devices
    if not devices:
        return "part of its unit" if row.owner.startswith("unit ") else "named by match"
    names: dict[str, set[str]] = {}
    for device in devices:
        path, _, way = device.rpartition(" ")
        names.setdefault(path.rpartition("/")[2], set()).add(way)
    shown = [f"{name} (mapped)" if ways == {"(map)"} else name for name, ways in names.items()]
    return f"{'holds' if row.outcome == 'planned' else 'held'} {', '.join(shown)}"


def _what(row: Ended) -> str:
    if row.outcome == "planned":
        return "would be ended"
    return f"{row.outcome} ({row.signal})" if row.signal else row.outcome


def grid(rows: Sequence[Row]) -> str:
    """Rows as a markdown table."""
    if not rows:
        return "(none)"
    heads = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for row in rows:
        lines.append("| " + " | ".join(cell(row.get(head, "")) for head in heads) + " |")
    return "\n".join(lines)


def cell(text: str) -> str:
    """Text that stays text in a table's cell or a paragraph of markdown."""
    if re.fullmatch(r"`[^`|\r\n]*`", text):
        return text
    # Names come from processes: nothing in them may end the cell or become markup.
    safe = re.sub(r"([\\`*_{}\[\]()#+!<>~|])", r"\\\1", text)
    return re.sub(r"[\r\n]", " ", safe)


def show_survey(survey: Survey) -> None:
    """The GPUs as first seen."""
    table(slug("gpu-survey", survey.host), gpu_rows(survey.reading.gpus), f"GPUs of {survey.host}")


def show_outcome(host: str, outcome: Outcome) -> None:
    """Who was ended and who spared in a step."""
    rows = process_rows(outcome.ended, outcome.spared)
    rows = [
        {"what": "stopped", "name": row.unit, "why": ", ".join(row.triggered_by), "by": ""}
        for row in outcome.stopped
    ] + rows
    table(slug(outcome.step.name, host), rows, f"{outcome.step.name} on {host}")


def show_settled(host: str, settled: Settled) -> None:
    """The readings of a wait."""
    rows = [
        {
            "at (s)": f"{sample.seconds:.1f}",
            "used (MiB)": ", ".join(f"{k}: {_mib(v)}" for k, v in sample.memory_mib.items()),
            "holders": "; ".join(sample.holders),
            "problem": sample.problem,
        }
        for sample in settled.samples
    ]
    table(slug("settle", host), rows, f"settle on {host}: {settled.reason}")


def show_report(report: ReclaimReport) -> None:
    """The whole reclaim on one page."""
    markdown(slug("gpu-reclaim", report.host), page(report), f"{report.host}: {report.verdict}")


def page(report: ReclaimReport) -> str:
    """The report as markdown: verdict, remedy, GPUs, processes, timeline."""
    parts = [f"# {report.host}: {report.verdict}", cell(report.summary)]
    if report.remedy:
        parts.append(f"**What to do now:** {cell(report.remedy)}")
    gpus = gpu_rows(report.gpus_before, report.gpus_after)
    parts += ["## GPUs", grid(gpus) if gpus else "(not read)"]
    if report.stopped:
        title = "Would be stopped" if report.verdict == Verdict.PLANNED else "Stopped"
        units = [f"- {cell(_unit(row.unit, row.triggered_by))}" for row in report.stopped]
        parts += [f"## {title}", "\n".join(units)]
    parts += _hold(report)
    rows = process_rows(report.ended, report.spared)
    parts += ["## Processes", grid(rows) if rows else "(none seen)" if gpus else "(not read)"]
    steps = [
        {
            "at": step.at,
            "step": step.name,
            "by": f"`{step.via}`" if step.via else "",
            "attempts": str(step.attempts),
            "seconds": f"{step.seconds:.2f}",
        }
        for step in report.steps
    ]
    parts += [f"## Timeline ({report.seconds:.2f} s)", grid(steps)]
    return "\n\n".join(parts)


def _hold(report: ReclaimReport) -> list[str]:
    """What the page says of hold and restore."""
    parts = []
    if report.held_until:
        until = f"No unit or trigger above can be started until {report.held_until}"
        parts += ["## Held", cell(f"{until}. Then the host puts them back by itself.")]
    if report.leftovers:
        parts += ["## Left by an earlier run, put back first", restored(report.leftovers)]
    if report.restore:
        parts += ["## Put back", cell(report.restore)]
        parts += [restored(report.restored)] if report.restored else []
    return parts


def restored(rows: Sequence[RestoredUnit]) -> str:
    """What became of units, as a markdown table."""
    return grid([{"unit": x.unit, "what": x.outcome, "detail": x.detail} for x in rows])


def show_restore(report: RestoreReport) -> None:
    """What was put back, on one page."""
    title = "put back" if report.complete else "not all was put back"
    parts = [f"# {report.host}: {title}", cell(report.summary)]
    parts += [f"**What to do now:** {cell(report.remedy)}"] if report.remedy else []
    parts += [f"The hold was that of {cell(report.owner)}."] if report.owner else []
    parts += [restored(report.restored)] if report.restored else []
    markdown(slug("gpu-restore", report.host), "\n\n".join(parts), f"{report.host}: {title}")


def show_exclusive(host: str, moments: Sequence[tuple[str, str]], report: RestoreReport) -> None:
    """A block of `exclusive_gpus` from beginning to end, on one page."""
    title = "held and put back" if report.complete else "not all was put back"
    parts = [f"# {host}: {title}", cell(report.summary)]
    parts += [f"**What to do now:** {cell(report.remedy)}"] if report.remedy else []
    parts += ["## Timeline", grid([{"at": at, "what": what} for at, what in moments])]
    parts += ["## Put back", restored(report.restored)] if report.restored else []
    markdown(slug("gpu-exclusive", host), "\n\n".join(parts), f"{host}: {title}")


def _unit(unit: str, triggers: Sequence[str]) -> str:
    return f"{unit} (and {', '.join(triggers)}, which would start it again)" if triggers else unit


def fenced(text: str, lines: int = 20, width: int = 400) -> str:
    """The last lines of somebody else's text as a code block that nothing in it can end."""
    last = [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
    # A block of Prefect's pages does not wrap.
    rows = [row for line in last for row in wrap(printable(line, limit=width), 78)]
    shown = "\n".join(rows)
    # A block ends at a row of backticks as long as its own: this one's is longer than any inside.
    longest = max((len(row) for row in re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{shown}\n{fence}"
