"""Tables of a tuning of MoE kernels: what was tuned, and what was timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpu_reclaim.commands import printable
from gpu_reclaim.tasks.artifacts import Row, cell, fenced, grid
from gpu_reclaim.tuning import KernelTime, TunedSize

ORDER = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")


def sizes_table(sizes: Sequence[TunedSize]) -> list[str]:
    """What the tuning script found, and the words of what failed."""
    if not sizes:
        return []
    parts = ["## Batch sizes", grid([_size_row(size) for size in sizes])]
    for size in sizes:
        if size.failure:
            parts.append(f"**{size.tokens}**: {cell(size.failure)}")
            parts += [fenced(size.detail)] if size.detail.strip() else []
    return parts


def _size_row(size: TunedSize) -> Row:
    return {
        "tokens": str(size.tokens),
        "M / N / K / group / warps / stages": row_words(size.row) or "failed",
        "took (min)": f"{size.seconds / 60:.1f}",
        "GPU": size.gpu,
        "ended": size.at,
    }


def row_words(row: Mapping[str, int | bool]) -> str:
    """A row in short: its numbers in a fixed order, `-` where it has none."""
    if not row:
        return ""
    more = [f"{name} {value}" for name, value in row.items() if name not in ORDER]
    return " ".join([" / ".join(str(row.get(name, "-")) for name in ORDER), *more])


def kernels_table(kernels: Sequence[KernelTime]) -> list[str]:
    """Microseconds of each config's kernel, a row for each batch size."""
    if not kernels:
        return []
    arms = list(dict.fromkeys(x.arm for x in kernels))
    rows: list[Row] = []
    for tokens in sorted({x.tokens for x in kernels}):
        here = {x.arm: x for x in kernels if x.tokens == tokens}
        rows.append({"tokens": str(tokens)} | {arm: _time(here.get(arm)) for arm in arms})
    lines = [
        f"- **{cell(x.arm)}** at {x.tokens}: {cell(printable(x.failure, limit=300))}"
        for x in kernels
        if x.failure
    ]
    return ["## Kernel time (us)", grid(rows), *(["\n".join(lines)] if lines else [])]


def _time(kernel: KernelTime | None) -> str:
    if kernel is None:
        return ""
    return "failed" if kernel.us is None else f"{kernel.us:.1f}"
