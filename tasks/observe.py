"""Tasks that only read: survey, settle, verify_nvidia_smi."""

from __future__ import annotations

import logging
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from gpu_reclaim import settling, steps, verifying
from gpu_reclaim.models import ReclaimPolicy, Sample, Settled, Survey
from gpu_reclaim.tasks import artifacts
from gpu_reclaim.tasks.host import (
    DEFAULT_POLICY,
    count_attempts,
    open_host,
    ops_task,
    with_defaults,
)

log = logging.getLogger(__name__)

PROGRESS_AFTER_S = 2.0
"""A wait shorter than this gets no progress artifact: nobody would see it move."""


@ops_task("survey")
def survey(host: str, policy: ReclaimPolicy = DEFAULT_POLICY) -> Survey:
    """Read everything about a host; touch nothing.

    Args:
        host: Name of the GpuHost block.
        policy: What will be asked of it (`match`, `gpus` and `via` matter here).

    Raises:
        BadInput: The host, a unit or a GPU is unknown.
        GuestRefused: The guest is another one, locked or stopped.
        TransportError: It could not be reached.
    """
    policy = with_defaults(policy)
    with open_host(host, policy.via) as session:
        found = steps.survey(session, policy)
    count_attempts(found.step)
    log.info(
        "%s: %s, %d holders, units: %s",
        host,
        found.reading.problem or _used(found),
        len(found.table.holders),
        ", ".join(f"{unit.name} {unit.active_state}" for unit in found.units) or "none",
    )
    artifacts.show_survey(found)
    return found


def _used(survey: Survey) -> str:
    used = [f"GPU {gpu.index}: {gpu.memory_used_mib} MiB" for gpu in survey.reading.gpus]
    return ", ".join(used)


@ops_task("settle")
def settle(host: str, policy: ReclaimPolicy = DEFAULT_POLICY) -> Settled:
    """Wait until GPU memory is released, on evidence, at most `settle_timeout_s`.

    Args:
        host: Name of the GpuHost block.
        policy: How long, and how many readings in a row must agree.

    Raises:
        TransportError: It could not be reached.
    """
    policy = with_defaults(policy)
    with open_host(host, policy.via) as session:
        settled = settling.settle(session, policy, _Progress(host))
    count_attempts(settled.step)
    log.info(
        "%s: %s after %.1f s and %d readings",
        host,
        "GPUs are free" if settled.free else f"not free ({settled.reason})",
        settled.step.seconds,
        len(settled.samples),
    )
    artifacts.show_settled(host, settled)
    return settled


class _Progress:
    """Log lines, and a progress artifact once the wait is long enough to be watched."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._artifact: UUID | None = None
        self._most = 0
        self._said = 0.0

    def __call__(self, sample: Sample) -> None:
        used = sum(value or 0 for value in sample.memory_mib.values())
        self._most = max(self._most, used)
        if not used or sample.seconds - self._said < PROGRESS_AFTER_S:
            return
        self._said = sample.seconds
        holders = f", held by {'; '.join(sample.holders)}" if sample.holders else ""
        log.info("%s: %d MiB still in use%s", self._host, used, holders)
        artifacts.write(lambda: self._show(100.0 * (1 - used / self._most)))

    def _show(self, percent: float) -> None:
        if self._artifact is None:
            made = create_progress_artifact(
                progress=percent,
                key=artifacts.slug("settle-progress", self._host),
                description=f"GPU memory released on {self._host}",
            )
            self._artifact = made if isinstance(made, UUID) else None
        else:
            update_progress_artifact(artifact_id=self._artifact, progress=percent)


@ops_task("verify_nvidia_smi")
def verify_nvidia_smi(host: str, policy: ReclaimPolicy = DEFAULT_POLICY) -> Survey:
    """Take the final look at GPUs and holders, on which the verdict rests.

    Args:
        host: Name of the GpuHost block.
        policy: Which GPUs are wanted, and what may remain.

    Raises:
        TransportError: It could not be reached.
    """
    policy = with_defaults(policy)
    with open_host(host, policy.via) as session:
        found = verifying.verify(session, policy)
    count_attempts(found.step)
    log.info("%s: %s", host, found.reading.problem or _used(found))
    rows = artifacts.gpu_rows([], found.reading.gpus)
    artifacts.table(artifacts.slug("verify-nvidia-smi", host), rows, f"GPUs of {host} at the end")
    return found
