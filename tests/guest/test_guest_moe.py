"""MoE kernels tuned on the real guest: SGLang's own loader, a server of known speed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from prefect.client.schemas.objects import StateType
from prefect.settings import PREFECT_API_URL, temporary_settings

from gpu_reclaim.errors import BadInput
from gpu_reclaim.flows import moe_autotune
from gpu_reclaim.plans import MoeTunePlan
from gpu_reclaim.tuning import ArmResult, TunedSize, TuningReport
from guest import holds, tunings, units
from guest.real_prefect import Prefect
from guest.stepping import Stepping
from guest.tunings import POLICY, TUNED
from lab.lab import Lab
from lab.waiting import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("prefect_server", "stand_in_devices")]

NAME = "E=256,N=256,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition.json"
FILE = f"/etc/systemd/system/{TUNED}.d/zz-gpu-reclaim-moe.conf"
OVERLAYS = f"/var/lib/gpu-reclaim-moe/{TUNED}"
DECODE, PREFILL = 16, 8192
"""8 requests of 2 draft tokens each, and the stand-in's prefill chunk."""

BEST_16 = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
GOOD = {"moe_gain_pct": 100}
"""So much that a machine which is busy otherwise does not hide it."""


@pytest.fixture(autouse=True)
def clean(lab: Lab) -> Iterator[None]:
    yield
    tunings.forget(lab, TUNED)
    lab.do("rm -rf /var/lib/gpu-reclaim-moe")


def plan(**changes: Any) -> MoeTunePlan:
    values: dict[str, Any] = {
        "levels": [8],
        "requests_per_stream": 2,
        "least_requests": 8,
        "rounds": 6,
        "measure_timeout_s": 60,
    }
    return MoeTunePlan(**(values | changes))


def serve(
    lab: Lab, speed: dict[str, Any] | None = None, *, script: dict[str, Any] | None = None
) -> None:
    """The server, so much quicker with the best rows, and the tuning script's faults."""
    tunings.save(lab, sglang_source="/opt/sglang-source")
    lab.smi("moe.json", json.dumps({"seconds": 0.5} | (script or {})))
    tunings.serve(lab, speed=speed or {})


def tuned(lab: Lab, *, left: tuple[str, ...] = (), **changes: Any) -> TuningReport:
    """Tune, with the server as it is; afterwards nothing of a hold or a job is left."""
    report = moe_autotune("llm", plan(**changes), POLICY)
    assert holds.traces(lab) == [*left]
    assert jobs_left(lab) == []
    return report


def jobs_left(lab: Lab) -> list[str]:
    """What runs of the tuning scripts."""
    shown = lab.do("systemctl list-units --plain --no-legend 'gpu-reclaim-job-*' | cut -d ' ' -f 1")
    found = lab.attach("pgrep -f '^ray::|^raylet|^gcs_server|tuning_fused_moe'").stdout
    return shown.split() + found.split()


def used(lab: Lab) -> set[str]:
    """What the ranks of the server that runs now say of the file they use."""
    run = lab.do(f"systemctl show -P InvocationID {TUNED}").strip()
    said = lab.do(
        f"journalctl --no-pager -o cat _SYSTEMD_INVOCATION_ID={run} | grep -F 'MoE kernel config'"
    )
    return {line.partition("] ")[2] for line in said.splitlines() if "down_moe" not in line}


def sizes(report: TuningReport) -> dict[int, TunedSize]:
    return {size.tokens: size for size in report.sizes}


def arms(report: TuningReport) -> dict[str, ArmResult]:
    return {arm.arm: arm for arm in report.arms}


def default(lab: Lab) -> bool:
    """All ranks use SGLang's default, as before."""
    said = used(lab)
    return len(said) == 1 and said.pop().startswith("Using default MoE kernel config.")


def test_better_configs_are_made_kept_and_proven(lab: Lab) -> None:
    """One size fails meanwhile; a Ray that outlives its script ends with its unit."""
    serve(lab, GOOD, script={"faults": {"64": "crashes", str(PREFILL): "leaves ray"}})
    assert default(lab)
    report = tuned(lab, batch_sizes=[DECODE, 64, PREFILL])
    assert (report.outcome, report.winner) == ("replaced", "tuned"), report
    found = sizes(report)
    assert BEST_16.items() <= found[DECODE].row.items()
    assert found[PREFILL].row
    assert "illegal memory access" in found[64].failure + found[64].detail
    assert tunings.drop_ins(lab) == [FILE]
    path = f"{report.overlay}/configs/triton_3_6_0/{NAME}"
    assert used(lab) == {f"Using MoE kernel config from {path}."}
    table = json.loads(lab.do(f"cat '{path}'"))
    # What was not tuned is as the server had it.
    assert table["64"] == table["48"]
    assert table["64"]["BLOCK_SIZE_N"] == 32
    # Every other shape finds what it found before.
    site = "/opt/sglang/lib/sglang/srt/layers/moe/fused_moe_triton/configs"
    assert lab.do(f"diff -rq {site} {report.overlay}/configs || true").splitlines() == [
        f"Only in {report.overlay}/configs: triton_3_6_0"
    ]
    assert lab.do(f"ls {OVERLAYS}").split() == [report.overlay.rpartition("/")[2]]
    lab.do(f"systemctl restart {TUNED}")
    tunings.wait_served(lab)
    assert used(lab) == {f"Using MoE kernel config from {path}."}
    # Undone as the file's own first lines say.
    lab.do(f"rm -r {FILE} {report.overlay}; systemctl daemon-reload; systemctl restart {TUNED}")
    tunings.wait_served(lab)
    assert default(lab)


