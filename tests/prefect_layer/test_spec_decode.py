"""A tuning of speculative decoding, through a real Prefect server; the host is pretended."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.utilities.callables import parameter_schema

from gpu_reclaim import serving as serving_module
from gpu_reclaim import trial
from gpu_reclaim.blocks import GpuHost, LlmServer
from gpu_reclaim.commands import Script
from gpu_reclaim.errors import BadInput, HoldLost, Intruded, NotInForce
from gpu_reclaim.flows import spec_decode_retune
from gpu_reclaim.models import ReclaimPolicy
from gpu_reclaim.plans import SpecDecodePlan, SpecSetting
from gpu_reclaim.tasks import host as host_tasks
from gpu_reclaim.tasks import slots
from gpu_reclaim.tuning import TuningReport
from prefect_layer.conftest import put_behind_every_name
from prefect_layer.pretend_server import (
    BEST,
    NOW,
    OFF,
    OWN_FLAGS,
    SECRET,
    PretendServer,
    intruder,
    tunable,
)
from prefect_layer.test_exclusive import (
    BACK,
    KEEP,
    PROVE,
    QUICK,
    STOP,
    TAKE,
    ended,
    give_away_slot,
    hooked,
    slot_is_free,
)
from prefect_layer.test_reclaim_flow import artifacts_of, task_runs_of
from unit.actors import LIMIT_S
from unit.values import said

BEGIN, CLOSE = "start sglang.service on trial", "close the trial"
KEPT = "keep the setting of sglang.service"
WROTE = "write visits.jsonl"
PLACE = "/var/lib/gpu-reclaim-tuning/sglang.service/"
FASTER = {OFF: 0.5, BEST: 1.3}
SLOWER = {OFF: 0.5}


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> PretendServer:
    """The host that the name "pretend" leads to, with the server "llm" on it."""
    host = tunable()
    put_behind_every_name(host, monkeypatch)
    monkeypatch.setattr(serving_module, "POLL_S", (0.01, 0.01))
    monkeypatch.setattr(trial, "POLL_S", 0.01)
    made = LlmServer(
        host=GpuHost(),
        unit="sglang",
        python="/opt/sglang/bin/python",
        dataset_path="/srv/prompts.json",
        api_key=SECRET,
        ready_timeout_s=0.5,
    )
    made.host._block_document_name = "pretend"
    monkeypatch.setattr(host_tasks, "load_llm", {"llm": made}.__getitem__)
    return host


def plan(*numbers: int, **changes: Any) -> SpecDecodePlan:
    """A tuning as short as one can be that still finds a winner."""
    settings = [SpecSetting(num_steps=number) for number in numbers]
    return SpecDecodePlan(**({"settings": settings, "levels": [1, 8], "rounds": 3} | changes))


def tune(*numbers: int, policy: ReclaimPolicy = QUICK, **changes: Any) -> TuningReport:
    return spec_decode_retune("llm", plan(*numbers, **changes), policy)


def last_run() -> FlowRun:
    """The newest tuning's run."""
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(limit=200)
    found = [run for run in runs if run.name == "spec-decode-llm" and run.created]
    return max(found, key=lambda run: str(run.created))


def page_of(key: str, run_id: UUID | None = None) -> str:
    """What a person reads of the newest tuning there."""
    text = str(artifacts_of(run_id or last_run().id)[key].data)
    return text.replace("\\", "")


def at(name: str, do: Callable[[], object], *, nth: int = 1) -> Callable[[Script], None]:
    """Trouble when a script of that name comes for the nth time."""
    seen: list[str] = []

    def trouble(script: Script) -> None:
        if script.name == name:
            seen.append(name)
            if len(seen) == nth:
                do()

    return trouble


def places(names: list[str], name: str) -> list[int]:
    return [place for place, one in enumerate(names) if one == name]


def raising(error: BaseException) -> Callable[[], object]:
    def do() -> object:
        raise error

    return do


