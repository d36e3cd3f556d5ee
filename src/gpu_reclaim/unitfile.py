"""systemd's unit files: which commands of `ExecStart=` are in force.

Sources: systemd.syntax(7), systemd.service(5) "Command lines", and systemd 252's own parser
(conf-parser.c, load-fragment.c).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gpu_reclaim.errors import BadInput
from gpu_reclaim.unitwords import SPACE, Word, opened, read_word

_LINE_END = re.compile(r"\r\n|\n\r|\r|\n|\0")
_HEADER = re.compile(r"# (/.*\.(?:service|conf))")


@dataclass(frozen=True)
class ExecCommand:
    """One command of `ExecStart=`.

    Attributes:
        file: Which file it stands in; empty where the text does not say.
        line: The whole value it stands in, as written, on one line.
        prefix: The special characters before the program: `@ - : + ! !!`.
        words: The program, then its arguments.
    """

    file: str
    line: str = field(repr=False)
    prefix: str
    words: tuple[Word, ...] = field(repr=False)


def parse_exec_start(text: str, paths: Iterable[str] = ()) -> list[ExecCommand]:
    """The commands that are in force.

    Args:
        text: What `systemctl cat` printed: the unit's file and its drop-ins, in order.
        paths: These files; where they are not given, every comment that looks like the line
            before a file counts as one.

    Raises:
        BadInput: systemd would not read it either, or it cannot be told where a file begins.
    """
    commands: list[ExecCommand] = []
    for file, lines in _files(text.encode("utf-8", "replace").decode(), list(paths)):
        for section, key, value in _assignments(lines, file):
            if (section, key) != ("Service", "ExecStart"):
                continue
            if not value:
                commands.clear()
            commands.extend(_commands(value, file))
    return commands


def _files(text: str, paths: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each file with its lines. A line continued at a file's end does not reach into the next."""
    files: list[tuple[str, list[str]]] = [("", [])]
    for line in _LINE_END.split(text):
        header = _HEADER.fullmatch(line)
        if header and (not paths or header[1] in paths):
            files.append((header[1], []))
        else:
            files[-1][1].append(line)
    found = [file for file, _ in files[1:]]
    if paths and found != list(paths):
        raise BadInput(
            f"the files of {paths[0]} and its drop-ins could not be told apart",
            remedy="look at `systemctl cat`: each file must be shown once, after its own path",
        )
    return files


def _assignments(lines: Iterable[str], file: str) -> Iterator[tuple[str, str, str]]:
    """Section, key and value of each assignment."""
    section = ""
    for line in _joined(lines):
        text = line.strip(SPACE)
        if text.startswith("["):
            if not text.endswith("]"):
                raise BadInput(f"{file}: systemd does not read a section header without ]")
            section = text[1:-1]
        elif "=" in text:
            key, _, value = text.partition("=")
            yield section, key.strip(SPACE), value.strip(SPACE)


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Lines without comments, continued ones as one; a doubled backslash continues nothing."""
    begun = ""
    for line in lines:
        if line.lstrip(SPACE)[:1] in ("#", ";"):
            continue
        begun += line.removeprefix("\ufeff")
        if (len(begun) - len(begun.rstrip("\\"))) % 2:
            begun = begun[:-1] + " "
            continue
        yield begun
        begun = ""
    yield begun


def _commands(value: str, file: str) -> Iterator[ExecCommand]:
    at = 0
    while (at := _skip(value, at)) < len(value):
        start = at
        first, at = read_word(value, at, file)
        if first == ";":
            continue
        prefix = _prefix(first)
        program = opened(first[len(prefix) :], variables=False)
        words = [Word(first[len(prefix) :], program, start=start, end=at)]
        while (at := _skip(value, at)) < len(value) and not re.match(
            r";([ \t]|$)", value[at : at + 2]
        ):
            begin = at
            if re.match(r"\\;([ \t]|$)", value[at : at + 3]):
                at += 2
                words.append(Word(";", (";",), start=begin, end=at))
                continue
            raw, at = read_word(value, at, file)
            words.append(_argument(raw, begin, at, variables=":" not in prefix))
        yield ExecCommand(file, value, prefix, tuple(words))


def _prefix(word: str) -> str:
    """The special characters, each at most once, and of `+ ! !!` one."""
    end, privilege = 0, ""
    for char in word:
        if char in "@-:" and char not in word[:end]:
            end += 1
        elif char in "+!" and (privilege + char) in ("+", "!", "!!"):
            privilege += char
            end += 1
        else:
            break
    return word[:end]


def _argument(raw: str, start: int, end: int, *, variables: bool) -> Word:
    # `$FOO` counts only where it is the whole word; its name is all that follows.
    many = variables and raw[:1] == "$" and raw[1:2] not in ("{", "$")
    parts = (None,) if many else opened(raw, variables=variables)
    return Word(raw, parts, many, start, end)


def _skip(text: str, at: int) -> int:
    return at + len(text[at:]) - len(text[at:].lstrip(SPACE))
