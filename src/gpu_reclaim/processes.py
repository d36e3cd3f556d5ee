"""What the look through /proc found: holders of NVIDIA devices, members of control groups."""

from __future__ import annotations

import re

from gpu_reclaim.commands import Result, Section, printable
from gpu_reclaim.errors import BadAnswer
from gpu_reclaim.models import Process, ProcessTable
from gpu_reclaim.owners import guest_prefix
from gpu_reclaim.scanning import CUT, NVIDIA, DeviceSet, scan

__all__ = ["NVIDIA", "DeviceSet", "parse_scan", "scan"]


_PID = re.compile(r"[1-9][0-9]{0,9}")


def parse_scan(result: Result, section: Section, devices: DeviceSet = NVIDIA) -> ProcessTable:
    """What `scan` printed.

    Raises:
        BadAnswer: It lacks the lines that every Linux gives.
    """
    namespace = section.value("ns")
    ourselves = [int(pid) for pid in section.lines("self") if _PID.fullmatch(pid)]
    if not namespace.startswith("pid:[") or not ourselves:
        raise BadAnswer(
            f"{result.where}: /proc could not be read, so its processes are unknown",
            remedy="mount /proc and install find, stat, grep and sed (coreutils, findutils)",
            result=result,
        )
    unseen_by = {"fds", "nodes", "people"} - set(section.lines("sees"))
    if unseen_by:
        raise BadAnswer(
            f"{result.where}: the tools there do not see even this run's own shell, so holders "
            f"are unknown ({', '.join(sorted(unseen_by))})",
            remedy="install find, stat, grep, sed, sort, tr and xargs (coreutils, findutils), or "
            "busybox, and see what stands in /etc/environment",
            result=result,
        )
    held = _held(section, devices)
    exes = _exes(section)
    processes = [
        process.model_copy(update={"devices": sorted(held.get(process.pid, ()))})
        for process in _described(section, exes)
    ]
    # A holder that could not be described is not skipped: it counts as not inspected.
    unseen = (set(held) | {pid for pid, paths in exes.items() if len(paths) > 1}) - {
        process.pid for process in processes
    }
    own = [line.split(":", 2)[2] for line in section.lines("own") if line.count(":") > 1]
    prefix = guest_prefix(own)
    for process in processes if prefix else ():
        process.cgroups = sorted({group.removeprefix(prefix) for group in process.cgroups})
    parents = {process.pid: process.ppid for process in processes}
    return ProcessTable(
        pid_namespace=namespace,
        boot_id=section.value("boot"),
        ourselves=ourselves,
        processes=[x for x in processes if not _our_own(x, section, parents, ourselves[0])],
        cut=CUT in result.stderr,
        root=section.value("uid") in ("", "0"),
        uninspected=sorted(_denied(result.stderr) | _unread_maps(section, held) | unseen),
    )


def _our_own(process: Process, section: Section, parents: dict[int, int], shell: int) -> bool:
    """Part of this very script, and gone by now: what its shell started.

    When few processes are described, those between the shell and its nvidia-smi are not among them:
    then it is known by the script's session.
    """
    seen, pid = set(), process.pid
    while pid in parents and pid not in seen:
        seen.add(pid)
        pid = parents[pid]
        if pid == shell:
            return True
    same = str(process.session) == section.value("session")
    return same and process.exe.rpartition("/")[2] == "nvidia-smi"


def _held(section: Section, devices: DeviceSet) -> dict[int, set[str]]:
    """Pid to the devices it holds, each as `path (fd)` or `path (map)`."""
    numbers = _numbers(section)
    majors = _majors(section, devices)
    held: dict[int, set[str]] = {}
    for line in section.lines("link"):
        match = re.fullmatch(
            r"'?(([1-9][0-9]{0,9})(?:/task/[0-9]+)?/fd/[0-9]+)'? -> '?(.*?)'?", line
        )
        if match and _counts(numbers.get(match[1]), match[3], majors, devices):
            held.setdefault(int(match[2]), set()).add(f"{printable(match[3])} (fd)")
    for pid, path, files in _maps(section):
        node = next((numbers[file] for file in files if file in numbers), None)
        if _counts(node, path, majors, devices):
            held.setdefault(pid, set()).add(f"{printable(path)} (map)")
    return held


def _maps(section: Section) -> list[tuple[int, str, list[str]]]:
    """Pid, path, and the files below /proc that tell the mapped file's number."""
    line = re.compile(r"(([1-9][0-9]{0,9})(?:/task/[0-9]+)?) (/.*) ([0-9a-f]+-[0-9a-f]+)")
    found = (line.fullmatch(text) for text in section.lines("map"))
    return [
        (
            int(match[2]),
            match[3],
            [f"{match[1]}/map_files/{match[4]}", f"{match[1]}/root{match[3]}"],
        )
        for match in found
        if match
    ]


