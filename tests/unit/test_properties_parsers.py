"""Whatever a tool prints: a parser raises only the package's own errors, and invents nothing."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest
from hypothesis import strategies as st
from proxmoxer.core import ResourceException

from gpu_reclaim import containers, errors, fuser
from gpu_reclaim.commands import (
    MARK,
    Framed,
    Guard,
    Result,
    Script,
    Section,
    decode,
    printable,
    unframe,
)
from gpu_reclaim.models import Ended, Gpu, Process
from gpu_reclaim.nvidia_smi import mib, parse_apps, parse_gpus
from gpu_reclaim.owners import guest_prefix, owner, stop_command
from gpu_reclaim.processes import parse_scan
from gpu_reclaim.scanning import DeviceSet, scan
from gpu_reclaim.signals import end, parse_end
from gpu_reclaim.systemd import parse_show, unit_name
from gpu_reclaim.transport import proxmox_answers as answers
from unit.scenery import NAMESPACE, scan_text
from unit.strategies import (
    ANY_TEXT,
    CONTAINER_GROUPS,
    GUEST_GROUPS,
    ODD,
    OWN_GROUPS,
    always,
    answer,
    app_rows,
    damaged,
    gpu_rows,
    processes,
    scans,
    sections,
    told,
)

# nvidia-smi.

ROW = re.compile(
    r"\s*[0-9]+\s*,\s*"  # index
    r"((GPU|MIG)-[0-9a-fA-F-]{8,}|[^,]*(unknown error|is lost|err!|reset|requires)[^,]*)\s*,"
    r"(.*,){2}[^,]*",  # name, used, total
    re.IGNORECASE,
)
UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def gpu_lines(text: str) -> list[str]:
    return [x[4:] for x in text.split("\n") if x.startswith("gpu ") and x[4:].strip()]


def is_number_in(number: int | None, text: str) -> bool:
    return number is None or (number >= 0 and str(number) in text)


PLAIN = re.compile(r"(0|[1-9][0-9]{0,8})(?: MiB)?")


def told_of(gpu: Gpu, lines: list[str]) -> bool:
    """A line gives this very GPU its memory, in the field before the last."""
    for line in lines:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) > 4 and fields[1] == gpu.uuid and fields[0] == str(gpu.index):
            plain = PLAIN.fullmatch(fields[-2])
            if gpu.memory_used_mib == (int(plain[1]) if plain else None):
                return True
    return False


@always(times=3, section=sections(told("gpu", gpu_rows())))
def test_gpus_are_those_that_rows_tell_of(section: Section) -> None:
    reading = answer(lambda: parse_gpus(section))
    assert reading is not None
    lines = gpu_lines(section.text)

    for gpu in reading.gpus:
        assert is_number_in(gpu.index, section.text)
        assert is_number_in(gpu.memory_used_mib, section.text)
        assert is_number_in(gpu.memory_total_mib, section.text)
        assert told_of(gpu, lines)
        assert gpu.memory_used_mib is not None or gpu.note


@always(times=3, section=sections(told("gpu", gpu_rows())))
def test_a_reading_without_problem_is_rows_and_nothing_else(section: Section) -> None:
    reading = answer(lambda: parse_gpus(section))
    assert reading is not None
    lines = gpu_lines(section.text)

    if reading.problem:
        return
    assert section.code in (0, 14)
    assert reading.gpus
    assert all(ROW.fullmatch(line) for line in lines if section.code == 0 or line[:1].isdigit())
    rows = [line for line in lines if ROW.fullmatch(line)]
    assert len(rows) == len(reading.gpus)
    assert len({gpu.index for gpu in reading.gpus}) == len(rows)
    assert set(UUID.findall("\n".join(rows))) <= {gpu.uuid for gpu in reading.gpus}


@always(text=st.one_of(ODD, st.integers().map(str), st.integers(0).map("{} MiB".format)))
def test_memory_is_a_plain_number_or_none(text: str) -> None:
    plain = PLAIN.fullmatch(text.strip())

    assert answer(lambda: mib(text)) == (int(plain[1]) if plain else None)


@always(section=sections(told("app", app_rows())))
def test_compute_processes_are_those_that_lines_name(section: Section) -> None:
    for app in answer(lambda: parse_apps(section)) or []:
        used = "" if app.memory_used_mib is None else app.memory_used_mib
        assert app.pid > 0
        assert is_number_in(app.memory_used_mib, section.text)
        assert re.search(
            rf"^app \s*{re.escape(app.gpu_uuid)}\s*,\s*{app.pid}\s*,\s*0*{used}",
            section.text,
            re.MULTILINE,
        )


# Processes.


def stderr_lines() -> st.SearchStrategy[str]:
    kinds = ["find: '{}/fd'", "stat: cannot statx '{}/fd/3'", "grep: {}/maps", "grep: {}/cmdline"]
    line = st.builds(
        lambda kind, pid, why: f"{kind.format(pid)}: {why}",
        st.sampled_from(kinds),
        st.integers(1, 60),
        st.sampled_from(["Permission denied", "No such file or directory", "not permitted"]),
    )
    return st.lists(line, max_size=3).map("\n".join)


SCANNED = st.one_of(damaged(scans()), damaged(scans()), told("self", scans()))


@always(text=SCANNED, stderr=damaged(stderr_lines()))
def test_processes_are_those_that_were_printed(text: str, stderr: str) -> None:
    result = Result(Script("look", {}), "a host", text, stderr, 0)
    found = answer(lambda: parse_scan(result, Section(text, 0)))

    if found is None:
        return
    for process in found.processes:
        assert process.pid > 0
        assert f"{process.pid}/stat:" in text
        for number in (process.start_time, process.ppid, process.session):
            assert is_number_in(number, text)
        assert process.exe in text
        named = rf"^(link '?{process.pid}/|map {process.pid}[ /])"
        assert not process.devices or re.search(named, text, re.MULTILINE)
    for pid in found.ourselves:
        assert pid > 0
        assert f"self {pid}" in text
    for pid in found.uninspected:
        assert pid > 0
        assert str(pid) in text + stderr
    assert found.pid_namespace in text


def without(lines: list[str], lost: list[bool]) -> str:
    kept = [line for line, gone in zip(lines, lost, strict=False) if not gone]
    return "\n".join([*kept, *lines[len(lost) :], ""])


LOSSES = st.lists(st.booleans(), max_size=60)


@always(seen=processes(groups=2, held=True), lost=LOSSES)
def test_a_holder_is_told_of_whatever_else_was_not_printed(
    seen: list[Process], lost: list[bool]
) -> None:
    lines = scan_text(seen).split("\n")
    needed = ("ns ", "major ", "self ", "session ", "sees ", "link ", "node ")
    kept = [line for line in lines if line.startswith(needed)]
    text = "\n".join(kept) + "\n" + without([x for x in lines if x not in kept], lost)
    result = Result(Script("look", {}), "a host", text, "", 0)
    found = parse_scan(result, Section(text, 0))

    known = {process.pid for process in found.holders} | set(found.uninspected)
    ours = {x.pid for x in seen if x.exe.endswith("/nvidia-smi")}
    assert {process.pid for process in seen} - ours <= known


# Units.


def block(name: str, state: str, triggers: str, can_stop: str) -> str:
    return (
        f"Id={name}\nNames={name}\nLoadState=loaded\nActiveState={state}\nSubState=running\n"
        f"TriggeredBy={triggers}\nControlGroup=/system.slice/{name}\nCanStop={can_stop}\n"
    )


BLOCKS = st.lists(
    st.builds(
        block,
        st.sampled_from(["sglang.service", "ollama.service", "a@1.service"]),
        st.sampled_from(["active", "inactive", "failed", "activating"]),
        st.sampled_from(["", "sglang.socket sglang.timer"]),
        st.sampled_from(["yes", "no"]),
    ),
    max_size=3,
).map("\n".join)


@always(section=sections(st.one_of(damaged(BLOCKS), ANY_TEXT)))
def test_units_are_those_of_whole_blocks(section: Section) -> None:
    blocks = [x.split("\n") for x in re.split(r"\n\s*\n", section.text)]

    for state in answer(lambda: parse_show(section)) or []:
        wanted = [
            f"Id={state.name}",
            f"LoadState={state.load_state}",
            f"ActiveState={state.active_state}",
        ]
        mine = [x for x in blocks if all(line in "\n".join(x) for line in wanted)]
        assert mine
        assert any(len({line for line in x if line.startswith("Id=")}) == 1 for x in mine)
        assert all(unit in section.text for unit in state.triggered_by)


# Ending.

VICTIMS = [Process(pid=pid, start_time=pid * 10, name="x") for pid in (5, 50, 51)]
DONE = st.lists(
    st.builds(
        lambda word, pid: word.format(pid),
        st.sampled_from(
            [
                *("sent {} TERM", "sent {} KILL", "gone {}", "changed {}", "zombie {}"),
                *("denied {}", "left {} D nvidia_close", "left {} S 0", "refused namespace"),
            ]
        ),
        st.sampled_from([5, 50, 5]),
    ),
    max_size=4,
).map("\n".join)


def said(row: Ended, text: str, word: str) -> bool:
    return bool(re.search(rf"^{word}\s+{row.pid}(?![0-9])", text, re.MULTILINE))


@always(times=2, section=sections(told("sent", DONE), st.sampled_from([0, 0, 0, 78, 1])))
def test_what_became_of_each_process_is_what_was_told(section: Section) -> None:
    result = Result(Script("end", {}), "a host", section.text, "", 0)
    rows = answer(lambda: parse_end(result, section, VICTIMS, {}, "ssh"))

    if rows is None:
        assert section.code != 0
        return
    assert [(x.pid, x.start_time) for x in rows] == [(x.pid, x.start_time) for x in VICTIMS]
    for row in rows:
        assert row.signal in section.text
        assert row.signal == "" or said(row, section.text, "sent")
        assert row.outcome != "ended" or said(row, section.text, "sent")
        assert row.outcome != "ended" or not said(row, section.text, r"(left|denied)")
        if row.outcome in ("denied", "changed", "zombie", "gone"):
            assert said(row, section.text, f"({row.outcome}|left)")


FREE = st.one_of(ANY_TEXT, ODD)


@always(
    seen=st.lists(
        st.builds(
            Process,
            pid=st.integers(1, 2**22),
            start_time=st.integers(0, 2**63),
            exe=FREE,
            comm=FREE,
            name=FREE,
            command_line=FREE,
            cgroups=st.lists(FREE, max_size=2),
        ),
        max_size=4,
    ),
    grace_s=st.floats(0, 600),
)
def test_the_script_that_ends_holds_numbers_and_no_names(
    seen: list[Process], grace_s: float
) -> None:
    script = end(seen, NAMESPACE, grace_s=grace_s)
    pairs = " ".join(f"{process.pid}:{process.start_time}" for process in seen)
    empty = end([], NAMESPACE, grace_s=grace_s)

    assert script.count("\ntargets='") == 1
    assert script == empty.replace("targets=''", f"targets='{pairs}'")


@always(namespace=damaged(st.just(NAMESPACE)))
def test_nothing_but_a_namespace_of_the_kernels_reaches_the_script(namespace: str) -> None:
    script = answer(lambda: end(VICTIMS, namespace, grace_s=5))

    assert script is None or re.fullmatch(r"pid:\[[0-9]+\]", namespace)


# fuser, pct.

FUSED = st.lists(st.integers(1, 99_999), max_size=5).map(
    lambda pids: f"fuser {'  '.join(map(str, pids))}\n"
)


@always(section=sections(told("fuser", FUSED)))
def test_pids_are_those_that_fuser_named(section: Section) -> None:
    pids = answer(lambda: fuser.parse(section)) or []
    named = " ".join(section.lines("fuser"))

    assert pids == sorted(set(pids))
    assert all(pid > 0 and str(pid) in named for pid in pids)


PCT = st.sampled_from(
    [
        "pct status: running\npct name: llm\npct lock: backup\n",
        "pct status: stopped\n",
        "pct Configuration file 'nodes/pve/lxc/129.conf' does not exist\n",
    ]
)


@always(
    section=sections(told("pct", PCT), st.sampled_from([0, 1, 78, 90, 91, 92, 93, 124])),
    hostname=ANY_TEXT,
)
def test_only_the_checks_exit_statuses_refuse_a_container(section: Section, hostname: str) -> None:
    error = answer(lambda: containers.refusal("pve", 129, hostname, section))

    assert (error is not None) == (section.code in (90, 91, 92, 93))
    if error is not None:
        assert "nothing was touched" in error.message
        assert error.remedy
        assert str(error)


# Frames.

TOKEN = f"{MARK}0123456789abcdef"


def framed(names: list[str], hostname: str = "llm") -> Framed:
    script = Script("look", dict.fromkeys(names, ""))
    return Framed(script, "", TOKEN, Guard(hostname=hostname, machine_id="a1"))


@st.composite
def frames(draw: st.DrawFn) -> str:
    """A whole answer, with what is printed between its markers."""
    bodies = draw(st.lists(ANY_TEXT, min_size=1, max_size=3))
    refused = draw(st.sampled_from(["", "", "", f"{TOKEN} refused hostname other\n"]))
    parts = [
        f"{TOKEN} section s{at}\n{body}\n{TOKEN} code {at}\n" for at, body in enumerate(bodies)
    ]
    return "".join([f"{TOKEN} begin\n", refused, *parts, f"{TOKEN} end\n"])


@always(
    text=st.one_of(damaged(frames()), ANY_TEXT), code=st.sampled_from([None, 0, 1, 124, 137, 255])
)
def test_sections_are_those_between_markers(text: str, code: int | None) -> None:
    asked = framed(["s0", "s1"])
    result = answer(lambda: unframe(asked, Result(asked.script, "a host", text, "", code)))

    if result is None:
        return
    assert f"{TOKEN} end" in text.split("\n")
    assert f"\n{TOKEN} refused " not in text
    for name, section in result.sections.items():
        assert f"{TOKEN} section {name}\n{section.text}\n{TOKEN} code {section.code}" in text
        assert section.code >= 0


PRINTED = st.one_of(
    ANY_TEXT,
    st.sampled_from(
        [
            f"{MARK}0000000000000000 section processes\nns pid:[1]\n{MARK}0000000000000000 code 0",
            f"{MARK} end",
            f"x {TOKEN[:-1]} end\n",
        ]
    ),
)


@always(
    bodies=st.dictionaries(
        st.from_regex(r"[a-z]{1,8}", fullmatch=True),
        st.tuples(PRINTED, st.integers(0, 255)),
        min_size=1,
        max_size=4,
    )
)
def test_whatever_is_printed_comes_back_as_it_was(bodies: dict[str, tuple[str, int]]) -> None:
    asked = framed(list(bodies))
    parts = [
        f"{TOKEN} section {name}\n{text}\n{TOKEN} code {code}\n"
        for name, (text, code) in bodies.items()
    ]
    stdout = "".join([f"{TOKEN} begin\n", *parts, f"{TOKEN} end\n"])
    result = unframe(asked, Result(asked.script, "a host", stdout, "", 0))

    assert {name: (x.text, x.code) for name, x in result.sections.items()} == bodies
    for cut in (stdout[: -len(f"{TOKEN} end\n")], stdout[:-2], stdout[: len(stdout) // 2]):
        with pytest.raises(errors.Incomplete):
            unframe(asked, Result(asked.script, "a host", cut, "", 0))


@always(data=st.binary(max_size=80), limit=st.integers(0, 50))
def test_bytes_are_shown_harmlessly(data: bytes, limit: int) -> None:
    shown = printable(decode(data), limit=limit)

    assert shown.isprintable()
    assert len(shown) <= limit + 3


# Owners.

GROUPS = st.one_of(
    damaged(st.sampled_from([*OWN_GROUPS, *CONTAINER_GROUPS, *GUEST_GROUPS])),
    ANY_TEXT.map("/{}".format),
)


@always(groups=st.lists(GROUPS, max_size=4))
def test_an_owner_is_named_in_a_control_group(groups: list[str]) -> None:
    found = owner(groups)
    everything = "\n".join(groups)

    assert (found.kind == "none") == (not found.name) or "/kubepods" in everything
    for word in found.name.split(" of uid " if found.kind == "user unit" else " "):
        assert word in everything
    assert stop_command(found).isprintable() or not found.name.isprintable()
    assert not guest_prefix(groups) or guest_prefix(groups) in everything
    assert found.kind != "guest" or guest_prefix(groups)


# Proxmox.

ASK = answers.Ask("Proxmox API pve:8006", "nodes/pve/lxc/129/status/current", "VM.Audit")
SURROGATES = st.text(st.characters(), max_size=20)  # JSON may hold half of a pair
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), SURROGATES, ODD),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(ANY_TEXT, inner, max_size=2)
    ),
    max_leaves=4,
)
FIELDS = st.sampled_from(["node", "type", "status", "name", "lock", "exited", "exitcode"])
GOOD = {"node": "pve", "type": "lxc", "status": "running", "name": "llm", "exitcode": 0}


@always(
    changes=st.dictionaries(FIELDS, JSON, max_size=3),
    said=st.sampled_from([None, 0, 1, "0", "1", False, True, "yes", 2]),
    whole=JSON,
)
def test_an_answer_of_proxmox_is_read_as_it_is_or_refused(
    changes: dict[str, object], said: object, whole: object
) -> None:
    row = GOOD | {"exited": said} | changes
    place = answer(lambda: answers.place_of(ASK, 129, row))
    code = answer(lambda: answers.number_of(ASK, row, "exitcode"))
    exited = answer(lambda: answers.truth_of(ASK, row, "exited"))
    mapping = answer(lambda: answers.mapping_of(ASK, whole))

    assert place is None or re.fullmatch(r"[A-Za-z0-9-]+", place.node)
    assert place is None or (place.kind, place.status) == (row["type"], str(row["status"]))
    assert code is None or str(row["exitcode"]).lstrip("-0") == str(code).lstrip("-0")
    assert exited in (None, False) or row["exited"] in (1, True, "1", "True")
    assert mapping is None or mapping == whole


@always(text=st.one_of(SURROGATES, st.binary(max_size=40).map(lambda x: x.decode("latin-1"))))
def test_a_guests_output_is_text_that_can_be_written(text: str) -> None:
    answers.guest_text(text).encode()


@always(
    status=st.sampled_from([400, 401, 403, 404, 500, 501, 595, 596, 599]),
    words=st.one_of(SURROGATES, st.sampled_from(["VM 129 not running", "does not exist"])),
    detail=JSON,
    writes=st.booleans(),
)
def test_a_refusal_of_proxmox_is_an_error_of_the_package(
    status: int, words: str, detail: object, writes: bool
) -> None:
    ask = answers.Ask(ASK.where, ASK.path, ASK.needs, writes)
    error = answers.refused(ask, ResourceException(status, "no", words, detail), "root@pam!x")

    assert isinstance(error, errors.GpuReclaimError)
    assert error.message.isprintable()


# Scripts.

PLACEHOLDERS = ["@LONG@", "@EVERYBODY@", "@MEMBERS@", "@PREFIXES@", "@COMMON@", "@COMMON_MAPS@"]
UNIT_NAMES = st.one_of(
    ANY_TEXT,
    st.from_regex(r"[A-Za-z0-9:_.@\\-]{1,20}", fullmatch=True),
    st.sampled_from(PLACEHOLDERS).map("a{}.service".format),
    st.sampled_from(["'; reboot; '", "$(reboot)", "`reboot`", "-e", "a'b", "a\nb", "\\"]),
)


def members_of(script: str) -> list[str]:
    """The words of the command that looks for units' members."""
    line = script.partition("pids=$(for file in $files $selves $(")[2].rpartition("); do echo")[0]
    return shlex.split(line)