def all_as_before(pretend: PretendServer) -> bool:
    return (pretend.active, pretend.arm, pretend.trial, pretend.flags) == (
        True,
        NOW,
        False,
        OWN_FLAGS,
    )


# The order of things.


def test_everything_happens_in_its_order(pretend: PretendServer) -> None:
    pretend.speeds = SLOWER
    report = tune()

    assert (report.outcome, report.winner) == ("kept", NOW)
    # All that can refuse is looked at first; and only then is the host taken.
    first = pretend.asked[: pretend.asked.index("survey")]
    assert {"ask for health", "read its command line", "look at the prompts"} < set(first)
    assert {"look for the benchmark", "read the logbook"} < set(first)
    assert not set(first) & set(pretend.wrote)
    end = next(x for x in pretend.wrote if x.startswith("end "))
    visit = [BEGIN, WROTE]
    assert [x for x in pretend.wrote if x != KEEP] == [
        *(TAKE, STOP, end, PROVE, "set the logbook aside"),
        *(BEGIN, "write about.json", "write answers.json", WROTE),
        # Closed, and free again, before the next one starts.
        *(CLOSE, STOP, end, *visit),
        BACK,
    ]
    for begun, written in zip(
        places(pretend.asked, BEGIN), places(pretend.asked, WROTE), strict=True
    ):
        between = pretend.asked[begun:written]
        assert between.count("measure at 1") == between.count("measure at 8") == 1
        # The proof comes before the first measurement.
        assert between.index("ask for its arguments") < between.index("measure at 1")
    assert pretend.visits == [NOW, OFF]
    assert all_as_before(pretend)
    names = [re.sub(r"-[0-9a-f]+$", "", x.name) for x in task_runs_of(last_run().id)]
    assert {"look-before-tuning-pretend", "measure-setting-pretend"} <= set(names)


def test_a_winner_is_applied_proven_and_kept(pretend: PretendServer, plain: None) -> None:
    pretend.speeds = FASTER
    report = tune(2)

    assert (report.outcome, report.current, report.winner) == ("replaced", NOW, BEST)
    assert report.drop_in == "/etc/systemd/system/sglang.service.d/zz-gpu-reclaim.conf"
    assert report.proof == f"/server_info says so: sglang.service serves with {BEST}"
    assert (pretend.active, pretend.arm, pretend.trial) == (True, BEST, False)
    # What is kept has no trace of the trial: a server that ends is started again.
    assert list(pretend.kept) == ["/etc"]
    assert "Restart=" not in pretend.kept["/etc"]
    # It is started once more, and runs on.
    assert pretend.visits[-1] == BEST
    assert pretend.wrote.index(KEPT) > max(places(pretend.wrote, BEGIN))
    assert len(pretend.measured) == len(pretend.visits) - 1
    page = page_of("spec-decode-llm")
    assert "a better setting is in force" in page
    assert "Clearly better than the present setting" in page
    assert (report.drop_in in page, report.proof in page) == (True, True)


def test_a_winner_for_the_time_until_a_reboot(pretend: PretendServer, plain: None) -> None:
    pretend.speeds = FASTER
    report = tune(2, persist=False)

    assert report.drop_in == "/run/systemd/system/sglang.service.d/zz-gpu-reclaim.conf"
    assert list(pretend.kept) == ["/run"]


def test_a_winner_is_only_told_where_nothing_shall_be_applied(
    pretend: PretendServer, plain: None
) -> None:
    pretend.speeds = FASTER
    report = tune(2, apply="never")

    assert (report.outcome, report.winner, report.drop_in) == ("found", BEST, "")
    assert "apply = if_better" in report.remedy
    assert all_as_before(pretend)
    assert KEPT not in pretend.wrote
    assert "a better setting was found, not applied" in page_of("spec-decode-llm")


