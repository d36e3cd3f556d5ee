"""A server's unit and its main process, as they are: what systemd shows, files, command line."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from gpu_reclaim.commands import Section
from gpu_reclaim.errors import BadAnswer
from gpu_reclaim.lease import HOST, TRIAL_FILE, Places
from gpu_reclaim.systemd import unit_name

PROPERTIES = ("LoadState", "FragmentPath", "DropInPaths", "MainPID", "NeedDaemonReload")


@dataclass(frozen=True)
class Unit:
    """What `show_server` found.

    Attributes:
        name: Of the unit.
        properties: Of systemd, by name.
        text: What `systemctl cat` printed.
        argv: Command line of the main process; empty where none runs.
        exe: Its executable.
        fixed: No drop-in can be written to /etc, as where it is part of a read-only image.
        print: Checksum of its files, without those of a hold or a trial.
    """

    name: str
    properties: dict[str, str]
    text: str = field(repr=False)
    argv: tuple[str, ...] = field(default=(), repr=False)
    exe: str = ""
    fixed: bool = False
    print: str = ""


def show_server(unit: str, places: Places = HOST) -> str:
    """Shell text that prints all that `locate` needs; neither environment nor its files are read.

    What it prints may hold secrets: run it in a script with `together`, whose output is never
    shown.
    """
    name, folder = shlex.quote(unit_name(unit)), shlex.quote(f"{places.etc}/systemd/system")
    held = shlex.quote(f"{places.run}/systemd/system")
    return f"""shown=$(systemctl show --no-pager -p {",".join(PROPERTIES)} -- {name}) || exit 1
printf '%s\\n' "$shown" | sed 's/^/show /'
systemctl cat --no-pager -- {name} | sed 's/^/file /'
[ -w {folder} ] || echo 'fixed yes'
for file in "$(printf '%s\\n' "$shown" | sed -n 's/^FragmentPath=//p')" \\
    {folder}/{name}.d/*.conf {held}/{name}.d/*.conf; do
  case ${{file##*/}} in
    50-gpu-reclaim-hold.conf | gpu-reclaim-no-kill.conf | {TRIAL_FILE}) continue;;
  esac
  [ ! -f "$file" ] || cat "$file"
done | cksum | sed 's/^/print /'
pid=$(printf '%s\\n' "$shown" | sed -n 's/^MainPID=//p')
case $pid in ''|0) exit 0;; esac
# In hexadecimal, so that newlines and bytes that are no text survive.
printf 'argv %s\\n' "$(od -An -v -tx1 "/proc/$pid/cmdline" | tr -d ' \\n')"
printf 'exe %s\\n' "$(readlink "/proc/$pid/exe")\""""


def parse_server(section: Section, unit: str) -> Unit:
    """What `show_server` printed.

    Raises:
        BadAnswer: systemd did not show the unit.
    """
    pairs = [line.partition("=") for line in section.lines("show")]
    properties = {name: value for name, _, value in pairs}
    lines = section.lines("file")
    if "LoadState" not in properties or not lines:
        raise BadAnswer(
            f"{unit}: systemd did not show the unit and its files",
            remedy=f"see what `systemctl cat {unit}` says on the host",
        )
    raw = section.value("argv")
    try:
        bytes_ = bytes.fromhex(raw)
    except ValueError:
        raise BadAnswer(f"{unit}: its main process's command line could not be read") from None
    argv = bytes_.decode("utf-8", "surrogateescape").removesuffix("\0").split("\0")
    exe = section.value("exe").removesuffix(" (deleted)")
    words = tuple(argv) if bytes_ else ()
    fixed = section.value("fixed") == "yes"
    return Unit(unit, properties, "\n".join(lines), words, exe, fixed, section.value("print"))
