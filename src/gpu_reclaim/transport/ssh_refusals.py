"""Telling from what came back that the far side never started the script."""

from __future__ import annotations

import re

from gpu_reclaim.commands import TIMEOUT_CODES, Framed, Result
from gpu_reclaim.errors import AccessRefused, CommandFailed, Incomplete
from gpu_reclaim.transport.ssh_options import SshOptions

REFUSED = 1
"""How sudo ends when it does not run the command (sudo(8), EXIT VALUE)."""

NOT_FOUND = 127
"""What POSIX shells answer for a command they do not find, and `timeout` for one it cannot find."""

NO_SHELL = "This account is currently not available."
"""What nologin prints in place of a shell (shadow and util-linux; nologin(8))."""


def raise_if_not_started(framed: Framed, raw: Result, options: SshOptions) -> None:
    """Raise when the begin marker is missing, and say why where that is plain.

    Programs translate their words, but not their own names, so names are looked for.

    Raises:
        AccessRefused: sudo wants a password, forbids it, or is missing; or there is no shell.
        CommandFailed: `timeout` or `sh` is missing.
        Incomplete: Something came to an end, but it cannot be seen that the script had begun.
    """
    if f"{framed.mark} begin" in raw.stdout or raw.exit_code in (None, *TIMEOUT_CODES):
        return
    if raw.exit_code in (REFUSED, NOT_FOUND):
        _raise_if_refused(raw, options)
    raise Incomplete(
        f"{raw.where}: {raw.script.name} shows no sign of having begun (exit status "
        f"{raw.exit_code}), so nobody knows what it did",
        remedy="look at what takes the place of a shell there: the login shell of "
        f"{options.username}, ForceCommand in sshd_config, command= in authorized_keys",
        result=raw,
    )


def _raise_if_refused(raw: Result, options: SshOptions) -> None:
    if raw.exit_code == REFUSED and NO_SHELL in raw.stdout.split("\n"):
        raise AccessRefused(
            f"{raw.where}: {options.username} has no login shell there (nologin); nothing was run",
            remedy=f"log in as somebody else and set sudo, or give {options.username} a shell: "
            f"`chsh -s /bin/sh {options.username}` on the host",
            result=raw,
        )
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
