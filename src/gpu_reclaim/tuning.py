"""What a tuning measured and decided: plain values without behaviour."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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
        differing_pct: Share of greedy answers that differ from the present setting's first ones, in
            percent, at the concurrency where most do; None where they were not compared.
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


class TunedSize(BaseModel):
    """What SGLang's tuning script found for one batch size.

    Attributes:
        tokens: Tokens in one call of the kernel.
        row: The kernel's launch parameters; empty after a failure.
        failure: Why there are none, for people.
        detail: Its last words.
        final: It would fail in the same way again.
        seconds: How long it took.
        limit_s: Its time limit, in seconds.
        gpu: Index of the GPU it ran on.
        at: When it ended, as `2026-11-30 13:05:59`, by the worker's clock.
    """

    model_config = ConfigDict(frozen=True)

    tokens: int
    row: dict[str, int | bool] = {}
    failure: str = ""
    detail: str = ""
    final: bool = False
    seconds: float = 0
    limit_s: float = 0
    gpu: str = ""
    at: str = ""


class KernelTime(BaseModel):
    """One config's kernel at one batch size, measured alone.

    Attributes:
        arm: Name of the config.
        tokens: Tokens in one call of the kernel.
        us: Microseconds of a call; None where it could not be measured.
        failure: Why not.
    """

    model_config = ConfigDict(frozen=True)

    arm: str
    tokens: int
    us: float | None = None
    failure: str = ""


TuningOutcome = Literal["planned", "kept", "found", "replaced", "unfinished", "measured"]
"""How a tuning ended: only planned; the present setting is as good as any; a better one was found
and not applied; it was applied and proven; its time was over, the present setting could not be
measured, or an error ended it, before it was decided; kernels alone were measured."""


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
        overlay: Folder on the host with a winner's kernel configs; empty where there is none.
        sizes: What the tuning script found, by batch size.
        kernels: Kernels that were measured alone.
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
    overlay: str = ""
    sizes: list[TunedSize] = []
    kernels: list[KernelTime] = []
    raw: str = ""
