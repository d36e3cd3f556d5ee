"""Prefect tasks, one verb each; callable one by one from any flow."""

from gpu_reclaim.tasks.observe import settle, survey, verify_nvidia_smi
from gpu_reclaim.tasks.release import fuser_release, proxmox_exec_kill, stop_systemd

__all__ = [
    "fuser_release",
    "proxmox_exec_kill",
    "settle",
    "stop_systemd",
    "survey",
    "verify_nvidia_smi",
]
