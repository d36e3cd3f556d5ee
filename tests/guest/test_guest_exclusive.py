"""exclusive_gpus on the real guest: ours for the length of a block, and as before afterwards.

`make test` has the main path; what is exhaustive here is played there on a host in memory
(prefect_layer/test_exclusive.py), except for cut wires and restarts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from prefect import flow, get_client

from gpu_reclaim.blocks import GpuHost, LlmServer
from gpu_reclaim.errors import GpusNotReclaimed, HeldByOther, HoldLost, Intruded, NotRestored
from gpu_reclaim.flows import exclusive_gpus, reclaim_gpus, restore_services
from gpu_reclaim.models import Verdict
from gpu_reclaim.reclaim import reclaim
from gpu_reclaim.tasks import slots
from gpu_reclaim.tasks.stage import Exclusive
from guest import holds, units, ways, witness
from guest.test_guest_flow import artifacts
from guest.ways import UNIT
from lab.guest_files import HOLDER
from lab.lab import Lab
from lab.waiting import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("prefect_server", "stand_in_devices")]


def hold_gpus(
    stage: Callable[[Exclusive], object], minutes: float = 5, **changes: Any
) -> Exclusive:
    """A pipeline with a block, and a stage in it; what the block gave."""
    given: list[Exclusive] = []

    @flow
    def pipeline() -> None:
        with exclusive_gpus("lab", holds.policy(minutes, **changes)) as gpus:
            given.append(gpus)
            stage(gpus)

    pipeline()
    return given[0]


def sleep_on(_: object = None) -> None:
    """A stage in one long call."""
    time.sleep(120)


def test_everything_is_as_before(lab: Lab) -> None:
    """Idle stays idle, failed stays failed, and the file system has not changed."""
    units.add(lab, "lab-idle.service", Service=["ExecStart=/bin/sleep 600"])
    units.add(lab, "lab-broken.service", Service=["ExecStart=/bin/false"])
    lab.attach("systemctl start lab-broken")
    wait_until("it failed", lambda: holds.is_active(lab, "lab-broken") == ["failed"])
    triggers = holds.add_triggers(lab)
    lab.start_server()
    gateway = holds.add_gateway(lab)
    ways.save_host(lab, units=[UNIT, "lab-idle", "lab-broken"])
    before = holds.running(lab), holds.files(lab)
    seen: list[str] = []

    def stage(gpus: Exclusive) -> None:
        seen.extend(holds.is_active(lab, UNIT, gateway, *triggers))
        seen.append(lab.do(f"cat {holds.LEASE}"))
        assert exclusive_once_more() is gpus
        assert reclaim_gpus("lab").verdict == Verdict.CLEAN

    def exclusive_once_more() -> Exclusive:
        with exclusive_gpus("lab") as again:
            return again

    gpus = hold_gpus(stage)
    assert seen[:-1] == ["inactive"] * 5
    assert "owner Prefect run reclaim-lab (" in seen[-1]
    assert "flow-runs/flow-run/" in seen[-1]
    assert gpus.restored is not None
    assert {x.unit: x.outcome for x in gpus.restored.restored} == dict.fromkeys(
        [UNIT, gateway, *triggers], "started"
    )
    assert gpus.intruders == []
    lab.wait_ready()
    assert (holds.running(lab), holds.files(lab) ^ before[1]) == (before[0], set())
    assert holds.traces(lab) == []
    page = str(artifacts()["gpu-exclusive-lab"])
    for text in ("the GPUs are ours", "putting back", f"{UNIT} | started"):
        assert text in page.replace("\\", "")


def test_whoever_comes_meanwhile_is_named(lab: Lab) -> None:
    """By hand, in a session's scope, in a unit of its own; and no way starts the held unit."""
    triggers = holds.add_triggers(lab)
    ways.save_host(lab)
    lab.start_server()
    needs = [f"Requires={UNIT}", f"After={UNIT}"]
    units.add(lab, "lab-other.service", Unit=needs, Service=["ExecStart=/bin/sleep 600"])
    units.add(lab, "lab-thief.service", Service=[f"ExecStart={HOLDER} --gpus 3 --mib 100"])
    pids: list[int] = []

    def stage(gpus: Exclusive) -> None:
        for name in (UNIT, *triggers, "lab-other.service"):
            code, state = holds.start(lab, name)
            assert (code != 0, state) == (True, "inactive"), name
        lab.do("systemctl start lab-thief")
        pids.append(lab.hold("--gpus", "1", "--mib", "300"))
        pids.append(lab.hold("--gpus", "2", "--mib", "300", unit="lab-hold-x.scope"))
        wait_until("all three are named", lambda: len(gpus.intruders) == 3)

    gpus = hold_gpus(stage)
    named = {row.pid: row.owner for row in gpus.intruders}
    assert {pid: named.get(pid) for pid in pids} == {
        pids[0]: "none",
        pids[1]: "scope lab-hold-x.scope",
    }
    assert "unit lab-thief.service" in named.values()
    page = str(artifacts()["gpu-exclusive-lab"]).replace("\\", "")
    assert page.count("intruder: ") == 3
    assert witness.state_of(lab) == "active"


