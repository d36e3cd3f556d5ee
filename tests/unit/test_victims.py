"""Who is to be ended, and who spared and why."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gpu_reclaim.models import GpuApp, GpuReading, Process, ProcessTable, ReclaimPolicy
from gpu_reclaim.protected import PROTECTED, never_stopped
from gpu_reclaim.victims import (
    MAX_UNREAD_ROWS,
    UNREAD,
    Choice,
    choose,
)
from unit.values import app, process, reading, table

POLICY = ReclaimPolicy()
DOCKER = "/system.slice/docker-0123456789abcdef.scope"


def sorted_out(
    *processes: Process,
    policy: ReclaimPolicy = POLICY,
    units: Iterable[str] = (),
    protect: Iterable[str] = (),
    seen: GpuReading | None = None,
) -> tuple[list[int], dict[int, str]]:
    """Pids of the victims; pids of the spared, and why."""
    choice = choose(
        table(*processes), seen or reading(0), policy, units=list(units), protect=list(protect)
    )
    return pids(choice), {row.pid: row.reason for row in choice.spared}


def pids(choice: Choice) -> list[int]:
    return [victim.pid for victim in choice.victims]


# Wanted.


def test_holders_are_ended_and_others_are_not_even_mentioned() -> None:
    assert sorted_out(process(50), process(51, holds=False)) == ([50], {})


def test_what_is_left_in_the_control_group_of_a_stopped_unit_is_ended() -> None:
    left = process(50, holds=False, unit="sglang.service")
    other = process(51, holds=False, unit="other.service")

    assert sorted_out(left, other, units=["sglang.service"]) == ([50], {})


@pytest.mark.parametrize(
    ("pattern", "field"),
    [
        ("^/opt/llm/bin/", {"exe": "/opt/llm/bin/python3.11"}),
        ("^python3", {"comm": "python3.11"}),
        ("scheduler_TP\\d", {"name": "sglang::scheduler_TP0"}),
        ("--tp 8", {"command_line": "python3 -m sglang --tp 8"}),
    ],
)
def test_a_match_looks_at_executable_title_and_command_line(
    pattern: str, field: dict[str, str]
) -> None:
    plain = {"exe": "/bin/x", "comm": "x", "name": "x", "command_line": "x"}
    policy = ReclaimPolicy(match=["nothing", pattern])
    hit = process(50, holds=False, **(plain | field))
    miss = process(51, holds=False, **plain)

    assert sorted_out(hit, miss, policy=policy) == ([50], {})
    assert sorted_out(hit) == ([], {})


# Some GPUs.


def test_with_some_gpus_wanted_only_who_computes_there_is_ended() -> None:
    seen = reading(500, 500, apps=[app(0, 50), app(1, 51)])
    policy = ReclaimPolicy(gpus=[1])

    assert sorted_out(process(50), process(51), process(52), policy=policy, seen=seen) == ([51], {})


def test_a_process_on_a_wanted_and_an_unwanted_gpu_is_spared() -> None:
    seen = reading(500, 500, apps=[app(0, 50), app(1, 50)])
    choice = choose(table(process(50)), seen, ReclaimPolicy(gpus=[1]))

    assert choice.victims == []
    assert [(row.reason, row.straddles) for row in choice.spared] == [
        ("it also uses GPU 0, which you did not ask for", True)
    ]


@pytest.mark.parametrize(
    ("cgroup", "spared"),
    [
        ("/system.slice/sglang.service", "unit sglang.service"),
        ("/system.slice/run-r1.scope", "scope run-r1.scope"),
        (f"/system.slice/docker-{'ab' * 32}.scope", "container docker abababababab"),
        ("/user.slice/user-0.slice/session-3.scope", ""),
        ("/", ""),
    ],
)
def test_one_of_a_group_that_uses_other_gpus_too_is_spared(cgroup: str, spared: str) -> None:
    """Ending one worker of a server stops the others' work; a login session is no such group."""
    seen = reading(500, 500, apps=[app(0, 50), app(1, 51)])
    both = [process(pid, cgroups=[cgroup]) for pid in (50, 51)]
    policy = ReclaimPolicy(gpus=[1], match=["python"])
    choice = choose(table(*both), seen, policy)

    assert [x.pid for x in choice.victims] == ([] if spared else [51])
    reasons = {row.pid: row.reason for row in choice.spared}
    if spared:
        assert reasons[51] == f"its {spared} also uses GPU 0, which you did not ask for"
    assert reasons[50] == "it uses GPU 0, which you did not ask for"


