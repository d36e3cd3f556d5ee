"""The watch beside a stage, over a host in memory: signs of life, and who else comes."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any

import pytest

from gpu_reclaim.commands import Script
from gpu_reclaim.errors import HoldLost, Intruded, Unreachable
from gpu_reclaim.keeper import Keeper
from gpu_reclaim.models import Intruder, Process, ReclaimPolicy
from gpu_reclaim.restoring import STAGE, STAGE_COMMAND
from gpu_reclaim.session import Session
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.local import Family
from gpu_reclaim.transport.scripted import ScriptedTransport
from unit.scenery import LEASE, NAMESPACE, Host, Scene, Unit, scene
from unit.values import process, said

SGLANG = "sglang.service"
KEEP, WATCH = "keep the hold", "watch"
POLICY = ReclaimPolicy(hold_minutes=5)
NOBODY = Family("", "", ())


class Counted(ScriptedTransport):
    """Counts how often it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


@dataclass
class Watch:
    """A keeper, the host it keeps, and what it told."""

    taken: Scene
    policy: ReclaimPolicy = POLICY
    told: list[Intruder] = field(default_factory=list)
    ways: list[Counted] = field(default_factory=list)
    me: Family = NOBODY

    def __post_init__(self) -> None:
        self.keeper = Keeper(self.taken.session, self.reopen, self.policy, self.told.append)

    def reopen(self) -> Session:
        way = Counted(self.taken.host.answer, name="ssh root@llm")
        self.ways.append(way)
        clock = self.taken.clock
        # As a block makes it: of the session that took the host it knows nothing.
        return Session(
            "llm", Links(way), units=["sglang"], me=self.me, clock=clock.read, sleep=clock.sleep
        )

    @property
    def asked(self) -> list[Script]:
        return [script for way in self.ways for script in way.asked]

    @property
    def names(self) -> list[str]:
        return [script.name for script in self.asked]

    def beat_after(self, seconds: float) -> None:
        self.taken.clock.now += seconds
        self.keeper.beat()


def watch(*processes: Process, policy: ReclaimPolicy = POLICY, **more: Any) -> Watch:
    """A host whose unit is held and stopped; its GPUs are free but for those processes."""
    host = Host(
        used=[0, 0],
        processes=list(processes),
        units={SGLANG: Unit(active="inactive")},
        memory={x.pid: (int(x.devices[0][11]), 900) for x in processes if x.devices},
    )
    taken = scene(host, units=["sglang"], **more)
    taken.session.token, taken.session.held, taken.session.locked = "t-of-ours", [SGLANG], True
    return Watch(taken, policy)


def titled(pid: int, title: str, **more: Any) -> Process:
    return process(pid, name=title, command_line=title, **more)


def cut(script: Script) -> None:
    raise Unreachable("ssh: no answer")


def whole(script: Script) -> None:
    pass


# Signs of life.


def test_a_beat_renews_the_hold_with_the_claim_of_who_took_it() -> None:
    made = watch()
    made.keeper.beat()
    made.beat_after(5)

    assert made.names == [KEEP, WATCH] * 2
    text = made.asked[0].sections["hold"]
    assert "TOKEN=t-of-ours\n" in text
    assert "TTL=300\n" in text
    # One connection, and not that of the session that took it: it belongs to another thread.
    assert len(made.ways) == 1
    assert made.taken.direct.asked == []


@pytest.mark.parametrize(("minutes", "every_s"), [(5, 5), (0.1, 1.5), (60, 5)])
def test_beats_are_close_enough_for_the_hold(minutes: float, every_s: float) -> None:
    made = watch(policy=ReclaimPolicy(hold_minutes=minutes))

    assert made.keeper.every_s == pytest.approx(every_s)


def test_a_hold_that_is_no_longer_ours_is_lost() -> None:
    made = watch()
    made.taken.host.holds[KEEP] = f"{LEASE}status lost\n"
    with pytest.raises(HoldLost, match="no longer ours") as caught:
        made.keeper.beat()

    assert caught.value.remedy


def test_a_host_that_is_away_for_a_while_is_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    made = watch()
    made.keeper.beat()
    made.taken.host.hook = cut
    with caplog.at_level(logging.INFO, "gpu_reclaim"):
        for _ in range(3):
            made.beat_after(70)
        made.taken.host.hook = whole
        made.beat_after(10)
        made.beat_after(200)

    lines = said(caplog)
    assert [x for x in lines if "not watched" in x] == [
        "llm: the hold is not watched: ssh: no answer"
    ]
    assert lines.count("llm: looked at again") == 1
    assert made.told == []


