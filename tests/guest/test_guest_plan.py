"""A plan performs every check of a reclaim, and changes nothing at all."""

from __future__ import annotations

import pytest

from gpu_reclaim.models import ReclaimPolicy, Verdict, Via
from gpu_reclaim.reclaim import reclaim
from guest import kinds_owned, kinds_seen, kinds_stubborn, units, ways, witness
from guest.kinds import Case, Kind
from guest.samples import sampled
from lab.guest_files import HOLDER
from lab.lab import Lab
from lab.waiting import wait_until

pytestmark = pytest.mark.lab

LOGIN = (
    "/var/log/journal",
    "/var/log/wtmp",
    "/var/log/lastlog",
    "/run/log/journal",
    "/run/systemd",
    "/run/utmp",
    "/run/user",
    "/run/motd",
    "/run|",
    "/dev/pts",
    "/dev/ptmx",
)
"""What a login by SSH itself leaves, whatever is done in it."""

SHOW = "systemctl list-units --all --plain --no-legend --full; systemctl list-jobs --no-legend"


def files(lab: Lab, via: str) -> set[str]:
    """Every file of the guest, with its times."""
    # The journal is written by whoever runs there, at any time.
    skipped = LOGIN if via == "ssh" else ("/var/log/journal", "/run/log/journal")
    return witness.files(lab, "%p|%y|%m|%s|%T@|%C@|%l", skipped)


@pytest.mark.parametrize("via", ["hypervisor", "ssh"])
def test_plan_changes_no_process_no_unit_and_no_file(lab: Lab, via: Via) -> None:
    lab.start_server()
    units.add(
        lab,
        "lab-gateway.service",
        Unit=[f"Requires={ways.UNIT}"],
        Service=["ExecStart=/bin/sleep 600"],
    )
    units.add(lab, "lab-model.timer", Timer=["OnActiveSec=1h"])
    units.add(lab, "lab-model.service", Service=[f"ExecStart={HOLDER} --gpus 1 --mib 500"])
    lab.do("systemctl start lab-gateway lab-model.timer lab-model")
    wait_until("it holds", lambda: witness.memory(lab)[1] > 90100)
    holder = lab.hold("--gpus", "2", "--mib", "700")
    session = ways.session(lab, via, units=[ways.UNIT, "lab-model"])
    before = files(lab, via), witness.everybody(lab), lab.do(SHOW)
    report = reclaim(session, ReclaimPolicy(mode="plan", via=via, match=["gpu_agent"]))
    after = files(lab, via), witness.everybody(lab), lab.do(SHOW)
    assert after[0] ^ before[0] == set()
    assert after[1] == before[1]
    if via == "hypervisor":  # a login by SSH is a unit of its own for a moment
        assert after[2] == before[2]
    assert report.verdict == Verdict.PLANNED
    assert [(x.unit, x.triggered_by, x.because) for x in report.stopped] == [
        (ways.UNIT, [], ""),
        ("lab-model.service", ["lab-model.timer"], ""),
        ("lab-gateway.service", [], f"systemd stops it along with {ways.UNIT}"),
    ]
    planned = {row.pid for row in report.ended}
    assert {holder, *lab.server_pids().values()} < planned


REFUSED_FIRST = [
    kind
    for kind in [*kinds_seen.KINDS, *kinds_owned.KINDS, *kinds_stubborn.KINDS]
    if kind.name
    in (
        "[N/A]",
        "a GPU off the bus",
        "a row missing",
        "a docker container",
        "a display with memory",
        "one on wanted and unwanted GPUs",
        "RefuseManualStop",
        "DCGM among the host's units",
        "a protected unit requires it",
    )
]


@pytest.mark.parametrize("kind", sampled(REFUSED_FIRST, 3), ids=lambda kind: kind.name)
def test_plan_refuses_what_a_reclaim_would_refuse(
    lab: Lab, kind: Kind, request: pytest.FixtureRequest
) -> None:
    case = Case(lab, lambda: request.getfixturevalue("second_guest"))
    with case.cleanup:
        kind.play(case)
        case.policy["mode"] = "plan"
        with witness.untouched(lab):
            verdict, _, said, _ = case.reclaim()
    assert verdict == kind.verdict
    for text in case.says:
        assert text in said
