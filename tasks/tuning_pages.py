"""What a person reads of a tuning in Prefect's UI: plan, progress, and result with its chart."""

from __future__ import annotations

import base64
import logging
import math
import shlex
from collections.abc import Mapping, Sequence

from gpu_reclaim.plans import TrialPlan
from gpu_reclaim.tasks import artifacts
from gpu_reclaim.tasks.artifacts import Row, cell, fenced, grid, slug
from gpu_reclaim.tasks.chart_looks import STATES
from gpu_reclaim.tasks.charts import throughput_chart
from gpu_reclaim.tasks.moe_tables import kernels_table, sizes_table
from gpu_reclaim.tuning import ArmResult, LevelResult, TuningOutcome, TuningReport, Visit

log = logging.getLogger(__name__)

TITLES: dict[TuningOutcome, str] = {
    "planned": "planned, nothing was stopped",
    "kept": "the present setting stays",
    "found": "a better setting was found, not applied",
    "replaced": "a better setting is in force",
    "unfinished": "ended before it was decided",
    "measured": "kernels were timed, nothing was changed",
}


def show_tuning(report: TuningReport, plan: TrialPlan, kind: str = "spec-decode") -> None:
    """The whole tuning on one page, and its settings as a table.

    Args:
        report: What is shown.
        plan: How it was decided.
        kind: Of tuning, for the artifacts' names.
    """
    title = f"{report.server}: {TITLES[report.outcome]}"
    artifacts.markdown(slug(kind, report.server), page(report, plan), title)
    rows = _arm_rows(report)
    artifacts.table(slug(f"{kind}-settings", report.server), rows, f"Settings of {title}")


def show_trials(
    server: str,
    plan: TrialPlan,
    trials: Mapping[str, Sequence[str]],
    refused: Mapping[str, str],
    estimated_minutes: float,
) -> None:
    """What would be tried, before anything is stopped.

    Args:
        server: Name of the LlmServer block.
        plan: How it is measured.
        trials: The flags of each setting, by its name; the present one first.
        refused: Settings that are not tried, and why.
        estimated_minutes: The longest that all of it takes.
    """
    names = list(trials)
    rows = [
        {"setting": name, "flags": shlex.join(flags) or "none"} for name, flags in trials.items()
    ]
    parts = [
        f"# {cell(server)}: {len(names)} settings to try",
        f"At most {_minutes(estimated_minutes)}, in which the service is restarted for each "
        f"setting and round: up to {plan.rounds} rounds.",
        "## Settings",
        grid(rows),
        *refused_ones(refused),
        "## How it is decided",
        rules(plan),
    ]
    artifacts.markdown(slug("spec-decode-plan", server), "\n\n".join(parts), f"{server}: plan")


def page(report: TuningReport, plan: TrialPlan) -> str:
    """The report as markdown: outcome, remedy, chart, evidence, failures, timeline."""
    parts = [f"# {cell(report.server)}: {TITLES[report.outcome]}", cell(report.summary)]
    if report.remedy:
        parts.append(f"**What to do now:** {cell(report.remedy)}")
    parts += _in_force(report)
    parts += _chart(report.arms, plan)
    if report.arms:
        rows = [{k: v for k, v in row.items() if k != "why"} for row in _arm_rows(report)]
        reasons = {arm.arm: arm.why for arm in report.arms if arm.why}
        parts += ["## Settings", grid(rows), *_reasons(reasons), rules(plan)]
    parts += _levels(report.arms)
    parts += refused_ones(report.refused)
    parts += sizes_table(report.sizes)
    parts += kernels_table(report.kernels)
    parts += _failures(report.visits)
    parts += _timeline(report)
    return "\n\n".join(parts)


def _in_force(report: TuningReport) -> list[str]:
    """What shows that the setting is in force, and where that is written."""
    lines = [f"- Proof: {cell(report.proof)}"] if report.proof else []
    lines += [f"- Drop-in on the host: {cell(report.drop_in)}"] if report.drop_in else []
    lines += [f"- Its configs on the host: {cell(report.overlay)}"] if report.overlay else []
    lines += [f"- Raw records on the host: {cell(report.raw)}"] if report.raw else []
    return ["\n".join(lines)] if lines else []


def _chart(arms: Sequence[ArmResult], plan: TrialPlan) -> list[str]:
    if not any(arm.levels for arm in arms):
        return []
    try:
        drawn = throughput_chart(arms, plan.max_loss_pct)
    except Exception:
        # The service runs with its new setting by now, and the tables below say the same.
        log.warning("the chart could not be drawn", exc_info=True)
        return ["(The chart could not be drawn; the run's log says why.)"]
    data = base64.b64encode(drawn.encode()).decode()
    return [f"![Throughput of each setting](data:image/svg+xml;base64,{data})"]


