"""One source for the remedies in reports and the table in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_reclaim import causes
from gpu_reclaim.causes import CAUSES, Cause
from gpu_reclaim.models import GOOD_VERDICTS, Verdict

ROOT = Path(__file__).parents[2]


def test_every_verdict_has_a_cause() -> None:
    assert {cause.verdict for cause in CAUSES} == set(Verdict)


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.meaning)
def test_a_bad_verdict_has_a_remedy_and_a_good_one_none(cause: Cause) -> None:
    assert bool(cause.remedy) == (cause.verdict not in GOOD_VERDICTS)
    assert cause.meaning.endswith(".")
    assert cause.recognised.endswith(".")


@pytest.mark.parametrize(
    "name", [name for name, value in vars(causes).items() if isinstance(value, Cause)]
)
def test_every_cause_is_found_somewhere(name: str) -> None:
    sources = [*ROOT.glob("src/gpu_reclaim/**/*.py"), *ROOT.glob("flows/*.py")]

    assert any(f"causes.{name}" in file.read_text() for file in sources)


def test_the_documentation_has_the_same_text() -> None:
    assert causes.table() in (ROOT / "docs/verdicts.md").read_text()
