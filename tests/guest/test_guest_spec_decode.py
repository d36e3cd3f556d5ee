"""A whole tuning on the real guest: a server of known speed, measured by SGLang's own benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from prefect.client.schemas.objects import StateType
from prefect.settings import PREFECT_API_URL, temporary_settings

from gpu_reclaim import measuring
from gpu_reclaim.errors import BadInput
from gpu_reclaim.flows import spec_decode_retune
from gpu_reclaim.tuning import ArmResult, TuningReport
from guest import holds, tunings, units
from guest.real_prefect import Prefect
from guest.stepping import Stepping
from guest.tunings import ENV, NOW, POLICY, TUNED
from lab.lab import Lab
from lab.waiting import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("prefect_server", "stand_in_devices")]

BEST = "NEXTN 2/1/3"
WINNER = ("EAGLE", 2, 1, 3)
PRESENT = ("EAGLE", 1, 1, 2)
BOOK = "/var/lib/gpu-reclaim-tuning/sglang-tuned.service/*/visits.jsonl"
FILE = f"/etc/systemd/system/{TUNED}.d/zz-gpu-reclaim.conf"


@pytest.fixture(autouse=True)
def clean(lab: Lab) -> Iterator[None]:
    yield
    for unit in (TUNED, ENV):
        tunings.forget(lab, unit)


def arms(report: TuningReport) -> dict[str, ArmResult]:
    return {arm.arm: arm for arm in report.arms}


def tuned(lab: Lab, *numbers: int, left: tuple[str, ...] = (), **changes: Any) -> TuningReport:
    """Tune, with the server as it is; afterwards nothing of a hold is left, but for a winner."""
    report = spec_decode_retune("llm", tunings.plan(*numbers, **changes), POLICY)
    assert holds.traces(lab) == [*left]
    return report


def test_the_best_setting_is_found_applied_and_proven(lab: Lab) -> None:
    """Others die, hang, lie, or are quick and wrong: each is told, and none of them wins."""
    tunings.save(lab)
    tunings.serve(lab, speed={NOW: 1.0, BEST: 1.6, "off": 0.5, "NEXTN 4/1/5": 3})
    lab.smi("faults.json", json.dumps({"NEXTN 3/1/4": "out of memory", "NEXTN 4/1/5": "garbage"}))
    report = tuned(lab, 2, 3, 4, levels=[8])
    assert (report.outcome, report.winner, report.current) == ("replaced", BEST, NOW), report
    assert tunings.asked_for(lab) == WINNER
    assert tunings.drop_ins(lab) == [FILE]
    assert holds.is_active(lab, TUNED) == ["active"]
    found = arms(report)
    assert found[BEST].state == "winner"
    assert found["NEXTN 3/1/4"].state == "failed"
    assert "out of memory at start" in found["NEXTN 3/1/4"].why
    assert found["NEXTN 4/1/5"].state == "rejected"
    assert found["off"].state == "worse"
    gain = found[BEST].gain_pct
    assert gain is not None
    assert 45 < gain < 75
    assert [level.accept_length for level in found[BEST].levels] == pytest.approx([2.44], 0.1)
    words = next(visit.detail for visit in report.visits if visit.arm == "NEXTN 3/1/4")
    assert "OutOfMemoryError" in words
    # A restart is all that it takes to see that it is no matter of this run alone.
    lab.do(f"systemctl restart {TUNED}")
    tunings.wait_served(lab)
    assert tunings.asked_for(lab) == WINNER
    # Undone as its own first lines say.
    lab.do(f"rm {FILE}; systemctl daemon-reload; systemctl restart {TUNED}")
    tunings.wait_served(lab)
    assert tunings.asked_for(lab) == PRESENT


@pytest.mark.exhaustive
@pytest.mark.parametrize("unit", [TUNED, ENV])
def test_equal_settings_leave_all_as_it_was(lab: Lab, unit: str) -> None:
    tunings.save(lab, unit)
    tunings.serve(lab, unit, speed={NOW: 1, BEST: 1, "off": 1})
    before, files = tunings.info(lab), holds.files(lab)
    report = tuned(lab, 2, rounds=3)
    assert (report.outcome, report.winner) == ("kept", NOW)
    after = tunings.info(lab)
    assert after["launch_command"] == before["launch_command"]
    assert tunings.asked_for(lab) == PRESENT
    changed = {x for x in holds.files(lab) ^ files if "/var/lib/gpu-reclaim-tuning" not in x}
    assert changed == set()
    assert tunings.drop_ins(lab, unit) == []


@pytest.mark.exhaustive
def test_the_arguments_may_be_in_an_environment_file(lab: Lab) -> None:
    tunings.save(lab, ENV)
    tunings.serve(lab, ENV, speed={NOW: 1.0, BEST: 1.6, "off": 0.5})
    file = f"/run/systemd/system/{ENV}.d/zz-gpu-reclaim.conf"
    report = tuned(lab, 2, persist=False, left=(file,))
    assert (report.outcome, report.winner) == ("replaced", BEST)
    assert tunings.asked_for(lab) == WINNER
    assert tunings.drop_ins(lab, ENV) == [file]


KINDS = {
    "NEXTN 3/1/4": ("dies at start", "ended at start"),
    "NEXTN 4/1/5": ("never ready", "did not serve within"),
    "NEXTN 5/1/6": ("hangs", "no answer (timed out)"),
    "NEXTN 6/1/7": ("wrong flags", "other arguments"),
    "NEXTN 7/1/8": ("hangs after 30 requests", "did not end within"),  # 25 are greedy
    "NEXTN 8/1/9": ("leaves workers", ""),
    "NEXTN 9/1/10": ("half fail", "HTTP 500"),
}


@pytest.mark.exhaustive
def test_every_kind_of_failure_is_an_observation(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A better setting is among them and only told, for that is what was asked for."""
    monkeypatch.setattr(measuring, "ANSWER_S", 5)
    tunings.save(lab)
    tunings.serve(lab, speed={NOW: 1.0, BEST: 1.6, "off": 0.5, "NEXTN 8/1/9": 0.5})
    lab.smi("faults.json", json.dumps({arm: fault for arm, (fault, _) in KINDS.items()}))
    report = tuned(lab, *range(2, 10), apply="never", measure_timeout_s=15)
    assert (report.outcome, report.winner) == ("found", BEST)
    assert "apply = if_better" in report.remedy
    found = arms(report)
    for arm, (_, words) in KINDS.items():
        if words:
            assert found[arm].state == "failed", arm
            assert words in found[arm].why, arm
    assert found["NEXTN 8/1/9"].state != "failed"
    assert tunings.asked_for(lab) == PRESENT
    assert tunings.drop_ins(lab) == []