def _arm_rows(report: TuningReport) -> list[Row]:
    visits = [visit for visit in report.visits if not visit.failure]
    return [_arm_row(arm, [x for x in visits if x.arm == arm.arm]) for arm in report.arms]


def _arm_row(arm: ArmResult, visits: Sequence[Visit]) -> Row:
    differing = [x.differing_pct for x in visits if x.differing_pct is not None]
    cache = [x.token_capacity for x in visits if x.token_capacity is not None]
    return {
        "setting": arm.arm,
        "state": STATES[arm.state],
        "gain (%)": _signed(arm.gain_pct),
        "rounds": str(arm.rounds),
        "differing (%)": f"{max(differing):.1f}" if differing else "",
        "cache (tokens)": f"{min(cache):,}" if cache else "",
        "why": arm.why,
    }


def rules(plan: TrialPlan) -> str:
    """What counts as better, in sentences."""
    said = [
        f"The present setting is replaced from {plan.min_gain_pct:+g} % on, if no concurrency "
        f"loses more than {plan.max_loss_pct:g} % and at most {plan.output_tolerance_pct:g} % of "
        "the greedy answers differ, beyond those in which it differs from itself"
    ]
    for name, limit in (("TTFT", plan.max_ttft_ms), ("TPOT", plan.max_tpot_ms)):
        said += [f"{name} p99 stays below {limit:g} ms"] if limit else []
    weights = [f"{weight:g} at {at}" for at, weight in zip(plan.levels, plan.weights, strict=False)]
    counts = f"The concurrencies count {', '.join(weights)}" if weights else "All count the same"
    return cell(f"{'; '.join(said)}. {counts}.")


def _levels(arms: Sequence[ArmResult]) -> list[str]:
    """A table for each concurrency: narrow enough to be read, and settings stand side by side."""
    parts = ["## By requests in flight"] if any(arm.levels for arm in arms) else []
    for level in sorted({x.level for arm in arms for x in arm.levels}):
        rows = [_level_row(arm, x) for arm in arms for x in arm.levels if x.level == level]
        parts += [f"### {level} in flight", grid(rows)]
    return parts


def _level_row(arm: ArmResult, level: LevelResult) -> Row:
    change = "" if arm.state == "current" else _signed(level.change_pct)
    return {
        "setting": arm.arm,
        "tokens/s": f"{_number(level.output_tok_s)} ± {level.spread_pct:.1f} %",
        "change (%)": change,
        "TTFT / p99 (ms)": f"{_number(level.ttft_ms)} / {_number(level.ttft_p99_ms)}",
        "TPOT / p99 (ms)": f"{_number(level.tpot_ms)} / {_number(level.tpot_p99_ms)}",
        "accepted": "" if level.accept_length is None else f"{level.accept_length:.2f}",
    }


def refused_ones(refused: Mapping[str, str]) -> list[str]:
    """What is not tried, and why."""
    return ["## Not tried", *_reasons(refused)] if refused else []


def _reasons(reasons: Mapping[str, str]) -> list[str]:
    """A list, for the cells of Prefect's tables do not wrap: a sentence would be cut off."""
    lines = [f"- **{cell(name)}**: {cell(why)}" for name, why in reasons.items()]
    return ["\n".join(lines)] if lines else []


def _failures(visits: Sequence[Visit]) -> list[str]:
    """Each failure once per setting and reason, with the last lines of its journal."""
    failed = {(visit.arm, visit.failure): visit for visit in visits if visit.failure}
    parts = ["## Failures"] if failed else []
    for visit in failed.values():
        parts.append(f"**{cell(visit.arm)}**, round {visit.round}: {cell(visit.failure)}")
        parts += [fenced(visit.detail)] if visit.detail.strip() else []
    return parts


def _timeline(report: TuningReport) -> list[str]:
    if not report.visits:
        return []
    took = f"{_minutes(report.minutes)}, at most {_minutes(report.estimated_minutes)} expected"
    parts = [f"## Timeline ({took})", grid([_visit_row(visit) for visit in report.visits])]
    if report.resumed:
        parts.insert(1, f"{report.resumed} of them come from an earlier run's record.")
    return parts


def _visit_row(visit: Visit) -> Row:
    measured = [f"{x.level}: {_number(x.output_tok_s)}" for x in visit.levels]
    return {
        "round": str(visit.round),
        "setting": visit.arm,
        "ended": max((x.at for x in visit.levels), default=""),
        "ready (s)": f"{visit.ready_s:.0f}" if visit.ready_s else "",
        "tokens/s by requests in flight": "failed" if visit.failure else ", ".join(measured),
    }


def _number(value: float | None, missing: str = "?") -> str:
    """Three digits that matter."""
    if value is None or not math.isfinite(value):
        return missing
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004


def _signed(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:+.1f}"


def _minutes(value: float) -> str:
    return f"{value:.0f} min"