def test_a_winner_that_fails_at_its_last_start_is_not_kept(
    pretend: PretendServer, plain: None
) -> None:
    pretend.speeds = FASTER
    assert tune(2, apply="never").outcome == "found"
    pretend.faults = {BEST: "dies"}
    report = tune(2)

    assert (report.outcome, report.drop_in, KEPT in pretend.wrote) == ("found", "", False)
    assert "It was not kept, for at its last start: it ended at start" in report.summary
    assert all_as_before(pretend)


def test_wrong_outputs_never_win(pretend: PretendServer, plain: None) -> None:
    pretend.speeds = FASTER
    pretend.faults = {BEST: "wrong"}
    report = tune(2)

    assert (report.outcome, report.winner) == ("kept", NOW)
    assert {x.arm: x.state for x in report.arms}[BEST] == "rejected"
    assert "100 % of its outputs differ" in page_of("spec-decode-llm")


def test_the_present_setting_that_fails_twice_leaves_all_as_it_was(
    pretend: PretendServer, plain: None
) -> None:
    pretend.faults = {NOW: "breaks"}
    report = tune(2)

    assert (report.outcome, report.winner) == ("unfinished", NOW)
    assert report.summary.startswith("Nothing can be compared")
    assert "see its failures" in report.remedy
    assert pretend.visits == [NOW, NOW]
    assert all_as_before(pretend)
    assert "## Failures" in page_of("spec-decode-llm")


# A plan, and what is refused.


def test_a_plan_touches_nothing_and_shows_what_would_be_tried(pretend: PretendServer) -> None:
    report = tune(2, 64, mode="plan")

    assert (report.outcome, report.visits, pretend.wrote) == ("planned", [], [])
    assert report.estimated_minutes > 0
    page = page_of("spec-decode-plan-llm")
    assert "4 settings to try" in page
    assert f"| {BEST} | --speculative-algorithm NEXTN --speculative-num-steps 2" in page
    assert set(artifacts_of(last_run().id)) == {"spec-decode-plan-llm"}
    assert all_as_before(pretend)


def test_what_cannot_be_measured_is_refused_untouched(pretend: PretendServer) -> None:
    pretend.conversations = 15
    with pytest.raises(BadInput, match="has 15 conversations"):
        tune()

    assert (pretend.wrote, pretend.stops) == ([], 0)


def test_a_policy_that_only_plans_is_refused_untouched(pretend: PretendServer) -> None:
    with pytest.raises(BadInput, match="mode is plan"):
        tune(policy=ReclaimPolicy(mode="plan"))

    assert (pretend.wrote, pretend.stops) == ([], 0)


def test_a_unit_that_was_edited_meanwhile_is_not_tuned(pretend: PretendServer) -> None:
    """Another run may have been waited for, and have kept its winner."""
    pretend.trouble = at(STOP, lambda: setattr(pretend, "files", "1 1"))
    with pytest.raises(BadInput, match=r"sglang\.service was changed since it was looked at"):
        tune(2)

    assert (pretend.visits, pretend.measured, BACK in pretend.wrote) == ([], [], True)
    assert (all_as_before(pretend), slot_is_free()) == (True, True)


# The logbook.


def test_nothing_is_measured_twice(pretend: PretendServer, plain: None) -> None:
    pretend.speeds = FASTER
    pretend.trouble = at("measure at 8", raising(KeyboardInterrupt()), nth=4)
    with pytest.raises(KeyboardInterrupt):
        tune(2)

    assert all_as_before(pretend)
    pretend.trouble = lambda _: None
    before = list(pretend.measured)
    report = tune(2)

    assert (report.outcome, report.resumed, len(before)) == ("replaced", 3, 3)
    assert len(pretend.measured) == len(set(pretend.measured)) == len(report.visits)
    assert "3 of them come from an earlier run's record" in page_of("spec-decode-llm")


def test_what_is_decided_already_needs_no_reclaim(pretend: PretendServer, plain: None) -> None:
    pretend.speeds = SLOWER
    first = tune()
    wrote, stops = list(pretend.wrote), pretend.stops
    again = tune()

    assert (again.outcome, again.resumed) == ("kept", len(first.visits))
    assert (pretend.wrote, pretend.stops) == (wrote, stops)
    assert again.proof == "/server_info says so: sglang.service serves all as before"


