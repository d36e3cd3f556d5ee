"""Words of a systemd command line: quotes, escapes, specifiers and variables, read and written.

Sources: systemd.syntax(7) "Quoting", systemd.service(5) "Command lines", and systemd 252's own
parser (extract-word.c, escape.c, env-util.c).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from gpu_reclaim.errors import BadInput

SPACE = " \t\n\r"
"""What stands between words."""

_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-3][0-7]{2})|(.))", re.S
)
_NAMED = {**dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True)), "s": " "}
_NAMED |= {char: char for char in "\\\"'"}
_LAST_CODE_POINT = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)

_SPECIFIERS = re.compile(r"(%%)|%.", re.S)
_VARIABLES_TOO = re.compile(r"(%%|\$\$)|%.|\$\{[^}]*\}", re.S)


@dataclass(frozen=True)
class Word:
    """One word of a command line.

    Attributes:
        raw: Without quotes and escapes; `%` and `$` still mean what they mean to systemd.
        parts: Its text; None where a specifier or variable stands, whose value is not known here.
        many: A variable as a word of its own, which becomes any number of words.
        start: Where it begins in the command's line.
        end: Where it ends there.
    """

    raw: str = field(repr=False)
    parts: tuple[str | None, ...] = field(repr=False)
    many: bool = False
    start: int = 0
    end: int = 0

    @property
    def known(self) -> bool:
        """Nothing in it depends on a specifier or a variable."""
        return None not in self.parts

    @property
    def text(self) -> str:
        """Its text, where it is known; specifiers and variables are left out."""
        return "".join(part or "" for part in self.parts)


def opened(raw: str, *, variables: bool) -> tuple[str | None, ...]:
    """Text, with None for each specifier and, where they are replaced, each `${VARIABLE}`."""
    parts: list[str | None] = [""]
    at = 0
    for match in (_VARIABLES_TOO if variables else _SPECIFIERS).finditer(raw):
        single = match[0][0] if match[1] else None
        parts[-1] = f"{parts[-1]}{raw[at : match.start()]}{single or ''}"
        if single is None:
            parts += [None, ""]
        at = match.end()
    parts[-1] = f"{parts[-1]}{raw[at:]}"
    return tuple(parts)


def read_word(line: str, at: int, file: str) -> tuple[str, int]:
    """The word that begins there, without quotes and escapes, and where it ends."""
    value, quote = bytearray(), ""
    while at < len(line):
        char = line[at]
        if char == "\\":
            piece, at = _unescaped(line, at)
            value += piece
            continue
        if char == quote:
            quote = ""
        elif not quote and char in "'\"":
            quote = char
        elif not quote and char in SPACE:
            break
        else:
            value += char.encode()
        at += 1
    if quote:
        raise BadInput(f"{file or 'the unit'}: a quotation mark in ExecStart= is never closed")
    try:
        return value.decode(), at
    except UnicodeDecodeError:
        raise BadInput(f"{file or 'the unit'}: ExecStart= has a word that is no UTF-8") from None


def _unescaped(line: str, at: int) -> tuple[bytes, int]:
    """What an escape stands for. An unknown one stands for itself, which systemd warns of."""
    match = _ESCAPE.match(line, at)
    if match is None:
        return b"\\", at + 1
    byte = int(match[1] or "0", 16) or int(match[4] or "0", 8)
    point = int(match[2] or match[3] or "0", 16)
    if byte:
        return bytes([byte]), match.end()
    if 0 < point <= _LAST_CODE_POINT and point not in _SURROGATES:
        return chr(point).encode(), match.end()
    char = line[at + 1]
    return _NAMED.get(char, f"\\{char}").encode(), at + 2


def escaped(text: str, *, variables: bool = True) -> str:
    """Text in which `%` and, where variables are replaced, `$` stand for themselves."""
    text = text.replace("%", "%%")
    return text.replace("$", "$$") if variables else text


def quoted(raw: str) -> str:
    """One word as it stands in a unit file; `%` and `$` in it keep their meaning.

    Raises:
        BadInput: It holds NUL, which no argument can, or is no Unicode text.
    """
    if "\0" in raw or (not raw.isascii() and raw.encode("utf-8", "replace").decode() != raw):
        raise BadInput("a flag holds a character that no command line can hold")
    if re.fullmatch(r"[\w@%+=:,./$-]+", raw, re.A):
        return raw
    # systemd drops a line with, for example, U+FFFE: only what can be printed stands as it is.
    return '"' + "".join(x if _plain(x) else _as_bytes(x) for x in raw) + '"'


def _plain(char: str) -> bool:
    return char.isprintable() and char not in '"\\'


def _as_bytes(char: str) -> str:
    return f"\\{char}" if char in '"\\' else "".join(f"\\x{byte:02x}" for byte in char.encode())
