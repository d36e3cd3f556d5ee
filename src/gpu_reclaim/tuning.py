"""What is tuned, what was measured and what was decided: plain values without behaviour."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Level = Annotated[int, Field(ge=1, le=4096)]
"""Requests in flight at the same time."""


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


class SpecDecodePlan(BaseModel):
    """What is tried, how it is measured, and what counts as better."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["tune", "plan"] = Field(
        default="tune", title="Mode", description="plan only shows the trials; nothing is stopped."
    )
    settings: list[SpecSetting] = Field(
        default=[SpecSetting(num_steps=n, eagle_topk=1) for n in (1, 2, 3, 4)],
        title="Settings",
        description="What to try. The unit's present setting and off are always tried too.",
    )
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
        description="Greedy answers that may differ from the present setting's, in percent. Batch "
        "and kernel shapes change the last digits, so a few differ without being worse.",
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
    max_running_requests: int = Field(
        default=0,
        ge=0,
        le=100_000,
        title="Running requests",
        description="--max-running-requests of every trial. 0: what the server runs with now.",
    )
    measure_timeout_s: float = Field(
        default=1800,
        gt=0,
        le=86_400,
        title="Measurement time limit (s)",
        description="Longest time of one measurement, in seconds.",
    )
    max_minutes: float = Field(
        default=0,
        ge=0,
        le=100_000,
        title="Time limit (minutes)",
        description="No visit is begun that would end later; another run goes on from there. "
        "0: no limit.",
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
    def _one_weight_each(self) -> SpecDecodePlan:
        if self.weights and len(self.weights) != len(self.levels):
            raise ValueError(
                f"weights: {len(self.weights)} for {len(self.levels)} concurrencies; "
                "give one for each, or none"
            )
        return self


class Measurement(BaseModel):
    """One benchmark run: one concurrency of one server.

    Attributes:
        level: Requests in flight.
        requests: How many were to be answered.
        completed: How many were.
        seconds: From the first request to the last answer.
        output_tok_s: Output tokens per second, all requests together.
        ttft_ms: Time to first token: median.
        ttft_p99_ms: The same, 99th percentile.
        tpot_ms: Time per output token after the first: median.
        tpot_p99_ms: The same, 99th percentile.
        accept_length: Tokens per verification, the bonus token counted; None where there is none.
        at: When it ended, as `2026-11-30 13:05:59`, by the host's clock.
        record: All numbers and words that the benchmark client wrote itself, by its own names.
    """

    model_config = ConfigDict(frozen=True)

    level: int
    requests: int
    completed: int
    seconds: float
    output_tok_s: float
    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    tpot_p99_ms: float
    accept_length: float | None = None
    at: str = ""
    record: dict[str, float | str] = Field(default={}, repr=False)


class Visit(BaseModel):
    """One start of the server with one setting, and all that was measured then.

    Attributes:
        arm: The setting's name.
        round: From 1.
        failure: Why there is no result, for people (`out of memory at start`); empty when it went
            well.
        detail: Last lines of the journal, or what was answered instead.
        ready_s: Seconds from the start until it served.
        levels: One measurement for each concurrency; empty after a failure.
        differing_pct: Share of greedy answers that differ from the present setting's, in percent;
            None where they were not compared.
        token_capacity: Tokens that fit into its cache; None where it does not say.
    """

    model_config = ConfigDict(frozen=True)

    arm: str
    round: int
    failure: str = ""
    detail: str = ""
    ready_s: float = 0
    levels: list[Measurement] = []
    differing_pct: float | None = None
    token_capacity: int | None = None


class LevelResult(BaseModel):
    """What one setting does at one concurrency, over all its measurements there.

    Attributes:
        output_tok_s: Median.
        spread_pct: Robust spread of it (1.4826 times the median absolute deviation), in percent of
            the median; 0 for a single measurement.
        change_pct: Median, over the rounds that both were measured in, of its change against the
            present setting, in percent; None without such a round.
        ttft_ms: Median of the medians.
        ttft_p99_ms: Median of the 99th percentiles.
        tpot_ms: As for ttft.
        tpot_p99_ms: As for ttft.
        accept_length: Median; None where there is none.
    """

    level: int
    output_tok_s: float
    spread_pct: float
    change_pct: float | None
    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    tpot_p99_ms: float
    accept_length: float | None = None


ArmState = Literal["current", "winner", "equal", "worse", "rejected", "failed"]
"""What became of a setting: the present one; the one to replace it; not clearly different; clearly
worse; faster, but not allowed (guard rail, outputs); or its server could not be measured."""


class ArmResult(BaseModel):
    """One setting, and what became of it.

    Attributes:
        why: One sentence.
        gain_pct: Its score against the present setting's, in percent, over the rounds of both.
        rounds: In how many rounds it was measured.
    """

    arm: str
    state: ArmState
    why: str = ""
    gain_pct: float | None = None
    rounds: int = 0
    levels: list[LevelResult] = []


TuningOutcome = Literal["planned", "kept", "found", "replaced", "unfinished"]
"""How a tuning ended: only planned; the present setting is as good as any; a better one was found
and not applied; it was applied and proven; its time was over, the present setting could not be
measured, or an error ended it, before it was decided."""


class TuningReport(BaseModel):
    """What was tried, measured and decided.

    Attributes:
        server: Name of the LlmServer block.
        outcome: How it ended.
        summary: One sentence.
        remedy: What a person should do now; empty when nothing.
        current: Name of the setting that was in force before.
        winner: Name of the setting to use; the same where nothing better was found.
        minutes: How long it took altogether.
        estimated_minutes: How long it was expected to take at most.
        resumed: So many visits were taken from an earlier run's record.
        arms: All settings, the present one first.
        visits: All that was measured, in order.
        refused: Settings that were never tried, and why.
        proof: What shows that the setting named is in force now.
        drop_in: The winner's file on the host; empty where there is none.
        raw: Folder on the host with the benchmark's own records.
    """

    server: str
    outcome: TuningOutcome
    summary: str
    remedy: str = ""
    current: str = ""
    winner: str = ""
    minutes: float = 0
    estimated_minutes: float = 0
    resumed: int = 0
    arms: list[ArmResult] = []
    visits: list[Visit] = []
    refused: dict[str, str] = {}
    proof: str = ""
    drop_in: str = ""
    raw: str = ""
