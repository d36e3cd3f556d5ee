"""Make tuned kernel configs for a server's expert layers, and keep them only if they help."""

from __future__ import annotations

from prefect import flow

from gpu_reclaim.flows.exclusive import exclusive_gpus
from gpu_reclaim.flows.reclaim import reclaim_gpus
from gpu_reclaim.flows.trials import run_trials
from gpu_reclaim.models import ReclaimPolicy
from gpu_reclaim.moecourse import MoeTuning
from gpu_reclaim.plans import MoeTunePlan
from gpu_reclaim.tasks.host import DEFAULT_POLICY, host_of, open_host, with_defaults
from gpu_reclaim.tasks.moe import (
    look_before_moe,
    make_overlays,
    read_sizes,
    tidy_overlays,
    time_kernels,
    tune_sizes,
)
from gpu_reclaim.tasks.moe_pages import KIND, show_moe_plan
from gpu_reclaim.tasks.restoring import put_back_after
from gpu_reclaim.tasks.tuning import check_unedited, prove_in_force, read_logbook
from gpu_reclaim.tasks.tuning_pages import show_tuning
from gpu_reclaim.tuning import TuningReport

DEFAULT_PLAN = MoeTunePlan()

BACK = [put_back_after()]


@flow(
    name="moe-autotune",
    flow_run_name="moe-{server}",
    persist_result=False,
    on_cancellation=BACK,
    on_crashed=BACK,
)
def moe_autotune(
    server: str,
    plan: MoeTunePlan = DEFAULT_PLAN,
    policy: ReclaimPolicy = DEFAULT_POLICY,
) -> TuningReport:
    """Tune the Triton kernels of a live server's expert layers, and keep the configs or none.

    Everything that can refuse the tuning is looked at before the server is stopped. Then SGLang's
    own script tunes one batch size on each GPU, each put on record when it is done. The configs
    are tried as a trial of `spec_decode_retune` is: proven, measured, outputs compared. However the
    run ends, the server is back: with the better configs, else exactly as it was.

    Args:
        server: Name of the LlmServer block document.
        plan: What is tuned and tried, and when it replaces what is in use.
        policy: As for `reclaim_gpus`; its `gpus` are those that tune.

    Returns:
        What was tuned, measured and decided.

    Raises:
        BadInput: Something speaks against it; nothing was touched.
        HeldByOther: Another run has the host.
        GpusNotReclaimed: The GPUs could not be freed; the server is back.
        HoldRefused: The host was lost meanwhile; it puts the server back.
        NotRestored: The server did not come back.
        NotInForce: It serves, and not with the configs that it should have.
    """
    policy = with_defaults(policy)
    host = host_of(server)
    with open_host(host, policy.via):
        moe = look_before_moe(host, server, plan, policy.gpus)
        work = MoeTuning(server, host, plan, policy, moe)
        if not plan.fresh:
            work.sizes = work.known(read_sizes(host, moe))
        show_moe_plan(work)
        if plan.mode == "plan":
            return work.planned()
        try:
            report = _timed(work) if plan.mode == "kernels" else _tuned(work)
        except BaseException as error:
            show_tuning(work.broken(error), plan, KIND)
            raise
    show_tuning(report, plan, KIND)
    return report


def _timed(work: MoeTuning) -> TuningReport:
    work.check_window()
    before = work.before
    with exclusive_gpus(work.host, work.policy, server=work.server):
        make_overlays(work.host, before)
        work.kernels = time_kernels(work.host, work, before)
        tidy_overlays(work.host, before, before.current)
    return work.measured()


def _tuned(work: MoeTuning) -> TuningReport:
    """Enter the host only where something is left to do there."""
    work.check_window()
    tuning, not_kept = work.trials(), ""
    if not work.plan.fresh and not work.missing:
        tuning.resume(*read_logbook(work.host, tuning.before))
    if work.missing or (len(tuning.arms) > 1 and tuning.unfinished):
        with exclusive_gpus(work.host, work.policy, server=work.server):
            if work.missing:
                check_unedited(work.host, tuning.before)
                tune_sizes(work.host, work)
                reclaim_gpus(work.host, work.policy)
            tuning = work.tried = work.trials()
            if not work.missing and len(tuning.arms) > 1:
                make_overlays(work.host, work.before)
                not_kept = run_trials(tuning, KIND)
            tidy_overlays(work.host, work.before, tuning.in_force)
    proof = prove_in_force(work.host, tuning.before, tuning.in_force)
    if work.missing:
        return work.cut()
    if len(tuning.arms) == 1:
        return work.fruitless()
    return work.told(tuning.report(not_kept=not_kept, proof=proof))
