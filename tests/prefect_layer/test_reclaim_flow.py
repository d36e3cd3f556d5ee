"""The flow and its tasks, against a real Prefect server; the host is pretended."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest
from prefect import flow, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
)
from prefect.client.schemas.objects import Artifact, FlowRun, TaskRun
from prefect.settings import PREFECT_RESULTS_PERSIST_BY_DEFAULT, temporary_settings
from prefect.utilities.callables import parameter_schema

from gpu_reclaim import tasks
from gpu_reclaim.commands import Script
from gpu_reclaim.errors import BadInput, GpusNotReclaimed, LinkLost, UnknownHost, Unreachable
from gpu_reclaim.flows import reclaim_gpus
from gpu_reclaim.models import ReclaimPolicy, ReclaimReport, Verdict
from gpu_reclaim.tasks import host as host_tasks
from gpu_reclaim.tasks.host import with_defaults
from prefect_layer.pretend_host import PretendHost

QUICK = ReclaimPolicy(settle_timeout_s=0)


def last_run() -> FlowRun:
    """The newest run of reclaim-gpus."""
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(limit=200)
    return max((run for run in runs if run.name == "reclaim-pretend"), key=lambda run: run.created)  # type: ignore[arg-type,return-value]


def artifacts_of(run_id: UUID) -> dict[str, Artifact]:
    wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]))
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=wanted)
    return {artifact.key or "": artifact for artifact in found}


def task_runs_of(run_id: UUID) -> list[TaskRun]:
    with get_client(sync_client=True) as client:
        return client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id]))
        )


def test_clean_run_returns_the_report(pretend: PretendHost) -> None:
    report = reclaim_gpus("pretend")

    assert report.verdict == Verdict.CLEAN
    assert [gpu.memory_used_mib for gpu in report.gpus_before] == [40_000, 40_000]
    assert [gpu.memory_used_mib for gpu in report.gpus_after] == [0, 0]
    assert [row.unit for row in report.stopped] == ["sglang.service"]
    assert pretend.ended == [(100, "TERM"), (101, "TERM")]
    assert [row.name for row in report.spared] == ["nvidia-persistenced"]
    assert [step.name for step in report.steps] == [
        "survey",
        "stop_systemd",
        "proxmox_exec_kill",
        "fuser_release",
        "settle",
        "verify_nvidia_smi",
    ]


def test_run_leaves_artifacts_a_person_can_read(pretend: PretendHost) -> None:
    reclaim_gpus("pretend")
    run = last_run()
    found = artifacts_of(run.id)

    assert {
        "gpu-survey-pretend",
        "stop-systemd-pretend",
        "settle-pretend",
        "verify-nvidia-smi-pretend",
        "gpu-reclaim-pretend",
    } <= set(found)
    page = str(found["gpu-reclaim-pretend"].data)
    assert "# pretend: clean" in page
    assert "sglang::scheduler\\_TP0" in page
    assert "it keeps the driver" in page


def test_only_the_name_of_the_host_is_stored(pretend: PretendHost) -> None:
    reclaim_gpus("pretend", ReclaimPolicy(settle_timeout_s=9))

    assert last_run().parameters["host"] == "pretend"
    assert last_run().parameters["policy"]["settle_timeout_s"] == 9


def test_bad_verdict_fails_the_run_and_carries_the_report(pretend: PretendHost) -> None:
    pretend.stuck_mib = 500
    with pytest.raises(GpusNotReclaimed) as caught:
        reclaim_gpus("pretend", QUICK)

    assert caught.value.report.verdict == Verdict.HELD_UNSEEN
    assert caught.value.report.remedy
    state = last_run().state
    assert state is not None
    assert state.is_failed()
    assert "held_unseen" in (state.message or "")
    page = str(artifacts_of(last_run().id)["gpu-reclaim-pretend"].data)
    assert "What to do now" in page


def test_parent_flow_never_reaches_its_gpu_stage(pretend: PretendHost) -> None:
    pretend.smi_code = 9
    reached: list[str] = []

    @flow
    def pipeline() -> None:
        reclaim_gpus("pretend", QUICK)
        reached.append("gpu stage")

    with pytest.raises(GpusNotReclaimed) as caught:
        pipeline()

    assert caught.value.report.verdict == Verdict.DRIVER_FAULT
    assert reached == []


def test_subflow_hands_its_report_to_the_parent(pretend: PretendHost) -> None:
    @flow
    def pipeline() -> ReclaimReport:
        return reclaim_gpus("pretend")

    assert pipeline().verdict == Verdict.CLEAN


def test_plan_touches_nothing(pretend: PretendHost) -> None:
    report = reclaim_gpus("pretend", ReclaimPolicy(mode="plan"))

    assert report.verdict == Verdict.PLANNED
    assert [(row.pid, row.outcome) for row in report.ended] == [(100, "planned"), (101, "planned")]
    assert (pretend.stops, pretend.ended, pretend.active) == (0, [], True)


def test_second_call_in_one_run_is_executed_although_results_persist(pretend: PretendHost) -> None:
    @flow(persist_result=True)
    def twice() -> list[int]:
        tasks.stop_systemd("pretend")
        pretend.active = True
        tasks.stop_systemd("pretend")
        return [pretend.stops]

    with temporary_settings({PREFECT_RESULTS_PERSIST_BY_DEFAULT: True}):
        assert twice() == [2]


def test_tasks_are_callable_one_by_one_from_any_flow(pretend: PretendHost) -> None:
    @flow
    def mine() -> list[str]:
        seen = tasks.survey("pretend")
        stopped = tasks.stop_systemd("pretend", before=seen.units)
        tasks.proxmox_exec_kill("pretend")
        tasks.fuser_release("pretend")
        settled = tasks.settle("pretend")
        after = tasks.verify_nvidia_smi("pretend")
        return [stopped.stopped[0].unit, str(settled.free), str(len(after.table.holders))]

    assert mine() == ["sglang.service", "True", "1"]


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tasks.__all__:
        monkeypatch.setattr(getattr(tasks, name), "retry_delay_seconds", 0)


def test_lost_link_is_tried_again_and_nothing_is_ended_twice(
    pretend: PretendHost, no_delay: None
) -> None:
    lost: list[str] = []

    def after_ending(script: Script) -> None:
        if "end" in script.sections and not lost:
            lost.append(script.name)
            pretend.answer_quietly(script)
            raise LinkLost("ssh root@pretend: the connection broke")

    pretend.trouble = after_ending
    report = reclaim_gpus("pretend")

    assert report.verdict == Verdict.CLEAN
    assert pretend.ended == [(100, "TERM"), (101, "TERM")]
    assert pretend.stops == 1
    assert [row.unit for row in report.stopped] == ["sglang.service"]
    assert {row.name for row in report.ended} == {"sglang::scheduler_TP0", "sglang::scheduler_TP1"}
    assert [step.attempts for step in report.steps] == [1, 2, 1, 1, 1, 1]


def test_unreachable_host_is_a_verdict_after_the_retries(
    pretend: PretendHost, no_delay: None
) -> None:
    def refuse(script: Script) -> None:
        raise Unreachable("ssh root@pretend: connection refused", remedy="start sshd")

    pretend.trouble = refuse
    with pytest.raises(GpusNotReclaimed) as caught:
        reclaim_gpus("pretend")

    assert caught.value.report.verdict == Verdict.UNREACHABLE
    assert caught.value.report.remedy == "start sshd"
    assert [run.run_count for run in task_runs_of(last_run().id)] == [1 + host_tasks.RETRIES]


def test_bad_answer_is_not_tried_again(pretend: PretendHost) -> None:
    def cut(script: Script) -> None:
        raise BadInput("nonsense", remedy="none")

    pretend.trouble = cut
    with pytest.raises(BadInput):
        reclaim_gpus("pretend")

    assert [run.run_count for run in task_runs_of(last_run().id)] == [1]


@pytest.mark.parametrize(
    ("policy", "word"),
    [
        (ReclaimPolicy(approve=True), "approve"),
        (ReclaimPolicy(gpus=[7]), "GPU 7"),
    ],
)
def test_policy_that_cannot_be_met_is_refused_untouched(
    pretend: PretendHost, policy: ReclaimPolicy, word: str
) -> None:
    with pytest.raises(BadInput, match=word):
        reclaim_gpus("pretend", policy)

    assert (pretend.stops, pretend.ended) == (0, [])


def test_unknown_host_says_how_to_make_one() -> None:
    with pytest.raises(UnknownHost) as caught:
        reclaim_gpus("no-such-host")

    assert "no-such-host" in str(caught.value)
    assert ".save(" in caught.value.remedy


def test_library_lines_reach_the_run(
    pretend: PretendHost, prefect_log: pytest.LogCaptureFixture
) -> None:
    reclaim_gpus("pretend")

    lines = [record for record in prefect_log.records if "ending sglang" in record.getMessage()]

    assert [x.name for x in lines if x.name.startswith("prefect")] == ["prefect.task_runs"] * 2


def test_async_pipeline_can_call_it_from_a_thread(pretend: PretendHost) -> None:
    @flow
    async def pipeline() -> ReclaimReport:
        return await asyncio.to_thread(reclaim_gpus, "pretend")

    assert asyncio.run(pipeline()).verdict == Verdict.CLEAN


def test_form_of_the_flow_reads_well() -> None:
    schema = parameter_schema(reclaim_gpus.fn).model_dump()
    policy = schema["definitions"]["ReclaimPolicy"]["properties"]

    assert schema["properties"]["host"]["description"]
    assert policy["term_grace_s"]["title"] == "Term grace (s)"
    assert all(field.get("description") and field.get("title") for field in policy.values())
    assert not any("anyOf" in field for field in policy.values())


@pytest.mark.parametrize("verb", ["stop_systemd", "proxmox_exec_kill", "fuser_release"])
@pytest.mark.parametrize(
    "policy",
    [ReclaimPolicy(mode="plan"), ReclaimPolicy(approve=True), ReclaimPolicy(hold_minutes=1)],
    ids=["plan", "approve", "hold"],
)
def test_acting_task_refuses_a_policy_that_does_not_let_it_act(
    pretend: PretendHost, verb: str, policy: ReclaimPolicy
) -> None:
    @flow
    def mine() -> None:
        getattr(tasks, verb)("pretend", policy)

    with pytest.raises(BadInput):
        mine()

    assert (pretend.stops, pretend.ended, pretend.active) == (0, [], True)


def test_unreadable_gpus_are_refused_before_the_server_is_stopped(pretend: PretendHost) -> None:
    pretend.smi_code = 9
    with pytest.raises(GpusNotReclaimed) as caught:
        reclaim_gpus("pretend")

    assert caught.value.report.verdict == Verdict.DRIVER_FAULT
    assert "nothing was touched" in caught.value.report.summary
    assert (pretend.stops, pretend.ended, pretend.active) == (0, [], True)


def test_printed_report_names_everybody(pretend: PretendHost) -> None:
    plan = str(reclaim_gpus("pretend", ReclaimPolicy(mode="plan")))
    done = str(reclaim_gpus("pretend"))

    assert "would stop sglang.service" in plan
    assert "would end: sglang::scheduler_TP1 (pid 101, unit sglang.service" in plan
    assert "GPU 0: 40000 MiB in use, now 0 MiB" in done
    assert "ended TERM: sglang::scheduler_TP0 (pid 100" in done
    assert "spared: nvidia-persistenced (pid 7" in done


def test_what_a_policy_leaves_unset_is_as_the_settings_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    default = ReclaimPolicy(protect=["ollama*"], term_grace_s=30)
    monkeypatch.setattr("gpu_reclaim.tasks.host.DEFAULT_POLICY", default)
    given = with_defaults(ReclaimPolicy(mode="plan", term_grace_s=2))

    assert given == ReclaimPolicy(mode="plan", protect=["ollama*"], term_grace_s=2)
    assert with_defaults(given) == given
    assert with_defaults(ReclaimPolicy()) == default
