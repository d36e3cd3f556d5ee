"""What a verdict is made from: all that was seen and done, as one value."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gpu_reclaim.models import Ended, Gpu, GpuReading, Process, ReclaimPolicy, Settled, Spared


@dataclass(frozen=True)
class Evidence:
    """All that decides.

    Attributes:
        policy: What was asked.
        before: GPUs before anything was touched.
        after: GPUs at the end.
        settled: How the wait before the last look went; None: there was none.
        expected_gpus: How many GPUs the host must have; None: as many as before.
        holders: Unprotected holders at the end.
        known: Who was there before anything was touched, as (pid, start time).
        survivors: Processes that were sent KILL and are there at the end, holders or not.
        starters: Pid of such a holder to who started it, where that is known.
        spared: Who was left alone at the end, and why.
        ended: Whom we signalled, and what became of them.
        undead: Dead or uninterruptible processes at the end that held a GPU before, or that
            nvidia-smi lists.
        running_again: The host's units that were to be stopped and run at the end, each with the
            live units that may have started it.
        restarting: Other units of ended holders that are about to run again.
        uninspected: How many processes could not be looked into at the end.
        blind: Other users' processes cannot be looked into at all.
        unlisted: Unprotected holders of which nvidia-smi does not tell the GPU, when only some
            GPUs are wanted.
        trusted: Everybody that nvidia-smi lists is a holder here; else its pids mean nobody.
        strangers: Pids that nvidia-smi lists and that are no holders here.
        other_guests: Where else (`guest 130`, `the node itself`) to the processes that hold the
            devices there, seen from the node.
        inside: Processes of this very guest that hold devices as seen from the node alone.
        driver: Driver version; empty where it was not asked.
        mig: A GPU is in MIG mode.
    """

    policy: ReclaimPolicy
    before: GpuReading
    after: GpuReading
    settled: Settled | None = None
    expected_gpus: int | None = None
    holders: Sequence[Process] = ()
    known: Collection[tuple[int, int]] = ()
    survivors: Sequence[Process] = ()
    starters: Mapping[int, str] = field(default_factory=dict)
    spared: Sequence[Spared] = ()
    ended: Sequence[Ended] = ()
    undead: Sequence[Process] = ()
    running_again: Mapping[str, Sequence[str]] = field(default_factory=dict)
    restarting: Sequence[str] = ()
    uninspected: int = 0
    blind: bool = False
    unlisted: Sequence[str] = ()
    trusted: bool = True
    strangers: Sequence[str] = ()
    other_guests: Mapping[str, Sequence[str]] = field(default_factory=dict)
    inside: Sequence[str] = ()
    driver: str = ""
    mig: bool = False

    @property
    def wanted(self) -> list[Gpu]:
        """The wanted GPUs, as read at the end."""
        return self.policy.wanted(self.after.gpus)

    @property
    def in_use(self) -> list[Gpu]:
        """Wanted GPUs with more memory in use than may remain."""
        return self.policy.in_use(self.after.gpus)

    @property
    def listed_mib(self) -> dict[int, int | None]:
        """Pid to the most MiB that nvidia-smi says it uses on a wanted GPU; None: no number."""
        wanted = {gpu.uuid for gpu in self.wanted}
        found: dict[int, int | None] = {}
        for app in self.after.apps if self.trusted else ():
            if app.gpu_uuid in wanted:
                known = [x for x in (found.get(app.pid), app.memory_used_mib) if x is not None]
                found[app.pid] = max(known, default=None)
        return found
