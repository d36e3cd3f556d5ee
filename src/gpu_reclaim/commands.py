"""A command is a POSIX shell script with a time limit; what it printed comes back as a value.

Scripts travel on standard input to `sh -s`, so nothing is quoted more than once and no word of
ours stands in a command line where a pattern could find it. A script is a row of sections. Begin
and end of the whole, and of each section, are marked with a number used once, so nothing that a
process on the host prints or is called can be taken for a marker. No end marker: nobody knows what
ran, and `unframe` says so by raising `Incomplete`.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpu_reclaim import causes
from gpu_reclaim.errors import BadAnswer, IdentityMismatch, Incomplete, OutcomeUnknown, TimedOut

KILL_AFTER_S = 5
"""`timeout -k`: seconds between TERM and KILL of a remote script that outstays its limit."""

TIMEOUT_CODES = (124, 137, 143)
"""What `timeout` answers when it ended the script by TERM, or had to use KILL (coreutils); 143 is
busybox's answer to the former."""

REMOTE_SLACK_S = 5
"""Seconds the near side waits longer than the far side, whose own `timeout` should speak first."""

PATHS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Appended to PATH, of which `pct exec` leaves little (pve-container, 2026-06)."""


MARK = "@gr-"
"""Begins every marker; the rest of one is used once."""


_NOISE = re.compile(
    r"(stat|find|grep): .*\d+/(fd|maps|exe|status|stat|cmdline|comm|cgroup|map_files)"
)
"""A process that ended while it was looked at; every look has some of these."""


@dataclass(frozen=True)
class Script:
    """What is to run.

    Attributes:
        name: For people: log lines and errors. Holds no secret.
        sections: Name to POSIX shell text; each runs in a subshell of its own, without input.
        timeout_s: Limit on the far side, in seconds.
        writes: It changes something, so it is never repeated blindly.
        together: The sections run at the same time; only for scripts that read.
    """

    name: str
    sections: Mapping[str, str]
    timeout_s: float = 30
    writes: bool = False
    together: bool = False


@dataclass(frozen=True)
class Section:
    """What one section printed, and the exit status of its last command."""

    text: str
    code: int

    def lines(self, word: str) -> list[str]:
        """Rests of the lines that begin with `word` and a space."""
        head = f"{word} "
        return [line[len(head) :] for line in self.text.split("\n") if line.startswith(head)]

    def value(self, word: str) -> str:
        """The rest of the first line that begins with `word`; empty when there is none."""
        return next(iter(self.lines(word)), "")


@dataclass(frozen=True)
class Result:
    r"""What came back.

    Attributes:
        script: What was asked.
        where: The transport's name.
        stdout: All of standard output, as text (bytes that are no UTF-8 become `\xNN`).
        stderr: All of standard error.
        exit_code: Of the far side's command, or None where it gave none.
        sections: The marked sections, once `unframe` has found them.
        seconds: From the first byte sent to the last received.
    """

    script: Script
    where: str
    stdout: str = field(repr=False)
    stderr: str = field(repr=False)
    exit_code: int | None
    sections: Mapping[str, Section] = field(default_factory=dict, repr=False)
    seconds: float = 0.0

    def section(self, name: str) -> Section:
        """One section.

        Raises:
            BadAnswer: The script had no such section.
        """
        if name not in self.sections:
            raise BadAnswer(f"{self.where}: {self.script.name} has no part {name!r}", result=self)
        return self.sections[name]

    def words(self, lines: int) -> str:
        """The last lines a tool wrote for people: standard error, else standard output."""
        # What a look printed is not for people, and may hold command lines with secrets.
        text = self.stderr.strip() or ("" if self.script.together else self.stdout.strip())
        said = [x for x in text.split("\n") if x and not x.startswith(MARK) and not _NOISE.match(x)]
        return printable("\n".join(said[-lines:]), newlines=True)


@dataclass(frozen=True)
class Guard:
    """Who the machine must be, read in the same call that acts.

    Attributes:
        hostname: Expected kernel hostname; a name without a dot matches any domain. Empty: any.
        machine_id: Expected content of /etc/machine-id. Empty: any.
    """

    hostname: str = ""
    machine_id: str = ""

    def shell(self, mark: str) -> str:
        """Shell text that ends the script before its first section on another machine."""
        checks = [
            "gr_host=$(cat /proc/sys/kernel/hostname)",
            f"case {shlex.quote(self.hostname)} in",
            '  ""|"$gr_host"|"$gr_host".*) ;;',
            f'  *) [ "${{gr_host%%.*}}" = {shlex.quote(self.hostname)} ] ||'
            f" {{ echo '{mark} refused hostname' \"$gr_host\"; exit 77; }};;",
            "esac",
        ]
        if self.machine_id:
            checks += [
                "gr_id=$(cat /etc/machine-id)",
                f'[ "$gr_id" = {shlex.quote(self.machine_id)} ] ||'
                f" {{ echo '{mark} refused machine-id' \"$gr_id\"; exit 77; }}",
            ]
        return "\n".join(checks)


ANY_MACHINE = Guard()


@dataclass(frozen=True)
class Framed:
    """A script as it travels: its text, and the mark that finds its answer."""

    script: Script
    text: str
    mark: str
    guard: Guard


def frame(script: Script, guard: Guard = ANY_MACHINE) -> Framed:
    """Render a script with its guard, markers and a plain environment."""
    mark = f"{MARK}{secrets.token_hex(8)}"
    lines = [
        f'PATH="$PATH:{PATHS}"; LC_ALL=C; LANG=C; export PATH LC_ALL LANG',
        f"echo '{mark} begin'",
    ]
    if guard != ANY_MACHINE:
        lines.append(guard.shell(mark))
    sections = [_section(mark, name, body) for name, body in script.sections.items()]
    lines.append(_together(sections) if script.together else "\n".join(sections))
    lines += [f"echo '{mark} end'", ""]
    return Framed(script, "\n".join(lines), mark, guard)


def _section(mark: str, name: str, body: str) -> str:
    lines = [f"echo '{mark} section {name}'", f"(\n{body}\n) </dev/null"]
    return "\n".join([*lines, f"printf '\\n%s %s\\n' '{mark} code' $?"])


def _together(sections: list[str]) -> str:
    """Sections side by side: each runs while a pipe keeps the output of those before it."""
    text = sections[0]
    for section in sections[1:]:
        text = f"{{\n{text}\n}} | {{\n{section}\ncat\n}}"
    return text


def argv(script: Script, *, sudo: bool = False) -> list[str]:
    """The far side's command: a shell reading the script, under its own time limit."""
    line = ["timeout", "-k", str(KILL_AFTER_S), f"{script.timeout_s:g}", "sh", "-s"]
    return ["sudo", "-n", "--", *line] if sudo else line