def test_a_pid_that_only_nvidia_smi_names_is_no_victim() -> None:
    seen = reading(500, apps=[app(0, 50)])
    policy = ReclaimPolicy(gpus=[0])

    assert sorted_out(process(50, holds=False), policy=policy, seen=seen) == ([], {})


def test_without_a_reading_nobody_is_known_to_compute_on_a_wanted_gpu() -> None:
    assert sorted_out(process(50), policy=ReclaimPolicy(gpus=[0]), seen=GpuReading()) == ([], {})


# Protected.


@pytest.mark.parametrize("name", PROTECTED)
def test_every_built_in_name_is_spared_and_says_why(name: str) -> None:
    holder = process(50, exe=f"/usr/bin/{name}", name="some title")
    everything = ReclaimPolicy(match=["."])

    for policy in (POLICY, everything):
        victims, spared = sorted_out(holder, policy=policy, units=["x.service"])
        assert victims == []
        assert spared == {50: f"protected: {PROTECTED[name]}"}


@pytest.mark.parametrize("name", PROTECTED)
def test_a_protected_name_is_known_where_its_executable_cannot_be_read(name: str) -> None:
    # The kernel keeps 15 characters of a name.
    holder = process(50, exe="", comm=name[:15])

    assert sorted_out(holder)[0] == []


@pytest.mark.parametrize(
    "exe",
    [
        "/opt/nvidia-persistenced-test",
        "/opt/my-nvidia-smi",
        "/opt/nvidia-smi.py",
        "/opt/Xorg/llm",
        "/opt/sshd2",
        "/opt/systemd/llm",
        "/opt/xorg",
        "/opt/nvtop ",
    ],
)
def test_a_protected_name_inside_another_one_protects_nobody(exe: str) -> None:
    assert sorted_out(process(50, exe=exe)) == ([50], {})


def test_a_title_of_a_protected_name_protects_nobody() -> None:
    named = process(50, name="nvidia-persistenced", comm="nvidia-persiste")

    assert sorted_out(named) == ([50], {})


@pytest.mark.parametrize(
    ("unit", "spared"),
    [
        ("nvidia-persistenced.service", True),
        ("nvidia-dcgm.service", True),
        ("nvsm-core.service", True),
        ("dcgm.service", True),
        ("dcgm-exporter.service", True),
        ("prometheus-node-exporter.service", True),
        ("sglang.service", False),
        ("my-nvidia-test.service", False),
    ],
)
def test_processes_of_protected_units_are_spared_whatever_they_are(unit: str, spared: bool) -> None:
    victims, reasons = sorted_out(process(50, unit=unit))

    assert victims == ([] if spared else [50])
    assert bool(reasons) is spared


@pytest.mark.parametrize(
    ("name", "spared"),
    [
        ("ollama*", True),
        ("ollama", True),
        ("runner", True),
        ("rag: worker 1", True),
        ("rag:*", True),
        ("rag.service", True),
        ("rag*.service", True),
        ("olla", False),
        ("Ollama", False),
        ("other.service", False),
        ("rag", True),
        ("ra", False),
        ("/opt/ollama", True),
        ("system.slice", True),
    ],
)
def test_names_of_policy_and_host_protect_by_program_title_name_and_unit(
    name: str, spared: bool
) -> None:
    holder = process(50, exe="/opt/ollama", name="rag: worker 1", comm="runner", unit="rag.service")
    expected = ([], {50: f"protected by name: {name}"}) if spared else ([50], {})

    assert sorted_out(holder, policy=ReclaimPolicy(protect=[name])) == expected
    assert sorted_out(holder, protect=[name]) == expected
    assert sorted_out(holder, protect=["zzz", name], units=["rag.service"]) == expected


