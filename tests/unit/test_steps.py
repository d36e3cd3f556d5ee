"""The verbs, over a host in memory: what is asked, what is written, and what happens in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from gpu_reclaim.commands import Script, Section
from gpu_reclaim.errors import (
    AccessRefused,
    BadAnswer,
    BadInput,
    CommandFailed,
    GpuReclaimError,
    GuestLocked,
    GuestStopped,
    HostKeyRefused,
    IdentityMismatch,
    LinkLost,
    TimedOut,
    UnknownUnit,
    Unreachable,
)
from gpu_reclaim.models import Outcome, ReclaimPolicy, StoppedUnit, Survey
from gpu_reclaim.releasing import fuser_release, proxmox_exec_kill
from gpu_reclaim.session import Session, look
from gpu_reclaim.steps import survey
from gpu_reclaim.stopping import stop_systemd
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.scripted import Answer, ScriptedTransport
from unit.scenery import NAMESPACE, Host, Scene, Unit, scene
from unit.values import process

POLICY = ReclaimPolicy()
SGLANG = "sglang.service"


def server(**more: object) -> Host:
    """A server with a worker that holds GPU 0, and one that holds nothing."""
    host = Host(
        used=[30_000],
        processes=[process(50, unit=SGLANG), process(51, unit=SGLANG, holds=False)],
        units={SGLANG: Unit()},
        memory={50: (0, 30_000)},
    )
    for name, value in more.items():
        setattr(host, name, value)
    return host


def served(host: Host | None = None, *, protect: Sequence[str] = ()) -> Scene:
    return scene(host or server(), units=["sglang"], protect=protect)


def failing(name: str, error: GpuReclaimError, *, after: bool = False) -> Callable[[Host], None]:
    """A hook that breaks the first script of that name, before or after it did its work."""

    def install(host: Host) -> None:
        left = [error]

        def hook(script: Script) -> None:
            if script.name.startswith(name) and left:
                broken = left.pop()
                if after:
                    host.carry_out(script)
                raise broken

        host.hook = hook

    return install


def ended(outcome: Outcome) -> list[tuple[int, str]]:
    return [(row.pid, row.outcome) for row in outcome.ended]


# Survey.


def test_a_survey_reads_everything_in_one_script_that_writes_nothing() -> None:
    stage = served()
    found = survey(stage.session, POLICY)
    (script,) = stage.direct.asked

    assert set(script.sections) == {"identity", "processes", "gpus", "apps", "units", "lease"}
    assert (script.writes, script.together) == (False, True)
    assert (found.hostname, found.machine_id) == ("llm", "a1b2")
    assert [gpu.memory_used_mib for gpu in found.reading.gpus] == [30_000]
    assert [app.pid for app in found.reading.apps] == [50]
    assert [unit.name for unit in found.units] == [SGLANG]
    assert [holder.pid for holder in found.table.holders] == [50]
    assert found.table.pid_namespace == NAMESPACE
    assert (found.step.name, found.step.via) == ("survey", "ssh root@llm")


def test_everybody_is_described_only_when_somebody_is_to_be_matched() -> None:
    stage = served()
    survey(stage.session, POLICY)
    survey(stage.session, ReclaimPolicy(match=["x"]))
    first, second = (script.sections["processes"] for script in stage.direct.asked)

    assert "pids=$(printf" not in first
    assert "pids=$(printf" in second


def test_a_gpu_that_is_not_there_is_bad_input() -> None:
    with pytest.raises(BadInput, match="there is no GPU 3"):
        survey(served().session, ReclaimPolicy(gpus=[0, 3]))


def test_a_failing_nvidia_smi_does_not_make_the_gpus_wrong() -> None:
    found = survey(served(server(smi_code=9)).session, ReclaimPolicy(gpus=[3]))

    assert "exit status 9" in found.reading.problem


def test_a_unit_that_systemd_does_not_know_is_named() -> None:
    stage = scene(server(), units=["sglang", "sglagn"])
    with pytest.raises(UnknownUnit, match=r"no unit sglagn\.service"):
        survey(stage.session, POLICY)


@pytest.mark.parametrize("unit", ["nvidia-persistenced", "dcgm", "ssh.socket", "systemd-logind"])
def test_a_unit_that_is_never_stopped_is_refused(unit: str) -> None:
    name = unit if "." in unit else f"{unit}.service"
    stage = scene(server(units={name: Unit()}), units=[unit])
    with pytest.raises(BadInput, match="never stopped"):
        survey(stage.session, POLICY)

    assert stage.writes == []


def test_a_host_without_systemd_is_a_bad_answer() -> None:
    def answer(script: Script) -> Answer:
        return {**server().carry_out(script), "units": Section("sh: systemctl: not found", 127)}

    session = Session("llm", Links(ScriptedTransport(answer)), units=["sglang"])
    with pytest.raises(BadAnswer, match="cannot be shown by systemctl"):
        survey(session, POLICY)


def test_a_host_without_units_is_not_asked_for_any() -> None:
    stage = scene(server())
    found = survey(stage.session, POLICY)

    assert "units" not in stage.direct.asked[0].sections
    assert found.units == []


def test_an_alias_is_looked_for_by_the_units_own_name() -> None:
    host = server()

    def answer(script: Script) -> Answer:
        found = host.carry_out(script)
        shown = Section(
            f"Id={SGLANG}\nNames={SGLANG} llm.service\nLoadState=loaded\nActiveState=active\n", 0
        )
        return {**found, **({"units": shown} if "units" in script.sections else {})}

    link = ScriptedTransport(answer)
    session = Session("llm", Links(link), units=["llm"])
    found = survey(session, POLICY)

    assert [unit.name for unit in found.units] == [SGLANG]
    assert list(session.units) == [SGLANG]
    assert f"/{SGLANG}" in link.asked[-1].sections["processes"]


# The node, before anything else.


def with_node(answer: Answer, *, direct: bool = True) -> tuple[Session, ScriptedTransport]:
    host = server()
    node = ScriptedTransport(lambda _: answer, name="ssh root@pve")
    way = ScriptedTransport(host.answer, name="ssh root@llm") if direct else None
    inside = ScriptedTransport(host.answer, name="container 129")
    links = Links(way, inside, node)
    return Session("llm", links, units=["sglang"], vmid=129, guest_name="llm"), node


@pytest.mark.parametrize(
    ("code", "kind"),
    [(90, CommandFailed), (91, GuestStopped), (92, GuestLocked), (93, IdentityMismatch)],
)
def test_a_guest_that_is_not_fit_is_not_even_looked_at(
    code: int, kind: type[GpuReclaimError]
) -> None:
    session, _ = with_node({"pct": Section("pct status: running\n", code)})
    with pytest.raises(kind):
        survey(session, POLICY)

    assert isinstance(session.links.direct, ScriptedTransport)
    assert session.links.direct.asked == []


def test_a_fit_guest_is_looked_at() -> None:
    session, node = with_node({"pct": Section("pct status: running\n", 0)})

    assert survey(session, POLICY).hostname == "llm"
    assert [script.writes for script in node.asked] == [False]


def test_with_via_ssh_the_node_is_not_asked() -> None:
    session, node = with_node({"pct": Section("", 92)})
    session.links.via = "ssh"
    survey(session, ReclaimPolicy(via="ssh"))

    assert node.asked == []


def test_an_unreachable_node_is_done_without_where_there_is_another_way() -> None:
    session, _ = with_node(Unreachable("pve: away"))

    assert survey(session, POLICY).hostname == "llm"


def test_an_unreachable_node_is_an_error_where_it_is_the_only_way() -> None:
    session, _ = with_node(Unreachable("pve: away"), direct=False)
    with pytest.raises(Unreachable):
        survey(session, POLICY)


@pytest.mark.parametrize("kind", [HostKeyRefused, AccessRefused])
def test_a_node_whose_key_or_login_is_refused_is_not_done_without(
    kind: type[GpuReclaimError],
) -> None:
    session, _ = with_node(kind("pve: refused"))
    with pytest.raises(kind):
        survey(session, POLICY)


# Stopping units.


def test_units_are_stopped_and_what_went_with_them_is_gone() -> None:
    stage = served()
    outcome = stop_systemd(stage.session, POLICY)

    assert outcome.stopped == [StoppedUnit(unit=SGLANG)]
    assert outcome.ended == []
    assert stage.host.processes == []
    assert stage.writes == [f"stop {SGLANG}"]


def test_what_is_left_in_the_control_group_is_ended_holder_or_not() -> None:
    stage = served(server(lingering={50, 51}))
    outcome = stop_systemd(stage.session, POLICY)

    assert ended(outcome) == [(50, "ended"), (51, "ended")]
    assert {row.owner for row in outcome.ended} == {f"unit {SGLANG}"}
    assert stage.host.processes == []


def test_what_is_protected_in_the_control_group_is_left() -> None:
    stage = served(server(lingering={50, 51}))
    stage.host.processes[1].exe = "/usr/bin/telegraf"
    outcome = stop_systemd(stage.session, POLICY)

    assert ended(outcome) == [(50, "ended")]
    assert [row.pid for row in outcome.spared] == [51]


def test_an_idle_unit_is_not_stopped_but_what_is_left_of_it_is_ended() -> None:
    stage = served(server(units={SGLANG: Unit(active="inactive")}))
    outcome = stop_systemd(stage.session, POLICY)

    assert outcome.stopped == []
    assert ended(outcome) == [(50, "ended"), (51, "ended")]
    assert stage.writes[-1] == "end 2 processes"


def test_a_unit_about_to_restart_is_stopped() -> None:
    stage = served(server(units={SGLANG: Unit(active="activating")}))

    assert [row.unit for row in stop_systemd(stage.session, POLICY).stopped] == [SGLANG]


def test_triggers_are_stopped_first_and_only_the_live_ones_are_remembered() -> None:
    units = {
        SGLANG: Unit(triggers="sglang.socket sglang.timer"),
        "sglang.socket": Unit(),
        "sglang.timer": Unit(active="inactive"),
    }
    stage = served(server(units=units))
    outcome = stop_systemd(stage.session, POLICY)
    script = stage.direct.asked[-1]

    assert outcome.stopped == [StoppedUnit(unit=SGLANG, triggered_by=["sglang.socket"])]
    assert list(script.sections) == ["stop", "units", "processes"]
    assert not script.together
    assert script.writes


def test_a_unit_that_goes_on_after_stop_is_an_error_with_the_tools_words() -> None:
    host = server()

    def answer(script: Script) -> Answer:
        found = host.carry_out(script)
        host.units[SGLANG].active = "deactivating"
        return found if "stop" not in script.sections else {**found, **host.carry_out(look_again)}

    look_again = Script("", {"units": f"x -- {SGLANG}"})
    session = Session(
        "llm", Links(ScriptedTransport(answer, stderr="Job failed")), units=["sglang"]
    )
    with pytest.raises(CommandFailed, match="is deactivating") as caught:
        stop_systemd(session, POLICY)

    assert "Job failed" in str(caught.value)


def test_a_unit_that_refuses_to_be_stopped_is_told_before_anything_is_touched() -> None:
    stage = served(server(units={SGLANG: Unit(can_stop="no")}))
    with pytest.raises(CommandFailed, match="RefuseManualStop"):
        stop_systemd(stage.session, POLICY)

    assert stage.host.units[SGLANG].active == "active"
    assert len(stage.host.processes) == 2


@pytest.mark.parametrize("policy", [ReclaimPolicy(protect=["sglang*"]), POLICY])
def test_a_protected_unit_is_not_stopped(policy: ReclaimPolicy) -> None:
    stage = served(protect=[] if policy.protect else [SGLANG])
    outcome = stop_systemd(stage.session, policy)

    assert outcome.stopped == []
    assert stage.writes == []


def two_servers() -> Host:
    return Host(
        used=[30_000, 30_000],
        processes=[process(50, unit="a.service"), process(60, unit="b.service")],
        units={"a.service": Unit(), "b.service": Unit()},
        memory={50: (0, 30_000), 60: (1, 30_000)},
    )


def test_with_some_gpus_wanted_only_their_units_are_stopped() -> None:
    stage = scene(two_servers(), units=["a", "b"])
    outcome = stop_systemd(stage.session, ReclaimPolicy(gpus=[1]))

    assert [row.unit for row in outcome.stopped] == ["b.service"]
    assert stage.host.units["a.service"].active == "active"


# Lost links.


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [LinkLost("ssh: lost"), TimedOut("ssh: time")])
def test_a_second_attempt_at_stopping_does_what_is_needed_and_reports_it_all(
    after: bool, error: GpuReclaimError
) -> None:
    host = server(lingering={51})
    stage = served(host)
    before = survey(stage.session, POLICY)
    failing("stop ", error, after=after)(host)
    with pytest.raises(type(error)):
        stop_systemd(stage.session, POLICY, before.units)
    outcome = stop_systemd(stage.session, POLICY, before.units)

    assert [row.unit for row in outcome.stopped] == [SGLANG]
    assert ended(outcome) == [(51, "ended")]
    assert host.processes == []


def test_a_second_attempt_with_some_gpus_wanted_still_reports_the_first() -> None:
    host = two_servers()
    stage = scene(host, units=["a", "b"])
    policy = ReclaimPolicy(gpus=[1])
    before = survey(stage.session, policy)
    failing("stop ", LinkLost("ssh: lost"), after=True)(host)
    with pytest.raises(LinkLost):
        stop_systemd(stage.session, policy, before.units)
    outcome = stop_systemd(stage.session, policy, before.units)

    assert [row.unit for row in outcome.stopped] == ["b.service"]
    assert host.units["a.service"].active == "active"


@pytest.mark.parametrize("after", [False, True])
def test_a_link_lost_between_look_and_write_is_raised_and_a_second_attempt_finds_what_is_left(
    after: bool,
) -> None:
    host = server()
    stage = served(host)
    failing("end ", LinkLost("ssh: lost"), after=after)(host)
    with pytest.raises(LinkLost):
        fuser_release(stage.session, POLICY)
    outcome = fuser_release(stage.session, POLICY)

    assert ended(outcome) == ([] if after else [(50, "ended"), (51, "ended")])
    assert host.processes == []


def test_nothing_is_written_when_the_look_fails() -> None:
    steps: list[Callable[[Session, ReclaimPolicy], Outcome | Survey]] = [
        survey,
        proxmox_exec_kill,
        fuser_release,
    ]
    for step in steps:
        host = server()
        host.hook = lambda _: (_ for _ in ()).throw(LinkLost("ssh: lost"))
        stage = served(host)
        stage.session.links.hypervisor = ScriptedTransport(host.answer)
        with pytest.raises(LinkLost):
            step(stage.session, POLICY)

        assert stage.writes == []


# Ending holders.


def test_whoever_is_left_is_ended() -> None:
    stage = served(server(fuser="50 77"))
    outcome = fuser_release(stage.session, POLICY)

    assert ended(outcome) == [(50, "ended"), (51, "ended")]
    assert {row.via for row in outcome.ended} == {"ssh root@llm"}
    assert [(row.pid, row.reason) for row in outcome.spared] == [
        (77, "named by fuser alone, not confirmed")
    ]
    assert outcome.step.name == "fuser_release"


def test_nobody_left_means_nothing_written() -> None:
    stage = served(server(processes=[]))

    assert fuser_release(stage.session, POLICY).ended == []
    assert stage.writes == []


def test_a_process_replaced_in_between_is_not_touched() -> None:
    host = server(processes=[process(50)])

    def hook(script: Script) -> None:
        if script.writes:
            host.processes = [process(50, start_time=9999, holds=False)]

    host.hook = hook
    stage = scene(host)
    outcome = fuser_release(stage.session, POLICY)

    assert ended(outcome) == [(50, "changed")]
    assert [x.pid for x in host.processes] == [50]


def test_grace_and_namespace_reach_the_script() -> None:
    stage = served()
    fuser_release(stage.session, ReclaimPolicy(term_grace_s=2.5))
    script = stage.direct.asked[-1]

    assert NAMESPACE in script.sections["end"]
    assert "wait_for 250" in script.sections["end"]
    assert "50:500 51:510" in script.sections["end"]
    assert script.timeout_s > 2.5


def test_a_script_in_another_namespace_is_an_error() -> None:
    host = server()

    def answer(script: Script) -> Answer:
        refused: Answer = {"owners": "", "end": Section("", 78)}
        return refused if script.writes else host.carry_out(script)

    session = Session("llm", Links(ScriptedTransport(answer)))
    with pytest.raises(BadAnswer, match="nothing was signalled"):
        fuser_release(session, POLICY)


# Through the hypervisor.


def through(error: GpuReclaimError | None = None, *, direct: bool = True) -> Scene:
    host = server()
    inside = ScriptedTransport(lambda script: error or host.answer(script), name="container 129")
    way = ScriptedTransport(host.answer, name="ssh root@llm")
    made = scene(host, links=Links(way if direct else None, inside), units=["sglang"])
    made.direct = way
    return made


def test_without_a_hypervisor_there_is_nothing_to_do() -> None:
    stage = served()
    outcome = proxmox_exec_kill(stage.session, POLICY)

    assert "no way through a hypervisor" in outcome.note
    assert stage.asked == []


def test_with_via_ssh_the_hypervisor_is_left_alone() -> None:
    stage = through()
    stage.session.links.via = "ssh"
    proxmox_exec_kill(stage.session, ReclaimPolicy(via="ssh"))

    assert stage.writes == []


def test_holders_are_ended_through_the_hypervisor() -> None:
    stage = through()
    outcome = proxmox_exec_kill(stage.session, POLICY)

    assert ended(outcome) == [(50, "ended"), (51, "ended")]
    assert {row.via for row in outcome.ended} == {"container 129"}
    assert outcome.step.via == "container 129"
    assert stage.asked == []


def test_an_unreachable_hypervisor_is_done_without_where_there_is_another_way() -> None:
    stage = through(Unreachable("pve: away"))
    outcome = proxmox_exec_kill(stage.session, POLICY)

    assert outcome.note == "pve: away"
    assert outcome.ended == []
    assert stage.asked == []


@pytest.mark.parametrize(
    ("error", "direct", "policy"),
    [
        (Unreachable("pve: away"), False, POLICY),
        (Unreachable("pve: away"), True, ReclaimPolicy(via="hypervisor")),
        (HostKeyRefused("pve: other key"), True, POLICY),
        (AccessRefused("pve: no login"), True, POLICY),
        (LinkLost("pve: lost"), True, POLICY),
        (GuestLocked("pve: backup"), True, POLICY),
        (IdentityMismatch("pve: other"), True, POLICY),
    ],
)
def test_every_other_error_of_the_hypervisor_is_an_error(
    error: GpuReclaimError, direct: bool, policy: ReclaimPolicy
) -> None:
    stage = through(error, direct=direct)
    stage.session.links.via = policy.via
    with pytest.raises(type(error)):
        proxmox_exec_kill(stage.session, policy)

    assert stage.asked == []


# One look.


def test_a_look_asks_for_what_it_is_told_to() -> None:
    stage = served()
    look(stage.session, "look", gpus=False, units=False, with_fuser=True)
    (script,) = stage.direct.asked

    assert set(script.sections) == {"identity", "processes", "fuser"}
    assert script.timeout_s == stage.session.script_timeout_s


def test_units_of_a_session_get_their_full_names() -> None:
    assert list(served().session.units) == [SGLANG]
    with pytest.raises(BadInput):
        Session("llm", Links(), units=["*"])


# Rounds.


@pytest.mark.parametrize(("generations", "left"), [(1, 0), (2, 0), (9, 1)])
def test_workers_that_start_others_are_ended_for_three_rounds(generations: int, left: int) -> None:
    host = server(processes=[process(50)])
    pids = iter(range(51, 99))
    rest = [generations]

    def hook(script: Script) -> None:
        if script.writes and rest[0]:
            rest[0] -= 1
            host.processes.append(process(next(pids)))

    host.hook = hook
    outcome = fuser_release(scene(host).session, POLICY)

    assert len(host.processes) == left
    assert len(outcome.ended) == min(generations + 1, 3)


def test_one_that_does_not_die_is_tried_once() -> None:
    host = server(processes=[process(50)], immortal={50})
    stage = scene(host)
    outcome = fuser_release(stage.session, POLICY)

    assert ended(outcome) == [(50, "D")]
    assert len(stage.writes) == 1


def test_mps_is_asked_to_quit_when_its_clients_are_gone() -> None:
    mps_server = process(60, exe="/usr/bin/nvidia-cuda-mps-server", name="nvidia-cuda-mps-server")
    host = server(processes=[process(50), mps_server])
    host.mps = "mps ended 60\n"
    stage = scene(host)
    outcome = fuser_release(stage.session, POLICY)

    assert stage.writes == ["end 1 processes", "ask MPS to quit"]
    assert [(x.pid, x.signal, x.outcome) for x in outcome.ended] == [
        (50, "TERM", "ended"),
        (60, "quit", "ended"),
    ]
    assert outcome.spared == []


def test_mps_that_stays_is_spared_and_says_why() -> None:
    mps_server = process(60, exe="/usr/bin/nvidia-cuda-mps-server", name="nvidia-cuda-mps-server")
    host = server(processes=[mps_server])
    host.mps = "mps clients 60 4711\n"
    stage = scene(host)
    outcome = fuser_release(stage.session, POLICY)

    assert outcome.ended == []
    assert [row.pid for row in outcome.spared] == [60]
    assert stage.session.mps_left == {60: "it still has clients (4711)"}


def test_mps_that_the_policy_protects_is_not_asked() -> None:
    mps_server = process(60, exe="/usr/bin/nvidia-cuda-mps-server")
    stage = scene(server(processes=[mps_server]))
    fuser_release(stage.session, ReclaimPolicy(protect=["nvidia-cuda-mps-server"]))

    assert stage.writes == []
