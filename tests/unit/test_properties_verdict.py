"""Whatever is known: no false "clean", and never the wrong victim."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase

from hypothesis import strategies as st

from gpu_reclaim.commands import Result, Script, Section
from gpu_reclaim.errors import BadAnswer, GpuReclaimError, GuestLocked, LinkLost, Unreachable
from gpu_reclaim.evidence import Evidence
from gpu_reclaim.models import (
    GOOD_VERDICTS,
    Ended,
    Gpu,
    GpuApp,
    GpuReading,
    Process,
    ProcessTable,
    ReclaimPolicy,
    Settled,
    Spared,
    Step,
    Verdict,
)
from gpu_reclaim.nvidia_smi import parse_gpus
from gpu_reclaim.processes import parse_scan
from gpu_reclaim.protected import PROTECTED
from gpu_reclaim.verdict import decide, hopeless, of_error
from gpu_reclaim.victims import Choice, choose
from unit.scenery import scan_text
from unit.strategies import (
    ANY_TEXT,
    CONTAINER_GROUPS,
    GUARDS,
    GUEST_GROUPS,
    MEMORY,
    ODD,
    PIDS,
    UNITS,
    always,
    damaged,
    gpu_rows,
    processes,
)
from unit.values import UUIDS, gpu, process, reading, table

# The verdict.

FAULTS = ("[Unknown Error]", "ERR!")
WORDS = st.lists(st.one_of(st.sampled_from(["x (pid 5)", "{a}", "%s", ""]), ANY_TEXT), max_size=2)


CHANGES: dict[str, Callable[[list[Gpu]], list[Gpu]]] = {
    "as they were": lambda rows: rows,
    "lost": lambda rows: rows[1:],
    "one more": lambda rows: [*rows, gpu(5)],
    "listed twice": lambda rows: [*rows, *rows[:1]],
    "same index": lambda rows: [*rows, *(gpu(x.index, uuid=UUIDS[5]) for x in rows[:1])],
    "same identity": lambda rows: [*rows, *(gpu(5, uuid=x.uuid) for x in rows[:1])],
    "another one": lambda rows: [*(gpu(x.index, uuid=UUIDS[5]) for x in rows[:1]), *rows[1:]],
    "unread": lambda rows: [*(gpu(x.index, None) for x in rows[:1]), *rows[1:]],
    "faulty": lambda rows: [*(gpu(x.index, note=FAULTS[0]) for x in rows[:1]), *rows[1:]],
    "unread, faulty": lambda rows: [
        *rows[:-1],
        *(gpu(x.index, None, note=FAULTS[1]) for x in rows[-1:]),
    ],
    "renumbered": lambda rows: [
        gpu(x.index, y.memory_used_mib, uuid=y.uuid)
        for x, y in zip(rows, reversed(rows), strict=True)
    ],
    "none": lambda _: [],
}
APPS = st.lists(
    st.builds(
        GpuApp,
        gpu_uuid=st.sampled_from(UUIDS[:2]),
        pid=st.integers(1, 4),
        memory_used_mib=st.one_of(MEMORY, st.none()),
    ),
    max_size=3,
)


@st.composite
def readings(draw: st.DrawFn, before: list[Gpu], sound: bool) -> GpuReading:
    """The GPUs that were there before, free or not; if not sound, something is wrong with them."""
    memory = draw(st.sampled_from([[0], [0], [0], [0, 1], [100, 0], [101], [501, 0], [30_000]]))
    rows = [gpu(row.index, memory[row.index % len(memory)]) for row in before]
    if sound:
        return GpuReading(gpus=rows, apps=draw(APPS))
    change = draw(st.sampled_from(sorted(CHANGES)))
    return GpuReading(
        gpus=CHANGES[change](rows),
        apps=draw(APPS),
        apps_known=draw(st.sampled_from([True, True, True, False])),
        problem=draw(st.sampled_from(["", "", "", "it broke", "it did not answer in time"])),
    )


POLICIES = st.builds(
    ReclaimPolicy,
    gpus=st.sampled_from([[], [], [], [], [0], [1], [0, 3]]),
    strict_zero=st.booleans(),
    residue_mib=st.sampled_from([0, 100, 500]),
    stable_samples=st.integers(1, 3),
)
OUTCOMES = ["ended", "gone", "changed", "denied", "zombie", "D", "S", "Z", "unknown", "planned"]
ENDED = st.builds(
    Ended,
    pid=st.integers(1, 4),
    start_time=st.sampled_from([10, 20, 30]),
    name=ANY_TEXT,
    owner=ANY_TEXT,
    signal=st.sampled_from(["", "TERM", "KILL"]),
    via=st.just("ssh"),
    outcome=st.one_of(st.sampled_from(OUTCOMES), ODD),
    wchan=st.sampled_from(["", "0", "nv_close"]),
)
SPARED = st.builds(
    Spared,
    pid=st.one_of(PIDS, st.just(0)),
    name=st.one_of(st.sampled_from(["nvidia-persistenced", "Xorg", "ollama"]), ANY_TEXT),
    owner=ANY_TEXT,
    reason=ANY_TEXT,
    devices=st.sampled_from([[], ["/dev/nvidia0 (fd)"]]),
    command=st.sampled_from(["", "systemctl stop {x}"]),
    idle=st.booleans(),
    by_command=st.booleans(),
    straddles=st.booleans(),
)
PLACES = st.dictionaries(st.sampled_from(["guest 130", "the node itself"]), WORDS, max_size=2)
SETTLED = st.builds(Settled, step=st.just(Step(name="settle")), free=st.booleans(), reason=ANY_TEXT)
FLAWS: dict[str, st.SearchStrategy[object]] = {
    "settled": SETTLED,
    "expected_gpus": st.integers(0, 5),
    "holders": processes(held=True),
    "starters": st.dictionaries(PIDS, ANY_TEXT, max_size=1),
    "spared": st.lists(SPARED, max_size=2),
    "ended": st.lists(ENDED, max_size=3),
    "undead": processes(held=True),
    "running_again": st.dictionaries(st.sampled_from(UNITS), WORDS, min_size=1, max_size=2),
    "restarting": st.lists(st.sampled_from(UNITS), min_size=1, max_size=2),
    "uninspected": st.just(3),
    "blind": st.just(True),
    "unlisted": WORDS,
    "strangers": WORDS,
    "other_guests": PLACES,
    "inside": WORDS,
    "driver": st.sampled_from(["", "470.1", "580.95.05", "x"]),
    "mig": st.just(True),
}
DECISIVE = ["settled", "expected_gpus", "holders", "running_again", "restarting", "blind"]
KNOWN = {one.name for one in fields(Evidence)}


@st.composite
def evidences(draw: st.DrawFn, most: int = 2) -> Evidence:
    """Evidence of a run that went well, but for some things."""
    before = [gpu(index, 500) for index in range(draw(st.sampled_from([4, 2, 1, 4, 2])))]
    sound = draw(st.sampled_from([True, True, False]))
    base = Evidence(draw(POLICIES), GpuReading(gpus=before), draw(readings(before, sound)))
    weighted = sorted(FLAWS) + 3 * DECISIVE
    names = draw(st.lists(st.sampled_from(weighted), unique=True, max_size=most))
    changes = {name: draw(FLAWS[name]) for name in names if name in KNOWN}
    return replace(base, **changes)  # type: ignore[arg-type]


def wanted_rows(e: Evidence) -> list[Gpu]:
    return [row for row in e.after.gpus if e.policy.gpus == [] or row.index in e.policy.gpus]


def all_rows_are_there(e: Evidence) -> bool:
    rows = e.after.gpus
    return (
        e.after.problem == ""
        and len(rows) > 0
        and len({row.index for row in rows}) == len({row.uuid for row in rows}) == len(rows)
        and {(old.index, old.uuid) for old in e.before.gpus} <= {(x.index, x.uuid) for x in rows}
        and all(any(row.index == index for row in rows) for index in e.policy.gpus)
        and e.expected_gpus in (None, len(rows))
        and not any(fault in row.note for row in wanted_rows(e) for fault in FAULTS)
    )


def may_be_good(e: Evidence, limit_mib: int) -> bool:
    """All that has to be proven, so that somebody else may start on the GPUs."""
    return (
        all_rows_are_there(e)
        and all(type(row.memory_used_mib) is int for row in wanted_rows(e))
        and all(0 <= (row.memory_used_mib or 0) <= limit_mib for row in wanted_rows(e))
        and len(e.holders) == 0
        and (e.settled is None or e.settled.free)
        and not e.blind
        and (e.policy.gpus == [] or e.after.apps_known)
        and len(e.restarting) == 0
        and len(e.running_again) == 0
    )


def limit_mib(e: Evidence) -> int:
    return 0 if e.policy.strict_zero else e.policy.residue_mib


@always(times=6, e=evidences())
def test_clean_and_residue_are_said_only_when_all_is_proven(e: Evidence) -> None:
    verdict = decide(e).verdict

    assert verdict != Verdict.CLEAN or may_be_good(e, 0)
    assert verdict not in GOOD_VERDICTS or may_be_good(e, limit_mib(e))
    assert verdict != Verdict.PLANNED


@always(e=evidences(most=0))
def test_nothing_but_the_gpus_decides_when_nothing_else_is_known(e: Evidence) -> None:
    verdict = decide(e).verdict

    assert (verdict == Verdict.CLEAN) == may_be_good(e, 0)
    assert (verdict in GOOD_VERDICTS) == may_be_good(e, limit_mib(e))


@always(times=3, e=evidences(most=8))
def test_whatever_is_not_good_comes_with_a_sentence_and_a_remedy(e: Evidence) -> None:
    finding, early = decide(e), hopeless(e)

    for one in (finding, early or finding):
        assert one.summary.strip()
        assert bool(one.remedy.strip()) == (one.verdict not in GOOD_VERDICTS)
    assert early is None or early.verdict not in GOOD_VERDICTS


@always(
    kind=st.sampled_from([BadAnswer, GpuReclaimError, GuestLocked, LinkLost, Unreachable]),
    message=ANY_TEXT,
    remedy=ANY_TEXT,
)
def test_an_error_is_never_a_good_verdict(
    kind: type[GpuReclaimError], message: str, remedy: str
) -> None:
    finding = of_error(kind(message, remedy=remedy))

    assert finding.verdict not in GOOD_VERDICTS
    assert finding.remedy
    assert finding.summary == message


def reads_zero(line: str, row: Gpu) -> bool:
    parts = [part.strip() for part in line.removeprefix("gpu ").split(",")]
    return (
        line.startswith("gpu ")
        and (parts[0].lstrip("0") or "0") == str(row.index)
        and parts[1] == row.uuid
        and line.count("GPU-") == 1
        and parts[-2] in ("0", "0 MiB")
    )


ALL_FREE = gpu_rows().map(lambda text: re.sub(r", \d+, (\d+)$", r", 0, \1", text, flags=re.M))


@st.composite
def before_and_after(draw: st.DrawFn) -> tuple[str, str]:
    """The rows before, and as they came after, damaged."""
    before = draw(st.one_of(ALL_FREE, ALL_FREE, gpu_rows()))
    return before, draw(damaged(st.just(before)))


@always(
    texts=before_and_after(),
    code=st.sampled_from([0, 0, 0, 14, 9]),
    count=st.booleans(),
)
def test_clean_is_said_only_of_gpus_whose_rows_read_zero(
    texts: tuple[str, str], code: int, count: bool
) -> None:
    before = parse_gpus(Section(texts[0], 0))
    after = parse_gpus(Section(texts[1], code))
    expected = len(before.gpus) if count else None
    verdict = decide(Evidence(ReclaimPolicy(), before, after, expected_gpus=expected)).verdict

    if verdict == Verdict.CLEAN:
        lines = texts[1].split("\n")
        assert all(any(reads_zero(line, row) for line in lines) for row in before.gpus)
        assert code in (0, 14)


# The choice of victims.

PATTERNS: list[list[str]] = [[], [], ["."], ["python3", "sglang"], ["^/opt", "ollama"], ["worker"]]
GIVEN_NAMES = ["python3*", "sglang::*", "*.service", "*"]


@st.composite
def tables(draw: st.DrawFn, groups: int = 1) -> ProcessTable:
    seen = draw(processes(groups=groups))
    pids = st.lists(st.one_of(PIDS, st.sampled_from([x.pid for x in seen])), max_size=1)
    return ProcessTable(
        pid_namespace="pid:[4026531836]",
        ourselves=draw(st.one_of(st.just([]), st.just([]), pids)),
        processes=seen,
        uninspected=draw(st.one_of(st.just([]), pids)),
        fuser_only=draw(st.one_of(st.just([]), pids)),
    )


@st.composite
def listings(draw: st.DrawFn, seen: ProcessTable) -> GpuReading:
    """What nvidia-smi lists: pids that are holders here, seldom others too."""
    pids = [x.pid for x in seen.holders] or [70]
    if draw(st.sampled_from([False] * 9 + [True])):
        pids = [*(x.pid for x in seen.processes), 70]
    apps = st.builds(
        GpuApp,
        gpu_uuid=st.sampled_from(UUIDS[:2]),
        pid=st.sampled_from(pids),
        memory_used_mib=st.one_of(MEMORY, st.none()),
    )
    return reading(500, 500, apps=draw(st.lists(apps, min_size=1, max_size=4)))


class Scene:
    """One choice, with all it was made from."""

    def __init__(
        self,
        table: ProcessTable,
        listing: GpuReading,
        policy: ReclaimPolicy,
        units: Sequence[str],
        protect: Sequence[str],
    ) -> None:
        self.table, self.listing, self.policy = table, listing, policy
        self.units, self.names = units, [*protect, *policy.protect]
        self.choice: Choice = choose(table, listing, policy, units=units, protect=protect)

    def __repr__(self) -> str:
        parts = (self.table, self.listing.apps, self.policy, self.units, self.names)
        return "Scene({!r}, {!r}, {!r}, units={!r}, protect={!r})".format(*parts)

    def matched(self, one: Process) -> bool:
        texts = (one.exe, one.name, one.comm, one.command_line)
        return any(re.search(x, text) for x in self.policy.match for text in texts)

    def member(self, one: Process) -> bool:
        return any(unit in path.split("/") for path in one.cgroups for unit in self.units)


@st.composite
def scenes(
    draw: st.DrawFn, groups: int = 1, gpus: bool | None = None, names: bool = False
) -> Scene:
    """A table, what nvidia-smi lists, and a policy; with `names`, somebody named by `protect`."""
    table = draw(tables(groups))
    some = draw(st.sampled_from([False, False, True])) if gpus is None else gpus
    parts = [part for one in table.processes for path in one.cgroups for part in path.split("/")]
    theirs = [one.name for one in table.processes] + [x for x in parts if x.endswith(".service")]
    given = draw(st.one_of(st.sampled_from(theirs), st.sampled_from(GIVEN_NAMES))) if names else ""
    policy = ReclaimPolicy(
        gpus=draw(st.sampled_from([[0], [1], [0, 1]])) if some else [],
        match=draw(st.sampled_from(PATTERNS)),
        protect=[given] if given else [],
    )
    protect = draw(st.sampled_from([[], ["ollama*"]])) if names else []
    units = [] if some else draw(st.lists(st.sampled_from(UNITS), max_size=2))
    return Scene(table, draw(listings(table)), policy, units, protect)


def base(one: Process) -> str:
    return one.exe.rpartition("/")[2]


@always(times=2, scene=scenes())
def test_who_is_protected_is_never_a_victim(scene: Scene) -> None:
    for one in scene.choice.victims:
        assert base(one) not in PROTECTED
        assert one.exe or one.comm not in {name[:15] for name in PROTECTED}
        assert one.pid != 1
        assert one.pid not in scene.table.ourselves
        assert one.exe or (one.ppid != 2 and one.pid != 2)
        assert not any("/nvidia-persistenced.service" in path for path in one.cgroups)


@always(times=2, scene=scenes())
def test_who_belongs_elsewhere_is_never_a_victim(scene: Scene) -> None:
    for one in scene.choice.victims:
        assert not set(one.cgroups) & set(GUEST_GROUPS)
        assert scene.matched(one) or not set(one.cgroups) & set(CONTAINER_GROUPS)


@always(scene=scenes(groups=3))
def test_one_control_group_elsewhere_is_enough(scene: Scene) -> None:
    """Each hierarchy of control groups (version 1) may place a process differently."""
    for one in scene.choice.victims:
        assert not set(one.cgroups) & set(GUEST_GROUPS)
        assert scene.matched(one) or not set(one.cgroups) & set(CONTAINER_GROUPS)
        assert not any("/nvidia-persistenced.service" in path for path in one.cgroups)


@always(times=2, scene=scenes(names=True))
def test_who_is_named_by_protect_is_never_a_victim(scene: Scene) -> None:
    for one in scene.choice.victims:
        for text in (base(one), one.name, one.comm):
            assert not any(text == x or fnmatchcase(text, x) for x in scene.names if text)


@always(name=st.one_of(ANY_TEXT, st.text("[]!*?-ab", max_size=6)).filter(str.strip))
def test_a_name_protects_who_is_called_exactly_so(name: str) -> None:
    policy = ReclaimPolicy(protect=[name])

    assert choose(table(process(50, name=name)), reading(500), policy).victims == []


@always(times=2, scene=scenes(names=True))
def test_who_is_in_a_unit_named_by_protect_is_never_a_victim(scene: Scene) -> None:
    for one in scene.choice.victims:
        parts = [part for path in one.cgroups for part in path.split("/")]
        assert not any(
            fnmatchcase(x, y) for x in parts if x.endswith(".service") for y in scene.names
        )


@always(scene=scenes(gpus=False))
def test_all_holders_and_nobody_unasked_are_sorted(scene: Scene) -> None:
    victims = {one.pid for one in scene.choice.victims}
    spared = {row.pid for row in scene.choice.spared}

    for one in scene.choice.victims:
        assert one in scene.table.processes
        assert one.devices or scene.member(one) or scene.matched(one)
    assert {one.pid for one in scene.table.holders} <= victims | spared
    for one in scene.table.processes:
        if scene.member(one) or scene.matched(one):
            assert scene.member(one) or one.pid in victims | spared


@always(scene=scenes(gpus=True))
def test_with_some_gpus_wanted_only_their_users_are_victims(scene: Scene) -> None:
    wanted = {UUIDS[index] for index in scene.policy.gpus}
    listed = {app.pid for app in scene.listing.apps if app.gpu_uuid in wanted}

    assert all(one.pid in listed or scene.matched(one) for one in scene.choice.victims)


@always(times=2, scene=scenes())
def test_nobody_is_both_victim_and_spared(scene: Scene) -> None:
    victims = [one.pid for one in scene.choice.victims]

    assert len(victims) == len(set(victims))
    assert not set(victims) & {row.pid for row in scene.choice.spared}
    assert all(row.reason for row in scene.choice.spared)


@always(
    seen=processes(kinds=st.sampled_from(GUARDS), held=True),
    lost=st.lists(st.booleans(), max_size=80),
    match=st.sampled_from([[], ["."]]),
)
def test_who_is_protected_stays_so_when_lines_about_it_are_lost(
    seen: list[Process], lost: list[bool], match: list[str]
) -> None:
    lines = scan_text(seen).split("\n")
    flags = [*lost, *[False] * len(lines)]
    kept = [
        x
        for x, gone in zip(lines, flags, strict=False)
        if not gone or x[:3] in ("ns ", "sel", "see")
    ]
    text = "\n".join(kept)
    result = Result(Script("look", {}), "a host", text, "", 0)
    table = parse_scan(result, Section(text, 0))

    assert choose(table, reading(500), ReclaimPolicy(match=match)).victims == []


def test_a_scene_has_victims() -> None:
    one = process(50, unit="sglang.service")
    scene = Scene(ProcessTable(processes=[one]), reading(500), ReclaimPolicy(), [], [])

    assert scene.choice.victims == [one]