@pytest.mark.exhaustive
def test_neutral_ones_are_rolled_back_with_the_sentence(lab: Lab) -> None:
    serve(lab)
    before = holds.files(lab)
    report = tuned(lab, batch_sizes=[DECODE], rounds=3)
    assert report.outcome == "kept"
    assert report.summary.startswith("Identical within noise: rolled back.")
    assert default(lab)
    assert tunings.drop_ins(lab) == []
    assert {x for x in holds.files(lab) ^ before if "gpu-reclaim-tuning" not in x} == set()


@pytest.mark.exhaustive
def test_quick_and_wrong_ones_are_rejected(lab: Lab) -> None:
    # So slow that eight answers are under way at the same time, however busy this machine is.
    serve(lab, GOOD | {"moe_garbage": True, "tokens_per_s": 300})
    report = tuned(lab, batch_sizes=[DECODE])
    assert (report.outcome, arms(report)["tuned"].state) == ("kept", "rejected")
    assert default(lab)


FAULTS = {
    1: ("times out", "did not end within"),
    2: ("out of shared memory", "shared memory"),
    3: ("crashes", "illegal memory access"),
    4: ("writes nothing", "it wrote none"),
    5: ("bad row", "BLOCK_SIZE_M = 24"),
    6: ("metadata", "triton_version"),
    7: ("wrong size", "it was asked for 7"),
    8: ("ignores TERM", "did not end within"),
}


@pytest.mark.exhaustive
def test_every_failure_of_a_size_is_told_and_the_rest_goes_on(lab: Lab) -> None:
    serve(lab, GOOD, script={"faults": {str(size): kind for size, (kind, _) in FAULTS.items()}})
    report = tuned(lab, batch_sizes=[*FAULTS, DECODE], apply="never", size_timeout_minutes=0.15)
    found = sizes(report)
    for size, (kind, words) in FAULTS.items():
        assert words in found[size].failure, kind
    assert BEST_16.items() <= found[DECODE].row.items()
    assert report.outcome == "found"
    assert default(lab)
    # What failed for good is not tried again, unless it had too little time.
    again = tuned(
        lab, mode="plan", batch_sizes=[*FAULTS, DECODE], apply="never", size_timeout_minutes=1
    )
    assert "3 of them are missing" in again.summary


@pytest.mark.exhaustive
def test_a_script_that_makes_another_file_is_ended_at_once(lab: Lab) -> None:
    serve(lab, script={"seconds": 60, "faults": {"*": "wrong name"}})
    with pytest.raises(BadInput, match="the tuning script makes"):
        moe_autotune("llm", plan(batch_sizes=[DECODE]), POLICY)
    assert holds.traces(lab) == []
    assert jobs_left(lab) == []
    assert default(lab)


@pytest.mark.exhaustive
def test_given_files_are_tried_without_tuning(lab: Lab) -> None:
    """One is for another GPU, of worse rows; one has a row that no kernel takes."""
    serve(lab, GOOD)
    row = BEST_16 | {"num_warps": 4, "num_stages": 4}
    lab.do(f"echo '{json.dumps({'16': row, '8192': row})}' >/root/b200.json")
    lab.do("echo '{\"16\": {}}' >/root/empty.json")
    candidates = ["/root/b200.json", "/root/empty.json", "/root/none.json"]
    report = tuned(lab, tune=False, candidates=candidates)
    assert (report.outcome, report.winner) == ("replaced", "b200.json"), report
    assert set(report.refused) == {"empty.json", "none.json"}
    assert report.sizes == []
    path = f"{report.overlay}/configs/triton_3_6_0/{NAME}"
    assert used(lab) == {f"Using MoE kernel config from {path}."}


@pytest.mark.exhaustive
def test_kernels_alone_are_timed(lab: Lab) -> None:
    serve(lab, GOOD)
    row = BEST_16 | {"num_warps": 4, "num_stages": 4}
    lab.do(f"echo '{json.dumps({'16': row})}' >/root/b200.json")
    report = tuned(lab, mode="kernels", candidates=["/root/b200.json"], batch_sizes=[DECODE])
    assert report.outcome == "measured"
    times = {x.arm: x.us for x in report.kernels}
    assert times["present"] is not None
    assert times["b200.json"] is not None
    assert times["b200.json"] < times["present"]
    assert default(lab)
    assert lab.do("ls /var/lib/gpu-reclaim-moe 2>&1 || true").split()[-1:] != [TUNED]


