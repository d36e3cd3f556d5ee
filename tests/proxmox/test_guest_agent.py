"""Scripts run in a VM by its guest agent."""

import time
from collections.abc import Callable

import pytest

from gpu_reclaim.commands import REMOTE_SLACK_S, Guard, Script
from gpu_reclaim.errors import (
    BadInput,
    GuestLocked,
    GuestStopped,
    IdentityMismatch,
    Incomplete,
    LinkLost,
    OutcomeUnknown,
    TimedOut,
    Unreachable,
)
from gpu_reclaim.transport import Transport
from gpu_reclaim.transport.guest_agent import FIRST_POLLS_S, POLL_S, GuestAgentTransport
from gpu_reclaim.transport.proxmox_api import ProxmoxApi
from proxmox.pve_server import Fault, PveServer

HELLO = Script("say hello", {"greet": "echo hello", "fail": "echo oops >&2; exit 4"})


class FakeClock:
    """Time that passes only by sleeping; `during` is called at each sleep."""

    def __init__(self, during: Callable[[], object] = lambda: None) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.during = during

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self.during()


@pytest.fixture
def link(api: ProxmoxApi) -> GuestAgentTransport:
    return GuestAgentTransport(api, 200, expected_name="llm-vm")


def on_clock(api: ProxmoxApi, clock: FakeClock) -> GuestAgentTransport:
    return GuestAgentTransport(api, 200, sleep=clock.sleep, clock=clock)


def test_a_script_runs_in_the_guest(link: Transport, pve: PveServer) -> None:
    pve.environment["WHO"] = "the guest"
    script = Script("who", {"who": 'echo "$WHO"; cat', "code": "exit 4", "err": "echo no >&2"})
    result = link.run(script)
    assert result.section("who").text == "the guest\n"
    assert result.section("code").code == 4
    assert (result.stderr, result.exit_code) == ("no\n", 0)
    assert result.where.startswith("guest agent of VM 200 by Proxmox API 127.0.0.1:")
    assert result.seconds > 0


def test_it_looks_before_each_run_and_starts_once(link: Transport, pve: PveServer) -> None:
    for _ in range(2):
        pve.requests.clear()
        link.run(HELLO)
        order = [request.path.rsplit("/", 1)[1] for request in pve.requests]
        assert order[:4] == ["resources", "current", "config", "exec"]
        assert set(order[4:]) == {"exec-status"}
        assert pve.requests[3].params["command"] == ["timeout", "-k", "5", "30", "sh", "-s"]


def test_a_moved_vm_is_followed(link: Transport, pve: PveServer) -> None:
    link.run(HELLO)
    pve.guests[2].node = "pve1"
    assert link.run(HELLO).section("greet").text == "hello\n"


def test_the_guard_is_asked_inside_the_vm(api: ProxmoxApi) -> None:
    link = GuestAgentTransport(api, 200, guard=Guard(hostname="no-such-host.example"))
    with pytest.raises(IdentityMismatch, match=r"hostname is .*no-such-host"):
        link.run(HELLO)