@pytest.mark.exhaustive
def test_an_intruder_ends_the_stage_where_the_policy_says_so(lab: Lab) -> None:
    ways.save_host(lab)
    lab.start_server()
    started: list[float] = []

    def stage(_: Exclusive) -> None:
        lab.hold("--gpus", "1", "--mib", "300")
        started.append(time.monotonic())
        sleep_on()

    with pytest.raises(Intruded, match="lab-holder") as caught:
        hold_gpus(stage, on_intruder="fail")
    assert time.monotonic() - started[0] < 30
    assert "systemd-run" in caught.value.remedy
    assert witness.state_of(lab) == "active"
    assert holds.traces(lab) == []


def test_what_the_stage_starts_is_its_own_and_ends_with_it(lab: Lab) -> None:
    ways.save_host(lab)
    lab.start_server()

    def stage(gpus: Exclusive) -> None:
        command = " ".join(gpus.command(HOLDER, "--gpus", "0", "--mib", "700", "--ignore-term"))
        lab.do(f"{command} >/dev/null 2>&1 </dev/null &")
        wait_until("it holds", lambda: witness.memory(lab)[0] == 700)
        # Two looks of the watch at least.
        lease = "sed -n 's/^expires_uptime //p' /run/gpu-reclaim/lease"
        first = lab.do(lease)
        wait_until("one look", lambda: lab.do(lease) != first)
        second = lab.do(lease)
        wait_until("another", lambda: lab.do(lease) != second)

    gpus = hold_gpus(stage)
    assert gpus.intruders == []
    lab.wait_ready()
    assert witness.memory(lab) == [90_000, 90_100, 90_200, 90_300]
    assert not [x for x in lab.guest.processes() if x.title.startswith(HOLDER)]
    assert holds.traces(lab) == []


@pytest.mark.parametrize("how", [pytest.param("expired", marks=pytest.mark.exhaustive), "restored"])
def test_a_hold_that_is_lost_ends_the_stage(lab: Lab, how: str) -> None:
    ways.save_host(lab)
    lab.start_server()
    started: list[float] = []

    def stage(_: Exclusive) -> None:
        if how == "expired":
            holds.expire(lab)
        else:
            restore_services("lab")
        started.append(time.monotonic())
        sleep_on()

    with pytest.raises(HoldLost):
        hold_gpus(stage)
    assert time.monotonic() - started[0] < 30
    holds.wait_back(lab, UNIT)


@pytest.mark.exhaustive
def test_a_slot_that_is_lost_ends_the_stage(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "RENEW_S", 1)
    ways.save_host(lab)
    lab.start_server()
    started: list[float] = []

    def stage(_: Exclusive) -> None:
        with get_client(sync_client=True) as client:
            slot = slots.read_slot(client, "lab")
            assert slot is not None
            client.release_concurrency_slots_with_lease(slot.lease)
        started.append(time.monotonic())
        sleep_on()

    with pytest.raises(HoldLost, match="slot"):
        hold_gpus(stage)
    assert time.monotonic() - started[0] < 30
    assert witness.state_of(lab) == "active"
    assert holds.traces(lab) == []


@pytest.mark.exhaustive
def test_an_error_of_the_stage_puts_back_and_comes_out(lab: Lab) -> None:
    ways.save_host(lab)
    lab.start_server()

    def stage(_: Exclusive) -> None:
        raise ZeroDivisionError("tuning went wrong")

    with pytest.raises(ZeroDivisionError):
        hold_gpus(stage)
    assert witness.state_of(lab) == "active"
    assert holds.traces(lab) == []
    page = str(artifacts()["gpu-exclusive-lab"]).replace("\\", "")
    assert "the block ended with ZeroDivisionError" in page
    # What others' errors say may hold secrets.
    assert "tuning went wrong" not in page


@pytest.mark.exhaustive
def test_what_does_not_come_back_fails_a_good_block(lab: Lab) -> None:
    ways.save_host(lab)
    lab.start_server()
    main = lab.guest.rootfs / "opt/sglang/launch_server.py"
    text = main.read_text()

    def stage(_: Exclusive) -> None:
        main.write_text("raise SystemExit(3)\n")

    try:
        with pytest.raises(NotRestored, match="did not start"):
            hold_gpus(stage)
    finally:
        main.write_text(text)
    assert restore_services("lab").complete


@pytest.mark.exhaustive
def test_the_server_must_serve_again(lab: Lab) -> None:
    ways.save_host(lab)
    values: dict[str, Any] = {"host": GpuHost.load("lab"), "unit": UNIT, "ready_timeout_s": 4}
    LlmServer(**values).save("qwen", overwrite=True)
    lab.start_server()

    @flow
    def pipeline() -> Exclusive:
        with exclusive_gpus("lab", holds.policy(), server="qwen") as gpus:
            pass
        return gpus

    restored = pipeline().restored
    assert restored is not None
    assert f"{UNIT} serves again after" in restored.summary
    lab.smi("server.sick", "")
    with pytest.raises(NotRestored, match=r"did not serve within .* HTTP 503") as caught:
        pipeline()
    assert f"journalctl -u {UNIT}" in caught.value.remedy
    assert witness.state_of(lab) == "active"


