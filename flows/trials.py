"""The trials of a tuning, while its host is held: start, prove, measure, decide, keep."""

from __future__ import annotations

from gpu_reclaim.course import Tuning
from gpu_reclaim.flows.reclaim import reclaim_gpus
from gpu_reclaim.tasks.tuning import (
    apply_setting,
    check_unedited,
    close_trial,
    measure_setting,
    read_logbook,
    set_aside_logbook,
)
from gpu_reclaim.tasks.tuning_progress import Progress


def run_trials(tuning: Tuning, kind: str = "spec-decode") -> str:
    """Measure until it is decided, and keep a winner where the plan applies one.

    Args:
        tuning: Its host is held, and the GPUs are free.
        kind: Of tuning, for the names of its artifacts.

    Returns:
        Why a winner is not kept although it should be; empty when it is, or there is none.

    Raises:
        BadInput: The unit was changed since it was looked at; nothing was tried.
        HoldLost: The host is not ours any more.
        GpusNotReclaimed: The GPUs could not be freed between two trials.
        TransportError: The host could not be reached.
    """
    plan, host = tuning.plan, tuning.host
    check_unedited(host, tuning.before)
    if not plan.fresh:
        # A run that was waited for may have gone on with it.
        tuning.resume(*read_logbook(host, tuning.before))
    if not tuning.visits:
        set_aside_logbook(host, tuning.before)
    free = _measure(tuning, kind)
    if not tuning.to_apply:
        return ""
    _free(tuning, free=free)
    not_kept = apply_setting(host, tuning.before, tuning.winner, lasting=plan.persist)
    tuning.applied = not not_kept
    return not_kept


def _measure(tuning: Tuning, kind: str) -> bool:
    """Measure until it is decided; whether the GPUs are still free then."""
    progress, free = Progress(tuning.server, kind), True
    while (turn := tuning.turn) is not None:
        progress.visit(*tuning.progress(turn))
        _free(tuning, free=free)
        seen, tuning.answers = measure_setting(
            tuning.host, tuning.before, tuning.plan, turn, tuning.answers
        )
        tuning.visits.append(seen)
        free = False
    progress.visit(1, 1, "decided", 0)
    return free


def _free(tuning: Tuning, *, free: bool) -> None:
    if not free:
        close_trial(tuning.host)
        reclaim_gpus(tuning.host, tuning.policy)
