"""A host's GPUs for the length of a block, through a real Prefect server; the host is pretended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import flow, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Cancelled

from gpu_reclaim import serving as serving_module
from gpu_reclaim.blocks import GpuHost, LlmServer
from gpu_reclaim.commands import Script
from gpu_reclaim.errors import (
    BadInput,
    GpusNotReclaimed,
    HeldByOther,
    HoldLost,
    Intruded,
    NotRestored,
    UnknownHost,
    Unreachable,
)
from gpu_reclaim.flows import exclusive, exclusive_gpus, put_back_after, reclaim_gpus
from gpu_reclaim.models import ReclaimPolicy, ReclaimReport, Verdict
from gpu_reclaim.reclaim import reclaim
from gpu_reclaim.tasks import artifacts, slots, stage
from gpu_reclaim.tasks.host import open_host
from gpu_reclaim.tasks.slots import host_slot, limit_name, read_slot
from gpu_reclaim.tasks.stage import Exclusive
from prefect_layer.pretend_host import Holder, PretendHost
from prefect_layer.test_reclaim_flow import artifacts_of
from prefect_layer.test_slots import acquired, free, in_use, outside
from unit.actors import LIMIT_S, wait_for
from unit.values import said

QUICK = ReclaimPolicy(stable_samples=1)
TAKE, PROVE, BACK = "take the host", "prove the hold", "put back what was stopped"
KEEP = "keep the hold"
STOP, END = "stop sglang.service", "end 2 processes"
LOCKED = ["lock the host", "unlock the host"]

Events = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """Name and payload of what automations hear."""
    heard: Events = []

    def emit(name: str, resource: dict[str, str], payload: dict[str, Any]) -> None:
        assert resource["prefect.resource.id"] == "gpu-reclaim.host.pretend"
        heard.append((name.removeprefix("gpu-reclaim."), payload))

    monkeypatch.setattr(stage, "emit_event", emit)
    return heard


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is looked at many times a second."""
    monkeypatch.setattr("gpu_reclaim.keeper.EVERY_S", 0.05)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs are freed without a run of its own, which takes a second."""

    def free_them(host: str, policy: ReclaimPolicy) -> ReclaimReport:
        with open_host(host, policy.via) as session:
            return reclaim(session, policy)

    monkeypatch.setattr(exclusive, "reclaim_gpus", free_them)


def run(do: Callable[[Exclusive], object], policy: ReclaimPolicy = QUICK, **more: Any) -> Exclusive:
    """A block around that; it has been left again when this returns."""
    with exclusive_gpus("pretend", policy, **more) as gpus:
        do(gpus)
    return gpus


def nothing(_: Exclusive) -> None:
    pass


def slot_is_free() -> bool:
    with get_client(sync_client=True) as client:
        return free(client, "pretend")


def give_away_slot() -> None:
    with get_client(sync_client=True) as client:
        slot = read_slot(client, "pretend")
        assert slot is not None
        client.release_concurrency_slots_with_lease(slot.lease)


def raising(error: BaseException) -> Callable[[Exclusive], None]:
    def do(_: Exclusive) -> None:
        raise error

    return do


def test_from_the_taking_to_the_page(pretend: PretendHost, events: Events) -> None:
    seen: dict[str, Any] = {}

    @flow
    def evaluation() -> tuple[Exclusive, UUID]:
        with exclusive_gpus("pretend", QUICK) as gpus, get_client(sync_client=True) as client:
            slot = read_slot(client, "pretend")
            seen["wrote"] = list(pretend.wrote)
            seen["runs"] = slot.runs if slot else []
            seen["on the host"] = pretend.runs.split()
            seen["restored"] = gpus.restored
            seen["active"] = pretend.active
        return gpus, UUID(flow_run.id)

    gpus, run_id = evaluation()

    assert seen["wrote"] == [TAKE, STOP, END, PROVE]
    assert seen["runs"] == [run_id]
    assert seen["on the host"][-1] == str(run_id)
    assert (seen["active"], seen["restored"]) == (False, None)
    # The last look, then all comes back.
    assert pretend.wrote[4:] == [KEEP, BACK]
    assert (pretend.active, slot_is_free()) == (True, True)
    assert gpus.report is not None
    assert (gpus.report.verdict, gpus.report.held_until) == (Verdict.CLEAN, "11:00")
    assert gpus.restored is not None
    assert [str(row) for row in gpus.restored.restored] == ["sglang.service: started"]
    assert [what for _, what in gpus.moments] == [
        "freeing the GPUs",
        "the GPUs are ours, and the hold is proven",
        "putting back what was stopped",
        gpus.restored.summary,
    ]
    assert events == [
        ("held", {"until": "11:00"}),
        (
            "restored",
            {
                "complete": True,
                "units": [{"unit": "sglang.service", "outcome": "started", "detail": ""}],
            },
        ),
    ]
    page = str(artifacts_of(run_id)["gpu-exclusive-pretend"].data)
    assert "# pretend: held and put back" in page
    assert page.index("freeing the GPUs") < page.index("putting back") < page.index("## Put back")


def test_nested_in_itself_it_does_nothing(pretend: PretendHost, library: None) -> None:
    def do(gpus: Exclusive) -> None:
        with exclusive_gpus("pretend") as inner:
            assert inner is gpus
        assert (pretend.active, BACK in pretend.wrote) == (False, False)

    run(do)

    assert pretend.wrote == [TAKE, STOP, END, PROVE, KEEP, BACK]


def test_a_reclaim_inside_neither_takes_nor_puts_back(pretend: PretendHost) -> None:
    def do(_: Exclusive) -> None:
        pretend.holders.append(Holder(300, "stray.py", 0, unit="session-3.scope"))
        for policy in (QUICK, QUICK.model_copy(update={"hold_minutes": 1.0})):
            assert reclaim_gpus("pretend", policy).verdict == Verdict.CLEAN
        assert pretend.active is False

    run(do)

    assert "end 1 processes" in pretend.wrote
    assert (pretend.wrote.count(TAKE), pretend.wrote.count(PROVE)) == (1, 1)
    assert (pretend.wrote.index(BACK), pretend.wrote[-1]) == (len(pretend.wrote) - 1, BACK)
    assert not set(LOCKED) & set(pretend.asked)


def test_a_reclaim_inside_that_fails_ends_the_block_which_puts_back_once(
    pretend: PretendHost,
    library: None,
) -> None:
    def do(_: Exclusive) -> None:
        pretend.stuck_mib = 500
        reclaim_gpus("pretend", ReclaimPolicy(settle_timeout_s=0))

    with pytest.raises(GpusNotReclaimed) as caught:
        run(do)

    assert caught.value.report.restored == []
    assert pretend.wrote.count(BACK) == 1
    assert (pretend.active, slot_is_free()) == (True, True)


@pytest.mark.parametrize("error", [ValueError("own"), KeyboardInterrupt()])
def test_an_error_inside_comes_out_and_all_is_put_back(
    pretend: PretendHost, library: None, events: Events, error: BaseException
) -> None:
    with pytest.raises(type(error)) as caught:
        run(raising(error))

    assert caught.value is error
    assert (pretend.active, slot_is_free()) == (True, True)
    assert [name for name, _ in events] == ["held", "restored"]


def test_gpus_that_cannot_be_freed_are_put_back_and_the_block_is_never_entered(
    pretend: PretendHost,
) -> None:
    pretend.stuck_mib = 500
    reached: list[Exclusive] = []
    with pytest.raises(GpusNotReclaimed) as caught:
        run(reached.append, ReclaimPolicy(settle_timeout_s=0))

    assert [str(row) for row in caught.value.report.restored] == ["sglang.service: started"]
    assert (reached, pretend.wrote.count(BACK)) == ([], 1)
    assert (pretend.active, slot_is_free()) == (True, True)


def test_what_did_not_come_back_fails_a_block_that_went_well(
    pretend: PretendHost, library: None, events: Events
) -> None:
    pretend.broken = True
    with pytest.raises(NotRestored, match="did not start") as caught:
        run(nothing)

    assert "journalctl -u sglang.service" in caught.value.remedy
    assert events[-1][1]["complete"] is False
    assert slot_is_free()


def test_what_did_not_come_back_does_not_hide_the_blocks_own_error(
    pretend: PretendHost, library: None
) -> None:
    pretend.broken = True
    with pytest.raises(ValueError, match="own"):
        run(raising(ValueError("own")))


def test_what_cannot_be_told_keeps_nobody(
    pretend: PretendHost, library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the server is away")

    monkeypatch.setattr(stage, "emit_event", fail)
    monkeypatch.setattr(artifacts, "show_exclusive", fail)
    run(nothing)

    assert pretend.active


# What ends a stage.


def test_a_lost_hold_ends_a_sleeping_stage(
    pretend: PretendHost, library: None, events: Events, watched: None
) -> None:
    def do(_: Exclusive) -> None:
        pretend.taken = True
        time.sleep(LIMIT_S)

    began = time.monotonic()
    with pytest.raises(HoldLost, match="no longer ours"):
        run(do)

    assert time.monotonic() - began < LIMIT_S / 2
    assert [name for name, _ in events] == ["held", "lost", "restored"]
    assert "no longer ours" in events[1][1]["why"]
    # It is another's by now.
    assert pretend.active is False


def test_a_lost_slot_ends_a_sleeping_stage_and_all_is_put_back(
    pretend: PretendHost, library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "RENEW_S", 0.05)

    def do(_: Exclusive) -> None:
        with get_client(sync_client=True) as client:
            slot = read_slot(client, "pretend")
            assert slot is not None
            client.release_concurrency_slots_with_lease(slot.lease)
        time.sleep(LIMIT_S)

    with pytest.raises(HoldLost, match="gave our slot away"):
        run(do)

    assert (pretend.active, slot_is_free()) == (True, True)


def test_a_slot_lost_while_the_gpus_are_being_freed_ends_that_too(
    pretend: PretendHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "RENEW_S", 0.05)

    def lose(script: Script) -> None:
        if script.name == END:
            give_away_slot()
            time.sleep(LIMIT_S)

    pretend.trouble = lose
    reached: list[Exclusive] = []
    with pytest.raises(HoldLost, match="gave our slot away"):
        run(reached.append)

    assert reached == []
    # At once, and once more by the run's own hook, which finds nothing left.
    assert pretend.wrote == [TAKE, STOP, BACK, BACK]
    assert (pretend.active, slot_is_free()) == (True, True)


def test_on_two_hosts_the_loss_of_the_outer_one_ends_the_stage(
    pretend: PretendHost, library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "RENEW_S", 0.05)

    def do(_: Exclusive) -> None:
        with exclusive_gpus("the-other", QUICK):
            give_away_slot()
            time.sleep(LIMIT_S)

    began = time.monotonic()
    with pytest.raises(HoldLost, match="pretend: Prefect gave our slot away"):
        run(do)

    assert time.monotonic() - began < LIMIT_S / 2
    assert pretend.wrote.count(BACK) == 2


def test_an_intruder_is_named_and_the_stage_goes_on(
    pretend: PretendHost, library: None, events: Events, watched: None
) -> None:
    def do(gpus: Exclusive) -> None:
        pretend.holders.append(Holder(300, "train.py", 0, unit="gpureclaim.slice/x.scope"))
        pretend.holders.append(Holder(301, "stray.py", 0, unit="session-3.scope"))
        wait_for(lambda: bool(gpus.intruders), "the intruder")

    gpus = run(do)

    assert [(row.pid, row.name) for row in gpus.intruders] == [(301, "stray.py")]
    assert [payload["pid"] for name, payload in events if name == "intruder"] == [301]
    assert sum("intruder: stray.py" in what for _, what in gpus.moments) == 1


def test_an_intruder_ends_the_stage_where_the_policy_says_so(
    pretend: PretendHost, library: None, watched: None
) -> None:
    def do(_: Exclusive) -> None:
        pretend.holders.append(Holder(301, "stray.py", 0, unit="session-3.scope"))
        time.sleep(LIMIT_S)

    with pytest.raises(Intruded, match=r"stray\.py"):
        run(do, QUICK.model_copy(update={"on_intruder": "fail"}))

    assert pretend.active


def test_between_two_steps_one_can_ask() -> None:
    gpus = Exclusive("box")
    gpus.check()
    gpus.stopper.error = HoldLost("lost")
    with pytest.raises(HoldLost):
        gpus.check()


def test_a_command_is_marked_as_the_blocks_own() -> None:
    assert Exclusive("box").command("python3", "a b.py")[-4:] == [
        "--slice=gpureclaim.slice",
        "--",
        "python3",
        "a b.py",
    ]


# Who has the host already.


def test_the_host_of_another_run_is_refused_untouched(pretend: PretendHost, library: None) -> None:
    with host_slot("pretend"):
        error = outside(lambda: run(nothing))

    assert isinstance(error, HeldByOther)
    assert pretend.asked == []


def test_a_lease_of_another_run_is_a_verdict_and_nothing_is_touched(pretend: PretendHost) -> None:
    pretend.taken = True
    with pytest.raises(GpusNotReclaimed, match="held by the nightly run"):
        run(nothing)

    assert pretend.wrote == [TAKE]
    assert (pretend.stops, pretend.active, slot_is_free()) == (0, True, True)


def test_a_reclaim_while_another_run_has_the_slot_tells_who(pretend: PretendHost) -> None:
    with host_slot("pretend"):
        error = outside(lambda: reclaim_gpus("pretend", QUICK))
        plan = reclaim_gpus("pretend", ReclaimPolicy(mode="plan"))

    assert isinstance(error, GpusNotReclaimed)
    assert "concurrency limit gpu-reclaim-pretend" in error.report.summary
    assert plan.verdict == Verdict.PLANNED
    assert pretend.wrote == []


def test_a_reclaim_without_a_hold_gives_up_slot_and_lock(pretend: PretendHost) -> None:
    reclaim_gpus("pretend", QUICK)

    assert [x for x in pretend.wrote if x not in (STOP, END)] == LOCKED
    assert (pretend.token, slot_is_free()) == ("", True)


# The server.


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a server on the pretend host; saving a block would take seconds."""
    monkeypatch.setattr(serving_module, "POLL_S", (0.01, 0.01))
    made = LlmServer(
        host=GpuHost(), unit="sglang", python="/opt/sglang/bin/python", ready_timeout_s=0.5
    )
    monkeypatch.setattr(exclusive, "load_server", {"llm": made.server()}.__getitem__)
    return "llm"


