"""SGLang's tuning script as jobs on a held host: what each runs with."""

from __future__ import annotations

from gpu_reclaim.commands import PATHS
from gpu_reclaim.jobs import Job
from gpu_reclaim.moefound import MoeFound
from gpu_reclaim.overlays import VARIABLE
from gpu_reclaim.session import Session

SPACE_FILE = "space.json"
"""Name of a job's file with the rows to try."""

KERNEL_LIMIT_S = 900
"""Longest time for one kernel at one size without tuning, in seconds: most of it is Ray's start and
one compilation."""


def tuning_job(session: Session, moe: MoeFound, tokens: int, limit_s: float) -> Job:
    """The job that tunes one batch size.

    Args:
        session: The host.
        moe: What was found.
        tokens: The batch size.
        limit_s: Its time limit, in seconds.
    """
    folder = f"{moe.place}/{tokens}"
    files = {SPACE_FILE: moe.space_text} if moe.rows else {}
    space = f"{folder}/{SPACE_FILE}" if moe.rows else ""
    return Job(
        name=f"moe-{tokens}",
        folder=folder,
        argv=moe.script(tokens, tune=True, space_file=space),
        env=_env(session, moe, f"{tokens}", folder),
        files=files,
        limit_s=limit_s,
    )


def _env(session: Session, moe: MoeFound, name: str, folder: str) -> dict[str, str]:
    values = moe.env.for_scripts
    return {
        **values,
        "PATH": ":".join(filter(None, [values.get("PATH"), PATHS])),
        # It runs as root: nothing of it may be left among the files of the server's user.
        "HOME": f"{folder}/cache",
        "HF_MODULES_CACHE": f"{folder}/cache/modules",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # A cache of its own: what was compiled is there in the next attempt, and a broken one harms
        # this size alone.
        "TRITON_CACHE_DIR": f"{folder}/cache/triton",
        # A Ray of its own, whatever else runs on the host; its sockets need a short path.
        "RAY_TMPDIR": f"{session.places.run}/gpu-reclaim/ray-{name}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
    }


def timing_job(session: Session, moe: MoeFound, name: str, tokens: int, overlay: str) -> Job:
    """The job that times one config's kernel at one batch size.

    Args:
        session: The host.
        moe: What was found.
        name: The job's.
        tokens: The batch size.
        overlay: The config's; empty for what the server uses now.
    """
    folder = f"{moe.place}/{name}"
    wanted = overlay or moe.env.folder
    env = _env(session, moe, name, folder) | ({VARIABLE: wanted} if wanted else {})
    argv = moe.script(tokens, tune=False)
    return Job(name=name, folder=folder, argv=argv, env=env, limit_s=KERNEL_LIMIT_S)