def test_one_guest_by_two_names_is_one_host(lab: Lab) -> None:
    """The host's own lock keeps off whom no limit of Prefect's does: a person by hand, too."""
    ways.save_host(lab)
    ways.save_host(lab, "same-lab")
    lab.start_server()

    def stage(_: Exclusive) -> None:
        with pytest.raises(GpusNotReclaimed, match="held by Prefect run reclaim-lab") as caught:
            reclaim_gpus("same-lab", holds.policy(0))
        assert caught.value.report.verdict == Verdict.UNKNOWN
        assert "restore-services" in str(caught.value)
        with pytest.raises(GpusNotReclaimed, match="held by Prefect run reclaim-lab"):
            reclaim(ways.session(lab), holds.policy(0))
        plan = reclaim_gpus("same-lab", holds.policy(0, mode="plan"))
        assert "held by Prefect run reclaim-lab" in plan.summary
        assert witness.memory(lab) == [0, 0, 0, 0]

    hold_gpus(stage)
    assert witness.state_of(lab) == "active"


@pytest.mark.exhaustive
def test_a_second_run_waits_for_the_first(lab: Lab) -> None:
    """One waits for the slot, the other, by another name, for the host; both get it in the end."""
    ways.save_host(lab)
    ways.save_host(lab, "same-lab")
    lab.start_server()
    inside, over = threading.Event(), threading.Event()
    order: list[str] = []

    def first(_: Exclusive) -> None:
        inside.set()
        over.wait(60)
        order.append("first")

    def second(name: str) -> None:
        inside.wait(60)
        reclaim_gpus(name, holds.policy(0, wait_minutes=2))
        order.append(name)

    runs = [
        threading.Thread(target=hold_gpus, args=(first,)),
        threading.Thread(target=second, args=("lab",)),
        threading.Thread(target=second, args=("same-lab",)),
    ]
    for run in runs:
        run.start()
    inside.wait(60)
    with pytest.raises(GpusNotReclaimed, match=r"held by Prefect run .*limit gpu-reclaim-lab"):
        reclaim_gpus("lab", holds.policy(0))
    assert order == []
    over.set()
    for run in runs:
        run.join(90)
    assert order[0] == "first"
    assert sorted(order[1:]) == ["lab", "same-lab"]
    assert holds.traces(lab) == []


@pytest.mark.exhaustive
def test_a_block_in_another_thread_is_refused_its_slot(lab: Lab) -> None:
    ways.save_host(lab)
    lab.start_server()
    caught: list[BaseException] = []

    def other() -> None:
        try:
            hold_gpus(sleep_on)
        except HeldByOther as error:
            caught.append(error)

    def stage(_: Exclusive) -> None:
        run = threading.Thread(target=other)
        run.start()
        run.join(60)

    hold_gpus(stage)
    assert "held by Prefect run" in str(caught[0])
    assert "prefect gcl update gpu-reclaim-lab --active-slots 0" in str(caught[0])


@pytest.mark.exhaustive
def test_a_guest_that_starts_anew_ends_the_stage_and_gets_all_back(lab: Lab) -> None:
    ways.save_host(lab)
    triggers = holds.add_triggers(lab)
    lab.start_server()

    def stage(_: Exclusive) -> None:
        lab.guest.restart()
        sleep_on()

    with pytest.raises(HoldLost):
        hold_gpus(stage)
    assert holds.is_active(lab, UNIT, *triggers) == ["active"] * 4
    assert holds.traces(lab) == []


@pytest.mark.exhaustive
def test_a_short_cut_of_the_wire_does_no_harm(lab: Lab) -> None:
    ways.save_host(lab, guest=None)
    lab.start_server()

    def stage(_: Exclusive) -> None:
        with lab.cut():
            time.sleep(12)

    gpus = hold_gpus(stage)
    assert gpus.intruders == []
    assert witness.state_of(lab) == "active"
    assert holds.traces(lab) == []


@pytest.mark.exhaustive
def test_a_long_cut_ends_the_stage_and_the_host_mends_itself(lab: Lab) -> None:
    ways.save_host(lab)
    lab.start_server()
    cut = lab.cut()

    def stage(_: Exclusive) -> None:
        cut.__enter__()
        sleep_on()

    try:
        with pytest.raises((HoldLost, NotRestored)) as caught:
            hold_gpus(stage, minutes=0.3)
        holds.wait_back(lab, UNIT)
    finally:
        cut.__exit__(None, None, None)
    assert isinstance(caught.value, HoldLost)
    assert "could not be reached" in str(caught.value)
