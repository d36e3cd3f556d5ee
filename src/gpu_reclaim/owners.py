"""What a process belongs to, read from its control groups."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpu_reclaim.models import Owner

_GUEST = re.compile(
    r"^/lxc/([^/]+)(?:/ns)?(?=/|$)|^/lxc\.payload[./]([^/]+)|^/qemu\.slice/(\d+)\.scope"
    r"|^/machine\.slice/machine-([^/]+)\.scope"
)
"""Proxmox names the control group of a guest lxc/VMID/ns or qemu.slice/VMID.scope, LXC and Incus
lxc.payload.NAME, systemd-machined machine.slice/machine-NAME.scope."""

_ENGINE = re.compile(r"/(?:(docker|libpod|cri-containerd|crio)[-/])([0-9a-f]{12,64})(?:\.scope)?")
_POD = re.compile(r"/kubepods[^/]*")
_USER_UNIT = re.compile(r"/user@(\d+)\.service/(?:.*/)?([^/]+\.(?:service|scope))")
_SESSION = re.compile(r"/(session-[^/]+)\.scope")
_UNIT = re.compile(r"/([^/]+\.service)(?:/|$)")
_SCOPE = re.compile(r"/([^/]+\.scope)(?:/|$)")

_STOP = {"docker": "docker stop", "libpod": "podman stop", "cri-containerd": "crictl stop"}


def owner(cgroups: Iterable[str]) -> Owner:
    """The owner behind a process's control group paths.

    Args:
        cgroups: Paths of every hierarchy; the first that says something decides.
    """
    for path in sorted(cgroups, key=len, reverse=True):
        guest = _GUEST.match(path)
        if guest:
            return Owner(kind="guest", name=next(name for name in guest.groups() if name))
        found = _inside(path)
        if found:
            return found
    return Owner(kind="none")


def _inside(path: str) -> Owner | None:
    engine = _ENGINE.search(path)
    if engine:
        return Owner(kind="container", name=f"{engine[1]} {engine[2][:12]}")
    if _POD.search(path):
        return Owner(kind="container", name=path.rpartition("/")[2][:64])
    user = _USER_UNIT.search(path)
    if user:
        return Owner(kind="user unit", name=f"{user[2]} of uid {user[1]}")
    for pattern, kind in ((_SESSION, "session"), (_UNIT, "unit"), (_SCOPE, "scope")):
        match = pattern.search(path)
        if match:
            return Owner.model_validate({"kind": kind, "name": match[1]})
    return None


def guest_prefix(cgroups: Iterable[str]) -> str:
    """The part of our own paths that names the guest we are in; empty outside of one.

    Without a control group namespace a guest's processes see it in front of all their paths.
    """
    found = (_GUEST.match(path) for path in cgroups)
    return next((match[0] for match in found if match), "")


def stop_command(of: Owner) -> str:
    """The command with which a person stops what owns a process; empty when there is none."""
    if of.kind == "unit":
        return f"systemctl stop {of.name}"
    if of.kind == "user unit":
        unit, _, uid = of.name.partition(" of uid ")
        return f"systemctl --user --machine={uid}@ stop {unit}"
    engine, _, identifier = of.name.partition(" ")
    if of.kind == "container" and engine in _STOP:
        return f"{_STOP[engine]} {identifier}"
    return ""


def in_unit(cgroups: Iterable[str], unit: str) -> bool:
    """The process is in the control group of this system unit."""
    return owner(cgroups) == Owner(kind="unit", name=unit)
