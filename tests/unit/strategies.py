"""Anything that could be told: real-looking output that was damaged, and values at random.

A property is written with `always`. It becomes two tests: a quick one that tries the same examples
each time, and an exhaustive one that tries many more, and others each time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gpu_reclaim.commands import Section
from gpu_reclaim.errors import GpuReclaimError
from gpu_reclaim.models import Process
from gpu_reclaim.protected import PROTECTED
from unit.scenery import scan_text
from unit.values import UUIDS

T = TypeVar("T")

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
PHASES = (Phase.generate, Phase.shrink)
BOTH = settings(deadline=None, database=None, suppress_health_check=SLOW, phases=PHASES)
QUICK = settings(BOTH, max_examples=80, derandomize=True)
EXHAUSTIVE = settings(BOTH, max_examples=5_000, print_blob=True)


def always(
    times: int = 1, **drawn: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a check of drawn values a test: quick by default, and an exhaustive one.

    Args:
        times: How many times as many examples as usual the quick one tries.
        drawn: What the check is given, by name.
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize(
            "depth",
            [
                pytest.param(QUICK, id="quick"),
                pytest.param(EXHAUSTIVE, id="exhaustive", marks=pytest.mark.exhaustive),
            ],
        )
        def test(depth: settings) -> None:
            examples = depth.max_examples * (times if depth is QUICK else 1)
            settings(depth, max_examples=examples)(given(**drawn)(check))()

        test.__name__, test.__module__, test.__doc__ = (
            check.__name__,
            check.__module__,
            check.__doc__,
        )
        return test

    return decorate


def answer(parse: Callable[[], T]) -> T | None:
    """What a parser returns; None where it raises an error of the package, as it may."""
    try:
        return parse()
    except GpuReclaimError:
        return None


# Text.

ANY_TEXT = st.text(max_size=60)
NO_NUMBERS = [
    *("Idx", "-", "", "[N/A]", "N/A", "[Unknown Error]", "[Insufficient Permissions]"),
    *("GPU is lost", "[GPU requires reset]", "-1", "-500", "+5", "0x0", "1e3", "0.0", "0 0", "NaN"),
    *("\u0663", "\u0660", "\u00b2", "\uff10", "\x00", "00", "007", "nvidia", "0 MiB"),
]
HUGE_NUMBERS = ["9" * 10, "9" * 20, "1" + "0" * 5_000]
ODD = st.one_of(st.sampled_from(NO_NUMBERS), st.sampled_from(HUGE_NUMBERS), st.text(max_size=6))


def _field(draw: st.DrawFn, line: str) -> list[str]:
    parts = re.split(r"([ ,=:|/>]+)", line)
    parts[2 * draw(st.integers(0, len(parts) // 2))] = draw(ODD)
    return ["".join(parts)]


def _cut(draw: st.DrawFn, line: str) -> list[str]:
    return [line[: draw(st.integers(0, len(line)))]]


def _behead(draw: st.DrawFn, line: str) -> list[str]:
    return [line[draw(st.integers(0, len(line))) :]]


EDITS: list[Callable[[st.DrawFn, str], list[str]]] = [
    _field,
    _field,
    _field,
    _cut,
    _behead,
    lambda _, __: [],
    lambda _, line: [line, line],
    lambda _, line: [f"{line}\r"],
    lambda _, line: [line[:5] + "\x00" + line[5:]],
    lambda draw, line: [line, draw(ANY_TEXT)],
    lambda draw, line: [line, f"{line.partition(' ')[0]} {draw(ANY_TEXT)}"],
]


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[str]) -> str:
    """Text of which some lines were lost, doubled, cut, joined, moved or garbled."""
    lines = draw(whole).split("\n")
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        edit = draw(st.integers(0, len(EDITS) + 1))
        if edit < len(EDITS):
            lines[at : at + 1] = EDITS[edit](draw, lines[at])
        elif edit == len(EDITS):
            lines[at : at + 2] = ["".join(lines[at : at + 2])]
        else:
            lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(at))
        lines = lines or [""]
    text = "\n".join(lines)
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 9)) == 0 else text


def told(word: str, whole: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Lines that begin with a word: real-looking ones, damaged; or anything at all."""
    anything = st.lists(st.one_of(ODD, ANY_TEXT), max_size=3).map(
        lambda lines: "\n".join(f"{word} {line}" for line in lines)
    )
    return st.one_of(damaged(whole), damaged(whole), anything)


CODES = st.sampled_from([0, 0, 0, 14, 9, 124, 127])


def sections(
    text: st.SearchStrategy[str], codes: st.SearchStrategy[int] = CODES
) -> st.SearchStrategy[Section]:
    """What one section printed, and how it ended."""
    return st.builds(Section, text, codes)


# nvidia-smi.

MEMORY = st.sampled_from([0, 0, 0, 0, 1, 99, 100, 101, 30_000])
BOARDS = st.sampled_from(["L40S", "NVIDIA H100 80GB HBM3", "Board, 80 GB, HBM3"])


