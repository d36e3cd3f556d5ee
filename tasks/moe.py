"""Tasks of a tuning of MoE kernels: look first, tune sizes, make overlays, time kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpu_reclaim import hold, logbook, moestage, overlays
from gpu_reclaim.commands import Script
from gpu_reclaim.errors import CommandFailed
from gpu_reclaim.jobs import Job
from gpu_reclaim.moecourse import MoeTuning
from gpu_reclaim.moefinding import moe_preflight
from gpu_reclaim.moefound import PRESENT, MoeFound
from gpu_reclaim.moepreflight import MoePreflight, overlay_script
from gpu_reclaim.plans import MoeTunePlan
from gpu_reclaim.tasks.host import load_server, open_host, ops_task
from gpu_reclaim.tasks.tuning_progress import Progress
from gpu_reclaim.tuning import KernelTime, TunedSize


@ops_task("look_before_moe")
def look_before_moe(host: str, server: str, plan: MoeTunePlan, gpus: Sequence[int]) -> MoeFound:
    """Look at everything that can speak against tuning MoE kernels; touch nothing.

    Args:
        host: Name of the GpuHost block.
        server: Name of the LlmServer block.
        plan: What is to be tried.
        gpus: Indexes of the GPUs that may be used; empty: all.

    Raises:
        BadInput: Something speaks against it.
        TransportError: The host could not be reached.
    """
    with open_host(host) as session:
        return moe_preflight(session, load_server(server), plan, gpus)


@ops_task("read_sizes")
def read_sizes(host: str, moe: MoeFound) -> list[TunedSize]:
    """The batch sizes that earlier runs have tuned for the very same kernel.

    Also those whose script ended well after its run was gone.

    Args:
        host: Name of the GpuHost block.
        moe: From `look_before_moe`.

    Raises:
        TransportError: The host could not be reached.
    """
    with open_host(host) as session:
        known = logbook.read_sizes(session, moe.place)
        left = [size for size in moe.sizes if size not in {x.tokens for x in known if x.row}]
        late = moestage.harvest(session, moe, left)
        return [x for x in known if x.tokens not in {y.tokens for y in late}] + late


@ops_task("tune_sizes")
def tune_sizes(host: str, work: MoeTuning) -> None:
    """Tune the missing batch sizes, one on each GPU; each is put on record at once.

    Args:
        host: Name of the GpuHost block; its GPUs are free and held.
        work: Takes in what was tuned.

    Raises:
        BadInput: The script makes a file that the server would never read.
        CommandFailed: A size could not be begun or ended.
        HoldLost: The host is not ours any more.
        TransportError: The host could not be reached.
    """
    bars = _Bars(work, list(work.missing))
    with open_host(host) as session:
        for size in moestage.tune(
            session,
            work.moe,
            work.missing,
            limit_s=work.limit_s,
            window=work.window(),
            progress=bars.hear,
        ):
            # Whoever ended the hold meanwhile ended the script too: that says nothing of a size.
            hold.renew(session, session.lease_s)
            logbook.add_size(session, work.moe.place, size)
            work.add(size)
            bars.show()
        if not work.missing:
            moestage.drop_caches(session, work.moe)


class _Bars:
    """How far the stage is, on the run's page."""

    def __init__(self, work: MoeTuning, sizes: Sequence[int]) -> None:
        self._work, self._sizes = work, sizes
        self._parts: dict[str, float] = {}
        self._progress = Progress(work.server, "moe")
        self._shown = -1.0
        self.show()

    def hear(self, job: Job, rows: tuple[int, int] | None) -> None:
        """Take in how many rows a job has tried."""
        if rows and rows[1]:
            self._parts[job.name] = min(1.0, rows[0] / rows[1])
        self.show()

    def show(self) -> None:
        """Show it where it has moved by a percent."""
        left = set(self._work.missing)
        done = len(self._sizes) - len(left)
        parts = sum(self._parts.get(f"moe-{size}", 0) for size in left)
        share = (done + parts) / max(1, len(self._sizes))
        if share - self._shown < 0.01 and done < len(self._sizes):  # noqa: PLR2004 - a percent
            return
        self._shown = share
        rounds = math.ceil(len(left) / max(1, len(self._work.moe.devices)))
        minutes = max(0.0, rounds - parts / max(1, len(self._work.moe.devices)))
        said = f"tuned {done} of {len(self._sizes)} batch sizes"
        self._progress.visit(round(100 * share), 100, said, minutes * self._work.size_s / 60)


@ops_task("make_overlays")
def make_overlays(host: str, before: MoePreflight) -> None:
    """Make a folder of configs on the host for each arm; those that are there stay.

    Args:
        host: Name of the GpuHost block; it is held.
        before: The arms.

    Raises:
        CommandFailed: One could not be made.
        TransportError: The host could not be reached.
    """
    with open_host(host) as session:
        for arm in before.folders:
            script = Script(
                f"make an overlay for {arm}", {"made": overlay_script(before, arm)}, writes=True
            )
            result = session.links.run(script)
            if result.section("made").value("built") != "yes":
                raise CommandFailed(
                    f"{session.host}: {before.folders[arm]} could not be made from "
                    f"{before.moe.base}/configs",
                    remedy="see the space on the disk there",
                    result=result,
                )


@ops_task("tidy_overlays")
def tidy_overlays(host: str, before: MoePreflight, used: str) -> None:
    """Remove the overlays of arms that lost.

    Args:
        host: Name of the GpuHost block.
        before: The arms.
        used: The arm that is in force.

    Raises:
        TransportError: The host could not be reached.
    """
    kept = [before.folders[used]] if used != PRESENT else [before.moe.base]
    with open_host(host) as session:
        text = overlays.tidy(before.server.unit, kept, session.places)
        session.links.run(Script("remove overlays", {"tidy": text}, writes=True))


@ops_task("time_kernels")
def time_kernels(host: str, work: MoeTuning, before: MoePreflight) -> list[KernelTime]:
    """Time the kernels of each arm at each size, without a server.

    Args:
        host: Name of the GpuHost block; its GPUs are free and held.
        work: What is tuned.
        before: The arms; their overlays are there.

    Raises:
        CommandFailed: A job could not be started or ended.
        HoldLost: The host is not ours any more.
        TransportError: The host could not be reached.
    """
    arms = {PRESENT: "", **before.folders}
    progress, most = Progress(work.server, "moe"), len(arms) * len(work.moe.sizes)
    found: list[KernelTime] = []
    with open_host(host) as session:
        for one in moestage.time_kernels(
            session, work.moe, arms, window=work.window(), progress=lambda *_: None
        ):
            found.append(one)
            progress.visit(len(found), most, f"{one.arm} at {one.tokens} tokens", math.inf)
        moestage.drop_caches(session, work.moe)
    return found