@pytest.mark.parametrize(("silent_s", "lost"), [(224, False), (226, True)])
def test_a_host_that_is_away_for_three_quarters_of_the_hold_is_lost(
    silent_s: float, lost: bool
) -> None:
    made = watch()
    made.keeper.beat()
    made.taken.host.hook = cut
    if lost:
        with pytest.raises(HoldLost, match="could not be reached for 226 s") as caught:
            made.beat_after(silent_s)
        assert "ssh: no answer" in caught.value.remedy
    else:
        made.beat_after(silent_s)


def test_the_time_counts_from_the_beginning_of_the_last_sign_that_arrived() -> None:
    made = watch()

    def slow(script: Script) -> None:
        made.taken.clock.now += 50

    made.taken.host.hook = slow
    made.keeper.beat()  # renewed at most 100 s ago, when it ends
    made.taken.host.hook = cut
    with pytest.raises(HoldLost, match="for 230 s"):
        made.beat_after(130)


def test_a_host_that_was_never_reached_counts_from_the_taking() -> None:
    made = watch()
    made.taken.host.hook = cut
    made.beat_after(200)
    with pytest.raises(HoldLost):
        made.beat_after(30)


def test_every_sign_that_arrives_begins_the_count_anew() -> None:
    made = watch()
    made.beat_after(200)
    made.taken.host.hook = cut
    made.beat_after(200)
    with pytest.raises(HoldLost, match="for 230 s"):
        made.beat_after(30)


def test_a_broken_connection_is_made_anew() -> None:
    made = watch()
    made.keeper.beat()
    made.taken.host.hook = cut
    made.beat_after(5)
    made.taken.host.hook = whole
    made.beat_after(5)

    assert [way.closed for way in made.ways] == [1, 0]
    assert made.ways[1].asked[0].sections["hold"].count("TOKEN=t-of-ours\n") == 1


