"""Ending processes, for real; and what is made of the script's words."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpu_reclaim.commands import Result, Script, Section
from gpu_reclaim.errors import BadAnswer
from gpu_reclaim.models import Ended, Process
from gpu_reclaim.signals import end, parse_end, time_limit_s
from gpu_reclaim.transport.local import LocalTransport
from unit.actors import IGNORE_TERM, Stage, alive, identity, wait_for
from unit.shells import here

NAMESPACE = str(Path("/proc/self/ns/pid").readlink())
SCRIPT = Script("end", {})


def finish(
    victims: Sequence[Process],
    *,
    grace_s: float = 0.2,
    transport: LocalTransport | None = None,
) -> list[Ended]:
    body = end(victims, NAMESPACE, grace_s=grace_s)
    script = Script("end", {"end": body}, timeout_s=120, writes=True)
    result = (transport or LocalTransport()).run(script)
    return parse_end(result, result.sections["end"], victims, {}, "here")


def told(rows: Sequence[Ended]) -> list[tuple[int, str, str]]:
    return [(row.pid, row.outcome, row.signal) for row in rows]


# For real.


def test_an_ordinary_process_ends_on_term(shell: str, stage: Stage) -> None:
    pid = stage.start()
    rows = finish([identity(pid)], grace_s=60)

    assert told(rows) == [(pid, "ended", "TERM")]
    assert not alive(pid)


def test_one_that_ignores_term_is_killed(shell: str, stage: Stage) -> None:
    pid = stage.start(IGNORE_TERM)
    rows = finish([identity(pid)])

    assert told(rows) == [(pid, "ended", "KILL")]
    assert not alive(pid)


def test_without_grace_whoever_still_lives_is_killed_at_once(shell: str, stage: Stage) -> None:
    pid = stage.start(IGNORE_TERM)
    rows = finish([identity(pid)], grace_s=0)

    assert told(rows) == [(pid, "ended", "KILL")]


def test_one_that_is_stopped_gets_its_term_and_may_clean_up(shell: str, stage: Stage) -> None:
    trace = stage.folder / "cleaned"
    pid = stage.start(
        "def clean(*_):\n"
        f"    open({str(trace)!r}, 'w').close()\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, clean)"
    )
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: identity(pid).state == "T", "stopped")
    rows = finish([identity(pid)], grace_s=60)

    assert told(rows) == [(pid, "ended", "TERM")]
    assert trace.exists()


def test_one_that_is_gone_already_is_told_so(shell: str, stage: Stage) -> None:
    pid = stage.start()
    victim = identity(pid)
    os.kill(pid, signal.SIGKILL)
    stage.reap(pid)

    assert told(finish([victim])) == [(pid, "gone", "")]


@pytest.mark.parametrize("difference", [1, -1])
def test_another_process_with_the_same_pid_is_not_signalled(
    shell: str, stage: Stage, difference: int
) -> None:
    pid = stage.start()
    victim = identity(pid)
    other = victim.model_copy(update={"start_time": victim.start_time + difference})
    rows = finish([other])

    assert told(rows) == [(pid, "changed", "")]
    assert alive(pid)


def test_one_whose_name_pretends_another_start_time_is_known_by_its_own(
    shell: str, stage: Stage
) -> None:
    pid = stage.start("open('/proc/self/comm', 'w').write(') S 1 1 1\\n1')")
    rows = finish([identity(pid)], grace_s=60)

    assert told(rows) == [(pid, "ended", "TERM")]


def test_a_zombie_is_told_and_not_waited_for(shell: str, stage: Stage) -> None:
    pid = stage.start()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: identity(pid).state == "Z", "zombie")

    assert told(finish([identity(pid)], grace_s=600)) == [(pid, "zombie", "")]


LEADERLESS = """
import threading
threading.Thread(target=lambda: time.sleep(600)).start()
def leave():
    time.sleep(0.1)