@always(names=st.lists(UNIT_NAMES, min_size=1, max_size=3), everybody=st.booleans())
def test_a_units_name_is_refused_or_one_word_of_the_script(
    names: list[str], everybody: bool
) -> None:
    found = [answer(lambda name=name: unit_name(name)) for name in names]  # type: ignore[misc]
    units = [name for name in found if name is not None]
    script = scan(units=units, everybody=everybody)
    plain = scan(units=["x"] * len(units), everybody=everybody)

    assert all(unit.isascii() and not re.search(r"[\s'\"$`;&|<>*?\[]", unit) for unit in units)
    if units:
        words = [part for unit in units for part in ("-e", f"/{unit}", "-e", f"/_{unit}")]
        assert members_of(script) == ["grep", "-l", "-F", *words, "[0-9]*/cgroup"]
    assert re.sub(r"grep -l -F.*?cgroup", "", script) == re.sub(r"grep -l -F.*?cgroup", "", plain)


PREFIXES = st.one_of(
    ANY_TEXT,
    ANY_TEXT.map("/dev/{}".format),
    st.sampled_from(PLACEHOLDERS).map("/dev/gpu{}".format),
    st.sampled_from(["/dev/gpu", "/run/pretend/gpu", "/dev/a'b", "/dev/$(reboot)", "/dev/a+b"]),
)


@always(prefix=PREFIXES)
def test_a_device_prefix_is_refused_or_stands_for_itself(prefix: str) -> None:
    script = answer(lambda: scan(DeviceSet(path_prefixes=(prefix,))))
    if script is None:
        return
    before = scan().partition("/dev/|nvidia,")[0]
    assert script.startswith(before)
    pattern = script[len(before) :].partition("/dev/|nvidia|")[2].partition(",s/^/link")[0]
    assert re.fullmatch(pattern, prefix)
    assert not re.search(r"[\s\x00'\"$`]", prefix)
    assert script == scan().replace("/dev/|nvidia", f"/dev/|nvidia|{pattern}")


@pytest.mark.parametrize(
    ("unit", "prefix"),
    [
        ("sglang.service", "/dev/gpu"),
        ("a'b;c$(d)`e`\n.service", "/dev/gpu+(x)[y]{1}"),
        ("\\x2d@\u0663.service", "/run/\u043c|a&b;c"),
    ],
)
def test_a_shell_can_read_the_script(unit: str, prefix: str) -> None:
    script = scan(DeviceSet(path_prefixes=(prefix,)), units=[unit], everybody=True)
    read = subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True, check=False)

    assert (read.returncode, read.stderr) == (0, "")
