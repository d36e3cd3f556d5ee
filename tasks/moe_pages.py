"""What a person reads before MoE kernels are tuned."""

from __future__ import annotations

from gpu_reclaim.moecourse import MoeTuning
from gpu_reclaim.tasks import artifacts
from gpu_reclaim.tasks.artifacts import Row, cell, grid, slug
from gpu_reclaim.tasks.moe_tables import row_words
from gpu_reclaim.tasks.tuning_pages import refused_ones, rules

KIND = "moe"
"""Of tuning, for the artifacts' names."""

SPEC_FIRST = (
    "The batch sizes follow the draft tokens that are in force: tune speculative decoding first, "
    "then the kernels."
)


def show_moe_plan(work: MoeTuning) -> None:
    """What would be tuned and tried, before anything is stopped."""
    artifacts.markdown(slug("moe-plan", work.server), plan_page(work), f"{work.server}: plan")


def plan_page(work: MoeTuning) -> str:
    """The plan as markdown."""
    moe = work.moe
    parts = [
        f"# {cell(work.server)}: {len(moe.sizes)} batch sizes to tune",
        f"At most {work.most_minutes:.0f} min. {cell(moe.expectation)}",
        "\n".join(f"- {cell(line)}" for line in _facts(work)),
        "## Batch sizes",
        SPEC_FIRST,
        grid([_row(work, tokens) for tokens in moe.sizes]),
    ]
    if moe.candidates:
        rows: list[Row] = [
            {"candidate": arm, "sizes": ", ".join(map(str, sorted(table)))}
            for arm, table in moe.candidates.items()
        ]
        parts += ["## Candidates", grid(rows)]
    parts += [*refused_ones(moe.refused), "## How it is decided", rules(work.plan)]
    return "\n\n".join(parts)


def _facts(work: MoeTuning) -> list[str]:
    moe, first = work.moe, work.moe.lookups[0]
    uses = first.used or "no file, but its own default"
    version = moe.facts.source_version or "unknown"
    version += "" if moe.facts.exact else " with commits after it"
    return [
        f"The server asks for {moe.name} for Triton {moe.triton}, and uses {uses}",
        f"Checkout: SGLang {version}; package: {moe.facts.sglang or 'unknown'}",
        f"For each size: {moe.space}, on {len(moe.devices)} GPUs at the same time",
        f"A size takes {work.size_s / 60:.0f} min, {work.plan.size_timeout_minutes:g} at most",
    ]


def _row(work: MoeTuning, tokens: int) -> Row:
    known = next((x for x in work.sizes if x.tokens == tokens), None)
    state = "to be tuned" if tokens in work.missing else "as it is"
    if known is not None and tokens not in work.missing:
        state = f"failed: {known.failure}" if known.failure else f"tuned on {known.at}"
    return {
        "tokens": str(tokens),
        "now (M / N / K / group / warps / stages)": row_words(work.moe.row_before(tokens)),
        "state": state,
    }
