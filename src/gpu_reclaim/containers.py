"""Proxmox guests from their node: `pct` for LXC containers.

`pct exec` has no exit status channel of its own and ignores the guest's lock (pve-container,
2026-06), so its state is read first, in the same script, and success is judged by the markers of
the inner script alone.
"""

from __future__ import annotations

import re
import shlex

from gpu_reclaim import causes
from gpu_reclaim.commands import Framed, Section, argv
from gpu_reclaim.errors import (
    CommandFailed,
    GpuReclaimError,
    GuestLocked,
    GuestStopped,
    IdentityMismatch,
)

ABSENT, STOPPED, LOCKED, RENAMED, FROZEN = 90, 91, 92, 93, 95


def pct_exec(vmid: int, hostname: str, framed: Framed) -> str:
    """Shell text for the node: check the container, then run the framed script in it.

    Args:
        vmid: The container's number.
        hostname: The name it must have in its configuration; empty: any.
        framed: The inner script, which brings its own guard and markers.
    """
    end = f"{framed.mark}-EOF"
    return "\n".join(
        [
            pct_status(vmid, hostname),
            # An empty environment: which of it pct passes on depends on its version.
            f'env -i PATH="$PATH" LC_ALL=C pct exec {vmid} -- {shlex.join(argv(framed.script))}'
            f" <<'{end}'",
            framed.text + end,
        ]
    )


def pct_status(vmid: int, hostname: str) -> str:
    """Shell text for the node: only check the container."""
    return "\n".join(
        [
            f'out=$(pct status {vmid} --verbose 2>&1) || {{ echo "pct $out"; exit {ABSENT}; }}',
            "printf '%s\\n' \"$out\" | sed 's/^/pct /'",
            "nl='\n'",
            f'case "$nl$out$nl" in *"${{nl}}status: running$nl"*) ;; *) exit {STOPPED};; esac',
            f'case "$nl$out" in *"${{nl}}lock: "*) exit {LOCKED};; esac',
            f"want={shlex.quote(hostname)}",
            # As in the guard: with or without its domain.
            'case "$nl$out$nl" in *"${nl}name: $want$nl"* | *"${nl}name: $want."* '
            '| *"${nl}name: ${want%%.*}$nl"*) ;; '
            f'*) [ -z "$want" ] || exit {RENAMED};; esac',
            _frozen(vmid),
        ]
    )


def _frozen(vmid: int) -> str:
    """Shell text that refuses a frozen container: whoever enters it hangs, deaf to every signal.

    Proxmox calls it running. The files are those of control groups of version 2 and 1 (lxc/VMID is
    Proxmox's name); the kernel makes only one kind.
    """
    v2, v1 = f"/sys/fs/cgroup/lxc/{vmid}", f"/sys/fs/cgroup/freezer/lxc/{vmid}"
    return "\n".join(
        [
            f"for file in {v2}/cgroup.freeze {v2}/cgroup.events {v1}/freezer.state; do",
            f'  [ ! -r "$file" ] || ! grep -q -x -E "1|frozen 1|FREEZING|FROZEN" "$file" '
            f"|| exit {FROZEN}",
            "done",
        ]
    )


def refusal(where: str, vmid: int, hostname: str, section: Section) -> GpuReclaimError | None:
    """The error behind the exit statuses of the checks; None when they let the script run."""
    said = section.lines("pct")
    values = dict(line.split(": ", 1) for line in said if ": " in line)
    if section.code == ABSENT:
        text = " ".join(said)
        if "does not exist" in text:
            return IdentityMismatch(
                f"{where}: there is no container {vmid} on this node ({text}); nothing was touched",
                remedy=causes.NOT_ON_NODE.advice(),
            )
        return CommandFailed(
            f"{where}: pct failed: {text}; nothing was touched",
            remedy="check that this is a Proxmox node and that the login is root there",
        )
    if section.code == STOPPED and values.get("template") == "1":
        return IdentityMismatch(
            f"{where}: container {vmid} is a template, which never runs; nothing was touched",
            remedy=causes.TEMPLATE.advice(),
        )
    if section.code == STOPPED:
        return GuestStopped(
            f"{where}: container {vmid} is {values.get('status', 'not running')}; "
            "nothing was touched",
            remedy=causes.STOPPED.advice(command=f"pct start {vmid}"),
        )
    if section.code == LOCKED:
        lock = values.get("lock", "unknown")
        return GuestLocked(
            f"{where}: container {vmid} is locked ({lock}); nothing was touched",
            remedy=causes.LOCKED.advice(lock=lock, command=f"pct status {vmid} --verbose"),
        )
    if section.code == FROZEN:
        return GuestStopped(
            f"{where}: container {vmid} is frozen; nothing was touched",
            remedy=causes.FROZEN.advice(command=f"pct resume {vmid}"),
        )
    if section.code == RENAMED:
        return IdentityMismatch(
            f"{where}: container {vmid} is called {values.get('name', '')!r}, expected "
            f"{hostname!r}; nothing was touched",
            remedy=causes.OTHER_NAME.advice(),
        )
    return None


def not_running(stderr: str) -> bool:
    """`pct exec` itself says that the container stopped in between."""
    return bool(re.search(r"container '\d+' not running", stderr))
