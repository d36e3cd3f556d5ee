"""Where a unit's server flags are, and its command line with other flags.

What is in force is the running server's real command line; what can be changed is the text of
`ExecStart=`. Both are read, and only where they agree is a new command line written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

from gpu_reclaim.commands import printable
from gpu_reclaim.errors import BadInput
from gpu_reclaim.servercommand import ServerCommand
from gpu_reclaim.serverunit import Unit
from gpu_reclaim.shellwords import shell_words
from gpu_reclaim.unitfile import ExecCommand, parse_exec_start
from gpu_reclaim.unitwords import Word, escaped

_SHELLS = ("sh", "bash", "dash", "ash")
_CONTAINERS = ("docker", "podman", "nerdctl", "docker-compose", "podman-compose")
_PINNED = ("--spec", "--no-spec", "--max-ru", "--config")


def locate(unit: Unit) -> ServerCommand:
    """Where the server's flags are.

    Raises:
        BadInput: They cannot be changed by a drop-in without guessing; the message says why.
    """
    _check(unit)
    command = _only_command(unit)
    words = command.words
    if box := _container(words) or _container(_as_words(unit.argv)):
        raise _refused(
            unit,
            command,
            f"starts a container with {box}; its flags belong to the container",
            "run SGLang in the unit itself, or tune the container's own definition by hand",
        )
    real = _real_flags(unit.argv)
    if real is None:
        raise _refused(
            unit,
            command,
            f"does not show where SGLang's flags begin in its main process ({_program(unit)})",
            "let ExecStart= end in `python -m sglang.launch_server FLAGS` or `sglang serve FLAGS`; "
            f"a script in between must use `exec`{_script(words)}",
        )
    if at := _marker(words):
        return _checked(unit, command, words[at:], real, (_head(command, at), ""))
    inner = _inner(words) or ""
    found = shell_words(inner) or []
    if at := _marker(found):
        cut = (_head(command, len(words) - 1), inner[: found[at - 1].end])
        return _checked(unit, command, found[at:], real, cut)
    return _wrapped(unit, command, real)


def _check(unit: Unit) -> None:
    if unit.properties.get("NeedDaemonReload") != "no":
        raise BadInput(
            f"{unit.name}: its files were changed since systemd read them",
            remedy="see what was changed, then `systemctl daemon-reload` and restart it",
        )
    if not unit.argv:
        raise BadInput(
            f"{unit.name} has no running main process, so its real flags are unknown",
            remedy=f"start it (`systemctl start {unit.name}`) and wait until it serves",
        )


def _only_command(unit: Unit) -> ExecCommand:
    drop_ins = unit.properties.get("DropInPaths", "").split()
    # systemctl shows a backslash in a list as \x5c.
    unescape = (re.sub(r"\\x5c", r"\\", path) for path in drop_ins)
    commands = parse_exec_start(unit.text, [unit.properties.get("FragmentPath", ""), *unescape])
    if len(commands) != 1:
        raise BadInput(
            f"{unit.name} has {len(commands) or 'no'} commands in ExecStart=, not one",
            remedy="give the unit that starts the server, and only the server",
        )
    return commands[0]


def _refused(unit: Unit, command: ExecCommand, what: str, remedy: str) -> BadInput:
    return BadInput(f"{unit.name}: ExecStart= in {command.file} {what}", remedy=remedy)


def _program(unit: Unit) -> str:
    return printable(unit.exe or "unknown", limit=200)


def _script(words: Sequence[Word]) -> str:
    """The file that is likely the wrapper, for people: never an option, which may be a secret."""
    own = takewhile(lambda word: not word.text.startswith("--"), words)
    paths = [x.text for x in own if re.fullmatch(r"(/[\w.@+-]+)+", x.text)]
    scripts = [x for x in paths if x.rpartition("/")[2] not in _SHELLS]
    return f" (see {scripts[0]})" if scripts else ""


def _base(word: Word) -> str:
    return word.text.rpartition("/")[2]


def _marker(words: Sequence[Word]) -> int:
    """Where the server's flags begin; 0 where nothing says so."""
    for at, word in enumerate(words):
        before = words[at - 1].text if at else ""
        if word.text == "-msglang.launch_server" or (
            before == "-m" and word.text == "sglang.launch_server"
        ):
            return at + 1
        if at and _base(word) == "launch_server.py":
            return at + 1
        if at and word.text == "serve" and _base(words[at - 1]) == "sglang":
            return at + 1
    return 0


