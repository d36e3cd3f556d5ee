"""Find the better setting of speculative decoding for a server in production, and prove it."""

from __future__ import annotations

from prefect import flow

from gpu_reclaim.course import Tuning
from gpu_reclaim.flows.exclusive import exclusive_gpus
from gpu_reclaim.flows.trials import run_trials
from gpu_reclaim.models import ReclaimPolicy
from gpu_reclaim.plans import SpecDecodePlan
from gpu_reclaim.tasks.host import DEFAULT_POLICY, host_of, open_host, with_defaults
from gpu_reclaim.tasks.restoring import put_back_after
from gpu_reclaim.tasks.tuning import look_before_tuning, prove_in_force, read_logbook
from gpu_reclaim.tasks.tuning_pages import show_trials, show_tuning
from gpu_reclaim.tuning import TuningReport

DEFAULT_PLAN = SpecDecodePlan()


BACK = [put_back_after()]


@flow(
    name="spec-decode-retune",
    flow_run_name="spec-decode-{server}",
    persist_result=False,
    on_cancellation=BACK,
    on_crashed=BACK,
)
def spec_decode_retune(
    server: str,
    plan: SpecDecodePlan = DEFAULT_PLAN,
    policy: ReclaimPolicy = DEFAULT_POLICY,
) -> TuningReport:
    """Try settings of speculative decoding on a live server, and keep the best or none.

    Everything that can refuse the tuning is looked at before the server is stopped. Each trial
    starts it on reclaimed GPUs with exactly the wanted flags, proves that they are in force, and
    measures it by SGLang's own benchmark. However the run ends, the server is back: with the
    winner where the plan applies one, else exactly as it was.

    Args:
        server: Name of the LlmServer block document.
        plan: What is tried, how it is measured, and when one setting replaces another.
        policy: As for `reclaim_gpus`.

    Returns:
        What was tried, measured and decided.

    Raises:
        BadInput: Something speaks against it; nothing was touched.
        HeldByOther: Another run has the host.
        GpusNotReclaimed: The GPUs could not be freed; the server is back.
        HoldRefused: The host was lost meanwhile; it puts the server back.
        NotRestored: The server did not come back.
        NotInForce: It serves, and not with the setting that it should have.
    """
    policy = with_defaults(policy)
    host = host_of(server)
    with open_host(host, policy.via):
        before = look_before_tuning(host, server, plan)
        tuning = Tuning(server, host, plan, policy, before)
        show_trials(server, plan, before.trial_flags, before.refused, tuning.most_minutes)
        if plan.mode == "plan":
            return tuning.planned()
        if not plan.fresh:
            tuning.resume(*read_logbook(host, before))
        try:
            report = _tune(tuning)
        except BaseException as error:
            if tuning.visits:
                show_tuning(tuning.broken(error), plan)
            raise
    show_tuning(report, plan)
    return report


def _tune(tuning: Tuning) -> TuningReport:
    not_kept = ""
    if tuning.unfinished:
        with exclusive_gpus(tuning.host, tuning.policy, server=tuning.server):
            not_kept = run_trials(tuning)
    proof = prove_in_force(tuning.host, tuning.before, tuning.in_force)
    return tuning.report(not_kept=not_kept, proof=proof)