@pytest.mark.parametrize("pid", [900, 899, 1])
def test_we_our_ancestors_and_init_are_spared(pid: int) -> None:
    victims, spared = sorted_out(process(pid), policy=ReclaimPolicy(match=["."]))

    assert victims == []
    assert spared[pid] == "it is this run itself, or what started it"


@pytest.mark.parametrize(
    ("pid", "ppid", "exe", "spared"),
    [
        (300, 2, "", True),
        (2, 0, "", True),
        (300, 2, "/opt/llm", False),
        (2, 0, "/opt/llm", False),
        (300, 1, "", False),
    ],
)
def test_kernel_threads_are_spared(pid: int, ppid: int, exe: str, spared: bool) -> None:
    thread = process(pid, ppid=ppid, exe=exe, comm="nv_queue", name="nv_queue", holds=False)
    victims, reasons = sorted_out(thread, policy=ReclaimPolicy(match=["nv_queue|llm|sglang"]))

    assert victims == ([] if spared else [pid])
    assert list(reasons) == ([pid] if spared else [])


def test_containers_are_spared_with_the_command_that_stops_them() -> None:
    victims, spared = sorted_out(process(50, cgroups=[DOCKER]))

    assert victims == []
    assert spared[50] == (
        "it belongs to container docker 0123456789ab; stop that with: docker stop 0123456789ab"
    )


def test_a_container_whose_engine_is_unknown_is_spared_too() -> None:
    victims, spared = sorted_out(process(50, cgroups=["/kubepods/pod1/abc"]))

    assert victims == []
    assert "its engine's own command" in spared[50]


def test_a_containers_process_that_is_named_by_the_policy_is_ended() -> None:
    holder = process(50, cgroups=[DOCKER])

    assert sorted_out(holder, policy=ReclaimPolicy(match=["^sglang::"])) == ([50], {})


def test_a_spared_row_says_who_it_is() -> None:
    holder = process(50, exe="/usr/bin/nvtop", name="nvtop", unit="x.service")
    (row,) = choose(table(holder), reading(0), POLICY).spared

    assert (row.name, row.owner, row.devices) == ("nvtop", "unit x.service", ["/dev/nvidia0 (fd)"])


# Not inspected.


def unread(count: int, **more: object) -> ProcessTable:
    return table(process(50), uninspected=list(range(100, 100 + count)), **more)


def test_those_not_inspected_are_reported_and_never_ended() -> None:
    choice = choose(unread(2), reading(0), POLICY)

    assert pids(choice) == [50]
    assert [(row.pid, row.name, row.reason) for row in choice.spared] == [
        (100, "not inspected", UNREAD),
        (101, "not inspected", UNREAD),
    ]


@pytest.mark.parametrize("count", [MAX_UNREAD_ROWS, MAX_UNREAD_ROWS + 1, 500])
def test_very_many_are_counted_in_one_row(count: int) -> None:
    rows = choose(unread(count), reading(0), POLICY).spared
    more = count - MAX_UNREAD_ROWS

    assert len(rows) == min(count, MAX_UNREAD_ROWS + 1)
    assert not more or rows[-1].name == f"{more} more processes"


def test_whom_fuser_alone_names_is_reported_and_not_ended() -> None:
    choice = choose(table(fuser_only=[77]), reading(0), POLICY)

    assert pids(choice) == []
    assert [(row.pid, row.reason) for row in choice.spared] == [
        (77, "named by fuser alone, not confirmed")
    ]


# The policy itself.


@pytest.mark.parametrize("pattern", ["", " ", "(", "*", "a{2,1}"])
def test_a_match_that_means_everybody_or_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="match"):
        ReclaimPolicy(match=[pattern])


def test_an_empty_protection_is_refused() -> None:
    with pytest.raises(ValueError, match="protects nothing"):
        ReclaimPolicy(protect=[" "])


