"""Tasks that act: stop_systemd, proxmox_exec_kill, fuser_release.

Each looks first and does only what is still needed, so a second attempt after a lost connection
repeats nothing blindly.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gpu_reclaim import releasing, stopping
from gpu_reclaim.models import Outcome, ReclaimPolicy, UnitState
from gpu_reclaim.tasks import artifacts
from gpu_reclaim.tasks.host import (
    DEFAULT_POLICY,
    count_attempts,
    open_host,
    ops_task,
    with_defaults,
)

log = logging.getLogger(__name__)


@ops_task("stop_systemd")
def stop_systemd(
    host: str, policy: ReclaimPolicy = DEFAULT_POLICY, before: Sequence[UnitState] = ()
) -> Outcome:
    """Stop the host's units, triggers first, and end what is left in their control groups.

    Args:
        host: Name of the GpuHost block.
        policy: What may be done.
        before: The units as `survey` found them, so that the outcome of a second attempt still
            names what the first one stopped.

    Raises:
        CommandFailed: A unit did not stop.
        TransportError: It could not be reached.
    """
    policy = with_defaults(policy)
    with open_host(host, policy.via) as session:
        return _finish(host, stopping.stop_systemd(session, policy, before))


@ops_task("proxmox_exec_kill")
def proxmox_exec_kill(host: str, policy: ReclaimPolicy = DEFAULT_POLICY) -> Outcome:
    """End holders, and whom `match` names, inside the guest through its hypervisor.

    Without a hypervisor in the GpuHost block, or with `via="ssh"`, there is nothing to do.

    Args:
        host: Name of the GpuHost block.
        policy: Whom it may end.

    Raises:
        GuestRefused: The guest is another one, locked or stopped; nothing was touched.
        TransportError: It could not be reached.
    """
    policy = with_defaults(policy)
    with open_host(host, policy.via) as session:
        return _finish(host, releasing.proxmox_exec_kill(session, policy))


@ops_task("fuser_release")
def fuser_release(host: str, policy: ReclaimPolicy = DEFAULT_POLICY) -> Outcome:
    """End whoever still holds an NVIDIA device.

    Args:
        host: Name of the GpuHost block.
        policy: Whom it may end.

    Raises:
        TransportError: It could not be reached.
    """
    policy = with_defaults(policy)
    with open_host(host, policy.via) as session:
        return _finish(host, releasing.fuser_release(session, policy))


def _finish(host: str, outcome: Outcome) -> Outcome:
    count_attempts(outcome.step)
    for row in outcome.ended:
        log.info("%s: %s (pid %d): %s %s", host, row.name, row.pid, row.outcome, row.signal)
    log.info(
        "%s: %s: units stopped: %d, processes ended: %d%s",
        host,
        outcome.step.name,
        len(outcome.stopped),
        len(outcome.ended),
        f"; {outcome.note}" if outcome.note else "",
    )
    artifacts.show_outcome(host, outcome)
    return outcome