sys.stdout.write("ready\\n"); sys.stdout.flush()
ctypes.CDLL(None).syscall({exit}, 0)
"""


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="number of exit(2)")
def test_one_whose_first_thread_is_dead_is_ended_with_the_others(shell: str, stage: Stage) -> None:
    number = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
    pid = stage.start(LEADERLESS.format(exit=number))
    wait_for(lambda: identity(pid).state == "Z", "leader dead")
    assert len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    rows = finish([identity(pid)], grace_s=60)

    assert told(rows) == [(pid, "ended", "TERM")]
    wait_for(lambda: len(list(Path(f"/proc/{pid}/task").iterdir())) == 1, "threads gone")


def test_outcomes_come_in_the_order_of_the_victims(shell: str, stage: Stage) -> None:
    stubborn, meek, changed = stage.start(IGNORE_TERM), stage.start(), stage.start()
    victims = [identity(stubborn), identity(changed), identity(meek)]
    victims[1].start_time += 1
    rows = finish(victims)

    assert told(rows) == [
        (stubborn, "ended", "KILL"),
        (changed, "changed", ""),
        (meek, "ended", "TERM"),
    ]
    assert alive(changed)


def test_in_another_pid_namespace_nobody_is_signalled(shell: str, stage: Stage) -> None:
    pid = stage.start()
    victim = identity(pid)
    result = here({"end": end([victim], "pid:[1]", grace_s=0)})

    assert result.sections["end"].code == 78
    with pytest.raises(BadAnswer, match="nothing was signalled"):
        parse_end(result, result.sections["end"], [victim], {}, "here")
    assert alive(pid)


def test_one_that_may_not_be_signalled_is_told_and_not_waited_for(
    shell: str, stage: Stage, root: None, nobody: LocalTransport
) -> None:
    pid = stage.start()
    rows = finish([identity(pid)], grace_s=600, transport=nobody)

    assert told(rows) == [(pid, "denied", "")]
    assert alive(pid)


def test_one_that_does_not_die_is_told_with_its_state(
    shell: str, stage: Stage, root: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    freezer = Path("/sys/fs/cgroup/freezer")
    if not (freezer / "tasks").exists():
        pytest.skip("needs the freezer of cgroup v1: only that one holds back KILL")
    monkeypatch.setattr("gpu_reclaim.signals.KILL_WAIT_S", 1)
    pid = stage.start()
    victim = identity(pid)
    group = freezer / f"test-{pid}"
    group.mkdir()
    (group / "cgroup.procs").write_text(str(pid))
    try:
        (group / "freezer.state").write_text("FROZEN")
        wait_for(lambda: (group / "freezer.state").read_text() == "FROZEN\n", "frozen")
        rows = finish([victim])
    finally:
        (group / "freezer.state").write_text("THAWED")
        stage.reap(pid)
        group.rmdir()

    assert told(rows) == [(pid, "D", "KILL")]
    assert rows[0].wchan != ""


def test_nobody_to_end_is_no_work(shell: str) -> None:
    assert finish([], grace_s=600) == []


# Texts.


@pytest.mark.parametrize(
    "namespace", ["", "pid:[]", "pid:[1]'; reboot; '", "pid:[1]\n", "mnt:[1]", "pid:[x]"]
)
def test_what_is_no_namespace_is_refused(namespace: str) -> None:
    with pytest.raises(BadAnswer, match="nothing was signalled"):
        end([], namespace, grace_s=1)


def test_the_limit_leaves_room_for_both_waits() -> None:
    assert time_limit_s(5) >= 5 + 5 + 5
    assert time_limit_s(600) > 605


PROCESS = Process(pid=12, start_time=7, name="x", devices=["/dev/nvidia0 (fd)"])


def row(text: str) -> Ended:
    result = Result(SCRIPT, "a host", text, "", 0)
    return parse_end(result, Section(text, 0), [PROCESS], {12: "unit x.service"}, "ssh")[0]


@pytest.mark.parametrize(
    ("text", "outcome", "last", "wchan"),
    [
        ("sent 12 TERM\n", "ended", "TERM", ""),
        ("sent 12 TERM\nsent 12 KILL\n", "ended", "KILL", ""),
        ("sent 12 TERM\ngone 12\n", "ended", "TERM", ""),
        ("sent 12 TERM\nsent 12 KILL\nleft 12 D nvidia_close\n", "D", "KILL", "nvidia_close"),
        ("sent 12 TERM\nsent 12 KILL\nleft 12 D \n", "D", "KILL", ""),
        ("sent 12 TERM\nsent 12 KILL\nleft 12 S 0\n", "S", "KILL", "0"),
        ("gone 12\n", "gone", "", ""),
        ("changed 12\n", "changed", "", ""),
        ("zombie 12\n", "zombie", "", ""),
        ("denied 12\n", "denied", "", ""),
        ("sent 12 TERM\ndenied 12\n", "denied", "TERM", ""),
        ("sent 13 TERM\n", "unknown", "", ""),
        ("sent 123 TERM\nleft 121 D x\n", "unknown", "", ""),
        ("", "unknown", "", ""),
    ],
)
def test_what_became_of_a_process(text: str, outcome: str, last: str, wchan: str) -> None:
    expected = Ended(
        pid=12,
        start_time=7,
        name="x",
        owner="unit x.service",
        signal=last,
        via="ssh",
        outcome=outcome,
        devices=["/dev/nvidia0 (fd)"],
        wchan=wchan,
    )

    assert row(text) == expected