def refuse(link: Transport, pve: PveServer, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        link.run(HELLO)
    assert pve.count("agent/exec") == 0


def test_a_vm_of_another_name_is_not_touched(api: ProxmoxApi, pve: PveServer) -> None:
    link = GuestAgentTransport(api, 200, expected_name="llm")
    refuse(link, pve, IdentityMismatch, "called 'llm-vm', expected 'llm'; nothing was touched")


def test_a_container_is_not_touched(api: ProxmoxApi, pve: PveServer) -> None:
    refuse(GuestAgentTransport(api, 129), pve, IdentityMismatch, "is a container")


@pytest.mark.parametrize("source", ["resources", "current", "config"])
def test_a_locked_vm_is_not_touched(link: Transport, pve: PveServer, source: str) -> None:
    """The three places disagree for moments; a lock in any of them counts."""
    answer = pve.answer

    def with_lock(method: str, path: str, params: dict[str, list[str]]) -> object:
        pve.guests[2].lock = "migrate" if path.endswith(source) else ""
        return answer(method, path, params)

    pve.answer = with_lock  # type: ignore[method-assign]
    refuse(link, pve, GuestLocked, "lock 'migrate' on VM 200")


def test_a_stopped_vm_is_not_touched(link: Transport, pve: PveServer) -> None:
    pve.guests[2].status = "stopped"
    refuse(link, pve, GuestStopped, "VM 200 is stopped")


def test_a_paused_vm_is_not_touched(link: Transport, pve: PveServer) -> None:
    pve.guests[2].qmp_status = "paused"
    refuse(link, pve, GuestStopped, "VM 200 is paused")


def test_a_vm_without_agent_was_not_reached(link: Transport, pve: PveServer) -> None:
    pve.guests[2].agent = ""
    with pytest.raises(Unreachable, match="No QEMU guest agent configured"):
        link.run(HELLO)


def test_a_script_that_is_too_long_is_not_started(link: Transport, pve: PveServer) -> None:
    with pytest.raises(BadInput, match="65536 at most"):
        link.run(Script("long", {"all": "x" * 65536}))
    assert pve.count("agent/exec") == 0


@pytest.mark.parametrize("flag", ["out-truncated", "err-truncated"])
def test_cut_output_is_unknown(link: Transport, pve: PveServer, flag: str) -> None:
    pve.doctor = lambda answer: {**answer, flag: 1}
    with pytest.raises(Incomplete, match="more than the agent keeps") as caught:
        link.run(HELLO)
    assert caught.value.result is not None
    assert "hello" in caught.value.result.stdout


def test_no_output_at_all_is_unknown(link: Transport, pve: PveServer) -> None:
    pve.doctor = lambda _: {"exited": 1, "exitcode": 0}
    with pytest.raises(Incomplete):
        link.run(HELLO)


def test_a_killed_script_is_unknown_and_its_signal_is_told(link: Transport, pve: PveServer) -> None:
    pve.doctor = lambda answer: {"exited": 1, "signal": 9, "out-data": answer["out-data"][:40]}
    with pytest.raises(Incomplete) as caught:
        link.run(HELLO)
    assert caught.value.result is not None
    assert caught.value.result.exit_code == 137


def test_the_far_sides_time_limit_is_told(link: Transport) -> None:
    with pytest.raises(TimedOut, match=r"did not end within 0\.2 s"):
        link.run(Script("hang", {"hang": "sleep 60"}, timeout_s=0.2))


def test_a_command_that_never_ends_is_left_at_the_deadline(api: ProxmoxApi, pve: PveServer) -> None:
    pve.hang = True
    clock = FakeClock()
    with pytest.raises(TimedOut, match="did not end within 2 s"):
        on_clock(api, clock).run(Script("hang", {"hang": "true"}, timeout_s=2))
    limit = 2 + REMOTE_SLACK_S
    assert limit <= sum(clock.slept) <= limit + POLL_S
    assert tuple(clock.slept[:3]) == FIRST_POLLS_S
    assert max(clock.slept) == POLL_S
    assert pve.count("exec-status") == len(clock.slept) + 1


def test_a_link_that_comes_back_while_waiting_costs_nothing(
    api: ProxmoxApi, pve: PveServer
) -> None:
    pve.misbehave(
        Fault("exec-status", 595, "no route", times=4), Fault("exec-status", cut="before")
    )
    result = GuestAgentTransport(api, 200).run(HELLO)
    assert result.section("greet").text == "hello\n"
    assert pve.count("agent/exec") == 1


def test_a_link_that_stays_away_leaves_the_outcome_unknown(api: ProxmoxApi, pve: PveServer) -> None:
    pve.misbehave(Fault("exec-status", 595, "no route", times=999))
    with pytest.raises(LinkLost, match=r"was started, then: .*595 no route"):
        on_clock(api, FakeClock()).run(HELLO)
    assert pve.count("agent/exec") == 1


def test_a_told_and_lost_end_leaves_the_outcome_unknown(api: ProxmoxApi, pve: PveServer) -> None:
    """The agent forgets what it has told, and the repeated read finds nothing any more."""
    pve.hang = True

    def end_it() -> None:
        pve.end_all()
        pve.misbehave(Fault("exec-status", cut="after"))
        clock.during = lambda: None

    clock = FakeClock(end_it)
    with pytest.raises(LinkLost, match=r"cannot be learnt: .*Invalid parameter 'pid'"):
        on_clock(api, clock).run(HELLO)


@pytest.mark.parametrize(
    "change",
    [
        lambda pve: pve.privileges.clear(),
        lambda pve: setattr(pve.guests[2], "status", "stopped"),
        lambda pve: setattr(pve.guests[2], "node", "pve1"),
        lambda pve: pve.misbehave(Fault("exec-status", 200, "OK", b"<html>")),
        lambda pve: pve.misbehave(Fault("exec-status", 501, "what?")),
    ],
)
def test_whatever_happens_once_started_is_never_told_as_not_started(
    api: ProxmoxApi, pve: PveServer, change: Callable[[PveServer], object]
) -> None:
    pve.hang = True
    clock = FakeClock(lambda: change(pve))
    with pytest.raises(OutcomeUnknown, match=r"was started \(pid \d+\)"):
        on_clock(api, clock).run(HELLO)


def test_closing_closes_the_api_and_the_next_run_opens_it(
    link: Transport, api: ProxmoxApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    close = api.close

    def closing() -> None:
        closed.append("api")
        close()

    monkeypatch.setattr(api, "close", closing)
    link.run(HELLO)
    link.close()
    assert closed == ["api"]
    assert link.run(HELLO).exit_code == 0


def test_a_slow_script_is_waited_for(link: Transport) -> None:
    started = time.monotonic()
    assert link.run(Script("slow", {"slow": "sleep 0.3; echo done"})).section("slow").code == 0
    assert time.monotonic() - started >= 0.3
