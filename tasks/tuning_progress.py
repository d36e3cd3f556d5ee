"""How far a tuning is: a bar on the run's page."""

from __future__ import annotations

import logging
import math
from typing import Any, cast
from uuid import UUID

from httpx import HTTPStatusError
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.exceptions import ObjectNotFound

from gpu_reclaim.tasks import artifacts

log = logging.getLogger(__name__)


class Progress:
    """A bar on the run's page, moved forward by each visit. It never fails a run."""

    def __init__(self, server: str, kind: str) -> None:
        self._key = artifacts.slug(f"{kind}-progress", server)
        self._bar: UUID | None = None

    def visit(self, done: int, total: int, visit: str, minutes_left: float) -> None:
        """Say where the tuning is.

        Args:
            done: Visits that are over.
            total: Visits altogether, at most.
            visit: What comes now, for example `round 2 of 5, NEXTN 2/1/3`.
            minutes_left: The longest that the rest takes.
        """
        percent = min(100.0, max(0.0, 100.0 * done / total)) if total > 0 else 0.0
        left = f", about {minutes_left:.0f} min left" if math.isfinite(minutes_left) else ""
        text = artifacts.cell(f"{visit}{left}")
        log.info("%.0f %%: %s%s", percent, visit, left)
        artifacts.write(lambda: self._show(percent, text))

    def _show(self, percent: float, text: str) -> None:
        # Called from an async pipeline, they would return coroutines.
        create, update = (
            cast("Any", create_progress_artifact),
            cast("Any", update_progress_artifact),
        )
        if self._bar is not None:
            try:
                update(self._bar, progress=percent, description=text, _sync=True)
                return
            except (ObjectNotFound, HTTPStatusError):
                # Most likely somebody deleted it in the UI; which of the two is raised depends on
                # the release of Prefect.
                self._bar = None
        self._bar = create(progress=percent, key=self._key, description=text, _sync=True)