@pytest.mark.exhaustive
def test_a_window_ends_the_stage_and_the_next_run_goes_on(lab: Lab) -> None:
    serve(lab, GOOD, script={"seconds": 20})
    many, limit = [*range(1, 17)], 0.6
    first = tuned(lab, batch_sizes=many, window_minutes=2, size_timeout_minutes=limit)
    assert first.outcome == "unfinished"
    done = [size.tokens for size in first.sizes]
    assert 0 < len(done) < len(many), first
    assert default(lab)
    second = tuned(lab, batch_sizes=many, size_timeout_minutes=limit)
    assert second.outcome == "replaced"
    assert [x.at for x in second.sizes if x.tokens in done] == [x.at for x in first.sizes]


CONFIG = "/opt/sglang/model/config.json"
VERSION = "/opt/sglang-source/python/sglang/version.py"
REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"skew": True}, "", "", "does not run by the server's interpreter"),
    ({}, "--moe-runner-backend flashinfer_cutlass", "", "reads no Triton configs"),
    ({}, "--enable-deterministic-inference", "", "deterministic inference"),
    ({}, "", f"sed -i.old 's/: 1024/: 2048/' {CONFIG}", "which it would never read"),
    ({}, "", f"sed -i.old 's/0.5.9/0.5.8/' {VERSION}", "the checkout is of SGLang 0.5.8"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("script", "flags", "then", "words"), REFUSED)
def test_what_cannot_be_tuned_is_refused_before_anything_is_stopped(
    lab: Lab, script: dict[str, Any], flags: str, then: str, words: str
) -> None:
    if flags:
        shown = lab.do(f"systemctl show -P ExecStart {TUNED}")
        old = shown.partition("argv[]=")[2].partition(" ; ")[0]
        units.drop_in(lab, TUNED, f"[Service]\nExecStart=\nExecStart={old} {flags}\n")
    serve(lab, script=script)
    lab.do(then or ":")
    before = lab.processes()
    try:
        with pytest.raises(BadInput, match=words):
            moe_autotune("llm", plan(), POLICY)
    finally:
        lab.do(f"for file in {CONFIG} {VERSION}; do [ ! -e $file.old ] || mv $file.old $file; done")
    assert before.items() <= lab.processes().items()


def test_a_moe_plan_stops_nothing(lab: Lab) -> None:
    serve(lab)
    before = lab.processes()
    report = tuned(lab, mode="plan")
    assert report.outcome == "planned"
    assert "2 batch sizes would be tuned" in report.summary
    assert before.items() <= lab.processes().items()
    assert lab.attach("ls /var/lib/gpu-reclaim-moe").returncode != 0


UNTUNED = f"start job moe-{DECODE}"
"""Killed there, the batch size is not tuned yet; later what its script wrote is found."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("at", "when"),
    [
        (UNTUNED, "after"),
        ("read a file of a job", "after"),
        ("write sizes.jsonl", "after"),
        ("make an overlay for tuned", "after"),
        (f"start {TUNED} on trial", "after"),
        ("measure at 8", "during"),
        (f"keep the setting of {TUNED}", "after"),
    ],
)
def test_a_killed_tuning_is_put_back_and_the_next_one_goes_on(
    lab: Lab, prefect: Prefect, tmp_path: Path, at: str, when: Literal["during", "after"]
) -> None:
    with temporary_settings({PREFECT_API_URL: prefect.url}):
        # So long that a script which nobody waits for any more is not done by itself.
        serve(lab, GOOD, script={"seconds": 15 if at == UNTUNED else 1})
    deployment = prefect.deploy("gpu_reclaim.flows.moe.moe_autotune")
    asked = {
        "server": "llm",
        "plan": plan(batch_sizes=[DECODE]).model_dump(mode="json"),
        "policy": holds.QUICK,
    }
    steps = Stepping(tmp_path / "steps", at=at, when=when)
    run = prefect.submit(deployment, asked, steps.env)
    assert prefect.wait(run, timeout=400).type == StateType.CRASHED
    assert steps.names[-1] == at
    wait_until("it is back", lambda: holds.traces(lab) == [], 60)
    tunings.wait_served(lab)
    assert jobs_left(lab) == []
    kept = at.startswith("keep")
    assert tunings.drop_ins(lab) == ([FILE] if kept else [])
    assert default(lab) is not kept
    again = Stepping(tmp_path / "again")
    run = prefect.submit(deployment, asked, again.env)
    assert prefect.wait(run, timeout=400).type == StateType.COMPLETED
    assert tunings.drop_ins(lab) == [FILE]
    tuned_again = UNTUNED in again.names
    assert tuned_again is (at == UNTUNED)
    assert holds.traces(lab) == []
