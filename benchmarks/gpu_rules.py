"""What gpu_check.py found, and which of its checks that fails: values in, names out."""

from __future__ import annotations

import re

from pydantic import BaseModel

from gpu_reclaim.models import Ended, Verdict

IDLE_SLACK_MIB = 16
"""An idle GPU's reading varies by a few MiB with the driver's own needs."""

NODE = re.compile(r"nvidia\d+$")


class Holder(BaseModel):
    """A holder of GPU memory that the check started.

    Attributes:
        shape: Which of the shapes.
        gpu: The GPU it computes on.
        signal: The signal that should end it.
        shown: What `ps` could show of it.
        orphan: What started it has ended, and it has another parent now.
    """

    shape: str
    pid: int
    start_time: int
    gpu: int
    signal: str
    shown: str
    orphan: bool


class Row(BaseModel):
    """A process in a report: what a person asks first."""

    pid: int
    start_time: int
    name: str
    signal: str = ""
    outcome: str = ""
    devices: list[str] = []

    @classmethod
    def of(cls, row: Ended) -> Row:
        """The row of a report."""
        return cls.model_validate(row.model_dump())

    @property
    def gpu_nodes(self) -> int:
        """How many GPUs' own device nodes it holds."""
        paths = {device.rpartition(" ")[0] for device in self.devices}
        return len([path for path in paths if NODE.search(path)])


class Round(BaseModel):
    """One reclaim of holders that the check started, and what was seen around it.

    Attributes:
        name: The shape, or `all together`.
        not_run: Why it was not carried out; empty where it was.
        mib_held: Memory by GPU while they ran, read by the plan.
        planned: Whom the plan named.
        partly: Whom plans for one GPU named, by GPU; empty where they were not made.
        alive_after_plan: Pids of the holders that were there after the plan.
        seconds: What the reclaim took.
        mib_reported: Memory by GPU at the end, as the report has it.
        mib_after: The same, read by the check itself.
        alive_after: Pids of the holders that were there after the reclaim.
        bystanders: Name to whether it was there after the reclaim.
    """

    name: str
    not_run: str = ""
    holders: list[Holder] = []
    mib_held: dict[int, int | None] = {}
    planned: list[Row] = []
    partly: dict[int, list[int]] = {}
    alive_after_plan: list[int] = []
    verdict: str = ""
    summary: str = ""
    seconds: float = 0
    ended: list[Row] = []
    spared: list[str] = []
    mib_reported: dict[int, int | None] = {}
    mib_after: dict[int, int] = {}
    alive_after: list[int] = []
    bystanders: dict[str, bool] = {}


class Release(BaseModel):
    """How long a killed holder's memory stayed in use.

    Attributes:
        mib: What it had allocated.
        mib_held: Memory of its GPU while it ran.
        gone_s: From the signal until the kernel said that the process had ended.
        in_use_s: From the signal until the last reading began that showed memory in use.
        free_s: From the signal until the first reading ended that showed its memory released.
        reading_s: The longest reading: how finely the two before are known.
    """

    not_run: str = ""
    mib: int = 0
    gpu: int = 0
    mib_held: int = 0
    gone_s: float | None = None
    in_use_s: float = 0
    free_s: float | None = None
    reading_s: float = 0


class Found(BaseModel):
    """The whole document.

    Attributes:
        machine: Kernel, driver and the like, for whoever reads this elsewhere.
        nodes: Device nodes of GPUs.
        mib: What each holder allocates.
        idle_mib: Memory by GPU before anything was started.
        not_checked: What this machine does not allow to check, and why.
    """

    machine: dict[str, str] = {}
    nodes: list[str] = []
    smi_seconds: dict[str, float] = {}
    mib: int = 0
    idle_mib: dict[int, int] = {}
    rounds: list[Round] = []
    release: Release = Release(not_run="not reached")
    not_checked: list[str] = []
    crashed: str = ""
    seconds: float = 0
    failed: list[str] = []


def failures(found: Found) -> list[str]:
    """Names of the checks that did not hold, each behind the round it belongs to."""
    failed = ["crashed"] if found.crashed else []
    failed += [] if found.rounds else ["no rounds"]
    for done in found.rounds:
        checks = {"run": not done.not_run}
        if not done.not_run:
            checks |= _prepared(found, done) | _planned(done) | _reclaimed(found, done)
        failed += [f"{done.name}: {check}" for check, held in checks.items() if not held]
    return failed + [f"release: {check}" for check, held in _released(found).items() if not held]


def _prepared(found: Found, done: Round) -> dict[str, bool]:
    """The holders are what they should be; otherwise ending them would prove little."""
    taken = dict(found.idle_mib)
    for holder in done.holders:
        taken[holder.gpu] += found.mib
    rows = {row.pid: row for row in done.planned}
    openers = [x.pid for x in done.holders if x.shape == "every node"]
    return {
        "memory seen in use": all((done.mib_held.get(gpu) or 0) >= taken[gpu] for gpu in taken),
        "renamed": not any("python" in x.shown for x in done.holders if x.shape == "renamed"),
        "orphaned": all(x.orphan for x in done.holders if x.shape == "orphan"),
        "every node open": all(
            pid in rows and rows[pid].gpu_nodes >= max(1, len(found.nodes)) for pid in openers
        ),
    }


def _planned(done: Round) -> dict[str, bool]:
    by_gpu = {gpu: {x.pid for x in done.holders if x.gpu == gpu} for gpu in done.partly}
    return {
        "plan named exactly our holders": _same(done.holders, done.planned),
        "plan touched nothing": _pids(done.holders) == sorted(done.alive_after_plan),
        "plan for one GPU": all(by_gpu[gpu] == set(done.partly[gpu]) for gpu in by_gpu),
    }


def _reclaimed(found: Found, done: Round) -> dict[str, bool]:
    zero = bool(done.mib_reported) and not any(done.mib_reported.values())
    signals = {holder.pid: holder.signal for holder in done.holders}
    return {
        "verdict": done.verdict == (Verdict.CLEAN if zero else Verdict.RESIDUE),
        "exactly our holders ended": _same(done.holders, done.ended),
        "outcome": all(row.outcome == "ended" for row in done.ended),
        "signal": all(row.signal == signals.get(row.pid) for row in done.ended),
        "holders gone": not done.alive_after,
        "memory back at idle": idle(done.mib_after, found.idle_mib),
        "bystanders alive": bool(done.bystanders) and all(done.bystanders.values()),
    }


def _released(found: Found) -> dict[str, bool]:
    release = found.release
    if release.not_run:
        return {"run": False}
    return {
        "memory seen in use": release.mib_held >= found.idle_mib[release.gpu] + release.mib,
        "process gone": release.gone_s is not None,
        "memory free": release.free_s is not None,
    }


def idle(now: dict[int, int], before: dict[int, int]) -> bool:
    """Every GPU is there, and has no more in use than before anything was started."""
    return now.keys() == before.keys() and all(
        now[gpu] <= before[gpu] + IDLE_SLACK_MIB for gpu in before
    )


def _same(holders: list[Holder], rows: list[Row]) -> bool:
    return _identities(holders) == _identities(rows)


def _identities(some: list[Holder] | list[Row]) -> list[tuple[int, int]]:
    return sorted((x.pid, x.start_time) for x in some)


def _pids(holders: list[Holder]) -> list[int]:
    return sorted(holder.pid for holder in holders)