@st.composite
def gpu_rows(draw: st.DrawFn) -> str:
    """Rows of `nvidia-smi --query-gpu` as the script prints them."""
    count = draw(st.integers(1, 4))
    used = draw(st.lists(MEMORY, min_size=count, max_size=count))
    name = draw(BOARDS)
    rows = [f"gpu {at}, {UUIDS[at]}, {name}, {mib}, 46068" for at, mib in enumerate(used)]
    return "\n".join(rows) + "\n"


PIDS = st.integers(1, 60)


@st.composite
def app_rows(draw: st.DrawFn) -> str:
    """Rows of `nvidia-smi --query-compute-apps` as the script prints them."""
    rows = draw(st.lists(st.tuples(st.integers(0, 3), PIDS, MEMORY), min_size=1, max_size=4))
    return "\n".join(f"app {UUIDS[at]}, {pid}, {mib}" for at, pid, mib in rows) + "\n"


# Processes.

CONTAINER = "0123456789abcdef" * 4
GUEST_GROUPS = [
    "/lxc/130/ns/system.slice/vllm.service",
    "/lxc/130",
    "/lxc.payload.web/init.scope",
    "/qemu.slice/105.scope",
    "/machine.slice/machine-web.scope",
]
CONTAINER_GROUPS = [
    f"/system.slice/docker-{CONTAINER}.scope",
    f"/docker/{CONTAINER}",
    f"/machine.slice/libpod-{CONTAINER}.scope/container",
    f"/kubepods.slice/kubepods-pod1.slice/cri-containerd-{CONTAINER}.scope",
]
OWN_GROUPS = [
    "/",
    "/system.slice",
    "/system.slice/sglang.service",
    "/system.slice/ollama.service/worker",
    "/system.slice/nvidia-persistenced.service",
    "/user.slice/user-0.slice/session-3.scope",
    "/user.slice/user-1000.slice/user@1000.service/app.slice/train.service",
]
UNITS = ["sglang.service", "ollama.service", "train.service"]
KINDS = [
    ("/opt/llm/bin/python3.11", "python3.11", "sglang::scheduler_TP0"),
    ("/opt/llm/bin/python3.11", "python3.11", "python3 serve.py"),
    ("/usr/local/bin/ollama", "ollama", "ollama"),
    ("/opt/\u043c\u043e\u0434\u0435\u043b\u044c/\u8bad\u7ec3", "\u8bad\u7ec3", "\u8bad\u7ec3"),
    ("/opt/a b/[worker]", "[worker]", "[worker]"),
    ("", "python3.11", "sglang::scheduler_TP0"),
    ("", "kworker/0:1", "kworker/0:1"),
]
"""Executable, short name, name for people."""

GUARDS = [(f"/usr/bin/{name}", name[:15], name) for name in sorted(PROTECTED)]
GUARDS += [("", short, name) for _, short, name in GUARDS]
ANY_KIND = st.one_of(st.sampled_from(KINDS), st.sampled_from(KINDS), st.sampled_from(GUARDS))
PLACES = st.sampled_from([*OWN_GROUPS, *OWN_GROUPS, *CONTAINER_GROUPS, *GUEST_GROUPS])
PARENTS = st.sampled_from([1, 1, 0, 2, 50])
DEVICES = st.sampled_from([["/dev/nvidia0 (fd)"], []])


@st.composite
def processes(
    draw: st.DrawFn,
    kinds: st.SearchStrategy[tuple[str, str, str]] = ANY_KIND,
    groups: int = 1,
    held: bool = False,
) -> list[Process]:
    """Processes with pids of their own, each in up to `groups` control groups."""
    places = st.lists(PLACES, unique=True, min_size=1, max_size=groups)
    made = []
    for pid in draw(st.lists(PIDS, unique=True, min_size=1, max_size=3)):
        exe, comm, name = draw(kinds)
        made.append(
            Process(
                pid=pid,
                start_time=pid * 10,
                ppid=draw(PARENTS),
                session=pid,
                state="S",
                exe=exe,
                comm=comm,
                name=name,
                command_line=f"{name} --port 1",
                cgroups=draw(places) if groups > 1 else [draw(PLACES)],
                devices=["/dev/nvidia0 (fd)"] if held else draw(DEVICES),
            )
        )
    return made


@st.composite
def scans(draw: st.DrawFn) -> str:
    """What the look through /proc prints, mappings and the machine's own lines among it."""
    mapped = draw(PIDS)
    lines = [
        "own 0::/user.slice" if draw(st.booleans()) else "own 0::/lxc/129/ns",
        f"map {mapped} /dev/nvidia-uvm 7f00-7f10",
        f"node c3 0 character special file|{mapped}/map_files/7f00-7f10",
        "major 236 nvidia-caps",
        "boot 1f0f",
        "uid 0",
    ]
    return scan_text(draw(processes(groups=2))) + "\n".join(lines) + "\n"
