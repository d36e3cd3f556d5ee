"""How quick the stand-in server is: tokens a second by setting and by requests running.

A request has its part of what all running ones get together when it begins, and keeps it. Its clock
is worked out, not slept: it ends when it should have, even where this process is late, and the next
one of the same client counts from there. So a busy machine hardly changes what is measured.
"""

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lab.guest.sglang_flags import Setting
    from lab.guest.sglang_lookup import Rows
    from lab.guest.sglang_moe import quality
    from lab.guest.sglang_state import StateFile
else:
    from sglang_flags import Setting
    from sglang_lookup import Rows
    from sglang_moe import quality
    from sglang_state import StateFile

LEVELS = (1, 4, 16, 64)
FACTORS = {
    0: (0.60, 0.68, 0.78, 0.90),
    1: (0.94, 0.94, 0.94, 0.94),
    2: (1.00, 1.00, 1.00, 1.00),
    3: (0.92, 0.91, 0.90, 0.80),
}
"""By draft steps, 0 being off: 2 are best at all levels. More than 3 are as bad as it gets."""
MORE_STEPS = (0.88, 0.86, 0.80, 0.70)
BRANCHES = 0.97
"""What more than one branch makes of it."""
GARBAGE = 1.5
TOKENS_PER_S = 1000.0
GROWTH = 0.45
"""Twice the requests, 2**0.45 times the tokens."""
ACCEPTED = 0.8
"""How likely a draft token is right, with one branch."""
QUIET_S = 0.03
"""The first requests after a pause are one batch: so long after the last of them it starts."""
GATHER_S = 0.25
"""No batch waits longer than that for another request."""
GRACE_S = 0.3
"""A client that got its answer may take so long to send the next request."""


class Speed:
    """Tokens a second of one setting."""

    def __init__(self, state: Path, setting: Setting, starts: int, rows: Rows | None) -> None:
        """Draws the noise: it is the same for all requests until the cache is flushed."""
        self._rows = rows
        self._file = StateFile(state / "speed.json")
        self._setting = setting
        seed = self._file.read().get("seed")
        self._random = random.Random(None if seed is None else f"{seed} {setting.name} {starts}")
        self.garbage = False
        self.draw()

    def draw(self) -> None:
        """Draws other noise."""
        self._noise = self._random.uniform(-1, 1)

    def rate(self, running: int) -> float:
        """Tokens a second of all requests together."""
        said = self._file.read()
        base = said.get("tokens_per_s", TOKENS_PER_S) * running**GROWTH
        noise = 1 + said.get("noise_pct", 1) / 100 * self._noise
        factor = self._factor(said.get(self._setting.name), running)
        return float(base * noise * factor * self._kernel(said.get("moe_gain_pct", 0), running))

    def wrong_words(self, running: int) -> bool:
        """Whether the kernel's parameters spoil what is generated."""
        if self._rows is None or not self._file.read().get("moe_garbage"):
            return False
        return self._rows.tuned(running * self._setting.draft_tokens)

    def accept_length(self) -> float | None:
        """Tokens a step, the one that is always right included; none without drafts."""
        if not self._setting.steps:
            return None
        right = 1 - (1 - ACCEPTED) / self._setting.topk**0.5
        return float(sum(right**step for step in range(self._setting.steps + 1)))

    def _kernel(self, gain_pct: float, running: int) -> float:
        """What the kernel's parameters make of it."""
        if self._rows is None:
            return 1.0
        tokens = running * self._setting.draft_tokens
        return 1 + gain_pct / 100 * quality(self._rows.chosen(tokens), tokens)

    def _factor(self, said: float | dict[str, float] | None, running: int) -> float:
        if self.garbage:
            return GARBAGE
        if isinstance(said, dict):
            levels = {int(level): factor for level, factor in said.items()}
            return levels[max((x for x in levels if x <= running), default=min(levels))]
        if said is not None:
            return said
        row = FACTORS.get(self._setting.steps, MORE_STEPS)
        factor = row[sum(level <= running for level in LEVELS) - 1]
        return factor * (BRANCHES if self._setting.topk > 1 else 1)


@dataclass
class Job:
    """One request.

    Attributes:
        tokens: How many it generates.
        emit: Told how many there are, three times at most: first, half way, last.
    """

    tokens: int
    emit: Callable[[int], None]

    def steps(self) -> list[int]:
        """The counts to be told."""
        return sorted({1, max(1, self.tokens // 2), self.tokens})


@dataclass
class Pace:
    """Runs requests at a rate, on a clock that is worked out.

    Attributes:
        rate: Tokens a second by requests running.
        limit: Most that run; 0: all.
    """

    rate: Callable[[int], float]
    limit: int
    _running: int = 0
    _events: list[tuple[float, int, int, Job]] = field(default_factory=list)
    _batch: list[Job] = field(default_factory=list)
    _batch_began: float = 0
    _batch_ends: float = 0
    _vacant: deque[float] = field(default_factory=deque)  # when their requests ended
    _waiting: deque[Job] = field(default_factory=deque)
    _count: int = 0
    _timer: asyncio.TimerHandle | None = None

    def submit(self, job: Job) -> None:
        """Begins a request, or lets it wait for its turn."""
        now = asyncio.get_running_loop().time()
        self._advance(now)
        if self._vacant:
            # The answer of the one before was late here, or this client slow: neither counts.
            self._begin(job, self._vacant.popleft())
        elif self.limit and self._running + len(self._batch) >= self.limit:
            self._waiting.append(job)
        elif self._running and not self._batch:
            self._begin(job, now)
        else:
            if not self._batch:
                self._batch_began = now
            self._batch_ends = min(now + QUIET_S, self._batch_began + GATHER_S)
            self._batch.append(job)
        self._wake()

    def _begin(self, job: Job, time: float) -> None:
        """Plans a request. Who just left still counts: somebody may take over."""
        self._running += 1
        present = self._running + len(self._vacant) + len(self._batch)
        each = self.rate(present) / present
        for tokens in job.steps():
            self._count += 1
            heapq.heappush(self._events, (time + tokens / each, self._count, tokens, job))

    def _advance(self, now: float) -> None:
        """Does all that was due by now."""
        if self._batch and self._batch_ends <= now:
            while self._batch:
                self._begin(self._batch.pop(0), self._batch_began)
        while self._events and self._events[0][0] <= now:
            time, _, tokens, job = heapq.heappop(self._events)
            if tokens == job.tokens:
                self._leave(time)
            job.emit(tokens)
        while self._vacant and self._vacant[0] + GRACE_S <= now:
            self._vacant.popleft()

    def _leave(self, time: float) -> None:
        self._running -= 1
        if self._waiting:
            self._begin(self._waiting.popleft(), time)
        else:
            self._vacant.append(time)

    def _wake(self) -> None:
        """Sees to it that this goes on when the next thing is due."""
        if self._timer is not None:
            self._timer.cancel()
        due = [self._events[0][0]] if self._events else []
        due += [self._batch_ends] if self._batch else []
        if due:
            self._timer = asyncio.get_running_loop().call_at(min(due), self._on_time)

    def _on_time(self) -> None:
        self._advance(asyncio.get_running_loop().time())
        self._wake()
