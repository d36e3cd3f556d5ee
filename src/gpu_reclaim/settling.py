"""Waiting until GPU memory is released, on evidence."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_reclaim import hold
from gpu_reclaim.models import Process, ReclaimPolicy, Sample, Settled, Step, Survey
from gpu_reclaim.nvidia_smi import is_fault
from gpu_reclaim.session import Session, look
from gpu_reclaim.steps import describe
from gpu_reclaim.victims import choose

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
"""Pause after the first reading; memory of ordinary processes is free within that."""

PAUSE_GROWTH = 1.5
MAX_PAUSE_S = 1.0
"""Readings follow each other by at most this (law 7 of the design: polls of at most 1 s)."""


@dataclass
class _Streak:
    """The last readings that agreed with each other."""

    kind: str = ""
    key: object = None
    length: int = 0

    def add(self, kind: str, key: object) -> None:
        same = (kind, key) == (self.kind, self.key)
        self.kind, self.key, self.length = kind, key, self.length + 1 if same else 1


@dataclass
class _Pause:
    """Grows while nothing changes; short while readings only need to be confirmed."""

    seconds: float = field(default=FIRST_PAUSE_S)

    def next(self, kind: str) -> float:
        if kind == "free":
            return FIRST_PAUSE_S
        now = self.seconds
        self.seconds = min(now * PAUSE_GROWTH, MAX_PAUSE_S)
        return now


def settle(
    session: Session,
    policy: ReclaimPolicy,
    on_sample: Callable[[Sample], None] = lambda _: None,
) -> Settled:
    """Wait until the wanted GPUs are free in several readings in a row.

    It ends early when waiting cannot help: nvidia-smi keeps failing, or an unprotected process
    that is not waiting for the kernel keeps holding a device.

    Raises:
        TransportError: As `Transport.run`.
    """
    hold.keep(session)
    started = session.clock()
    samples: list[Sample] = []
    streak, pause = _Streak(), _Pause()
    while True:
        survey = look(session, "settle", units=False, apps=bool(policy.gpus))
        kind, sample = _judge(session, policy, survey, session.clock() - started)
        samples.append(sample)
        on_sample(sample)
        streak.add(kind, (sample.memory_mib, sample.holders) if kind == "free" else None)
        enough = streak.length >= policy.stable_samples and kind != "busy"
        left = policy.settle_timeout_s - (session.clock() - started)
        if enough or left <= 0:
            break
        session.sleep(min(_wait(pause, kind, sample), left))
    step = Step(name="settle", via=survey.step.via, seconds=session.clock() - started)
    free = kind == "free" and streak.length >= policy.stable_samples
    reason = {"failing": sample.problem, "held": "still held"}.get(kind, "") or "time limit"
    return Settled(step=step, free=free, reason="free" if free else reason, samples=samples)


def _wait(pause: _Pause, kind: str, sample: Sample) -> float:
    # A rest above zero may still be draining: it is confirmed slowly.
    draining = kind == "free" and any(sample.memory_mib.values())
    return MAX_PAUSE_S if draining or kind == "held" else pause.next(kind)


def _judge(
    session: Session, policy: ReclaimPolicy, survey: Survey, seconds: float
) -> tuple[str, Sample]:
    """One of free, failing, held, busy; and the sample."""
    wanted = policy.wanted(survey.reading.gpus)
    holders = holding(session, policy, survey)
    problem = survey.reading.problem or "; ".join(x.note for x in wanted if is_fault(x))
    sample = Sample(
        seconds=round(seconds, 3),
        memory_mib={gpu.index: gpu.memory_used_mib for gpu in wanted},
        holders=[describe(process) for process in holders],
        problem=problem,
    )
    used = [gpu.memory_used_mib for gpu in wanted]
    if problem or None in used or not used:
        return "failing", sample
    if holders:
        return ("busy" if all(x.state == "D" for x in holders) else "held"), sample
    return ("free" if max(x or 0 for x in used) <= policy.limit_mib else "busy"), sample


def holding(session: Session, policy: ReclaimPolicy, survey: Survey) -> list[Process]:
    """Unprotected holders of the wanted GPUs."""
    choice = choose(survey.table, survey.reading, policy, protect=session.protect)
    return [process for process in choice.victims if process.devices]
