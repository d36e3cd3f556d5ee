"""What the two lines of bash do to the very guest that a reclaim leaves in order."""

from __future__ import annotations

import pytest

from gpu_reclaim.models import ReclaimPolicy, Verdict
from gpu_reclaim.reclaim import reclaim
from guest import bash_lines, ways, witness
from lab.lab import Lab
from lab.waiting import wait_until

pytestmark = pytest.mark.lab

STOPPED_FIRST = pytest.mark.parametrize(
    "stop_unit", [True, pytest.param(False, marks=pytest.mark.exhaustive)]
)
WORKERS = [f"sglang::scheduler_TP{rank}" for rank in range(4)]


@STOPPED_FIRST
def test_lines_end_the_innocent(lab: Lab, stop_unit: bool) -> None:
    lab.start_server()
    assert len(witness.innocents(lab)) == 2
    bash_lines.run(lab, stop_unit)
    assert witness.innocents(lab) == {}
    assert witness.state_of(lab, "nvidia-persistenced") != "active"
    lab.reset()
    lab.start_server()
    people = witness.innocents(lab)
    assert reclaim(ways.session(lab), ReclaimPolicy()).verdict == Verdict.CLEAN
    assert witness.innocents(lab) == people


def test_lines_alone_have_the_unit_come_back(lab: Lab) -> None:
    before = lab.start_server()
    bash_lines.run(lab, stop_unit=False)
    wait_until("the unit is back", lambda: witness.state_of(lab) == "active")
    restarts = lab.do(f"systemctl show -P NRestarts {ways.UNIT}")
    assert int(restarts) >= 1
    now = lab.server_pids()
    assert now["launch_server"] != before["launch_server"]


def test_lines_with_a_stop_leave_a_worker(lab: Lab) -> None:
    """No "python3" in its title, no GPU in its hands: neither line sees it."""
    before = lab.start_server()
    bash_lines.run(lab, stop_unit=True)
    assert witness.state_of(lab) == "inactive"
    assert lab.server_pids() == {"sglang::detokenizer": before["sglang::detokenizer"]}


@STOPPED_FIRST
def test_lines_hide_a_missing_fuser(lab: Lab, stop_unit: bool) -> None:
    before = lab.start_server()
    lab.hide("/usr/bin/fuser")
    seen = bash_lines.run(lab, stop_unit)
    assert seen.codes == (0, 0)
    assert min(seen.memory_mib.values()) >= 90000
    # Ending by "python3" misses every worker: each has a title of its own.
    if stop_unit:
        assert {title: lab.server_pids()[title] for title in WORKERS} == {
            title: before[title] for title in WORKERS
        }


def test_lines_print_a_row_that_cannot_be_read(lab: Lab) -> None:
    """What fuser prints has no line end, so GPU 0 sticks to the last pid."""
    lab.start_server()
    seen = bash_lines.run(lab, stop_unit=True)
    assert set(seen.memory_mib) == {1, 2, 3}
    first = seen.printed.splitlines()[0]
    assert first.endswith(" MiB")
    assert not first.startswith("0,")


def test_lines_take_memory_that_lingers_for_the_end(lab: Lab) -> None:
    """They look once, whenever that is."""
    lab.start_server()
    lab.smi("lag", "4")
    assert witness.memory(lab) == [90000, 90100, 90200, 90300]
    seen = bash_lines.run(lab, stop_unit=True)
    assert seen.codes == (0, 0)
    assert seen.memory_mib == {1: 90100, 2: 90200, 3: 90300}