def test_a_winner_of_an_earlier_run_is_applied_without_a_visit(
    pretend: PretendServer, plain: None
) -> None:
    pretend.speeds = FASTER
    first = tune(2, apply="never")
    measured, pretend.visits = list(pretend.measured), []
    report = tune(2)

    assert (report.outcome, pretend.measured, pretend.visits) == ("replaced", measured, [BEST])
    assert report.resumed == len(first.visits)


def test_from_the_start_means_also_for_later_runs(pretend: PretendServer, plain: None) -> None:
    pretend.speeds = SLOWER
    tune()
    fresh = tune(fresh=True)
    later = tune()

    assert (fresh.resumed, later.resumed) == (0, 2)
    assert pretend.visits == [NOW, OFF] * 2
    assert later.visits == fresh.visits
    assert any(path.endswith("/visits-before.jsonl") for path in pretend.book)


def test_the_logbook_is_one_for_each_server(pretend: PretendServer, plain: None) -> None:
    pretend.speeds = SLOWER
    report = tune()

    assert re.fullmatch(rf"{PLACE}[0-9a-f]{{12}}", report.raw)
    names = ("about.json", "answers.json", "visits.jsonl")
    assert set(pretend.book) == {f"{report.raw}/{name}" for name in names}
    # Measured at other concurrencies, nothing can be compared.
    assert tune(levels=[1, 4]).raw != report.raw


# What ends it in the middle.


def test_a_lost_slot_ends_it_and_all_is_put_back(
    pretend: PretendServer, plain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "RENEW_S", 0.05)

    def lose() -> None:
        give_away_slot()
        time.sleep(LIMIT_S)

    # It comes while a trial runs.
    pretend.trouble = at("measure at 1", lose)
    with pytest.raises(HoldLost, match="gave our slot away"):
        tune()

    assert pretend.measured == []
    assert all_as_before(pretend)


