"""A read-only plan for the GPUs of this very machine. Started by demo.py where nvidia-smi is."""

from __future__ import annotations

import sys

import reports

from gpu_reclaim.blocks import GpuHost
from gpu_reclaim.errors import GpuReclaimError, GpusNotReclaimed
from gpu_reclaim.models import ReclaimPolicy, ReclaimReport
from gpu_reclaim.reclaim import reclaim


def plan() -> ReclaimReport:
    """Read everything; the mode is set here and nowhere else, so nothing can be touched."""
    try:
        return reclaim(GpuHost().session(), ReclaimPolicy(mode="plan"))
    except GpusNotReclaimed as refused:
        return refused.report


def main() -> int:
    """Print it; 0 when it could be made."""
    try:
        report = plan()
    except GpuReclaimError as error:
        print(f"  {error}")
        return 1
    if report.gpus_before:
        reports.gpus(report)
        print()
    reports.planned(report)
    reports.outcome(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
