"""Every check can fail: a good document, spoilt in one place, names the check of that place."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from real_gpu.conftest import Run
from real_gpu.machine import ROOT

if TYPE_CHECKING:
    from benchmarks import gpu_access as access
    from benchmarks import gpu_rules as rules
else:
    sys.path.append(str(ROOT / "benchmarks"))
    import gpu_access as access
    import gpu_rules as rules

Document = dict[str, Any]


def put(*path: str | int, value: object) -> Callable[[Document], None]:
    """Sets what lies at a path of keys."""

    def spoil(document: Document) -> None:
        place: Any = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return spoil


PLAIN, RENAMED, ORPHAN, OPENER, STUBBORN = range(5)
SPOILT = [
    (put("crashed", value="KeyError()"), "crashed"),
    (put("rounds", value=[]), "no rounds"),
    (put("rounds", PLAIN, "not_run", value="out of time"), "plain: run"),
    (put("rounds", PLAIN, "mib_held", "0", value=500), "plain: memory seen in use"),
    (put("rounds", PLAIN, "mib_held", "0", value=None), "plain: memory seen in use"),
    (put("rounds", RENAMED, "holders", 0, "shown", value="python3 x.py"), "renamed: renamed"),
    (put("rounds", ORPHAN, "holders", 0, "orphan", value=False), "orphan: orphaned"),
    (
        put("rounds", OPENER, "planned", 0, "devices", value=["/dev/nvidia0 (fd)"]),
        "every node: every node open",
    ),
    (put("rounds", OPENER, "partly", "1", value=[7]), "every node: plan for one GPU"),
    (put("rounds", OPENER, "partly", "0", value=[]), "every node: plan for one GPU"),
    (put("rounds", PLAIN, "planned", value=[]), "plain: plan named exactly our holders"),
    (
        put("rounds", PLAIN, "planned", 0, "start_time", value=1),
        "plain: plan named exactly our holders",
    ),
    (put("rounds", PLAIN, "alive_after_plan", value=[]), "plain: plan touched nothing"),
    (put("rounds", PLAIN, "verdict", value="held_unseen"), "plain: verdict"),
    (put("rounds", PLAIN, "verdict", value="residue"), "plain: verdict"),
    (put("rounds", PLAIN, "mib_reported", "0", value=4), "plain: verdict"),
    (put("rounds", PLAIN, "ended", value=[]), "plain: exactly our holders ended"),
    (put("rounds", PLAIN, "ended", 0, "start_time", value=1), "plain: exactly our holders ended"),
    (put("rounds", PLAIN, "ended", 0, "outcome", value="gone"), "plain: outcome"),
    (put("rounds", PLAIN, "ended", 0, "signal", value="KILL"), "plain: signal"),
    (put("rounds", STUBBORN, "ended", 0, "signal", value="TERM"), "ignores term: signal"),
    (put("rounds", PLAIN, "alive_after", value=[7]), "plain: holders gone"),
    (put("rounds", PLAIN, "mib_after", "0", value=17), "plain: memory back at idle"),
    (put("rounds", PLAIN, "mib_after", value={"0": 0}), "plain: memory back at idle"),
    (put("rounds", PLAIN, "bystanders", "namesake", value=False), "plain: bystanders alive"),
    (put("rounds", PLAIN, "bystanders", value={}), "plain: bystanders alive"),
    (put("release", "not_run", value="out of time"), "release: run"),
    (put("release", "mib_held", value=500), "release: memory seen in use"),
    (put("release", "gone_s", value=None), "release: process gone"),
    (put("release", "free_s", value=None), "release: memory free"),
]


@pytest.mark.lab
@pytest.mark.parametrize(
    ("spoil", "failed"), SPOILT, ids=[f"{n} {x[1]}" for n, x in enumerate(SPOILT)]
)
def test_each_check_fails_for_what_it_is_there_for(
    quiet: Run, spoil: Callable[[Document], None], failed: str
) -> None:
    document = copy.deepcopy(quiet.document)
    assert rules.failures(rules.Found.model_validate(document)) == []
    spoil(document)

    assert rules.failures(rules.Found.model_validate(document)) == [failed]


def test_a_residue_is_good_where_memory_is_left() -> None:
    done = rules.Round(name="plain", verdict="residue", mib_reported={0: 4})

    assert "plain: verdict" not in rules.failures(rules.Found(rounds=[done]))


def test_without_root_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    assert "not root" in access.obstacle()


def test_without_nvidia_smi_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")

    assert "no nvidia-smi" in access.obstacle()
