"""What a tuning tries, how it is measured, and what counts as better."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Level = Annotated[int, Field(ge=1, le=4096)]
"""Requests in flight at the same time."""

Tokens = Annotated[int, Field(ge=1, le=1 << 20)]
"""Tokens that one call of a kernel works at."""


class SpecSetting(BaseModel):
    """One setting of SGLang's speculative decoding.

    The rules between its numbers are those of SGLang (`speculative_hook.py`, 0.5.23): without
    steps the server chooses all three; with topk 1 the draft tokens are steps + 1 whatever is said.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    off: bool = Field(default=False, title="Off", description="No speculative decoding at all.")
    algorithm: str = Field(
        default="",
        title="Algorithm",
        description="For --speculative-algorithm, for example NEXTN. Empty: as the unit has it.",
    )
    num_steps: int = Field(
        default=0, ge=0, le=64, title="Steps", description="0: the server's own choice."
    )
    eagle_topk: int = Field(default=0, ge=0, le=64, title="Top k", description="0: 1.")
    num_draft_tokens: int = Field(
        default=0, ge=0, le=1024, title="Draft tokens", description="0: steps x top k + 1."
    )
    adaptive: bool = Field(
        default=False,
        title="Adaptive",
        description="The server picks the steps by batch size (--speculative-adaptive).",
    )

    def __str__(self) -> str:
        """Its name in tables and records, for example `NEXTN 2/1/3`, or `off`."""
        if self.off:
            return "off"
        numbers = f"{self.num_steps}/{self.eagle_topk}/{self.num_draft_tokens}"
        words = [self.algorithm or "?", numbers, *(["adaptive"] if self.adaptive else [])]
        return " ".join(words)


