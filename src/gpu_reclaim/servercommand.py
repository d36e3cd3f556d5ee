"""A server's command line, cut where its flags begin, and the drop-in that gives it others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gpu_reclaim.unitwords import escaped, quoted

_SECRET = re.compile(r"(key|secret|password|passwd|credentials?|token|auth)(=|$)", re.I)
_SECRET_FLAGS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")
_FLAGS_OF_THEIR_OWN = ("--ssl-keyfile",)
"""Each is the beginning of a secret's flag, and names a file."""


@dataclass(frozen=True)
class ServerCommand:
    """A server's command line, cut where its flags begin.

    Attributes:
        unit: The unit it is of.
        file: The file its `ExecStart=` stands in.
        head: All before the flags, as written there.
        shell: Where a shell is given the command as one word: that word up to the flags; systemd's
            `%` and `$` keep their meaning in it.
        variables: systemd replaces variables in it.
        flags: The server's flags, as it gets them.
        from_process: They were read from the running server: the file has variables instead.
        exe: The running server's executable.
    """

    unit: str
    file: str
    head: str = field(repr=False)
    shell: str = field(repr=False)
    variables: bool
    flags: tuple[str, ...] = field(repr=False)
    from_process: bool = False
    exe: str = ""

    @property
    def private(self) -> bool:
        """A file with it must not be readable for everyone (mode 0600)."""
        return self.from_process or hides_secrets([*self.head.split(), *self.flags])


def hides_secrets(words: Iterable[str]) -> bool:
    """Whether one looks like the name of a secret: `--api-key`, `HF_TOKEN=...`, `--api`."""
    return any(_is_secret(word.strip("'\"").partition("=")[0]) for word in words)


def _is_secret(name: str) -> bool:
    # argparse takes any beginning of a flag that no other flag has.
    if name in _FLAGS_OF_THEIR_OWN:
        return False
    short = len(name) >= len("--ap") and any(flag.startswith(name) for flag in _SECRET_FLAGS)
    return short or bool(_SECRET.search(name))


def drop_in(command: ServerCommand, flags: Sequence[str]) -> str:
    """Text of a drop-in that starts the same server with these flags.

    Raises:
        BadInput: A flag holds a character that no command line can hold.
    """
    if command.shell:
        text = escaped(shlex.join(flags), variables=command.variables)
        words = [quoted(f"{command.shell} {text}".rstrip())]
    else:
        words = [quoted(escaped(flag, variables=command.variables)) for flag in flags]
    return f"""# Written by gpu-reclaim: {command.unit} with other flags for SGLang.
# To undo: remove this file, then `systemctl daemon-reload` and restart the unit.
[Service]
ExecStart=
ExecStart={" ".join([command.head, *words])}
"""
