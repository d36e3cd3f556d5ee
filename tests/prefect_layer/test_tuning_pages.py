"""What a person reads of a tuning, written to a real Prefect server and read back."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
from typing import Any

import httpx
import pytest
from prefect import flow, get_client
from prefect.client.schemas.objects import Artifact

from gpu_reclaim.plans import SpecDecodePlan
from gpu_reclaim.tasks import artifacts, tuning_pages, tuning_progress
from gpu_reclaim.tasks.tuning_progress import Progress
from gpu_reclaim.tuning import TuningReport
from unit.tunings import arm, report, visit

PLAN = SpecDecodePlan()


@pytest.fixture(autouse=True)
def server_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(artifacts._away, "until", 0.0)


def written() -> dict[str, Artifact]:
    with get_client(sync_client=True) as client:
        found = client.request("POST", "/artifacts/filter", json={"sort": "CREATED_DESC"}).json()
    return {x["key"]: Artifact.model_validate(x) for x in reversed(found)}


def test_a_tuning_is_shown_as_a_page_and_a_table() -> None:
    @flow
    def show() -> None:
        tuning_pages.show_tuning(report(server="glm_5 prod"), PLAN)

    show()
    found = written()
    page = found["spec-decode-glm-5-prod"]
    assert page.type == "markdown"
    assert "a better setting is in force" in str(page.data)
    rows = json.loads(str(found["spec-decode-settings-glm-5-prod"].data))
    assert [row["state"] for row in rows][:3] == ["present setting", "clearly worse", "better"]
    assert rows[2]["why"] == "better by 4.8 %"


def test_the_plan_is_shown_before_anything_is_stopped() -> None:
    trials = {"NEXTN 2/1/3": ["--speculative-num-steps", "2"], "off": []}

    @flow
    async def show() -> None:
        tuning_pages.show_trials("planned", PLAN, trials, {"X 1/1/1": "no such|thing"}, 117.2)

    asyncio.run(show())
    page = str(written()["spec-decode-plan-planned"].data)
    assert "2 settings to try" in page
    assert "At most 117 min" in page
    assert "| NEXTN 2/1/3 | --speculative-num-steps 2 |" in page
    assert "- **X 1/1/1**: no such\\|thing" in page


def test_progress_is_one_bar_that_moves_in_sync_and_async_flows() -> None:
    @flow
    def sync_run() -> None:
        bar = Progress("sync", "spec-decode")
        bar.visit(0, 20, "round 1 of 5, off", 80)
        bar.visit(8, 20, "round 2 of 5, NEXTN 2/1/3", 41)

    @flow
    async def async_run() -> None:
        bar = Progress("async", "spec-decode")
        bar.visit(0, 20, "round 1 of 5, off", 80)
        bar.visit(25, 20, "round 2 of 5, NEXTN 2/1/3", 0)

    sync_run()
    asyncio.run(async_run())
    with get_client(sync_client=True) as client:
        # The server gives 200 at once, and other tests have left more than that.
        keys = {"any_": ["spec-decode-progress-sync", "spec-decode-progress-async"]}
        asked = {"artifacts": {"key": keys}}
        found = client.request("POST", "/artifacts/filter", json=asked).json()
    bars = {x["key"]: x for x in found if x["type"] == "progress"}
    assert len([x for x in found if x["key"] == "spec-decode-progress-sync"]) == 1
    assert bars["spec-decode-progress-sync"]["data"] == 40
    said = bars["spec-decode-progress-sync"]["description"]
    assert said == "round 2 of 5, NEXTN 2/1/3, about 41 min left"
    assert bars["spec-decode-progress-async"]["data"] == 100


def test_a_bar_that_somebody_deleted_is_made_anew() -> None:
    @flow
    def run() -> None:
        bar = Progress("deleted", "spec-decode")
        bar.visit(1, 4, "round 1", 9)
        with get_client(sync_client=True) as client:
            assert bar._bar
            client.delete_artifact(bar._bar)
        bar.visit(2, 4, "round 2", 6)

    run()
    assert written()["spec-decode-progress-deleted"].data == 50


def test_progress_fails_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def down(*_: object, **__: object) -> None:
        asked.append("once")
        raise httpx.ConnectError("all connection attempts failed")

    monkeypatch.setattr(tuning_progress, "create_progress_artifact", down)
    Progress("outside", "spec-decode").visit(0, 4, "round 1", 9)
    assert asked == []
    monkeypatch.setattr(artifacts, "in_a_run", lambda: True)
    bar = Progress("down", "spec-decode")
    bar.visit(0, 0, "round 1", float("nan"))
    bar.visit(1, 4, "round 1", 9)
    assert asked == ["once"]


def text(plan: SpecDecodePlan = PLAN, **more: Any) -> str:
    return tuning_pages.page(report(**more), plan)


def test_the_page_says_all_that_counts() -> None:
    plan = SpecDecodePlan(max_ttft_ms=800, weights=[1, 2, 4, 1])
    page = text(plan, remedy="look at the host", resumed=2).replace("\\", "")
    for said in (
        "**What to do now:** look at the host",
        "Proof: the server says num_steps 3",
        "90-tuning.conf",
        "/var/lib/gpu-reclaim/tuning/glm",
        "| NEXTN 3/1/4 | better | +4.8 | 5 | 1.2 |",
        "| NEXTN 2/1/3 | present setting |  | 5 |  | 412,000 |",
        "- **NEXTN 4/1/5**: TTFT p99 is 900 ms at 64 in flight",
        "### 64 in flight",
        "| NEXTN 3/1/4 | 1,641 ± 0.8 % | +4.8 | 90.5 / 181 | 7.25 / 11 | 2.35 |",
        "- **NEXTN 0/4/8**: without steps",
        "**NEXTN 5/1/6**, round 1: out of memory",
        "Timeline (81 min, at most 117 min expected)",
        "2 of them come from an earlier run's record",
        "| 1 | NEXTN 2/1/3 | 2026-11-30 13:05:59 | 71 | 1: 121 |",
        "TTFT p99 stays below 800 ms",
        "4 at 16",
    ):
        assert said in page, said
    assert "What to do now" not in text()


def test_the_chart_is_in_the_page_and_small() -> None:
    found = re.search(r"!\[.*\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", text())
    assert found
    assert len(found[0]) < 150_000
    assert b"NEXTN 3/1/4" in base64.b64decode(found[1])


def test_a_chart_that_fails_leaves_the_page(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> str:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(tuning_pages, "throughput_chart", fail)
    logging.getLogger("gpu_reclaim").propagate = True
    page = text()
    assert "The chart could not be drawn" in page
    assert "## Timeline" in page


@pytest.mark.parametrize(
    "detail",
    [
        "ok\n```\n# heading\n<img src=x onerror=alert(1)>",
        "`````\n~~~\n[x](javascript:alert(1))",
        "a\r```\r# heading\x1b[31m\u2028```\x85# x",
    ],
)
def test_nothing_in_a_journal_ends_its_block(detail: str) -> None:
    failed = visit("x", 1, levels=[], failure="it | died\n\n# so\r\r<b>", detail=detail)
    page = text(visits=[failed], arms=[], refused={})
    fence = re.search(r"^(`{3,})text$", page, re.M)
    assert fence
    _, _, after = page.partition(fence[0])
    block, closing, rest = after.partition(f"\n{fence[1]}\n")
    assert closing
    assert not re.search("`" * len(fence[1]), block)
    assert rest.lstrip().startswith("## Timeline")
    assert "\x1b" not in page
    assert "\r" not in page
    # Outside of the block: no heading or tag of theirs.
    outside = page.replace(block, "")
    assert "<b>" not in outside.replace("\\<b\\>", "")
    assert not re.search(r"^# so", outside, re.M)


def test_only_the_last_lines_of_a_long_journal_are_shown() -> None:
    lines = "\n".join(f"line {n} " + "word " * 900 for n in range(500))
    page = text(visits=[visit("x", 1, levels=[], failure="died", detail=lines)], arms=[])
    assert "line 499" in page
    assert "line 479" not in page
    assert len(page) < 12_000


def test_names_cannot_become_markup() -> None:
    bad = "`x\n\n# h`|<img>"
    page = text(
        server=bad, summary=bad, proof=bad, refused={bad: bad}, arms=[arm(bad, "equal", 1, why=bad)]
    )
    assert "\n# h" not in page
    assert not re.search(r"(?<!\\)<img", page)


@pytest.mark.parametrize("outcome", ["planned", "kept", "found", "replaced"])
def test_an_empty_report_is_a_page_too(outcome: Any) -> None:
    empty = TuningReport(server="glm", outcome=outcome, summary="that is all")
    page = tuning_pages.page(empty, PLAN)
    assert page.startswith("# glm: ")
    assert "##" not in page
