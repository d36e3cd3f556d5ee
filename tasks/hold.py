"""Tasks of the hold: take_hold, prove_hold, restore."""

from __future__ import annotations

import logging

from gpu_reclaim import claiming, hold
from gpu_reclaim.errors import BadInput
from gpu_reclaim.models import ReclaimPolicy, RestoreReport, Survey, Taken
from gpu_reclaim.tasks.host import open_host, ops_task, with_defaults
from gpu_reclaim.tasks.runs import this_run

log = logging.getLogger(__name__)


@ops_task("take_hold")
def take_hold(host: str, policy: ReclaimPolicy, before: Survey) -> Taken:
    """Take a host: nobody else reclaims it, and what is stopped from now on cannot be started.

    Without the policy's `hold_minutes` it only keeps other runs off. What an earlier run left
    stopped is put back first. The hold belongs to the session that took it, so this is of use
    inside `open_host` or `reclaim_gpus`.

    Args:
        host: Name of the GpuHost block.
        policy: Which units will be stopped.
        before: The host as `survey` found it.

    Raises:
        HeldByOther: Another run holds the host, `wait_minutes` long; nothing was touched.
        HoldBroken: The hold cannot be set; nothing was stopped.
        TransportError: It could not be reached.
    """
    policy = with_defaults(policy)
    with open_host(host, policy.via) as session:
        return claiming.take(session, policy, before, this_run())


@ops_task("prove_hold")
def prove_hold(host: str, policy: ReclaimPolicy) -> str:
    """Try to start every held unit and trigger; if each is refused, hold on for `hold_minutes`.

    Args:
        host: Name of the GpuHost block.
        policy: How long the host shall be held.

    Returns:
        Until when it is held, by its own clock.

    Raises:
        HoldBroken: One of them started; it was stopped again.
        HoldLost: The hold is no longer ours.
        TransportError: It could not be reached.
    """
    policy = with_defaults(policy)
    with open_host(host, policy.via) as session:
        if session.held is None:
            raise BadInput("nothing is held here", remedy="take_hold first, in the same open_host")
        return hold.prove(session, policy.hold_minutes * 60)


@ops_task("restore")
def restore(host: str) -> RestoreReport:
    """Put back what any run stopped on a host under a hold, and end the hold.

    It goes by the record on the host alone, and doing it again is safe.

    Args:
        host: Name of the GpuHost block.

    Raises:
        TransportError: It could not be reached.
    """
    with open_host(host) as session:
        return hold.restore(session, everybody=True)