@pytest.mark.parametrize(
    ("cgroup", "command"),
    [
        ("/system.slice/slurmstepd.scope/job_71/step_0/user/task_0", "scancel 71"),
        ("/slurm/uid_1000/job_71/step_batch/task_0", "scancel 71"),
        (f"/actions_job/{'0f' * 32}", "its engine's own command"),
        (f"/system.slice/nerdctl-{'0f' * 32}.scope", "nerdctl stop 0f0f0f0f0f0f"),
    ],
)
def test_what_another_manager_runs_is_spared_unless_named(cgroup: str, command: str) -> None:
    job = process(50, cgroups=[cgroup])
    row = choose(table(job), reading(500), ReclaimPolicy()).spared[0]

    assert row.reason.endswith(f"stop that with: {command}")
    assert row.command in (command, "")
    assert [
        x.pid for x in choose(table(job), reading(500), ReclaimPolicy(match=["sglang"])).victims
    ]


@pytest.mark.parametrize(
    ("unit", "named", "never"),
    [
        ("nvidia-dcgm.service", [], True),
        ("nvidia-dcgm.service", ["nvidia-dcgm.service"], False),
        ("nvidia-fabricmanager.service", ["nvidia-dcgm.service"], True),
        ("ssh.service", ["ssh.service"], True),
        ("sglang.service", [], False),
    ],
)
def test_a_unit_of_the_driver_is_stopped_only_when_named(
    unit: str, named: list[str], never: bool
) -> None:
    assert never_stopped(unit, named) == never


@pytest.mark.parametrize(
    ("exe", "cgroup", "idle", "by_command"),
    [
        ("/usr/bin/nvidia-persistenced", "/", True, False),
        ("/usr/bin/node_exporter", "/", True, False),
        ("/usr/lib/xorg/Xorg", "/", False, False),
        ("/usr/bin/nvidia-cuda-mps-server", "/", False, True),
        ("/usr/bin/nvidia-cuda-mps-server", f"/docker/{'0f' * 32}", False, False),
        ("/usr/bin/nvidia-cuda-mps-control", "/", False, False),
    ],
)
def test_what_is_known_of_the_protected(
    exe: str, cgroup: str, idle: bool, by_command: bool
) -> None:
    seen = table(process(50, exe=exe, cgroups=[cgroup]))
    row = choose(seen, reading(500), ReclaimPolicy()).spared[0]

    assert (row.idle, row.by_command) == (idle, by_command)


def test_mps_is_not_asked_to_quit_when_only_some_gpus_are_wanted() -> None:
    server = process(50, exe="/usr/bin/nvidia-cuda-mps-server")
    listed = reading(500, 500, apps=[app(0, 50)])

    assert not choose(table(server), listed, ReclaimPolicy(gpus=[0])).spared[0].by_command


@pytest.mark.parametrize("used", [[], [app(0, 50)]])
def test_one_that_match_names_is_spared_on_a_gpu_that_nobody_asked_for(used: list[GpuApp]) -> None:
    """Whether or not anybody uses a wanted GPU; and the wanted ones can be freed all the same."""
    train = process(51, command_line="train.py")
    seen = reading(500, 500, apps=[app(1, 51), *used])
    choice = choose(table(process(50), train), seen, ReclaimPolicy(gpus=[0], match=[r"train\.py"]))

    assert [x.pid for x in choice.victims] == [x.pid for x in used]
    assert [(row.pid, row.reason, row.straddles) for row in choice.spared] == [
        (51, "it uses GPU 1, which you did not ask for", False)
    ]


def test_with_foreign_pids_a_matched_holder_is_spared_for_some_gpus() -> None:
    train = process(51, command_line="train.py")
    seen = reading(500, 500, apps=[app(1, 4711)])
    choice = choose(table(train), seen, ReclaimPolicy(gpus=[0], match=[r"train\.py"]))

    assert choice.victims == []
    assert choice.spared[0].reason == "nvidia-smi does not tell which GPU it uses"


def test_a_named_unit_is_no_word_to_look_for() -> None:
    journal = process(50, holds=False, command_line="journalctl -fu nvidia-dcgm.service")
    policy = ReclaimPolicy(match=["nvidia-dcgm.service"])

    assert sorted_out(journal, policy=policy) == ([], {})
    assert sorted_out(journal, policy=ReclaimPolicy(match=["sglang.service"])) == ([], {})
    assert sorted_out(journal, policy=ReclaimPolicy(match=["journalctl"])) == ([50], {})
