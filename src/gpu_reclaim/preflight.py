"""What every tuning knows before a server is taken down: its settings, and how each is proven."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from gpu_reclaim.benching import Load
from gpu_reclaim.finding import Found, requests_at
from gpu_reclaim.plans import TrialPlan
from gpu_reclaim.serving import Server
from gpu_reclaim.session import Session

OUTPUT_TOKENS = 220
"""Mean answer of a ShareGPT conversation, in tokens: what a benchmark's length is guessed from
until one was measured."""

ONE_STREAM_TOK_S, STREAMS_POWER = 122, 0.61
"""Output tokens per second of N streams are guessed as 122 N^0.61: Qwen3.5-122B on four RTX PRO
6000 made 122 at one request and 1566 at 64."""


@dataclass(frozen=True)
class Preflight(ABC):
    """A server before it is tuned, and what will be tried.

    Attributes:
        found: The server.
        arms: Names of the settings, in order of preference, the present one first.
        refused: Settings that will not be tried, and why.
        parts: What must be the same so that measurements may be compared.
        place: Where its logbook is on the host.
        files: Checksum of the unit's files.
    """

    winner_file: ClassVar[str]
    """Name of a winner's drop-in."""

    proof: ClassVar[str]
    """What shows that a setting is in force."""

    found: Found
    arms: tuple[str, ...]
    refused: Mapping[str, str]
    parts: Mapping[str, object] = field(repr=False)
    place: str
    files: str

    @property
    def server(self) -> Server:
        """What is tuned."""
        return self.found.server

    @property
    def current(self) -> str:
        """Name of the present setting."""
        return self.arms[0]

    def tuned_file(self, *, lasting: bool) -> str:
        """Where a winner's drop-in is on the host."""
        root = "/etc" if lasting else "/run"
        return f"{root}/systemd/system/{self.server.unit}.d/{self.winner_file}"

    @abstractmethod
    def drop_in(self, arm: str) -> str:
        """Text of the drop-in that gives the unit that setting."""

    @abstractmethod
    def wrong_on_trial(self, session: Session, arm: str) -> list[str]:
        """Where the server that serves differs from what was put on trial.

        Raises:
            TransportError: As `Transport.run`.
        """

    @abstractmethod
    def wrong_now(self, session: Session, arm: str) -> list[str]:
        """Where the server that serves differs from what should serve after the tuning.

        Raises:
            TransportError: As `Transport.run`.
        """


def load_of(before: Preflight, plan: TrialPlan, level: int, name: str) -> Load:
    """What one measurement sends."""
    server = before.server
    return Load(
        level=level,
        requests=requests_at(plan, level),
        base_url=server.base_url,
        model=before.found.model,
        dataset_name=server.dataset_name,
        dataset_path=server.dataset_path,
        timeout_s=plan.measure_timeout_s,
        folder=before.place,
        name=name,
        api_key=server.api_key,
    )


def ladder_s(plan: TrialPlan) -> float:
    """Guessed seconds of one visit's measurements."""
    rates = {level: ONE_STREAM_TOK_S * math.pow(level, STREAMS_POWER) for level in plan.levels}
    return sum(requests_at(plan, x) * OUTPUT_TOKENS / rate for x, rate in rates.items())
