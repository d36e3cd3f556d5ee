"""A tuning of MoE kernels, through a real Prefect server; the host is pretended."""

from __future__ import annotations

import json
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.utilities.callables import parameter_schema

from gpu_reclaim import running, trial
from gpu_reclaim import serving as serving_module
from gpu_reclaim.blocks import GpuHost, LlmServer
from gpu_reclaim.errors import BadInput, CommandFailed, NotInForce
from gpu_reclaim.flows import moe_autotune
from gpu_reclaim.models import ReclaimPolicy
from gpu_reclaim.moecourse import WITHIN_NOISE
from gpu_reclaim.moefound import PRESENT, TUNED
from gpu_reclaim.plans import MoeTunePlan
from gpu_reclaim.tasks import host as host_tasks
from gpu_reclaim.tuning import TuningReport
from prefect_layer.conftest import put_behind_every_name
from prefect_layer.pretend_moe import OVERLAYS, PretendMoe, moe_tunable
from prefect_layer.pretend_server import SECRET
from prefect_layer.test_exclusive import BACK, PROVE, QUICK, STOP, TAKE, slot_is_free
from prefect_layer.test_reclaim_flow import artifacts_of, task_runs_of
from prefect_layer.test_spec_decode import at, raising
from unit.moe_host import PACKAGE
from unit.values import said

DROP_IN = "/etc/systemd/system/sglang.service.d/zz-gpu-reclaim-moe.conf"
SIZES = [2, 16, 2048]
FASTER = {TUNED: 1.3}


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> PretendMoe:
    """The host that the name "pretend" leads to, with the server "llm" on it."""
    host = moe_tunable()
    put_behind_every_name(host, monkeypatch)
    monkeypatch.setattr(serving_module, "POLL_S", (0.01, 0.01))
    for module in (trial, running):
        monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.setattr("gpu_reclaim.moepreflight.LOG_PAUSE_S", 0.01)
    made = LlmServer(
        host=GpuHost(),
        unit="sglang",
        python="/opt/sglang/bin/python",
        dataset_path="/srv/prompts.json",
        sglang_source="/src/sglang",
        api_key=SECRET,
        ready_timeout_s=0.5,
    )
    made.host._block_document_name = "pretend"
    monkeypatch.setattr(host_tasks, "load_llm", {"llm": made}.__getitem__)
    return host


def tune(policy: ReclaimPolicy = QUICK, **changes: Any) -> TuningReport:
    """A tuning as short as one can be that still finds a winner."""
    plan = MoeTunePlan(**({"levels": [1, 8], "rounds": 3} | changes))
    return moe_autotune("llm", plan, policy)


def last_run() -> FlowRun:
    """The newest tuning's run."""
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(limit=200)
    return max((x for x in runs if x.name == "moe-llm"), key=lambda run: str(run.created))


def page_of(key: str) -> str:
    return str(artifacts_of(last_run().id)[key].data).replace("\\", "")


def all_as_before(pretend: PretendMoe) -> bool:
    return (pretend.active, pretend.folder, pretend.trial, pretend.kept, pretend.token) == (
        True,
        PACKAGE,
        False,
        {},
        "",
    )


# The order of things.


def test_a_better_config_is_kept(pretend: PretendMoe, plain: None) -> None:
    pretend.speeds = FASTER
    report = tune()

    assert (report.outcome, report.current, report.winner) == ("replaced", PRESENT, TUNED)
    assert [(x.tokens, x.failure, x.seconds) for x in report.sizes] == [(m, "", 600) for m in SIZES]
    assert re.fullmatch(rf"{OVERLAYS}/[0-9a-f]{{12}}", report.overlay)
    assert (report.drop_in, pretend.folder) == (DROP_IN, report.overlay)
    assert list(pretend.kept) == ["/etc"]
    assert report.overlay in pretend.kept["/etc"]
    assert "Restart=" not in pretend.kept["/etc"]
    assert list(pretend.overlays) == [report.overlay]
    assert report.proof == (
        "/server_info, and the log of every rank, says so: sglang.service serves with tuned"
    )
    # All that can refuse is looked at first; and only then is the host taken.
    first = pretend.asked[: pretend.asked.index("survey")]
    assert {"read its log", "look for the tuning script", "read what was tuned"} < set(first)
    assert not set(first) & set(pretend.wrote)
    wrote = [x for x in pretend.wrote if x != "keep the hold"]
    assert [x for x in wrote if not x.startswith("end ")][:14] == [
        *(TAKE, STOP, PROVE, "start job moe-2", "start job moe-16"),
        *("write sizes.jsonl", "write sizes.jsonl", "start job moe-2048", "write sizes.jsonl"),
        "remove caches",
        # Free again, whatever the script has left.
        *(STOP, "make an overlay for tuned"),
        *("set the logbook aside", "start sglang.service on trial"),
    ]
    # While the host is held: nobody else makes an overlay meanwhile.
    assert wrote[-2:] == ["remove overlays", BACK]


