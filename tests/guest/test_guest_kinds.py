"""Every kind of hostile day: the right verdict, an explanation, and nobody innocent ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpu_reclaim import signals, systemd
from guest import kinds_owned, kinds_seen, kinds_stubborn
from guest.kinds import Case, Kind, play
from guest.samples import sampled
from lab.container import Container
from lab.lab import Lab

pytestmark = pytest.mark.lab

KINDS = [*kinds_seen.KINDS, *kinds_owned.KINDS, *kinds_stubborn.KINDS]


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "KILL_WAIT_S", 1)
    monkeypatch.setattr(systemd, "MAX_STOP_S", 3)


@pytest.mark.parametrize(
    "kind",
    # `make kinds` plays all.
    sampled(KINDS, len(KINDS) // 4),
    ids=lambda kind: f"{kind.group}: {kind.name}",
)
def test_kind(
    lab: Lab,
    kind: Kind,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
) -> None:
    def second() -> Container:
        guest: Container = request.getfixturevalue("second_guest")
        return guest

    case = Case(lab, second)
    with case.cleanup:
        played = play(kind, case)
        tally = {"innocents": len(played.innocents), "false_clean": played.false_clean}
        record_property("kind", {"group": kind.group, "name": kind.name} | tally)

        assert played.verdict == kind.verdict, played.said
        assert played.innocents == []
        assert not played.false_clean
        for text in case.says:
            assert text in played.said
        for text in case.advises:
            assert text in played.remedy
        if played.report is not None and not played.missed:
            ended = {(row.pid, row.start_time) for row in played.report.ended}
            assert case.victims <= ended
        assert played.missed == set() or kind.verdict is None