@pytest.mark.exhaustive
def test_a_winner_that_fails_at_its_last_start_is_not_kept(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    tunings.save(lab)
    tunings.serve(lab, speed={NOW: 1.0, BEST: 1.6, "off": 0.5})
    first = tuned(lab, 2, apply="never")
    assert first.outcome == "found"
    lab.smi("faults.json", json.dumps({BEST: "out of memory"}))
    report = tuned(lab, 2)
    assert report.resumed == len(first.visits)
    assert report.outcome == "found"
    assert "out of memory at start" in report.summary
    assert tunings.asked_for(lab) == PRESENT
    assert tunings.drop_ins(lab) == []


@pytest.mark.exhaustive
def test_a_plan_stops_nothing(lab: Lab) -> None:
    tunings.save(lab)
    tunings.serve(lab)
    before = lab.processes()
    report = spec_decode_retune("llm", tunings.plan(1, 2, mode="plan"), POLICY)
    assert report.outcome == "planned"
    assert report.estimated_minutes > 0
    assert before.items() <= lab.processes().items()
    assert tunings.drop_ins(lab) == []
    assert lab.attach("ls /var/lib/gpu-reclaim-tuning").returncode != 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dataset_path": ""}, "no prompts to measure with"),
    ({"dataset_path": "/no/such.json"}, "cannot be read as sharegpt"),
    ({"base_url": "http://127.0.0.1:30001"}, "does not serve at"),
    ({"unit": "ssh"}, "is none of its units"),
]


@pytest.mark.parametrize(
    ("block", "words"),
    [
        # Saving a block takes ten seconds; all of these are refused in the unit tests too.
        *REFUSED,
        ({"python": "/usr/bin/python3"}, "cannot run sglang's benchmark"),
    ],
)
@pytest.mark.exhaustive
def test_what_cannot_be_tuned_is_refused_before_anything_is_stopped(
    lab: Lab, block: dict[str, Any], words: str
) -> None:
    tunings.save(lab, **block)
    tunings.serve(lab)
    before = lab.processes()
    with pytest.raises(BadInput, match=words):
        spec_decode_retune("llm", tunings.plan(2), POLICY)
    assert before.items() <= lab.processes().items()


@pytest.mark.exhaustive
def test_a_unit_edited_since_it_started_is_refused(lab: Lab) -> None:
    tunings.save(lab)
    tunings.serve(lab)
    units.drop_in(lab, TUNED, "[Service]\nExecStart=\nExecStart=/opt/other\n")
    with pytest.raises(BadInput):
        spec_decode_retune("llm", tunings.plan(2), POLICY)
    assert holds.is_active(lab, TUNED) == ["active"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("at", "when"),
    [
        (f"start {TUNED} on trial", "after"),
        ("measure at 8", "during"),
        ("close the trial", "after"),
        (f"keep the setting of {TUNED}", "after"),
    ],
)
def test_a_killed_run_is_put_back_and_the_next_one_goes_on(
    lab: Lab, prefect: Prefect, tmp_path: Path, at: str, when: Literal["during", "after"]
) -> None:
    """Killed once the winner is kept, that is what is put back."""
    with temporary_settings({PREFECT_API_URL: prefect.url}):
        tunings.save(lab)
    tunings.serve(lab, speed={NOW: 1.0, BEST: 1.6, "off": 0.5})
    deployment = prefect.deploy("gpu_reclaim.flows.spec_decode.spec_decode_retune")
    asked = {
        "server": "llm",
        "plan": tunings.plan(2).model_dump(mode="json"),
        "policy": holds.QUICK,
    }
    steps = Stepping(tmp_path / "steps", at=at, when=when)
    run = prefect.submit(deployment, asked, steps.env)
    assert prefect.wait(run, timeout=400).type == StateType.CRASHED
    assert steps.names[-1] == at
    wait_until("it is back", lambda: holds.traces(lab) == [], 60)
    tunings.wait_served(lab)
    kept = at.startswith("keep")
    assert tunings.asked_for(lab) == (WINNER if kept else PRESENT)
    assert tunings.drop_ins(lab) == ([FILE] if kept else [])
    again = Stepping(tmp_path / "again")
    run = prefect.submit(deployment, asked, again.env)
    assert prefect.wait(run, timeout=400).type == StateType.COMPLETED
    # What was on record is not measured again.
    first = f'"arm":"{NOW}","round":1,'
    assert lab.do(f"cat {BOOK} | grep -cF '{first}'") == "1\n"
    assert tunings.asked_for(lab) == WINNER
    assert holds.traces(lab) == []