def test_what_people_see(pretend: PretendMoe, plain: None) -> None:
    pretend.speeds = FASTER
    report = tune()
    found = artifacts_of(last_run().id)

    assert {f"moe-{x}llm" for x in ("plan-", "", "settings-", "progress-")} <= set(found)
    page = page_of("moe-llm")
    for words in ("a better setting is in force", report.overlay, DROP_IN, "## Batch sizes"):
        assert words in page
    assert "3 batch sizes to tune" in page_of("moe-plan-llm")
    names = {re.sub(r"-[0-9a-f]+$", "", x.name) for x in task_runs_of(last_run().id)}
    assert {f"{x}-pretend" for x in ("look-before-moe", "tune-sizes", "make-overlays")} <= names
    rows = json.loads(str(found["moe-settings-llm"].data))
    assert [row["setting"] for row in rows] == [PRESENT, TUNED]


def test_one_that_is_as_quick_is_rolled_back(pretend: PretendMoe, plain: None) -> None:
    report = tune()

    assert (report.outcome, report.winner, report.overlay) == ("kept", PRESENT, "")
    assert report.summary.startswith(WITHIN_NOISE)
    assert WITHIN_NOISE in page_of("moe-llm")
    assert all_as_before(pretend)
    assert pretend.overlays == {}
    assert pretend.tuned == SIZES


@pytest.mark.parametrize("fault", ["dies", "mute", "breaks", "wrong"])
def test_one_that_is_wrong_never_wins(pretend: PretendMoe, plain: None, fault: str) -> None:
    pretend.speeds, pretend.faults = FASTER, {TUNED: fault}
    report = tune()

    state = {x.arm: x.state for x in report.arms}[TUNED]
    assert (report.outcome, state) == ("kept", "rejected" if fault == "wrong" else "failed")
    assert WITHIN_NOISE not in report.summary
    assert all_as_before(pretend)


def test_a_rank_that_uses_another_file_is_no_trial(pretend: PretendMoe, plain: None) -> None:
    pretend.speeds, pretend.stray = FASTER, TUNED
    report = tune()

    failure = next(x.failure for x in report.visits if x.arm == TUNED)
    assert failure.startswith(
        "it runs with other arguments: rank TP1 tells of no file, looking for"
    )
    assert (report.outcome, pretend.kept) == ("kept", {})


def test_a_winner_is_only_told_where_nothing_shall_be_applied(
    pretend: PretendMoe, plain: None
) -> None:
    pretend.speeds = FASTER
    report = tune(apply="never")

    assert (report.outcome, report.winner, report.drop_in) == ("found", TUNED, "")
    assert (report.overlay, pretend.overlays, all_as_before(pretend)) == ("", {}, True)
    # The next one begins with what was measured, and makes the configs anew.
    pretend.jobs = {}
    again = tune()
    assert (again.outcome, pretend.jobs, again.resumed) == ("replaced", {}, len(report.visits))
    assert pretend.folder == again.overlay


def test_a_second_tuning_begins_with_the_winner(pretend: PretendMoe, plain: None) -> None:
    pretend.speeds = FASTER
    first = tune()
    pretend.jobs, pretend.wrote = {}, []
    again = tune()

    # The same rows: there is nothing to try.
    assert (again.outcome, pretend.jobs) == ("kept", {})
    assert again.summary.startswith("There is nothing to try")
    assert pretend.wrote == []
    assert (pretend.folder, list(pretend.overlays)) == (first.overlay, [first.overlay])


# Plans, refusals, failures.


def test_a_plan_touches_nothing(pretend: PretendMoe) -> None:
    report = tune(mode="plan", candidates=["/configs/other.json", "/configs/gone.json"])

    assert (report.outcome, pretend.wrote, pretend.stops) == ("planned", [], 0)
    assert report.summary.startswith("3 batch sizes would be tuned for E=256,N=256,")
    page = page_of("moe-plan-llm")
    for words in ("| 2048 |", "| other.json | 8 |", "cannot be read on the host", "to be tuned"):
        assert words in page
    assert set(artifacts_of(last_run().id)) == {"moe-plan-llm"}
    assert all_as_before(pretend)


def test_what_is_refused_is_refused_untouched(pretend: PretendMoe) -> None:
    pretend.said = {"moe_runner_backend": "flashinfer_cutlass"}
    with pytest.raises(BadInput, match="which reads no Triton configs"):
        tune()

    assert (pretend.wrote, pretend.stops) == ([], 0)


