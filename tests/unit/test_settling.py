"""Waiting for free GPUs, and the last look, on a clock that only sleeping moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from gpu_reclaim.commands import Script
from gpu_reclaim.errors import GpuReclaimError, LinkLost, Unreachable
from gpu_reclaim.models import Process, ReclaimPolicy, Sample, Settled
from gpu_reclaim.settling import MAX_PAUSE_S, settle
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.scripted import Answer, ScriptedTransport
from gpu_reclaim.verifying import verify
from unit.scenery import Host, Scene, scan_text, scene
from unit.values import process

POLICY = ReclaimPolicy()


def playing(host: Host, steps: Sequence[Callable[[], None]]) -> Host:
    """Before each look one step is taken; the last one is repeated."""
    rest: Iterator[Callable[[], None]] = iter(steps)
    last = [steps[-1]]

    def hook(_: Script) -> None:
        last[0] = next(rest, last[0])
        last[0]()

    host.hook = hook
    return host


def memory(*readings: int | str) -> Host:
    """One GPU that reads so, a reading after the other; the last one stays."""
    host = Host()

    def show(value: int | str) -> Callable[[], None]:
        return lambda: host.used.__setitem__(0, value)

    return playing(host, [show(value) for value in readings])


def seen(settled: Settled) -> list[int | None]:
    return [sample.memory_mib[0] for sample in settled.samples]


def run(host: Host, policy: ReclaimPolicy = POLICY) -> tuple[Settled, Scene]:
    stage = scene(host)
    return settle(stage.session, policy), stage


# Free.


def test_free_gpus_are_confirmed_by_three_readings_within_a_moment() -> None:
    settled, stage = run(memory(0))

    assert settled.free
    assert settled.reason == "free"
    assert seen(settled) == [0, 0, 0]
    assert sum(stage.clock.sleeps) <= 0.1
    assert settled.step.via == "ssh root@llm"
    assert settled.step.seconds == pytest.approx(sum(stage.clock.sleeps))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_as_many_readings_must_agree_as_the_policy_says(count: int) -> None:
    settled, _ = run(memory(0), ReclaimPolicy(stable_samples=count))

    assert settled.free
    assert len(settled.samples) == count


def test_memory_that_is_released_late_is_waited_for() -> None:
    settled, stage = run(memory(*[30_000] * 12, 0))

    assert settled.free
    assert seen(settled) == [30_000] * 12 + [0, 0, 0]
    assert max(stage.clock.sleeps) <= MAX_PAUSE_S
    assert stage.clock.sleeps[:11] == sorted(stage.clock.sleeps[:11])


def test_memory_that_is_never_released_ends_at_the_time_limit() -> None:
    settled, stage = run(memory(30_000), ReclaimPolicy(settle_timeout_s=20))

    assert not settled.free
    assert settled.reason == "time limit"
    assert stage.clock.now - 1000 == pytest.approx(20)
    assert max(stage.clock.sleeps) <= MAX_PAUSE_S


def test_memory_that_comes_and_goes_is_not_free() -> None:
    settled, _ = run(memory(*[0, 0, 900] * 200), ReclaimPolicy(settle_timeout_s=20))

    assert not settled.free
    assert settled.reason == "time limit"


def test_two_free_readings_of_three_before_a_busy_one_do_not_add_up() -> None:
    settled, _ = run(memory(0, 0, 900, 0))

    assert settled.free
    assert seen(settled) == [0, 0, 900, 0, 0, 0]


def test_without_time_one_reading_is_taken_and_is_no_proof() -> None:
    settled, stage = run(memory(0), ReclaimPolicy(settle_timeout_s=0))

    assert not settled.free
    assert settled.reason == "time limit"
    assert len(settled.samples) == 1
    assert stage.clock.sleeps == []
    assert run(memory(0), ReclaimPolicy(settle_timeout_s=0, stable_samples=1))[0].free


# Residue.


def test_a_residue_that_still_drains_is_waited_for_slowly() -> None:
    settled, stage = run(memory(900, 90, 60, 30, 10))

    assert settled.free
    assert seen(settled) == [900, 90, 60, 30, 10, 10, 10]
    assert set(stage.clock.sleeps[1:]) == {MAX_PAUSE_S}


def test_a_residue_that_stays_is_free_within_the_limit() -> None:
    assert seen(run(memory(100))[0]) == [100] * 3
    assert not run(memory(101), ReclaimPolicy(settle_timeout_s=5))[0].free


def test_with_strict_zero_a_residue_is_not_free() -> None:
    policy = ReclaimPolicy(strict_zero=True, settle_timeout_s=5)

    assert not run(memory(1), policy)[0].free
    assert run(memory(1, 1, 1, 1, 0), policy)[0].free


# What waiting does not help.


@pytest.mark.parametrize("value", ["[N/A]", "[Unknown Error]", "ERR!", "[GPU is lost]"])
def test_memory_that_cannot_be_read_is_never_free_and_ends_early(value: str) -> None:
    settled, stage = run(memory(value))

    assert not settled.free
    assert len(settled.samples) == 3
    assert stage.clock.now < 1001
    assert seen(settled) == [None] * 3


def test_an_nvidia_smi_that_keeps_failing_ends_early_with_its_words() -> None:
    host = memory(0)
    host.smi_code = 9
    settled, stage = run(host)

    assert not settled.free
    assert "exit status 9" in settled.reason
    assert stage.clock.now < 1001


def test_an_nvidia_smi_that_fails_twice_only_is_asked_again() -> None:
    host = Host()
    codes = iter([9, 9])

    def hook(_: Script) -> None:
        host.smi_code = next(codes, 0)

    host.hook = hook
    settled, _ = run(host)

    assert settled.free
    assert len(settled.samples) == 5


def test_no_wanted_gpu_in_the_reading_is_never_free() -> None:
    settled, _ = run(Host(used=[0]), ReclaimPolicy(gpus=[3]))

    assert not settled.free


def holding(state: str = "S", exe: str = "/opt/llm") -> Host:
    return Host(used=[0], processes=[process(50, state=state, exe=exe)])


def test_a_holder_that_stays_ends_the_wait_early() -> None:
    settled, stage = run(holding())

    assert not settled.free
    assert settled.reason == "still held"
    assert len(settled.samples) == 3
    assert stage.clock.now < 1005
    assert "sglang::scheduler (pid 50" in settled.samples[-1].holders[0]


def test_a_holder_that_is_ending_is_given_a_moment() -> None:
    host = holding()
    settled, _ = run(playing(host, [lambda: None, lambda: None, lambda: host.gone(50)]))

    assert settled.free
    assert [len(sample.holders) for sample in settled.samples] == [1, 1, 0, 0, 0]


def test_a_holder_that_waits_for_the_kernel_is_waited_for() -> None:
    settled, stage = run(holding("D"), ReclaimPolicy(settle_timeout_s=30))

    assert not settled.free
    assert settled.reason == "time limit"
    assert stage.clock.now - 1000 == pytest.approx(30)


def test_one_that_waits_for_the_kernel_does_not_excuse_another() -> None:
    host = holding("D")
    host.processes.append(process(51, state="S"))

    assert run(host)[0].reason == "still held"


def test_a_protected_holder_does_not_keep_the_gpus_from_being_free() -> None:
    settled, _ = run(holding(exe="/usr/bin/nvidia-persistenced"))

    assert settled.free
    assert settled.samples[0].holders == []


def test_the_hosts_own_protection_counts_too() -> None:
    stage = scene(holding(), protect=["sglang::*"])

    assert settle(stage.session, POLICY).free


def test_only_wanted_gpus_and_their_processes_are_waited_for() -> None:
    host = Host(
        used=[30_000, 0],
        processes=[process(50), process(51)],
        memory={50: (0, 30_000)},
    )
    settled, stage = run(host, ReclaimPolicy(gpus=[1]))

    assert settled.free
    assert settled.samples[0].memory_mib == {1: 0}
    assert "apps" in stage.direct.asked[0].sections


def test_samples_are_told_as_they_come() -> None:
    told: list[Sample] = []
    settled = settle(scene(memory(5, 0)).session, POLICY, told.append)

    assert told == settled.samples


def test_a_lost_link_ends_the_wait_as_an_error() -> None:
    def lose(_: Script) -> None:
        raise LinkLost("ssh: gone")

    with pytest.raises(LinkLost):
        run(Host(hook=lose))


def test_no_reading_writes_anything() -> None:
    assert run(memory(900, 0))[1].writes == []


# The last look.


def node_with(*processes: Process, error: GpuReclaimError | None = None) -> ScriptedTransport:
    def answer(_: Script) -> Answer:
        return error or {"processes": scan_text(list(processes))}

    return ScriptedTransport(answer, name="ssh root@pve")


def look_last(host: Host, node: ScriptedTransport, policy: ReclaimPolicy = POLICY) -> Scene:
    direct = ScriptedTransport(host.answer, name="ssh root@llm")
    made = scene(host, links=Links(direct=direct, node=node), vmid=129)
    made.direct = direct
    made.session.expected_gpus = None
    return made


OURS = process(70, cgroups=["/lxc/129/ns/system.slice/sglang.service"])
THEIRS = process(71, cgroups=["/lxc/130/ns/init.scope"])
NODES_OWN = process(72, name="x.py", command_line="x.py", cgroups=["/system.slice/x.service"])


def test_zero_memory_needs_one_look_and_no_node() -> None:
    node = node_with(THEIRS)
    stage = look_last(Host(used=[0, 0]), node)
    survey = verify(stage.session, POLICY)

    assert stage.asked == ["verify_nvidia_smi"]
    assert node.asked == []
    assert survey.other_guests == {}


def test_memory_without_holder_is_looked_for_on_the_node() -> None:
    node = node_with(OURS, THEIRS, NODES_OWN)
    survey = verify(look_last(Host(used=[900]), node).session, POLICY)

    assert survey.other_guests == {
        "guest 130": ["sglang::scheduler (pid 71 on the node)"],
        "the node itself": ["x.py (pid 72 on the node)"],
    }
    assert [script.writes for script in node.asked] == [False]


def test_memory_with_a_holder_in_sight_needs_no_node() -> None:
    node = node_with(THEIRS)
    stage = look_last(Host(used=[900], processes=[process(50)]), node)
    survey = verify(stage.session, POLICY)

    assert node.asked == []
    assert survey.other_guests == {}
    assert "apps" in stage.direct.asked[-1].sections


def test_driver_services_of_the_node_are_no_suspects() -> None:
    node = node_with(
        process(73, exe="/usr/bin/nvidia-persistenced", cgroups=["/system.slice/a.service"])
    )

    assert verify(look_last(Host(used=[900]), node).session, POLICY).other_guests == {}


@pytest.mark.parametrize("error", [Unreachable("pve: away"), LinkLost("pve: lost")])
def test_a_node_that_cannot_be_asked_leaves_the_question_open(error: GpuReclaimError) -> None:
    survey = verify(look_last(Host(used=[900]), node_with(error=error)).session, POLICY)

    assert survey.other_guests == {}
    assert survey.reading.gpus[0].memory_used_mib == 900


def test_a_node_whose_answer_makes_no_sense_leaves_the_question_open() -> None:
    node = ScriptedTransport(lambda _: {"processes": "x"}, name="ssh root@pve")

    assert verify(look_last(Host(used=[900]), node).session, POLICY).other_guests == {}


def test_without_a_node_nothing_is_asked_elsewhere() -> None:
    stage = scene(Host(used=[900]))

    assert verify(stage.session, POLICY).other_guests == {}