def _head(command: ExecCommand, count: int) -> str:
    """The first words as written; the prefix is part of the first."""
    return command.line[command.words[0].start : command.words[count - 1].end]


def _inner(words: Sequence[Word]) -> str | None:
    """What a shell is given as its command, where that is the last word."""
    if len(words) < 3 or not re.fullmatch(r"-[a-z]*c", words[-2].text):  # noqa: PLR2004
        return None
    return words[-1].raw if any(_base(word) in _SHELLS for word in words[:-2]) else None


def _as_words(argv: Sequence[str]) -> list[Word]:
    return [Word(word, (word,)) for word in argv]


def _container(words: Sequence[Word]) -> str:
    """The container tool among the words before the server's flags; empty where there is none."""
    inner = _inner(words)
    found = [*words[: _marker(words) or None], *(shell_words(inner) or () if inner else ())]
    return next((name for name in map(_base, found) if name in _CONTAINERS), "")


def _real_flags(argv: Sequence[str]) -> list[str] | None:
    words = _as_words(argv)
    at = _marker(words)
    if not at and (inner := _inner(words)):
        words = list(shell_words(escaped(inner)) or ())
        at = _marker(words)
    if not at or not all(word.known for word in words[at:]):
        return None
    return [word.text for word in words[at:]]


def _checked(
    unit: Unit, command: ExecCommand, written: Sequence[Word], real: list[str], cut: tuple[str, str]
) -> ServerCommand:
    """The flags, once those in the file and those of the running server are the same."""
    if not _same(written, real):
        raise _refused(
            unit,
            command,
            "has other flags than the running server: one of them was changed since the start",
            "restart the unit, or undo the change, so that what is measured is what is written",
        )
    return _found(unit, command, real, cut, read=not all(word.known for word in written))


def _found(
    unit: Unit, command: ExecCommand, flags: list[str], cut: tuple[str, str], *, read: bool
) -> ServerCommand:
    head, shell = cut
    variables = ":" not in command.prefix
    return ServerCommand(
        unit.name, command.file, head, shell, variables, tuple(flags), read, unit.exe
    )


def _same(written: Sequence[Word], real: Sequence[str]) -> bool:
    """Whether the words can have become these."""
    pattern = "".join(map(_pattern, written))
    return re.fullmatch(pattern, "".join(f"{word}\x00" for word in real)) is not None


def _pattern(word: Word) -> str:
    """What matches the word, ended by NUL, whatever its specifiers and variables stand for."""
    if word.many:
        return r"(?:[^\x00]*\x00)*"
    return (
        "".join(r"[^\x00]*" if part is None else re.escape(part) for part in word.parts) + r"\x00"
    )


def _wrapped(unit: Unit, command: ExecCommand, real: list[str]) -> ServerCommand:
    """Flags that a script passes on: ExecStart's own last words, found again in the server's."""
    for at in range(1, len(command.words)):
        own = command.words[at:]
        others = _without([x.text for x in own], real) if all(x.known for x in own) else None
        if own[0].text.startswith("--") and others is not None:
            if any(flag.startswith(_PINNED) for flag in others):
                break
            cut = (_head(command, at), "")
            return _found(unit, command, [x.text for x in own], cut, read=False)
    raise _refused(
        unit,
        command,
        f"starts SGLang by a script, or by a shell with several commands{_script(command.words)}",
        "start the interpreter itself there (`/opt/venv/bin/python -m sglang.launch_server "
        'FLAGS`), or give all flags in ExecStart= where a script passes them on by "$@"',
    )


def _without(own: list[str], real: list[str]) -> list[str] | None:
    """The other flags of the server; None where these do not stand in one row among them."""
    for begin in range(len(real) - len(own) + 1):
        if real[begin : begin + len(own)] == own:
            return [*real[:begin], *real[begin + len(own) :]]
    return None