def test_the_block_is_left_when_the_server_serves_again(
    pretend: PretendHost, library: None, llm: str
) -> None:
    pretend.healths = ["0 Connection refused", "503", "200"]
    gpus = run(nothing, server=llm)

    assert gpus.restored is not None
    assert "sglang.service serves again" in gpus.restored.summary
    assert pretend.asked[-4:] == [BACK, *["ask for health"] * 3]


def test_a_server_that_does_not_serve_again_fails_the_block(
    pretend: PretendHost, library: None, llm: str
) -> None:
    pretend.healths = ["503"]
    with pytest.raises(NotRestored, match="did not serve within") as caught:
        run(nothing, server=llm)

    assert "journalctl -u sglang.service" in caught.value.remedy


def test_an_interpreter_that_is_not_there_fails_the_block(
    pretend: PretendHost, library: None, llm: str
) -> None:
    pretend.healths = [""]
    with pytest.raises(NotRestored, match="/opt/sglang/bin/python cannot be run"):
        run(nothing, server=llm)


def test_who_cancels_does_not_wait_for_the_server(
    pretend: PretendHost, library: None, llm: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(raising(KeyboardInterrupt()), server=llm)

    assert pretend.active
    assert "ask for health" not in pretend.asked


def test_a_server_that_was_not_put_back_is_not_waited_for(
    pretend: PretendHost, library: None, llm: str
) -> None:
    pretend.broken = True
    with pytest.raises(NotRestored, match="did not start"):
        run(nothing, server=llm)

    assert "ask for health" not in pretend.asked


# What is refused before anything is touched.


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (ReclaimPolicy(mode="plan"), "mode is plan"),
        (ReclaimPolicy(approve=True), "approve is not supported"),
    ],
)
def test_a_policy_that_frees_nothing_is_refused(
    pretend: PretendHost, library: None, policy: ReclaimPolicy, said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        run(nothing, policy)

    assert pretend.asked == []


def test_an_unknown_server_is_refused_untouched(pretend: PretendHost, library: None) -> None:
    with pytest.raises(UnknownHost, match="no-such-server") as caught:
        run(nothing, server="no-such-server")

    assert "LlmServer" in caught.value.remedy
    assert pretend.asked == []


def test_an_unknown_host_is_refused_and_gets_no_limit() -> None:
    name = f"no-such-{uuid4().hex[:8]}"
    with pytest.raises(UnknownHost, match=name):
        exclusive_gpus(name).__enter__()

    with get_client(sync_client=True) as client, pytest.raises(ObjectNotFound):
        client.read_global_concurrency_limit_by_name(limit_name(name))


# The hook.


def ended(client: Any, parameters: dict[str, Any]) -> FlowRun:
    """A run of somebody's flow, cancelled, as a hook gets it."""

    @flow
    def evaluation(host: str = "") -> None:
        pass

    made: FlowRun = client.create_flow_run(evaluation, parameters=parameters)
    return made


def hooked(run_of: FlowRun, host: str = "") -> None:
    @flow
    def evaluation() -> None:
        pass

    put_back_after(host)(flow=evaluation, flow_run=run_of, state=Cancelled())


@pytest.mark.parametrize("by", ["parameter", "argument"])
def test_a_hook_puts_back_what_its_own_run_stopped(pretend: PretendHost, by: str) -> None:
    with get_client(sync_client=True) as client:
        run_of = ended(client, {"host": "pretend"} if by == "parameter" else {})
        slots._ensure(client, "pretend")
        acquired(client, "pretend", [str(run_of.id)])
        pretend.active, pretend.token, pretend.record = False, "t", ["sglang.service"]
        pretend.runs = f"child {run_of.id}"
        hooked(run_of, "" if by == "parameter" else "pretend")

        assert (pretend.active, pretend.token) == (True, "")
        assert free(client, "pretend")


def test_a_hook_leaves_alone_what_another_run_has(pretend: PretendHost) -> None:
    with get_client(sync_client=True) as client:
        slots._ensure(client, "pretend")
        other = acquired(client, "pretend", [str(uuid4())])
        pretend.active, pretend.token, pretend.record = False, "t", ["sglang.service"]
        pretend.runs = "another"
        hooked(ended(client, {"host": "pretend"}))

        assert (pretend.active, pretend.token, in_use(client, "pretend")) == (False, "t", 1)
        slots._free(client, "pretend", other)


def test_an_error_of_a_hook_only_logs(
    pretend: PretendHost, prefect_log: pytest.LogCaptureFixture
) -> None:
    def cut(script: Script) -> None:
        raise Unreachable("ssh: no answer")

    pretend.trouble = cut
    with get_client(sync_client=True) as client:
        hooked(ended(client, {"host": "pretend"}))

    assert any("pretend: not put back by this hook" in line for line in said(prefect_log))


def test_a_hook_without_a_host_only_logs(prefect_log: pytest.LogCaptureFixture) -> None:
    with get_client(sync_client=True) as client:
        hooked(ended(client, {}))

    assert any("no host was named" in line for line in said(prefect_log))


def test_a_pipeline_that_crashes_after_a_reclaim_with_a_hold_is_put_back(
    pretend: PretendHost,
) -> None:
    """What the part took, the whole may put back."""
    back = put_back_after("pretend")

    class Died(BaseException):
        pass

    @flow(on_crashed=[back])
    def pipeline() -> None:
        reclaim_gpus("pretend", QUICK.model_copy(update={"hold_minutes": 5.0}))
        assert pretend.active is False
        raise Died

    with pytest.raises(Died):
        pipeline()

    assert (pretend.active, pretend.wrote[-1]) == (True, BACK)


def test_who_outlives_a_block_gets_one_of_its_own(pretend: PretendHost, library: None) -> None:
    """A context is copied into tasks and threads: in it the block that is over still stands."""
    copied: list[Context] = []
    run(lambda _: copied.append(copy_context()))
    assert pretend.active is True
    late = copied[0].run(lambda: run(nothing))
    assert late.restored is not None
    assert pretend.wrote.count(TAKE) == 2


def test_in_a_coroutine_the_block_ends_and_nobody_else(
    pretend: PretendHost, library: None, watched: None
) -> None:
    """The loop, and who else runs in it, goes on."""

    async def bystander() -> str:
        await asyncio.sleep(2)
        return "well"

    async def stage() -> None:
        with exclusive_gpus("pretend", QUICK):
            pretend.token = "another's"
            await asyncio.sleep(LIMIT_S)

    async def both() -> tuple[Any, Any]:
        return await asyncio.gather(stage(), bystander(), return_exceptions=True)

    lost, well = asyncio.run(both())
    assert isinstance(lost, HoldLost)
    assert well == "well"
