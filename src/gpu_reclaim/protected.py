"""Who is never signalled, and which units are never stopped: the built-in lists."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

KEEPS_DRIVER = "it keeps the driver or the fabric up"
MONITORS = "it monitors"
DISPLAYS = "it drives a display"
SYSTEM = "the machine needs it"
MPS = "MPS is ended by its own command, after its clients"
MPS_CONTROL, MPS_SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"

PROTECTED = {
    # NVIDIA's own services; KILL of the DCGM ones has frozen GPUs (NVIDIA/dcgm-exporter#84).
    "nvidia-persistenced": KEEPS_DRIVER,
    "nv-fabricmanager": KEEPS_DRIVER,
    "nvidia-fabricmanager": KEEPS_DRIVER,
    "nvidia-imex": KEEPS_DRIVER,
    "nvidia-powerd": KEEPS_DRIVER,
    MPS_CONTROL: MPS,
    MPS_SERVER: MPS,
    "nv-hostengine": MONITORS,
    "dcgm-exporter": MONITORS,
    "nvsm_core": MONITORS,
    "node_exporter": MONITORS,
    "prometheus-node-exporter": MONITORS,
    "nvidia_gpu_exporter": MONITORS,
    "telegraf": MONITORS,
    "netdata": MONITORS,
    "nvidia-smi": MONITORS,
    "nvtop": MONITORS,
    "btop": MONITORS,
    "datadog-agent": MONITORS,
    "prometheus": MONITORS,
    "zabbix_agent2": MONITORS,
    "zabbix_agentd": MONITORS,
    "Xorg": DISPLAYS,
    "Xwayland": DISPLAYS,
    "gnome-shell": DISPLAYS,
    "kwin_wayland": DISPLAYS,
    "kwin_x11": DISPLAYS,
    "sddm": DISPLAYS,
    "gdm3": DISPLAYS,
    "weston": DISPLAYS,
    "Xorg.bin": DISPLAYS,
    "Xorg.wrap": DISPLAYS,
    "Hyprland": DISPLAYS,
    "cosmic-comp": DISPLAYS,
    "gdm-wayland-session": DISPLAYS,
    "gdm-x-session": DISPLAYS,
    "gnome-remote-desktop-daemon": DISPLAYS,
    "labwc": DISPLAYS,
    "mutter": DISPLAYS,
    "plasmashell": DISPLAYS,
    "sway": DISPLAYS,
    "wayfire": DISPLAYS,
    "systemd": SYSTEM,
    "systemd-logind": SYSTEM,
    "systemd-udevd": SYSTEM,
    "dbus-daemon": SYSTEM,
    "sshd": SYSTEM,
    "sshd-session": SYSTEM,
    "dockerd": SYSTEM,
    "containerd": SYSTEM,
    "lxc-start": SYSTEM,
}
"""Executables never signalled, by base name (from mig-parted's list of GPU clients, NVIDIA's
documentation and reports of people whose scripts ended the wrong process)."""

_SHORT = {name[:15]: why for name, why in PROTECTED.items()}
"""The same as /proc/PID/comm has them (proc(5))."""

PROTECTED_UNITS = (
    "nvidia-persistenced.service",
    "nvidia-fabricmanager.service",
    "nvidia-imex.service",
    "nvidia-powerd.service",
    "nvidia-mps.service",
    "nvsm*.service",
    "*dcgm*.service",
    "*node-exporter.service",
    "*node_exporter.service",
)
"""Units whose processes are never signalled, with wildcards, whatever their executable is."""

NEVER_STOPPED = (
    *PROTECTED_UNITS,
    "*.slice",
    "*.target",
    "*.mount",
    "init.scope",
    "ssh.service",
    "ssh.socket",
    "sshd.service",
    "dbus*.service",
    "systemd-*.service",
    "user@*.service",
)
"""Units that are refused although a block names them: stopping them cuts the machine off."""

ZERO_MEMORY = frozenset(name for name, why in PROTECTED.items() if why in (KEEPS_DRIVER, MONITORS))
"""These hold devices only to keep the driver up or to read it, without GPU memory of their own."""


def short_protected(comm: str) -> str:
    """Why a short name is protected, for when the executable cannot be read; empty if it is not."""
    return _SHORT.get(comm, "")


def protected_name(patterns: Iterable[str], *names: str) -> str:
    """The first pattern (with wildcards) that covers one of the names; empty when none does."""
    # A name such as [worker] is meant as it is written too.
    found = (x for x in patterns if any(name == x or fnmatchcase(name, x) for name in names))
    return next(found, "")


def never_stopped(unit: str, named: Collection[str] = ()) -> bool:
    """Stopping this unit would cut the machine off, or break the driver.

    The latter is allowed for a unit that the policy names in full.
    """
    if unit in named and protected_name(PROTECTED_UNITS, unit):
        return False
    return bool(protected_name(NEVER_STOPPED, unit))
