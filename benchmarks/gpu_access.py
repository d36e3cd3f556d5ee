"""When gpu_check.py may act, and the library as it calls it: this machine, all its GPUs."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from typing import TYPE_CHECKING

from gpu_reclaim.errors import GpuReclaimError, GpusNotReclaimed
from gpu_reclaim.lease import Places, places_in
from gpu_reclaim.models import ReclaimPolicy, ReclaimReport, Verdict
from gpu_reclaim.processes import NVIDIA, DeviceSet
from gpu_reclaim.reclaim import reclaim
from gpu_reclaim.session import Session
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.local import LocalTransport

if TYPE_CHECKING:
    from benchmarks import gpu_actors as actors
    from benchmarks import gpu_rules as rules
else:
    import gpu_actors as actors
    import gpu_rules as rules


class Refused(Exception):
    """Nothing may be done here: somebody else would be harmed, or nothing could be proven."""

    def __init__(self, reason: str, holders: list[rules.Row] | None = None) -> None:
        self.holders = holders or []
        super().__init__(reason)


def obstacle() -> str:
    """What this machine lacks; empty when nothing."""
    if os.geteuid() != 0:
        return "not root, so holders of other users could not be seen"
    if shutil.which("nvidia-smi") is None:
        return "there is no nvidia-smi on PATH"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"the CUDA driver's library cannot be loaded: {error}"
    return ""


def devices() -> DeviceSet:
    """What counts as a GPU device, by the variable that gpu_reclaim.settings reads too."""
    prefixes = tuple(json.loads(os.environ.get("GPU_RECLAIM_DEVICE_PREFIXES", "[]")))
    if not prefixes:
        return NVIDIA
    return DeviceSet(majors=(), driver_names=(), path_prefixes=prefixes, nodes=prefixes)


def places() -> Places:
    """Where lease and record are, by the variable that gpu_reclaim.settings reads too."""
    return places_in(os.environ.get("GPU_RECLAIM_HOLD_FOLDER", ""))


def attempt(policy: ReclaimPolicy) -> ReclaimReport:
    """The report of a reclaim of this machine, whatever its verdict."""
    links = Links(direct=LocalTransport())
    session = Session("this machine", links, devices=devices(), places=places())
    try:
        return reclaim(session, policy)
    except GpusNotReclaimed as refused:
        return refused.report


def plan(gpus: list[int] | None = None) -> ReclaimReport:
    """Who would be ended; touches nothing.

    Raises:
        Refused: No plan can be made.
    """
    try:
        report = attempt(ReclaimPolicy(mode="plan", gpus=gpus or []))
    except GpuReclaimError as error:
        raise Refused(f"no plan can be made: {error}") from error
    if report.verdict != Verdict.PLANNED:
        raise Refused(f"no plan can be made: {report.verdict}: {report.summary}")
    return report


def alone() -> dict[int, int]:
    """Memory by GPU, where nobody uses one.

    Raises:
        Refused: Somebody does, or it cannot be known.
    """
    report = plan()
    if report.ended:
        rows = [rules.Row.of(row) for row in report.ended]
        raise Refused("processes that this check did not start hold GPUs", rows)
    try:
        apps = [row[0] for row in actors.ask("--query-compute-apps=pid") if row[0]]
        used = actors.memory()
    except actors.ActorError as error:
        raise Refused(str(error)) from error
    if apps:
        raise Refused(f"nvidia-smi lists processes that this check did not start: {apps}")
    if max(used.values(), default=0) > ReclaimPolicy().residue_mib:
        raise Refused(f"GPU memory is in use (MiB by GPU): {used}")
    return used
