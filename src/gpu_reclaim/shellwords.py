"""The words of a simple shell command: one program, its arguments, quotes and variables."""

from __future__ import annotations

import re

from gpu_reclaim.unitwords import Word, opened

# Whatever is not named here (lists, pipes, patterns, substitutions, comments) makes it no simple
# command. A dollar sign is doubled where systemd is to leave it to the shell.
_PIECE = re.compile(
    r"""(?P<space>[ \t]+)
    |(?P<plain>[\w@%+=:,./^-]+)
    |'(?P<single>[^']*)'
    |"(?P<double>(?:[^"\\`$]|\\["\\]|\$\$?(?:\w+|\{\w+\}))*)"
    |(?P<variable>\$\$?(?:\w+|\{\w+\}))""",
    re.X | re.A,
)
_VARIABLE = re.compile(r"\$\$?(?:\w+|\{\w+\})", re.A)


def shell_words(text: str) -> list[Word] | None:
    """The words of a command as it stands in a unit file.

    Args:
        text: Without systemd's quotes and escapes; `%` and `$` still mean what they mean to it.

    Returns:
        None where it is more than one simple command.
    """
    words: list[Word] = []
    begun = at = 0
    parts: list[str | None] = []
    many = False
    while at < len(text):
        match = _PIECE.match(text, at)
        if match is None:
            return None
        at = match.end()
        if match["space"]:
            if parts:
                words.append(
                    Word(text[begun : match.start()], tuple(parts), many, begun, match.start())
                )
            begun, parts, many = at, [], False
        else:
            parts += _parts(match)
            many = many or bool(match["variable"])
    if parts:
        words.append(Word(text[begun:], tuple(parts), many, begun, at))
    return words


def _parts(match: re.Match[str]) -> list[str | None]:
    if match["variable"]:
        return [None]
    if match["double"] is None:
        return list(opened(match["plain"] or match["single"] or "", variables=True))
    parts: list[str | None] = []
    rest = 0
    inside = match["double"]
    for variable in _VARIABLE.finditer(inside):
        parts += [*_text(inside[rest : variable.start()]), None]
        rest = variable.end()
    return [*parts, *_text(inside[rest:])]


def _text(inside: str) -> tuple[str | None, ...]:
    return opened(re.sub(r"\\(.)", r"\1", inside), variables=True)
