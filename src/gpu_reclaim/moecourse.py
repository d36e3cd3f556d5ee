"""A tuning of MoE kernels on its way: what is left, how long it may take, and the report."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from gpu_reclaim import moespace
from gpu_reclaim.course import GO_ON, RECLAIM_S, SEE_WHY, Tuning, error_words
from gpu_reclaim.errors import BadInput
from gpu_reclaim.models import ReclaimPolicy
from gpu_reclaim.moefound import PRESENT, MoeFound
from gpu_reclaim.moejobs import KERNEL_LIMIT_S
from gpu_reclaim.moepreflight import MoePreflight, moe_trials
from gpu_reclaim.moestage import Window
from gpu_reclaim.plans import MoeTunePlan
from gpu_reclaim.tuning import KernelTime, TunedSize, TuningOutcome, TuningReport

WITHIN_NOISE = "Identical within noise: rolled back."


@dataclass
class MoeTuning:
    """A tuning on its way.

    Attributes:
        server: Name of the LlmServer block.
        host: Name of the GpuHost block.
        plan: What is tried, and how it is decided.
        policy: For the reclaims.
        moe: From `moe_preflight`.
        sizes: Batch sizes that were tuned, or failed, an earlier run's first.
        kernels: Kernels that were timed.
        tried: The trials, once they have begun.
    """

    server: str
    host: str
    plan: MoeTunePlan
    policy: ReclaimPolicy
    moe: MoeFound
    sizes: list[TunedSize] = field(default_factory=list)
    kernels: list[KernelTime] = field(default_factory=list)
    tried: Tuning | None = None
    _began: float = field(default_factory=time.monotonic)

    @property
    def limit_s(self) -> float:
        """Longest time for one batch size, in seconds."""
        return self.plan.size_timeout_minutes * 60

    @property
    def missing(self) -> list[int]:
        """Batch sizes that are still to be tuned.

        One that failed as it would again is not, unless its time was over and there is more now.
        """
        if not self.plan.tune or self.plan.mode == "kernels":
            return []
        done = {x.tokens for x in self.sizes if x.row or not self._more_time(x)}
        return [tokens for tokens in self.moe.sizes if tokens not in done]

    def _more_time(self, size: TunedSize) -> bool:
        return size.seconds >= size.limit_s > 0 and self.limit_s > size.limit_s

    def known(self, sizes: Sequence[TunedSize]) -> list[TunedSize]:
        """What counts of an earlier run's sizes: not failures that may have been by chance."""
        return [size for size in sizes if size.row or size.final]

    def add(self, size: TunedSize) -> None:
        """Take in the last word on a batch size."""
        self.sizes = [x for x in self.sizes if x.tokens != size.tokens] + [size]

    @property
    def size_s(self) -> float:
        """Seconds that one batch size is expected to take: as measured, else guessed."""
        took = [x.seconds for x in self.sizes if x.row and x.seconds]
        guess = 60 * moespace.minutes(1, 1, self.moe.tried)
        return min(self.limit_s, median(took) if took else guess)

    @property
    def stage_minutes(self) -> float:
        """How long the missing sizes take."""
        rounds = math.ceil(len(self.missing) / max(1, len(self.moe.devices)))
        return rounds * self.size_s / 60

    def window(self) -> Window:
        """When the stage must stop, so that the service is back in time."""
        most = self.plan.window_minutes * 60 - self.moe.found.start_s - RECLAIM_S
        until = self._began + most if self.plan.window_minutes else math.inf
        one_s = KERNEL_LIMIT_S if self.plan.mode == "kernels" else self.size_s
        return Window(time.monotonic, until, one_s)

    def check_window(self) -> None:
        """Refuse a window in which not even one batch size, or kernel, can be done.

        Raises:
            BadInput: It is too short.
        """
        window = self.window()
        if (self.missing or self.plan.mode == "kernels") and not window.fits:
            least = (window.size_s + self.moe.found.start_s + RECLAIM_S) / 60
            raise BadInput(
                f"{self.server}: a window of {self.plan.window_minutes:g} min is too short: one "
                f"batch size and the server's start are expected to take {least:.0f} min",
                remedy="give a longer window_minutes, or fewer rows (full_space = false)",
            )

    @property
    def before(self) -> MoePreflight:
        """The arms: what is tuned so far, and the candidates."""
        return moe_trials(self.moe, self.sizes)

    def trials(self) -> Tuning:
        """The trials of those."""
        return Tuning(
            self.server,
            self.host,
            self.plan,
            self.policy,
            self.before,
            began=self._began,
            reserve_s=self.moe.found.start_s + RECLAIM_S,
        )

    @property
    def most_minutes(self) -> float:
        """How long all of it takes at most, in minutes."""
        arms = 1 + len(self.moe.candidates) + self.plan.tune
        visits = arms * self.plan.rounds * self.trials().visit_s / 60
        return self.stage_minutes + (visits if self.plan.mode != "kernels" else 0)

    def planned(self) -> TuningReport:
        """The report where nothing was touched."""
        said = (
            f"{len(self.moe.sizes)} batch sizes would be tuned for {self.moe.name} and Triton "
            f"{self.moe.triton}, {len(self.missing)} of them are missing; all of it takes "
            f"{self.most_minutes:.0f} min at most"
        )
        return self._report("planned", said)

    def cut(self) -> TuningReport:
        """The report where the window was over before all sizes were tuned."""
        left = ", ".join(map(str, self.missing))
        said = f"The window is over, and the service is back. Still to be tuned: {left}."
        return self._report("unfinished", said, remedy=GO_ON)

    def fruitless(self) -> TuningReport:
        """The report where there is nothing to try."""
        failed = [f"{x.tokens}: {x.failure}" for x in self.sizes if x.failure]
        said = "There is nothing to try beside the configs in use: they are what was found."
        if self.moe.refused and not failed:
            said = "None of the candidates can be tried, nothing was changed."
        if failed and self.plan.tune:
            said = f"No batch size could be tuned, nothing was changed. {'; '.join(failed)}."
        return self._report("unfinished" if failed else "kept", said, remedy=SEE_WHY * bool(failed))

    def measured(self) -> TuningReport:
        """The report of kernels that were timed alone."""
        arms = list(dict.fromkeys(x.arm for x in self.kernels))
        words = [_compared(self.kernels, arm) for arm in arms if arm != PRESENT]
        said = " ".join(words) or "Only the configs in use were timed."
        most = len(self.before.arms) * len(self.moe.sizes)
        if len(self.kernels) < most:
            said = f"The window was over after {len(self.kernels)} of {most} kernels. {said}"
        return self._report("measured", f"{said} Nothing was changed.")

    def told(self, report: TuningReport) -> TuningReport:
        """The report of the trials, with what was tuned."""
        said = report.summary
        equal = [arm for arm in report.arms if arm.state == "equal"]
        if report.outcome == "kept" and equal and len(equal) == len(report.arms) - 1:
            said = f"{WITHIN_NOISE} {said}"
        overlay = report.drop_in and self.before.folders.get(report.winner, "")
        return report.model_copy(update={"summary": said, "sizes": self._sizes, "overlay": overlay})

    def broken(self, error: BaseException) -> TuningReport:
        """The report of one that an error ended."""
        if self.tried is not None and self.tried.visits:
            return self.told(self.tried.broken(error))
        return self._report(
            "unfinished", f"It was ended by an error: {error_words(error)}", remedy=GO_ON
        )

    @property
    def _sizes(self) -> list[TunedSize]:
        return sorted(self.sizes, key=lambda size: size.tokens)

    def _report(self, outcome: TuningOutcome, summary: str, remedy: str = "") -> TuningReport:
        return TuningReport(
            server=self.server,
            outcome=outcome,
            summary=summary,
            remedy=remedy,
            current=PRESENT,
            winner=PRESENT,
            minutes=(time.monotonic() - self._began) / 60,
            estimated_minutes=self.most_minutes,
            refused=dict(self.moe.refused),
            sizes=self._sizes,
            kernels=self.kernels,
            raw=self.moe.place,
        )


def _compared(kernels: Sequence[KernelTime], arm: str) -> str:
    """How one arm's kernels compare with the present ones, over the sizes of both."""
    base = {x.tokens: x.us for x in kernels if x.arm == PRESENT}
    logs = [
        math.log(x.us / us) for x in kernels if x.arm == arm and x.us and (us := base.get(x.tokens))
    ]
    if not logs:
        return f"{arm} could not be compared."
    return f"{arm}: {100 * math.expm1(fmean(logs)):+.1f} % time over {len(logs)} batch sizes."
