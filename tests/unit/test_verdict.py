"""The verdict, from evidence alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gpu_reclaim import errors
from gpu_reclaim.evidence import Evidence
from gpu_reclaim.models import (
    GOOD_VERDICTS,
    Ended,
    Gpu,
    GpuReading,
    ReclaimPolicy,
    Spared,
    Verdict,
)
from gpu_reclaim.verdict import decide, hopeless, of_error
from unit.values import UUIDS, app, gpu, process, reading

POLICY = ReclaimPolicy()
STRICT = ReclaimPolicy(strict_zero=True)
HOLDER = process(50, unit="sglang.service", state="S")


def evidence(*used: int | None, **more: object) -> Evidence:
    """Evidence of a run after which the GPUs read so; before, all were in use."""
    base = Evidence(POLICY, before=reading(*[500 for _ in used]), after=reading(*used))
    return replace(base, **more)  # type: ignore[arg-type]


def verdict(*used: int | None, **more: object) -> Verdict:
    return decide(evidence(*used, **more)).verdict


def ended(pid: int = 50, outcome: str = "ended", wchan: str = "") -> Ended:
    return Ended(
        pid=pid,
        start_time=pid * 10,
        name="sglang::scheduler",
        owner="unit sglang.service",
        signal="KILL",
        via="ssh",
        outcome=outcome,
        wchan=wchan,
    )


def spared(pid: int = 60, name: str = "ollama", **more: object) -> Spared:
    values: dict[str, object] = {
        "pid": pid,
        "name": name,
        "owner": "unit ollama.service",
        "reason": "protected by name: ollama",
        "devices": ["/dev/nvidia0 (fd)"],
    }
    return Spared.model_validate(values | more)


# Clean and residue.


def test_all_gpus_at_zero_without_holder_are_clean() -> None:
    finding = decide(evidence(0, 0))

    assert finding.verdict == Verdict.CLEAN
    assert finding.summary == "2 GPUs at 0 MiB, no unprotected holder"
    assert finding.remedy == ""


@pytest.mark.parametrize(
    ("policy", "used", "expected"),
    [
        (POLICY, 1, Verdict.RESIDUE),
        (POLICY, 100, Verdict.RESIDUE),
        (POLICY, 101, Verdict.HELD_UNSEEN),
        (STRICT, 1, Verdict.HELD_UNSEEN),
        (STRICT, 0, Verdict.CLEAN),
        (ReclaimPolicy(residue_mib=0), 1, Verdict.HELD_UNSEEN),
        (ReclaimPolicy(residue_mib=500), 500, Verdict.RESIDUE),
    ],
)
def test_how_much_may_remain(policy: ReclaimPolicy, used: int, expected: Verdict) -> None:
    assert verdict(0, used, policy=policy) == expected


def test_only_wanted_gpus_count() -> None:
    assert verdict(20_000, 0, policy=ReclaimPolicy(gpus=[1])) == Verdict.CLEAN
    assert verdict(20_000, 0, policy=ReclaimPolicy(gpus=[0])) == Verdict.HELD_UNSEEN


def test_spared_processes_without_memory_do_not_stand_in_the_way() -> None:
    assert verdict(0, spared=[spared()]) == Verdict.CLEAN
    assert verdict(50, spared=[spared()]) == Verdict.RESIDUE


# The reading.


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ("nvidia-smi failed with exit status 9 (the NVIDIA driver ...)", Verdict.DRIVER_FAULT),
        ("nvidia-smi printed no GPU", Verdict.DRIVER_FAULT),
        ("nvidia-smi failed with exit status 124 (it did not answer in time): ", Verdict.UNKNOWN),
    ],
)
def test_a_reading_with_a_problem_is_never_believed(problem: str, expected: Verdict) -> None:
    after = reading(0, problem=problem)
    finding = decide(evidence(0, after=after))

    assert finding.verdict == expected
    assert problem in finding.summary
    assert finding.remedy


def test_a_gpu_that_is_gone_is_missing() -> None:
    finding = decide(evidence(0, 0, after=reading(0)))

    assert finding.verdict == Verdict.GPU_MISSING
    assert UUIDS[1] in finding.summary


def test_another_gpu_in_its_place_is_missing_too() -> None:
    other = GpuReading(gpus=[gpu(0), gpu(1, uuid=UUIDS[5])])

    assert verdict(0, 0, after=other) == Verdict.GPU_MISSING


@pytest.mark.parametrize(
    ("expected_gpus", "good"), [(None, True), (2, True), (1, False), (4, False)]
)
def test_as_many_gpus_as_expected(expected_gpus: int | None, good: bool) -> None:
    expected = Verdict.CLEAN if good else Verdict.GPU_MISSING

    assert verdict(0, 0, expected_gpus=expected_gpus) == expected


def test_a_wanted_gpu_that_is_not_there_is_missing() -> None:
    assert verdict(0, 0, policy=ReclaimPolicy(gpus=[0, 3])) == Verdict.GPU_MISSING


def test_no_gpu_at_all_is_never_clean() -> None:
    assert verdict() == Verdict.UNKNOWN
    assert verdict(expected_gpus=4) == Verdict.GPU_MISSING


@pytest.mark.parametrize("second", [gpu(0), gpu(1, uuid=UUIDS[0]), gpu(0, uuid=UUIDS[1])])
def test_a_gpu_listed_twice_is_never_clean(second: Gpu) -> None:
    both = GpuReading(gpus=[gpu(0), second])

    assert verdict(before=both, after=both) == Verdict.UNKNOWN
    assert verdict(before=both, after=both, expected_gpus=2) == Verdict.UNKNOWN


def test_a_fault_the_driver_reports_comes_before_memory() -> None:
    after = GpuReading(gpus=[gpu(0, None, note="memory.used reads [Unknown Error]"), gpu(1)])

    assert verdict(0, 0, after=after, holders=[HOLDER]) == Verdict.DRIVER_FAULT
    assert verdict(0, 0, after=after, policy=ReclaimPolicy(gpus=[1])) == Verdict.CLEAN


def test_memory_that_is_not_known_is_unknown() -> None:
    finding = decide(evidence(None, 0, holders=[HOLDER]))

    assert finding.verdict == Verdict.UNKNOWN
    assert "not known: GPU 0" in finding.summary


# Holders that are left.


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("D", Verdict.UNKILLABLE),
        ("S", Verdict.UNKILLABLE),
        ("ended", Verdict.UNKILLABLE),
        ("denied", Verdict.UNKNOWN),
        ("", Verdict.RESPAWNED),
    ],
)
@pytest.mark.parametrize("used", [0, 20_000])
def test_a_holder_that_is_left(outcome: str, expected: Verdict, used: int) -> None:
    rows = [ended(50, outcome)] if outcome else []
    finding = decide(evidence(used, holders=[HOLDER], ended=rows))

    assert finding.verdict == expected
    assert "sglang::scheduler (pid 50, unit sglang.service, state S)" in finding.summary
    assert finding.remedy


def test_where_in_the_kernel_it_waits_is_told() -> None:
    rows = [ended(50, "D", "nvidia_close"), ended(51, "D", "elsewhere"), ended(52, "ended", "0")]

    assert "waiting in nvidia_close" in decide(evidence(9, holders=[HOLDER], ended=rows)).summary
    assert "elsewhere" not in decide(evidence(9, holders=[HOLDER], ended=rows)).summary


def test_a_new_process_with_an_old_pid_has_come_back() -> None:
    again = HOLDER.model_copy(update={"start_time": 9999})
    finding = decide(evidence(9, holders=[again], ended=[ended(50, "ended")]))

    assert finding.verdict == Verdict.RESPAWNED
    assert "systemctl stop sglang.service" in finding.remedy


def test_who_starts_an_ownerless_holder_is_for_a_person_to_find() -> None:
    assert (
        "`ps -eo pid,ppid,lstart,args` shows it"
        in decide(evidence(9, holders=[process(50)])).remedy
    )


def test_one_that_will_not_die_outweighs_one_that_came_back() -> None:
    rows = [ended(50, "D"), ended(51, "denied")]

    assert verdict(9, holders=[process(52), HOLDER, process(51)], ended=rows) == Verdict.UNKILLABLE
    assert verdict(9, holders=[process(52), process(51)], ended=rows) == Verdict.UNKNOWN


# Memory without an unprotected holder.


def test_memory_held_in_another_guest() -> None:
    others = {"guest 130": ["python3 (pid 7 on the node)"]}
    finding = decide(
        evidence(900, other_guests=others, spared=[spared()], ended=[ended(outcome="D")])
    )

    assert finding.verdict == Verdict.HELD_BY_OTHER_GUEST
    assert "guest 130: python3 (pid 7 on the node)" in finding.summary
    assert "guest guest" not in finding.summary
    assert verdict(100, other_guests=others) == Verdict.RESIDUE


def test_memory_of_one_that_waits_in_the_kernel() -> None:
    finding = decide(evidence(900, ended=[ended(outcome="D", wchan="nv_close"), ended(51, "Z")]))

    assert finding.verdict == Verdict.UNKILLABLE
    assert "in nv_close" in finding.summary


@pytest.mark.parametrize("outcome", ["zombie", "Z"])
def test_memory_of_one_that_is_dead_but_not_gone(outcome: str) -> None:
    assert verdict(900, ended=[ended(outcome=outcome)], spared=[spared()]) == Verdict.ZOMBIE
    assert verdict(0, ended=[ended(outcome=outcome)]) == Verdict.CLEAN


@pytest.mark.parametrize(
    ("row", "listed", "policy", "expected"),
    [
        (spared(), [], POLICY, Verdict.HELD_BY_PROTECTED),
        (spared(), [app(0, 60, 900)], POLICY, Verdict.HELD_BY_PROTECTED),
        (spared(), [app(0, 60, None)], POLICY, Verdict.HELD_BY_PROTECTED),
        (spared(), [app(0, 60, 50)], POLICY, Verdict.HELD_UNSEEN),
        (spared(), [app(0, 60, 50)], STRICT, Verdict.HELD_BY_PROTECTED),
        (spared(), [app(0, 61, 900)], POLICY, Verdict.HELD_BY_PROTECTED),
        (spared(devices=[]), [app(0, 60, 900)], POLICY, Verdict.HELD_UNSEEN),
        (spared(idle=True), [], POLICY, Verdict.HELD_UNSEEN),
        (spared(idle=True), [app(0, 60, None)], POLICY, Verdict.HELD_UNSEEN),
        (spared(idle=True), [app(0, 60, 900)], POLICY, Verdict.HELD_BY_PROTECTED),
        (spared(name="Xorg"), [], POLICY, Verdict.HELD_BY_PROTECTED),
    ],
)
def test_memory_of_one_that_is_protected(
    row: Spared, listed: list[object], policy: ReclaimPolicy, expected: Verdict
) -> None:
    after = reading(900, apps=listed)  # type: ignore[arg-type]

    assert verdict(900, after=after, spared=[row], policy=policy) == expected


def test_memory_that_nobody_is_seen_to_hold() -> None:
    finding = decide(evidence(900, uninspected=3))

    assert finding.verdict == Verdict.HELD_UNSEEN
    assert "3 processes could not be looked into" in finding.summary
    assert "GPU 0: 900 MiB in use" in finding.summary


# Clues for whoever has to look.


def test_a_unit_of_the_host_that_runs_again_is_never_clean() -> None:
    again = {"sglang.service": ["sglang.timer", "gateway.service"]}
    finding = decide(evidence(0, running_again=again))

    assert finding.verdict == Verdict.RESPAWNED
    assert "sglang.service (perhaps by sglang.timer, gateway.service)" in finding.summary
    assert "systemctl stop gateway.service sglang.timer" in finding.remedy


def test_a_unit_that_somebody_started_by_hand_is_looked_for_in_the_journal() -> None:
    finding = decide(evidence(0, running_again={"sglang.service": []}))

    assert "`journalctl -u sglang.service` and `last`" in finding.remedy


def test_who_started_a_new_holder_is_named() -> None:
    finding = decide(evidence(9, holders=[process(50)], starters={50: "supervise (pid 7, none)"}))

    assert "started by supervise (pid 7, none)" in finding.summary


@pytest.mark.parametrize(
    ("process_state", "expected"), [("D", Verdict.UNKILLABLE), ("Z", Verdict.ZOMBIE)]
)
def test_one_that_was_undead_before_we_came(process_state: str, expected: Verdict) -> None:
    undead = [process(50, holds=False, state=process_state, ppid=7)]
    finding = decide(evidence(900, undead=undead))

    assert finding.verdict == expected
    assert "sglang::scheduler (pid 50)" in finding.summary
    assert verdict(0, undead=undead) == Verdict.CLEAN
    assert "pid 7" in finding.remedy or expected == Verdict.UNKILLABLE


def test_pids_that_mean_nobody_here_are_told() -> None:
    finding = decide(evidence(900, strangers=["pid 7001, which is not here"], inside=["x (pid 9)"]))

    assert finding.verdict == Verdict.HELD_UNSEEN
    assert "nvidia-smi lists pid 7001, which is not here" in finding.summary
    assert "the node sees x (pid 9) in this guest" in finding.summary


@pytest.mark.parametrize(
    ("driver", "mig", "word"),
    [
        ("470.256.02", False, "drivers before 510"),
        ("418.40.04", False, "drivers before 510"),
        ("510.39.01", False, "Proxmox node"),
        ("590.48.01", False, "Proxmox node"),
        ("590.48.01", True, "MIG instances"),
        ("", False, "Proxmox node"),
        ("[N/A]", False, "Proxmox node"),
    ],
)
def test_what_memory_in_use_means_depends_on_driver_and_mode(
    driver: str, mig: bool, word: str
) -> None:
    finding = decide(evidence(400, driver=driver, mig=mig))

    assert finding.verdict == Verdict.HELD_UNSEEN
    assert word in finding.remedy


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (["/dev/nvidia0 (fd)"], Verdict.HELD_BY_PROTECTED),
        (["/dev/nvidia12 (map)"], Verdict.HELD_BY_PROTECTED),
        (["/dev/nvidia0 (deleted) (fd)"], Verdict.HELD_BY_PROTECTED),
        (["/dev/nvidiactl (fd)", "/dev/nvidia-uvm (fd)"], Verdict.HELD_UNSEEN),
        (["/dev/nvidia-caps/nvidia-cap1 (fd)"], Verdict.HELD_UNSEEN),
    ],
)
def test_without_a_gpus_own_node_nobody_has_memory(devices: list[str], expected: Verdict) -> None:
    assert verdict(900, spared=[spared(devices=devices)]) == expected


def test_memory_on_unwanted_gpus_makes_nobody_guilty() -> None:
    """Of a protected process, only the memory on wanted GPUs counts."""
    after = reading(900, 50_000, apps=[app(1, 60, 50_000), app(0, 60, 20)])
    policy = ReclaimPolicy(gpus=[0])

    assert verdict(0, 0, before=after, after=after, spared=[spared()], policy=policy) == (
        Verdict.HELD_UNSEEN
    )


# What is certain before anything is touched.


@pytest.mark.parametrize(
    ("row", "listed", "refused"),
    [
        (spared(), [app(0, 60, 900)], True),
        (spared(), [app(0, 60, 90)], False),
        (spared(), [app(0, 60, None)], False),
        (spared(), [], False),
        (spared(by_command=True), [app(0, 60, 900)], False),
        (spared(devices=[]), [app(0, 60, 900)], False),
        (spared(straddles=True), [], True),
    ],
)
def test_a_reclaim_in_vain_is_refused_first(
    row: Spared, listed: list[object], refused: bool
) -> None:
    after = reading(900, apps=listed)  # type: ignore[arg-type]
    finding = hopeless(evidence(900, before=after, after=after, spared=[row]))

    assert (finding is not None) == refused
    assert finding is None or finding.verdict == Verdict.HELD_BY_PROTECTED


def test_the_remedy_has_the_command_that_stops_it() -> None:
    row = spared(command="docker stop 0f0f")
    finding = decide(evidence(900, spared=[row]))

    assert finding.remedy == (
        "stop it yourself if it may be stopped: docker stop 0f0f, then run this again"
    )


# Errors.


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (errors.IdentityMismatch, Verdict.IDENTITY_MISMATCH),
        (errors.GuestLocked, Verdict.GUEST_LOCKED),
        (errors.GuestStopped, Verdict.GUEST_STOPPED),
        (errors.Unreachable, Verdict.UNREACHABLE),
        (errors.HostKeyRefused, Verdict.UNREACHABLE),
        (errors.AccessRefused, Verdict.UNREACHABLE),
        (errors.LinkLost, Verdict.UNKNOWN),
        (errors.TimedOut, Verdict.UNKNOWN),
        (errors.Incomplete, Verdict.UNKNOWN),
        (errors.BadAnswer, Verdict.UNKNOWN),
        (errors.CommandFailed, Verdict.UNKNOWN),
        (errors.CameBack, Verdict.RESPAWNED),
        (errors.GuestRefused, Verdict.UNKNOWN),
    ],
)
def test_the_verdict_of_an_error(kind: type[errors.GpuReclaimError], expected: Verdict) -> None:
    finding = of_error(kind("it broke"))

    assert finding.verdict == expected
    assert finding.verdict not in GOOD_VERDICTS
    assert finding.summary == "it broke"
    assert finding.remedy
    assert of_error(kind("x", remedy="mend it")).remedy == "mend it"


# A walk over evidence.


def any_gpu(chance: random.Random, index: int) -> Gpu:
    used = chance.choice([0, 0, 0, 0, 1, 50, 101, 30_000, None])
    note = "memory.used reads ERR!" if used is None and chance.random() < 0.3 else ""
    identity = UUIDS[index if chance.random() < 0.95 else 5]
    return gpu(index, used, note=note, uuid=identity)


def any_evidence(chance: random.Random) -> Evidence:
    count = chance.choice([0, 1, 2, 2, 4])
    before = [gpu(index, 500) for index in range(count)]
    after = [any_gpu(chance, index) for index in range(count) if chance.random() < 0.95]
    if after and chance.random() < 0.05:
        after.append(after[0])
    outcomes = ["ended", "gone", "D", "S", "denied", "zombie", "changed"]
    some = [
        process(50 + n, state=chance.choice("SDRZ")) for n in range(chance.choice([0, 0, 0, 1, 2]))
    ]
    return Evidence(
        policy=ReclaimPolicy(
            gpus=chance.choice([[], [], [], [0], [1, 3]]),
            strict_zero=chance.random() < 0.3,
            residue_mib=chance.choice([0, 100, 500]),
        ),
        before=GpuReading(gpus=before),
        after=GpuReading(gpus=after, problem=chance.choice([""] * 9 + ["it broke"])),
        expected_gpus=chance.choice([None, None, count, count + 1]),
        holders=some,
        spared=[spared(60 + n) for n in range(chance.choice([0, 0, 1]))],
        ended=[ended(50 + n, chance.choice(outcomes)) for n in range(chance.choice([0, 0, 1, 2]))],
        uninspected=chance.choice([0, 0, 3]),
        other_guests=chance.choice([{}, {}, {"guest 130": ["x (pid 1 on the node)"]}]),
    )


def proven(e: Evidence) -> bool:
    """Said anew, from the contract: every expected GPU was read, and nobody unprotected holds."""
    rows = e.after.gpus
    seen = [row.uuid for row in rows]
    indexes = [row.index for row in rows]
    return all(
        [
            not e.after.problem,
            len(rows) > 0,
            len(set(seen)) == len(seen),
            len(set(indexes)) == len(indexes),
            {row.uuid for row in e.before.gpus} <= set(seen),
            e.expected_gpus in (None, len(rows)),
            set(e.policy.gpus) <= set(indexes),
            not e.holders,
        ]
    )


def test_clean_is_said_only_when_everything_is_proven() -> None:
    chance = random.Random(129)
    said: dict[Verdict, int] = {}
    for _ in range(8_000):
        e = any_evidence(chance)
        finding = decide(e)
        said[finding.verdict] = said.get(finding.verdict, 0) + 1
        wanted = [x for x in e.after.gpus if not e.policy.gpus or x.index in e.policy.gpus]
        memory = [x.memory_used_mib for x in wanted]
        limit = 0 if e.policy.strict_zero else e.policy.residue_mib
        known = [mib for mib in memory if mib is not None]

        clean = proven(e) and len(known) == len(memory) and not any(known)
        free = proven(e) and len(known) == len(memory) and max(known, default=0) <= limit
        assert (finding.verdict == Verdict.CLEAN) == clean, e
        assert (finding.verdict in GOOD_VERDICTS) == free, e
        assert finding.summary
        assert bool(finding.remedy) == (finding.verdict not in GOOD_VERDICTS)

    reached = set(said)
    never_by_evidence = {
        Verdict.PLANNED,
        Verdict.IDENTITY_MISMATCH,
        Verdict.GUEST_LOCKED,
        Verdict.GUEST_STOPPED,
        Verdict.UNREACHABLE,
    }
    assert reached == set(Verdict) - never_by_evidence
    assert min(said.values()) > 10, said