def test_an_intruder_ends_it_where_the_policy_says_so(
    pretend: PretendServer, plain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_reclaim.keeper.EVERY_S", 0.05)

    def come() -> None:
        pretend.holders.append(intruder())
        time.sleep(LIMIT_S)

    pretend.trouble = at("measure at 1", come)
    with pytest.raises(Intruded, match=r"stray\.py"):
        tune(policy=QUICK.model_copy(update={"on_intruder": "fail"}))

    assert all_as_before(pretend)


def test_its_own_server_is_no_intruder(
    pretend: PretendServer, plain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_reclaim.keeper.EVERY_S", 0.02)
    pretend.speeds = SLOWER
    report = tune(policy=QUICK.model_copy(update={"on_intruder": "fail"}))

    assert report.outcome == "kept"
    assert "watch" in pretend.asked


def test_nor_is_a_winner_that_stays(
    pretend: PretendServer, plain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_reclaim.keeper.EVERY_S", 0.02)
    pretend.speeds = FASTER
    report = tune(2, policy=QUICK.model_copy(update={"on_intruder": "fail"}))

    assert report.outcome == "replaced"


@pytest.mark.parametrize("where", [BEGIN, "look at the trial", "measure at 8", CLOSE])
def test_a_cancel_in_the_middle_puts_all_back(
    pretend: PretendServer, plain: None, where: str
) -> None:
    pretend.trouble = at(where, raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        tune()

    assert BACK in pretend.wrote
    assert (all_as_before(pretend), slot_is_free()) == (True, True)


def test_a_server_that_differs_afterwards_is_told(pretend: PretendServer, plain: None) -> None:
    pretend.speeds = SLOWER
    pretend.after = {"speculative_num_steps": 9}
    with pytest.raises(NotInForce, match="speculative_num_steps was 1 and is 9") as caught:
        tune()

    assert "journalctl -u sglang.service" in caught.value.remedy
    assert f"NotInForce: {caught.value.message}" in page_of("spec-decode-llm")


def test_a_winner_that_is_not_in_force_afterwards_is_told(
    pretend: PretendServer, plain: None
) -> None:
    pretend.speeds = FASTER
    pretend.after = {"speculative_num_steps": 1}
    with pytest.raises(NotInForce, match=f"does not run with {BEST}"):
        tune(2)


# What others see.


@pytest.mark.parametrize("fault", ["dies", "breaks", "mute"])
def test_no_secret_is_shown_anywhere(
    pretend: PretendServer, plain: None, prefect_log: pytest.LogCaptureFixture, fault: str
) -> None:
    pretend.faults = {OFF: fault}
    report = tune()
    run = last_run()
    found = artifacts_of(run.id)

    assert {x.arm: x.state for x in report.arms}[OFF] == "failed"
    keys = ("plan-llm", "llm", "settings-llm", "progress-llm")
    assert {f"spec-decode-{key}" for key in keys} <= set(found)
    assert "RuntimeError: no kernel" in page_of("spec-decode-llm")
    shown = [x.model_dump_json() for x in found.values()]
    shown += [x.model_dump_json() for x in task_runs_of(run.id)]
    shown += [run.model_dump_json(), report.model_dump_json(), *said(prefect_log)]
    assert SECRET in OWN_FLAGS
    assert not [x for x in shown if SECRET in x]


def test_a_refusal_shows_no_secret_either(
    pretend: PretendServer, prefect_log: pytest.LogCaptureFixture
) -> None:
    pretend.said = {"speculative_algorithm": None}
    with pytest.raises(BadInput, match="does not run as its flags say") as caught:
        tune()

    run = last_run()
    shown = [str(caught.value), run.model_dump_json(), *said(prefect_log)]
    assert not [x for x in shown if SECRET in x]


def test_plan_and_policy_are_the_runs_parameters(pretend: PretendServer) -> None:
    given = plan(2, mode="plan", weights=[1, 2.5])
    spec_decode_retune("llm", given, QUICK)
    stored = last_run().parameters

    assert stored["server"] == "llm"
    assert SpecDecodePlan.model_validate(stored["plan"]) == given
    assert ReclaimPolicy.model_validate(stored["policy"]) == QUICK
    assert stored["plan"]["settings"][0]["num_steps"] == 2


def test_the_form_is_plain() -> None:
    schema = parameter_schema(spec_decode_retune.fn).model_dump()
    assert list(schema["properties"]) == ["server", "plan", "policy"]
    assert schema["required"] == ["server"]
    assert all(field["description"] for field in schema["properties"].values())
    models = schema["definitions"]
    assert set(models) == {"SpecDecodePlan", "SpecSetting", "ReclaimPolicy"}
    for name, model in models.items():
        for field, shown in model["properties"].items():
            assert shown.get("title"), (name, field)
            assert shown.get("description"), (name, field)
            assert not {"anyOf", "oneOf", "allOf"} & set(shown), (name, field)
    assert models["SpecDecodePlan"]["properties"]["mode"]["enum"] == ["tune", "plan"]


# The hook.


def test_a_hook_finds_the_host_by_the_server(pretend: PretendServer) -> None:
    with get_client(sync_client=True) as client:
        run_of = ended(client, {"server": "llm"})
    pretend.active, pretend.token, pretend.record = False, "t", ["sglang.service"]
    pretend.runs = str(run_of.id)
    hooked(run_of)

    assert (pretend.active, pretend.token) == (True, "")


def test_a_hook_whose_block_is_gone_only_says_so(prefect_log: pytest.LogCaptureFixture) -> None:
    gone = f"no-such-{uuid4().hex[:8]}"
    with get_client(sync_client=True) as client:
        hooked(ended(client, {"server": gone}))

    assert any(f"{gone}: not put back by this hook" in line for line in said(prefect_log))
