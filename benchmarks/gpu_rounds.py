"""The rounds of gpu_check.py: holders of some shapes, a plan, a reclaim, and a look of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_reclaim.errors import GpuReclaimError
from gpu_reclaim.models import ReclaimPolicy

if TYPE_CHECKING:
    from benchmarks import gpu_access as access
    from benchmarks import gpu_actors as actors
    from benchmarks import gpu_rules as rules
else:
    import gpu_access as access
    import gpu_actors as actors
    import gpu_rules as rules

RELEASE_LIMIT_S = 30
SPARE_MIB = 2048
"""Left free beside a large allocation: a CUDA context needs some hundred MiB of its own."""

TITLE = "sglang::scheduler_TP0"

SHAPES = {
    "plain": [],
    "renamed": ["--title", TITLE],
    "orphan": ["--orphan"],
    "every node": ["--open"],
    "ignores term": ["--ignore-term"],
}
"""Name to the flags of cuda_holder.py."""

BYSTANDERS = {"plain python": [], "namesake": ["--title", "sglang-bystander"]}


def nodes() -> list[str]:
    """The device nodes of single GPUs."""
    beginnings = [Path(prefix) for prefix in access.devices().nodes]
    found = [path for x in beginnings for path in x.parent.glob(f"{x.name}[0-9]*")]
    return sorted(str(path) for path in found)


@dataclass
class Rounds:
    """Carries out rounds on this machine.

    Attributes:
        found: What is known so far; GPUs and device nodes are there already.
        bystanders: Processes that no reclaim may touch, by name.
        settle_s: How long a reclaim may wait for memory.
        until: No round starts later (monotonic seconds).
    """

    found: rules.Found
    bystanders: dict[str, actors.Actor]
    settle_s: float
    until: float

    def run(self, name: str, shapes: list[str]) -> rules.Round:
        """One round; whatever happens, none of its processes is left."""
        done = rules.Round(name=name)
        started: list[actors.Actor] = []
        try:
            if time.monotonic() > self.until:
                raise access.Refused("out of time")
            access.alone()
            for number, shape in enumerate(shapes):
                started.append(self._start(number, shape, done))
            self._plan(done, started)
            self._reclaim(done, started)
        except (access.Refused, actors.ActorError, GpuReclaimError) as error:
            done.not_run = f"{type(error).__name__}: {error}"
        finally:
            for actor in started:
                actor.end()
        return done

    def _start(self, number: int, shape: str, done: rules.Round) -> actors.Actor:
        gpus = sorted(self.found.idle_mib)
        gpu = gpus[number % len(gpus)]
        flags = [*SHAPES[shape], *(self.found.nodes if shape == "every node" else [])]
        actor = actors.start("--gpu", str(gpu), "--mib", str(self.found.mib), *flags)
        done.holders.append(
            rules.Holder(
                shape=shape,
                pid=actor.pid,
                start_time=actor.start_time,
                gpu=gpu,
                signal="KILL" if shape == "ignores term" else "TERM",
                shown=actor.shown,
                orphan=actor.orphan,
            )
        )
        return actor

    def _plan(self, done: rules.Round, started: list[actors.Actor]) -> None:
        report = access.plan()
        done.mib_held = {gpu.index: gpu.memory_used_mib for gpu in report.gpus_before}
        done.planned = [rules.Row.of(row) for row in report.ended]
        if done.name == "every node":
            done.partly = self._partly(done.holders[0])
        done.alive_after_plan = [actor.pid for actor in started if actor.alive]
        strangers = {row.pid for row in done.planned} - {actor.pid for actor in started}
        if strangers:
            raise access.Refused(f"the plan names others than our holders: {sorted(strangers)}")

    def _partly(self, holder: rules.Holder) -> dict[int, list[int]]:
        """Whom plans for its GPU alone, and for another alone, name."""
        gpus = sorted(self.found.idle_mib)
        listed = [row[0] for row in actors.ask("--query-compute-apps=pid")]
        if len(gpus) == 1 or str(holder.pid) not in listed:
            why = "there is one GPU" if len(gpus) == 1 else "nvidia-smi does not list our pids"
            self.found.not_checked.append(f"every node: plan for one GPU: {why}")
            return {}
        return {gpu: [row.pid for row in access.plan([gpu]).ended] for gpu in gpus[:2]}

    def _reclaim(self, done: rules.Round, started: list[actors.Actor]) -> None:
        report = access.attempt(ReclaimPolicy(settle_timeout_s=self.settle_s))
        done.mib_after = actors.memory()
        done.alive_after = [actor.pid for actor in started if actor.alive]
        done.bystanders = {name: actor.alive for name, actor in self.bystanders.items()}
        done.verdict, done.summary = report.verdict, report.summary
        done.seconds = report.seconds
        done.ended = [rules.Row.of(row) for row in report.ended]
        done.spared = [f"{row.name} (pid {row.pid}): {row.reason}" for row in report.spared]
        done.mib_reported = {gpu.index: gpu.memory_used_mib for gpu in report.gpus_after}


def release(found: rules.Found, most_mib: int) -> rules.Release:
    """KILL a holder of much memory, and watch the process and the memory go."""
    try:
        access.alone()
        gpu = min(found.idle_mib)
        mib = max(1, min(most_mib, actors.memory("free")[gpu] - SPARE_MIB))
        holder = actors.start("--gpu", str(gpu), "--mib", str(mib))
    except (access.Refused, actors.ActorError) as error:
        return rules.Release(not_run=f"{type(error).__name__}: {error}")
    result = rules.Release(mib=mib, gpu=gpu)
    try:
        result.mib_held = actors.memory()[gpu]
        _watch(holder, found.idle_mib[gpu] + rules.IDLE_SLACK_MIB, result)
    except actors.ActorError as error:
        result.not_run = f"broke off: {error}"
    finally:
        holder.end()
    return result


def _watch(holder: actors.Actor, idle_mib: int, result: rules.Release) -> None:
    """Fill in the times; nvidia-smi is asked without a pause, its own time is the resolution."""
    signalled = time.monotonic()
    holder.kill()
    while time.monotonic() < signalled + RELEASE_LIMIT_S and result.free_s is None:
        asked = time.monotonic()
        used = actors.memory()[result.gpu]
        answered = time.monotonic()
        result.reading_s = max(result.reading_s, round(answered - asked, 3))
        if used <= idle_mib:
            result.free_s = round(answered - signalled, 3)
        else:
            result.in_use_s = round(asked - signalled, 3)
    while holder.gone_at is None and time.monotonic() < signalled + RELEASE_LIMIT_S:
        time.sleep(0.01)
    result.gone_s = round(holder.gone_at - signalled, 4) if holder.gone_at else None