def decode(data: bytes) -> str:
    r"""Bytes of a remote tool as text; what is no UTF-8 is shown as `\xNN`."""
    return data.decode("utf-8", errors="backslashreplace")


def unframe(framed: Framed, raw: Result) -> Result:
    """Find the marked sections.

    Raises:
        IdentityMismatch: The guard did not let the script run.
        Incomplete: The end marker is missing.
    """
    mark = framed.mark
    refused = re.search(rf"^{mark} refused (\S*) ?(.*)$", raw.stdout, re.M)
    if refused:
        raise _mismatch(framed.guard, refused[1], printable(refused[2]), raw)
    if f"\n{mark} end\n" not in f"\n{raw.stdout}\n":
        raise _unfinished(framed.script, raw)
    found = re.findall(
        rf"^{mark} section ([^\n]+)\n(.*?)\n{mark} code ([0-9]{{1,3}})$", raw.stdout, re.M | re.S
    )
    sections = {name: Section(text, int(code)) for name, text, code in found}
    return Result(
        raw.script, raw.where, raw.stdout, raw.stderr, raw.exit_code, sections, raw.seconds
    )


def _unfinished(script: Script, raw: Result) -> OutcomeUnknown:
    if raw.exit_code in TIMEOUT_CODES:
        return TimedOut(
            f"{raw.where}: {script.name} did not end within {script.timeout_s:g} s",
            remedy="see what it waits for on the host: `ps -eo pid,stat,wchan,args`",
            result=raw,
        )
    return Incomplete(
        f"{raw.where}: {script.name} did not finish (exit status {raw.exit_code}), "
        "so nobody knows what it did",
        remedy="look at the host; the next attempt looks before it acts",
        result=raw,
    )


def _mismatch(guard: Guard, what: str, found: str, raw: Result) -> IdentityMismatch:
    wanted = guard.hostname if what == "hostname" else guard.machine_id
    return IdentityMismatch(
        f"{raw.where}: its {what} is {found!r}, expected {wanted!r}; nothing was touched",
        remedy=causes.OTHER_MACHINE.advice(what=what),
    )


def printable(text: str, *, newlines: bool = False, limit: int = 2000) -> str:
    """Text safe for logs and forms: control characters are escaped, length is bounded."""
    shown = "".join(
        c if c.isprintable() or (newlines and c == "\n") else c.encode("unicode_escape").decode()
        for c in text
    )
    return shown if len(shown) <= limit else f"{shown[:limit]}..."
