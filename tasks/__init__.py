"""Prefect tasks, one verb each; callable one by one from any flow."""

from gpu_reclaim.tasks.hold import prove_hold, restore, take_hold
from gpu_reclaim.tasks.observe import settle, survey, verify_nvidia_smi
from gpu_reclaim.tasks.release import fuser_release, proxmox_exec_kill, stop_systemd

__all__ = [
    "fuser_release",
    "prove_hold",
    "proxmox_exec_kill",
    "restore",
    "settle",
    "stop_systemd",
    "survey",
    "take_hold",
    "verify_nvidia_smi",
]