def _unread_maps(section: Section, held: dict[int, set[str]]) -> set[int]:
    """Processes with a mapping named like an NVIDIA device whose number could not be read."""
    numbers = _numbers(section)
    return {
        pid
        for pid, path, files in _maps(section)
        if path.startswith("/dev/nvidia") and pid not in held and not numbers.keys() & set(files)
    }


def _numbers(section: Section) -> dict[str, tuple[int, str]]:
    """File below /proc to (major, type)."""
    found = (
        re.fullmatch(r"([0-9a-f]{1,8}) [0-9a-f]+ ([^|]*)\|(.*)", x) for x in section.lines("node")
    )
    return {match[3]: (int(match[1], 16), match[2]) for match in found if match}


def _majors(section: Section, devices: DeviceSet) -> frozenset[int]:
    named = (re.fullmatch(r"([0-9]{1,9}) (.+)", line) for line in section.lines("major"))
    dynamic = {int(x[1]) for x in named if x and x[2].startswith(devices.driver_names)}
    return frozenset(dynamic | set(devices.majors))


def _counts(
    node: tuple[int, str] | None, path: str, majors: frozenset[int], devices: DeviceSet
) -> bool:
    major, kind = node or (0, "")
    character = kind == "character special file"
    if character and major in majors:
        return True
    by_path = bool(devices.path_prefixes) and path.startswith(devices.path_prefixes)
    return by_path and (character or not path.startswith("/dev/"))


def _denied(stderr: str) -> set[int]:
    """Processes that we were not allowed to look into; those that ended meanwhile do not count.

    map_files and root are two ways to the same number, and one is enough: see `_unread_maps`.
    """
    denied = (
        r"(?:^|[\s'`\u2018\"])(?:/proc/)?([1-9][0-9]{0,9})/(?!map_files/|root/)"
        r"[^\n]*(?:Permission denied|not permitted)"
    )
    return {int(match[1]) for match in re.finditer(denied, stderr, re.M)}


def _exes(section: Section) -> dict[int, set[str]]:
    """Pid to its executable. Two for one pid: a path with a newline pretends to be another line."""
    exes: dict[int, set[str]] = {}
    for line in section.lines("exe"):
        match = re.fullmatch(r"'?([1-9][0-9]{0,9})/exe'? -> '?(.*?)'?", line)
        if match:
            exes.setdefault(int(match[1]), set()).add(match[2])
    return exes


def _described(section: Section, exes: dict[int, set[str]]) -> list[Process]:
    files: dict[int, dict[str, list[str]]] = {}
    for line in section.text.split("\n"):
        match = re.fullmatch(r"([1-9][0-9]{0,9})/(comm|cmdline|stat|cgroup):(.*)", line)
        if match:
            files.setdefault(int(match[1]), {}).setdefault(match[2], []).append(
                match[3].replace("\x01", "\n")
            )
    found = (
        _process(pid, parts, next(iter(exes.get(pid, {""}))))
        for pid, parts in sorted(files.items())
        if len(exes.get(pid, ())) <= 1
    )
    return [process for process in found if process]


def _process(pid: int, files: dict[str, list[str]], exe: str) -> Process | None:
    head, _, tail = "\n".join(files.get("stat", [])).rpartition(") ")
    stat = tail.split()
    if len(stat) < 20:  # noqa: PLR2004 - field 22 is the 20th after the name (proc(5))
        return None
    if not all(re.fullmatch(r"[0-9]{1,20}", field) for field in (stat[1], stat[3], stat[19])):
        return None
    comm = "\n".join(files.get("comm", [])).rstrip("\n") or head.partition("(")[2]
    if not comm and not exe:
        return None
    words = files.get("cmdline", [])
    groups = "".join(files.get("cgroup", [])).split("\n")
    return Process(
        pid=pid,
        start_time=int(stat[19]),
        ppid=int(stat[1]),
        session=int(stat[3]),
        state=stat[0],
        exe=exe.removesuffix(" (deleted)"),
        comm=printable(comm),
        name=_name(comm, words),
        command_line=" ".join(words).strip(),
        cgroups=sorted({group.split(":", 2)[2] for group in groups if group.count(":") >= 2}),  # noqa: PLR2004
    )


_INTERPRETER = re.compile(r"(python[\d.]*|(ba|da|z)?sh|perl|ruby|node|java)$")


def _name(comm: str, words: list[str]) -> str:
    """Title or program for people; of an interpreter also its script, never further arguments."""
    # A set title may hold the whole command line, secrets and all: options end what is shown.
    first = re.split(r"\s+-|[?]|\s+\S*(?:=|://)", words[0].strip())[0].strip() if words else ""
    if not first:
        return printable(comm, limit=80)
    program = first.rpartition("/")[2] if first.startswith("/") else first
    rest = words[1:]
    if _INTERPRETER.match(program) and rest:
        module = rest[0] == "-m" and len(rest) > 1
        if module or not rest[0].startswith("-"):
            script = rest[0].split("?")[0].rpartition("/")[2]
            program += f" -m {rest[1]}" if module else f" {script}"
    return printable(program.split("\n")[0], limit=80)