def test_all_sizes_fail(pretend: PretendMoe, plain: None) -> None:
    pretend.sizes = dict.fromkeys(SIZES, "fails")
    report = tune()

    assert (report.outcome, len(report.sizes)) == ("unfinished", 3)
    assert report.summary.startswith("No batch size could be tuned, nothing was changed. 2: it en")
    assert "ValueError: no kernel at 16" in page_of("moe-llm")
    assert SECRET not in page_of("moe-llm") + report.model_dump_json()
    assert (pretend.visits, all_as_before(pretend)) == ([], True)


def test_a_size_that_fails_is_served_as_before(pretend: PretendMoe, plain: None) -> None:
    pretend.speeds, pretend.sizes = FASTER, {16: "fails", 2: "other size"}
    report = tune()

    assert report.outcome == "replaced"
    assert [bool(x.failure) for x in report.sizes] == [True, True, False]
    assert "it was asked for 2, and wrote 3" in page_of("moe-llm")
    rows = json.loads(pretend.overlays[report.overlay][1])
    assert [rows[str(m)].get("num_stages") for m in SIZES] == [None, None, 3]


def test_a_script_that_makes_another_file_ends_it(pretend: PretendMoe, plain: None) -> None:
    pretend.sizes = {16: "other name"}
    with pytest.raises(BadInput, match=r"the tuning script makes E=256,N=999,"):
        tune()

    assert "It was ended by an error: BadInput" in page_of("moe-llm")
    assert (all_as_before(pretend), slot_is_free()) == (True, True)


@pytest.mark.parametrize("mode", ["tune", "kernels"])
def test_a_window_that_is_too_short_is_refused_untouched(
    pretend: PretendMoe, plain: None, mode: str
) -> None:
    with pytest.raises(BadInput, match="a window of 1 min is too short"):
        tune(mode=mode, window_minutes=1)

    assert (pretend.wrote, pretend.stops, all_as_before(pretend)) == ([], 0, True)


def test_a_window_that_is_over(
    pretend: PretendMoe, plain: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(passed))
    monkeypatch.setattr("gpu_reclaim.moecourse.time", clock)
    pretend.trouble = at("write sizes.jsonl", lambda: passed.append(2 * 3600))
    report = tune(window_minutes=120)

    assert (report.outcome, pretend.tuned, pretend.visits) == ("unfinished", [2, 16], [])
    assert "Still to be tuned: 2048." in report.summary
    assert "goes on from there" in report.remedy
    assert (all_as_before(pretend), page_of("moe-llm").count("The window is over")) == (True, 1)


