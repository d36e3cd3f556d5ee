"""What a process belongs to, read from its control groups."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpu_reclaim.models import Owner

_GUEST = re.compile(
    r"^/lxc/([^/]+)(?:/ns)?(?=/|$)|^/lxc\.payload[./]([^/]+)|^/qemu\.slice/(\d+)\.scope"
    r"|^/machine\.slice/machine-([^/]+)\.scope|^/machine\.slice/systemd-nspawn@([^/]+)\.service"
)
"""Proxmox names the control group of a guest lxc/VMID/ns or qemu.slice/VMID.scope, LXC and Incus
lxc.payload.NAME, systemd-machined machine.slice/machine-NAME.scope."""

_ENGINE = re.compile(
    r"/(?:(docker|libpod|cri-containerd|crio|nerdctl)[-/])([0-9a-f]{12,64})(?:\.scope)?(?:/|$)"
)
_OTHER_ENGINE = re.compile(r"/([^/]+)/([0-9a-f]{64})(?:\.scope)?(?:/|$)")
"""An engine told to use a group of its own (docker's --cgroup-parent) still names the container by
its whole identifier."""

_SLURM = re.compile(r"/[^/]*slurm[^/]*/(?:uid_\d+/)?job_(\d+)(?:/step_(\w+))?")
"""Slurm's slurmstepd.scope/job_N/step_M of version 2, slurm/uid_U/job_N/step_M of version 1
(its cgroup documentation)."""

_POD = re.compile(r"/kubepods[^/]*")
_USER_UNIT = re.compile(r"/user@(\d+)\.service/(?:.*/)?([^/]+\.(?:service|scope))")
_SESSION = re.compile(r"/(session-[^/]+)\.scope")
_UNIT = re.compile(r"/([^/]+\.service)(?:/|$)")
_SCOPE = re.compile(r"/([^/]+\.scope)(?:/|$)")

_STOP = {
    "docker": "docker stop",
    "libpod": "podman stop",
    "nerdctl": "nerdctl stop",
    "cri-containerd": "crictl stop",
    "crio": "crictl stop",
}


def owner(cgroups: Iterable[str]) -> Owner:
    """The owner behind a process's control group paths.

    Args:
        cgroups: Paths of every hierarchy. A guest named by any of them outweighs all else, then a
            container or a Slurm step; otherwise the path that says most decides.
    """
    paths = sorted(map(unescaped, cgroups), key=len, reverse=True)
    guests = [match for match in map(_GUEST.match, paths) if match]
    if guests:
        return Owner(kind="guest", name=next(name for name in guests[0].groups() if name))
    found = [of for of in map(_inside, paths) if of]
    managed = [of for of in found if of.kind in ("container", "Slurm step")]
    return next(iter([*managed, *found]), Owner(kind="none"))


def services(cgroups: Iterable[str]) -> list[str]:
    """Every service, slice and scope that any of the paths goes through, in order, once each."""
    parts = [part for path in cgroups for part in unescaped(path).split("/")]
    kinds = (".service", ".slice", ".scope")
    return list(dict.fromkeys(part for part in parts if part.endswith(kinds)))


def unescaped(path: str) -> str:
    """Systemd puts a line before a name that begins with one, or like a control group's file."""
    return re.sub(r"/_(?=[^/]+\.(?:service|scope|slice|mount|socket|swap)(?:/|$))", "/", path)


def _inside(path: str) -> Owner | None:
    pod = _POD.search(path)
    engine = _ENGINE.search(path) or (None if pod else _OTHER_ENGINE.search(path))
    if engine:
        rootless = re.search(r"/user@(\d+)\.service/", path)
        of = f" of uid {rootless[1]}" if rootless else ""
        return Owner(kind="container", name=f"{engine[1]} {engine[2][:12]}{of}")
    slurm = _SLURM.search(path)
    if slurm:
        return Owner(kind="Slurm step", name=f"{slurm[1]}.{slurm[2]}" if slurm[2] else slurm[1])
    if pod:
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
    """The part of our own paths that names the guest or container we are in; empty outside of one.

    Without a control group namespace its processes see it in front of all their paths, and to
    those inside it is no other owner.
    """
    for path in cgroups:
        found = _GUEST.match(path) or _ENGINE.search(path) or _OTHER_ENGINE.search(path)
        if found:
            return path[: found.end()].rstrip("/")
    return ""


def stop_command(of: Owner) -> str:
    """The command with which a person stops what owns a process; empty when there is none."""
    name, _, uid = of.name.partition(" of uid ")
    match of.kind:
        case "unit" | "scope":
            return f"systemctl stop {name}"
        case "user unit":
            return f"systemctl --user --machine={uid}@ stop {name}"
        case "session":
            return f"loginctl terminate-session {name.removeprefix('session-')}"
        case "Slurm step":
            return f"scancel {name.partition('.')[0]}"
    engine, _, identifier = name.partition(" ")
    if of.kind != "container" or engine not in _STOP:
        return ""
    command = f"{_STOP[engine]} {identifier}"
    return f"sudo -u '#{uid}' XDG_RUNTIME_DIR=/run/user/{uid} {command}" if uid else command


def in_unit(cgroups: Iterable[str], unit: str) -> bool:
    """The process is in the control group of this system unit."""
    return owner(cgroups) == Owner(kind="unit", name=unit)
