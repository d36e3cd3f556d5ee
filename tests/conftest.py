"""The tally of the kinds that were played."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Kinds, false cleans and innocents ended, over all tests that played a kind."""
    reports = [x for rows in terminalreporter.stats.values() for x in rows]
    played = [
        dict(value)
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, value in report.user_properties
        if name == "kind" and isinstance(value, dict)
    ]
    if not played:
        return
    groups = sorted({row["group"] for row in played})
    for group in groups:
        count = sum(row["group"] == group for row in played)
        terminalreporter.write_line(f"kinds, {group}: {count}")
    false = sum(row["false_clean"] for row in played)
    innocents = sum(row["innocents"] for row in played)
    terminalreporter.write_line(
        f"{len(played)} kinds, {false} false cleans, {innocents} innocents ended"
    )