def test_nothing_is_tuned_twice(pretend: PretendMoe, plain: None) -> None:
    pretend.trouble = at("start job moe-2048", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        tune()
    assert (all_as_before(pretend), pretend.tuned) == (True, [2, 16])

    pretend.trouble, pretend.jobs = (lambda _: None), {}
    assert tune().outcome == "kept"
    assert (list(pretend.jobs), pretend.tuned) == (["moe-2048"], SIZES)

    pretend.jobs = {}
    assert tune(fresh=True).outcome == "kept"
    assert len(pretend.jobs) == 3


@pytest.mark.parametrize(("name", "nth", "tuned"), [(STOP, 1, []), ("write sizes.jsonl", 3, SIZES)])
def test_a_unit_that_was_edited_meanwhile_is_not_tuned(
    pretend: PretendMoe, plain: None, name: str, nth: int, tuned: list[int]
) -> None:
    pretend.trouble = at(name, lambda: setattr(pretend, "files", "1 1"), nth=nth)
    with pytest.raises(BadInput, match=r"sglang\.service was changed since it was looked at"):
        tune()

    assert (pretend.tuned, bool(pretend.jobs), pretend.visits) == (tuned, bool(tuned), [])
    assert (BACK in pretend.wrote, all_as_before(pretend), slot_is_free()) == (True, True, True)


def test_what_the_scripts_of_a_dead_run_have_finished_counts(
    pretend: PretendMoe, plain: None
) -> None:
    pretend.trouble = at("write sizes.jsonl", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        tune()
    assert (list(pretend.jobs), pretend.tuned) == (["moe-2", "moe-16"], [])

    pretend.trouble = lambda _: None
    report = tune()
    assert ([x.tokens for x in report.sizes], list(pretend.jobs)[2:]) == (SIZES, ["moe-2048"])


def test_what_is_finished_late_takes_the_place_of_a_failure_on_record(
    pretend: PretendMoe, plain: None
) -> None:
    pretend.sizes = {16: "other size"}
    assert [x.final for x in tune().sizes] == [False, True, False]
    pretend.sizes, before = {}, dict(pretend.jobs)
    report = tune()

    assert pretend.jobs == before
    found = sorted((x.tokens, bool(x.row)) for x in report.sizes)
    assert found == [(tokens, True) for tokens in SIZES]


@pytest.mark.parametrize("where", ["start job moe-2", "make an overlay for tuned", "measure at 8"])
def test_an_error_in_the_stage_puts_all_back(pretend: PretendMoe, plain: None, where: str) -> None:
    pretend.trouble = at(where, raising(RuntimeError(SECRET)))
    with pytest.raises(RuntimeError):
        tune()

    assert BACK in pretend.wrote
    assert (all_as_before(pretend), slot_is_free()) == (True, True)
    page = page_of("moe-llm")
    assert ("It was ended by an error: RuntimeError" in page, SECRET in page) == (True, False)


def test_a_disk_that_is_full(pretend: PretendMoe, plain: None) -> None:
    pretend.disk_full = True
    with pytest.raises(CommandFailed, match=f"could not be made from {PACKAGE}/configs"):
        tune()

    assert (all_as_before(pretend), pretend.tuned) == (True, SIZES)


def test_a_server_that_differs_afterwards_is_told(pretend: PretendMoe, plain: None) -> None:
    pretend.after = {"tp_size": 1}
    with pytest.raises(NotInForce, match="tp_size was 2 and is 1"):
        tune()

    assert "NotInForce" in page_of("moe-llm")


# Other ways to use it.


def test_candidates_without_tuning(pretend: PretendMoe, plain: None) -> None:
    pretend.speeds = {"other.json": 1.3}
    report = tune(tune=False, candidates=["/configs/other.json"])

    assert (report.outcome, report.winner, pretend.jobs) == ("replaced", "other.json", {})
    assert (report.sizes, set(pretend.visits)) == ([], {PRESENT, "other.json"})


def test_the_best_of_several_is_kept(pretend: PretendMoe, plain: None) -> None:
    pretend.speeds = {TUNED: 1.2, "other.json": 1.5}
    report = tune(candidates=["/configs/other.json"])

    assert (report.winner, pretend.arm) == ("other.json", "other.json")
    assert list(pretend.overlays) == [report.overlay]


def test_kernels_alone(pretend: PretendMoe, plain: None) -> None:
    pretend.speeds = {"other.json": 1.25}
    report = tune(mode="kernels", candidates=["/configs/other.json"])

    assert (report.outcome, pretend.visits, len(pretend.jobs)) == ("measured", [], 6)
    assert report.summary == ("other.json: -20.0 % time over 3 batch sizes. Nothing was changed.")
    assert {(x.arm, x.us) for x in report.kernels} == {(PRESENT, 100.0), ("other.json", 80.0)}
    assert all("--tune" not in body for body in pretend.jobs.values())
    assert "| 2048 | 100.0 | 80.0 |" in page_of("moe-llm")
    assert (pretend.overlays, all_as_before(pretend)) == ({}, True)


def test_kernels_in_a_window(pretend: PretendMoe, plain: None) -> None:
    """A kernel takes minutes, not the better part of an hour as a size that is tuned."""
    report = tune(mode="kernels", candidates=["/configs/other.json"], window_minutes=30)

    assert len(report.kernels) == 6


def test_no_secret_is_shown_anywhere(
    pretend: PretendMoe, plain: None, prefect_log: pytest.LogCaptureFixture
) -> None:
    pretend.faults, pretend.sizes = {TUNED: "breaks"}, {2: "fails"}
    report, run = tune(), last_run()
    shown = [x.model_dump_json() for x in artifacts_of(run.id).values()]
    shown += [x.model_dump_json() for x in task_runs_of(run.id)]
    shown += [run.model_dump_json(), report.model_dump_json(), *said(prefect_log)]

    assert not [x for x in shown if SECRET in x]


def test_the_form_is_plain() -> None:
    schema = parameter_schema(moe_autotune.fn).model_dump()
    assert list(schema["properties"]) == ["server", "plan", "policy"]
    models = schema["definitions"]
    assert set(models) == {"MoeTunePlan", "ReclaimPolicy"}
    fields = models["MoeTunePlan"]["properties"]
    assert next(iter(fields)) == "mode"
    assert fields["mode"]["enum"] == ["tune", "plan", "kernels"]
    for name, shown in fields.items():
        assert shown.get("title"), name
        assert shown.get("description"), name
        assert not {"anyOf", "oneOf", "allOf"} & set(shown), name