def test_an_answer_that_makes_no_sense_is_asked_for_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One odd answer ends no stage of four hours; without a sign of life it is lost in the end."""
    made = watch()
    made.taken.host.holds[KEEP] = "nonsense\n"
    made.keeper.beat()
    assert "the hold is not watched" in said(caplog)[-1]
    with pytest.raises(HoldLost, match="for 226 s"):
        made.beat_after(226)


def test_closing_closes_its_own_connection_alone_and_twice_is_fine() -> None:
    made = watch()
    made.keeper.close()
    made.keeper.beat()
    made.keeper.close()
    made.keeper.close()

    assert [way.closed for way in made.ways] == [1]


def test_a_transient_unit_that_is_gone_since_it_was_stopped_is_no_error() -> None:
    """systemd forgets it; the session that took the host knew it."""
    made = watch()
    del made.taken.host.units[SGLANG]
    made.taken.session.known_units = {SGLANG}
    made.keeper.beat()

    assert made.told == []


# Who else comes.


def test_an_intruder_is_named_once() -> None:
    made = watch(titled(60, "train.py", cgroups=["/user.slice/session-3.scope"]))
    made.keeper.beat()
    made.beat_after(5)

    assert [str(x) for x in made.told] == [
        "train.py (pid 60, session session-3, /dev/nvidia0 (fd))"
    ]
    assert made.told[0].start_time == 600
    made.taken.host.processes.append(titled(61, "eval.py"))
    made.beat_after(5)
    assert [x.pid for x in made.told] == [60, 61]


def test_another_process_with_the_same_pid_is_another_intruder() -> None:
    made = watch(titled(60, "train.py"))
    made.keeper.beat()
    made.taken.host.processes = [titled(60, "train.py", start_time=999)]
    made.keeper.beat()

    assert [x.start_time for x in made.told] == [600, 999]


@pytest.mark.parametrize(
    "innocent",
    [
        process(60, cgroups=["/gpureclaim.slice/run-u5.scope"]),
        process(60, cgroups=["/gpureclaim.slice"]),
        process(60, exe="/usr/bin/nvidia-persistenced", comm="nvidia-persiste"),
        process(60, holds=False),
        process(60, holds=False, unit=SGLANG),
        process(60, cgroups=["/lxc/130/ns/system.slice/x.service"]),
    ],
    ids=["stage", "stage itself", "protected", "no GPU", "left of the unit", "another guest"],
)
def test_who_is_no_intruder(innocent: Process) -> None:
    made = watch(innocent)
    made.keeper.beat()

    assert made.told == []


@pytest.mark.parametrize("group", ["/gpureclaim.slicer/x.scope", "/x-gpureclaim.slice/y.scope"])
def test_a_group_that_only_begins_like_the_stages_is_not_the_stages(group: str) -> None:
    made = watch(process(60, cgroups=[group]))
    made.keeper.beat()

    assert [x.pid for x in made.told] == [60]


def test_whom_host_or_policy_protect_is_no_intruder() -> None:
    policy = ReclaimPolicy(hold_minutes=5, protect=["watchman"])
    people = [titled(60, "guard"), titled(61, "watchman"), titled(62, "thief")]
    made = watch(*people, policy=policy, protect=["guard"])
    made.keeper.beat()

    assert [x.name for x in made.told] == ["thief"]


def test_whom_the_policy_matches_is_no_intruder_as_long_as_he_holds_no_gpu() -> None:
    policy = ReclaimPolicy(hold_minutes=5, match=["agent"])
    made = watch(titled(60, "agent.py", holds=False), policy=policy)
    made.keeper.beat()

    assert made.told == []


def test_a_held_unit_that_runs_is_an_intruder() -> None:
    made = watch()
    made.taken.host.units[SGLANG].active = "active"
    made.keeper.beat()
    made.keeper.beat()

    assert [str(x) for x in made.told] == [f"unit {SGLANG}, which runs although it is held"]


def test_a_unit_that_is_not_held_may_run() -> None:
    made = watch()
    made.taken.session.held = []
    made.taken.host.units[SGLANG].active = "active"
    made.keeper.beat()

    assert made.told == []


def test_an_intruder_fails_the_stage_where_the_policy_says_so() -> None:
    policy = ReclaimPolicy(hold_minutes=5, on_intruder="fail")
    made = watch(titled(60, "train.py"), policy=policy)
    with pytest.raises(Intruded, match=r"train\.py \(pid 60") as caught:
        made.keeper.beat()

    assert "systemd-run --quiet --scope --collect --slice=gpureclaim.slice`" in caught.value.remedy
    assert [x.pid for x in made.told] == [60]


def test_with_some_gpus_wanted_only_those_are_watched() -> None:
    other = titled(61, "theirs", devices=["/dev/nvidia1 (fd)"])
    policy = ReclaimPolicy(hold_minutes=5, gpus=[0])
    made = watch(titled(60, "thief"), other, policy=policy)
    made.keeper.beat()

    assert [x.name for x in made.told] == ["thief"]


# On this very machine.

ME = 800
"""The stage's own process, where it is on that machine."""


def on_this_machine(made: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker runs where the GPUs are."""
    monkeypatch.setattr(os, "getpid", lambda: ME)
    made.me = Family("the-boot", NAMESPACE, (ME, 1))
    made.taken.host.scanned = "boot the-boot\n"


def test_what_the_stage_started_itself_is_no_intruder_on_the_same_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = titled(59, "sh", holds=False, ppid=ME)
    made = watch(shell, titled(60, "tune.py", ppid=59), titled(61, "thief"))
    on_this_machine(made, monkeypatch)
    made.keeper.beat()
    made.keeper.beat()

    assert [x.name for x in made.told] == ["thief"]
    # Once it is known, everybody is described with the first look.
    assert made.names == [KEEP, WATCH, WATCH, KEEP, WATCH]


def test_a_pid_that_is_ours_by_chance_on_another_machine_makes_nobody_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker in a container has a small pid, as have the first processes of a guest."""
    made = watch(titled(60, "thief", ppid=ME))
    monkeypatch.setattr(os, "getpid", lambda: ME)
    made.me = Family("another-boot", NAMESPACE, (ME, 1))
    made.taken.host.scanned = f"boot the-boot\nself {ME}\n"
    made.keeper.beat()

    assert [x.name for x in made.told] == ["thief"]


def test_parents_in_a_circle_are_no_endless_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pids are used again while the list is read."""
    made = watch(process(60, ppid=61), process(61, ppid=60, holds=False))
    on_this_machine(made, monkeypatch)
    made.keeper.beat()

    assert [x.pid for x in made.told] == [60]


def test_the_stages_command_is_of_the_slice_that_is_ended() -> None:
    assert f"--slice={STAGE}" in STAGE_COMMAND
