"""Hold and restore as Prefect flows, on the real guest."""

from __future__ import annotations

import pytest
from prefect import flow

from gpu_reclaim import releasing, signals
from gpu_reclaim.errors import GpusNotReclaimed, NotRestored
from gpu_reclaim.flows import reclaim_gpus, restore_services
from gpu_reclaim.models import ReclaimReport, Verdict
from guest import holds, units, ways, witness
from guest.test_guest_flow import artifacts
from guest.ways import UNIT
from lab.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("prefect_server", "stand_in_devices")]


def test_held_by_one_flow_and_put_back_by_another(lab: Lab) -> None:
    ways.save_host(lab)
    lab.start_server()
    report = reclaim_gpus("lab", holds.policy())
    assert report.verdict == Verdict.CLEAN
    assert report.held_until.partition(" +")[0] in str(artifacts()["gpu-reclaim-lab"])
    lease = lab.do(f"cat {holds.LEASE}")
    assert "owner Prefect run reclaim-lab (" in lease
    assert holds.start(lab, UNIT) == (1, "inactive")
    back = restore_services("lab")
    assert [str(row) for row in back.restored] == [f"{UNIT}: started"]
    assert back.owner.startswith("Prefect run reclaim-lab (")
    page = str(artifacts()["gpu-restore-lab"])
    assert "put back" in page
    assert UNIT in page
    again = restore_services("lab")
    assert (again.restored, again.complete) == ([], True)
    assert witness.state_of(lab) == "active"
    assert holds.traces(lab) == []


@pytest.mark.exhaustive
def test_inside_a_pipeline(lab: Lab) -> None:
    ways.save_host(lab)
    lab.start_server()

    @flow
    def pipeline() -> ReclaimReport:
        report = reclaim_gpus("lab", holds.policy())
        restore_services("lab")
        return report

    assert pipeline().held_until
    assert witness.state_of(lab) == "active"


def test_a_failed_start_fails_the_restore_and_carries_the_report(lab: Lab) -> None:
    ways.save_host(lab)
    lab.start_server()
    reclaim_gpus("lab", holds.policy())
    main = lab.guest.rootfs / "opt/sglang/launch_server.py"
    text = main.read_text()
    main.write_text("raise SystemExit(3)\n")
    try:
        with pytest.raises(NotRestored) as caught:
            restore_services("lab")
    finally:
        main.write_text(text)
    assert [(x.unit, x.outcome) for x in caught.value.report.restored] == [(UNIT, "failed")]
    assert "journalctl" in str(caught.value)
    assert "not all was put back" in str(artifacts()["gpu-restore-lab"])
    assert restore_services("lab").complete


def test_a_bad_verdict_is_put_back_and_told(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "KILL_WAIT_S", 1)
    ways.save_host(lab)
    lab.start_server()
    units.drop_in(lab, UNIT, "[Service]\nExecStopPost=/bin/sh -c 'touch /run/lab-stopped'\n")
    lab.freeze(lab.hold("--gpus", "0", "--mib", "500", "--ignore-term"))
    with pytest.raises(GpusNotReclaimed) as caught:
        reclaim_gpus("lab", holds.policy())
    lab.thaw()
    assert caught.value.report.verdict == Verdict.UNKILLABLE
    assert [str(row) for row in caught.value.report.restored] == [f"{UNIT}: started"]
    page = str(artifacts()["gpu-reclaim-lab"])
    assert "## Put back" in page
    assert holds.traces(lab) == []


class Cancelled(BaseException):
    """As a cancel raises it."""


@pytest.mark.exhaustive
def test_a_cancelled_flow_is_put_back_and_told(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    ways.save_host(lab)
    lab.start_server()

    def cut(*_: object) -> None:
        raise Cancelled

    monkeypatch.setattr(releasing, "fuser_release", cut)
    with pytest.raises(Cancelled):
        reclaim_gpus("lab", holds.policy())
    assert witness.state_of(lab) == "active"
    assert holds.traces(lab) == []
    page = str(artifacts()["gpu-reclaim-lab"])
    assert "what was stopped is back" in page