class TrialPlan(BaseModel):
    """How arms are measured, and what counts as better."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    apply: Literal["if_better", "never"] = Field(
        default="if_better",
        title="Apply",
        description="if_better leaves a winner in place; never only reports.",
    )
    persist: bool = Field(
        default=True,
        title="Keep after a reboot",
        description="A winner's drop-in is written to /etc; else to /run, which a reboot clears.",
    )
    levels: list[Level] = Field(
        default=[1, 4, 16, 64],
        min_length=1,
        title="Concurrencies",
        description="Requests in flight at which each setting is measured.",
    )
    weights: list[Annotated[float, Field(gt=0)]] = Field(
        default=[],
        title="Weights",
        description="How much each concurrency counts, in the same order. Empty: all the same.",
    )
    min_gain_pct: float = Field(
        default=2,
        ge=0,
        le=100,
        title="Least gain (%)",
        description="A setting must score so much more than the present one to replace it.",
    )
    max_loss_pct: float = Field(
        default=3,
        ge=0,
        le=100,
        title="Most loss at a concurrency (%)",
        description="No concurrency may lose more throughput than that, whatever the others gain.",
    )
    max_ttft_ms: float = Field(
        default=0,
        ge=0,
        title="TTFT limit (ms)",
        description="Longest p99 time to first token at any concurrency. 0: no limit.",
    )
    max_tpot_ms: float = Field(
        default=0,
        ge=0,
        title="TPOT limit (ms)",
        description="Longest p99 time per output token at any concurrency. 0: no limit.",
    )
    output_tolerance_pct: float = Field(
        default=25,
        ge=0,
        le=100,
        title="Differing outputs (%)",
        description="Greedy answers that may differ from the present setting's at any concurrency, "
        "in percent, beyond those in which it differs from itself. Batch and kernel shapes change "
        "the last digits, so a few differ without being worse.",
    )
    rounds: int = Field(
        default=24,
        ge=2,
        le=100,
        title="Rounds",
        description="At most so often each setting is started and measured. It ends as soon as "
        "nothing can change any more: after about 5 where measurements agree to 1 %. Fewer rounds "
        "ask for clearer gains, and so miss small ones.",
    )
    requests_per_stream: int = Field(
        default=8,
        ge=1,
        le=1000,
        title="Requests per stream",
        description="Requests of a measurement, times its concurrency.",
    )
    least_requests: int = Field(
        default=16,
        ge=1,
        le=100_000,
        title="Least requests",
        description="A measurement has at least so many requests.",
    )
    measure_timeout_s: float = Field(
        default=1800,
        gt=0,
        le=86_400,
        title="Measurement time limit (s)",
        description="Longest time of one measurement, in seconds.",
    )
    fresh: bool = Field(
        default=False,
        title="From the start",
        description="Measure everything anew, also what an earlier run has measured.",
    )

    @field_validator("levels")
    @classmethod
    def _different(cls, levels: list[int]) -> list[int]:
        if len(set(levels)) != len(levels):
            raise ValueError("levels: a concurrency is named twice")
        return sorted(levels)

    @model_validator(mode="after")
    def _one_weight_each(self) -> Self:
        if self.weights and len(self.weights) != len(self.levels):
            raise ValueError(
                f"weights: {len(self.weights)} for {len(self.levels)} concurrencies; "
                "give one for each, or none"
            )
        return self

    @property
    def limit_minutes(self) -> float:
        """After so many minutes no visit is begun; 0: no limit."""
        return 0


class _SpecTrials(BaseModel):
    # A class of its own, for a form shows the fields of the last base first.
    mode: Literal["tune", "plan"] = Field(
        default="tune", title="Mode", description="plan only shows the trials; nothing is stopped."
    )
    settings: list[SpecSetting] = Field(
        default=[SpecSetting(num_steps=n, eagle_topk=1) for n in (1, 2, 3, 4)],
        title="Settings",
        description="What to try. The unit's present setting and off are always tried too.",
    )


class SpecDecodePlan(TrialPlan, _SpecTrials):
    """Which settings of speculative decoding are tried, and how."""

    max_running_requests: int = Field(
        default=0,
        ge=0,
        le=100_000,
        title="Running requests",
        description="--max-running-requests of every trial. 0: what the server runs with now.",
    )
    max_minutes: float = Field(
        default=0,
        ge=0,
        le=100_000,
        title="Time limit (minutes)",
        description="No visit is begun that would end later; another run goes on from there. "
        "0: no limit.",
    )

    @property
    def limit_minutes(self) -> float:
        """As `max_minutes`."""
        return self.max_minutes


class _MoeTrials(BaseModel):
    mode: Literal["tune", "plan", "kernels"] = Field(
        default="tune",
        title="Mode",
        description="plan only shows what would be done; nothing is stopped. kernels measures the "
        "kernels of each config alone, without the server.",
    )
    tune: bool = Field(
        default=True,
        title="Tune",
        description="Run SGLang's tuning script. Without it only the candidates are tried.",
    )
    batch_sizes: list[Tokens] = Field(
        default=[],
        title="Batch sizes",
        description="Tokens in one call of the kernel, to tune for. Empty: concurrencies times "
        "draft tokens, and the size of a prefill chunk.",
    )
    candidates: list[str] = Field(
        default=[],
        title="Candidates",
        description="Config files on the host that are tried as they are, for example one that was "
        "made for another GPU.",
    )
    size_timeout_minutes: float = Field(
        default=90,
        gt=0,
        le=10_000,
        title="Time limit of a batch size (minutes)",
        description="Longest time that tuning one batch size may take. With SGLang's whole search "
        "space an H100 takes 44 min.",
    )
    window_minutes: float = Field(
        default=0,
        ge=0,
        le=100_000,
        title="Window (minutes)",
        description="The service is back when so much time is over; the next run goes on from "
        "there. 0: no limit.",
    )
    full_space: bool = Field(
        default=False,
        title="Whole search space",
        description="Also try configs that do not fit into the GPU's shared memory; the script "
        "passes over them after compiling each.",
    )


class MoeTunePlan(TrialPlan, _MoeTrials):
    """Which fused-MoE kernel configs are made and tried, and how."""

    @field_validator("batch_sizes")
    @classmethod
    def _each_once(cls, sizes: list[int]) -> list[int]:
        return sorted(set(sizes))

    @field_validator("candidates")
    @classmethod
    def _paths(cls, paths: list[str]) -> list[str]:
        wrong = [path for path in paths if not path.startswith("/")]
        if wrong:
            raise ValueError(f"candidates: {wrong[0]!r} is no absolute path on the host")
        return list(dict.fromkeys(paths))

    @model_validator(mode="after")
    def _something_to_try(self) -> Self:
        if not self.tune and not self.candidates and self.mode != "kernels":
            raise ValueError("tune is off and there are no candidates: nothing would be tried")
        return self

    @property
    def limit_minutes(self) -> float:
        """As `window_minutes`."""
        return self.window_minutes
