"""Telling from what came back that the far side never started the script."""

from __future__ import annotations

import re

from gpu_reclaim.commands import Framed, Result
from gpu_reclaim.errors import AccessRefused, CommandFailed
from gpu_reclaim.transport.ssh_options import SshOptions

REFUSED = 1
"""How sudo ends when it does not run the command (sudo(8), EXIT VALUE)."""

NOT_FOUND = 127
"""What POSIX shells answer for a command they do not find, and `timeout` for one it cannot find."""


def raise_if_not_started(framed: Framed, raw: Result, options: SshOptions) -> None:
    """Raise when the begin marker is missing and it is plain why.

    Programs translate their words, but not their own names, so only names are looked for.

    Raises:
        AccessRefused: sudo wants a password, forbids it, or is missing.
        CommandFailed: `timeout` or `sh` is missing.
    """
    if f"{framed.mark} begin" in raw.stdout or raw.exit_code not in (REFUSED, NOT_FOUND):
        return
    sudo_spoke = options.sudo and re.search(r"\bsudo(ers)?\b", raw.stderr) is not None
    tool_missing = raw.exit_code == NOT_FOUND and not sudo_spoke
    if tool_missing or re.search(r"^sudo: timeout: ", raw.stderr, re.M):
        raise CommandFailed(
            f"{raw.where}: {raw.script.name} could not be started: `timeout` or `sh` is missing "
            "there; nothing was run",
            remedy="install coreutils (or busybox) on the host",
            result=raw,
        )
    if sudo_spoke:
        raise _no_sudo(raw, options)


def _no_sudo(raw: Result, options: SshOptions) -> AccessRefused:
    user = options.username
    if raw.exit_code == NOT_FOUND:
        return AccessRefused(
            f"{raw.where}: sudo is missing there; nothing was run",
            remedy="install sudo on the host, or log in as root and turn sudo off",
            result=raw,
        )
    return AccessRefused(
        f"{raw.where}: sudo refused to start {raw.script.name} as root; nothing was run",
        remedy=f"on the host, put this line into /etc/sudoers.d/gpu-reclaim by `visudo -f` (it "
        f"makes {user} root in effect): {user} ALL=(root) NOPASSWD: /usr/bin/timeout -k * * sh -s",
        result=raw,
    )
