"""Made-up results of a tuning."""

from __future__ import annotations

from gpu_reclaim.tuning import ArmResult, LevelResult, Measurement, TuningReport, Visit

BASE = {1: 122.0, 4: 401.0, 16: 905.0, 64: 1566.0}


def level(at: int, tok_s: float, change: float | None = None, spread: float = 0.8) -> LevelResult:
    return LevelResult(
        level=at,
        output_tok_s=tok_s,
        spread_pct=spread,
        change_pct=change,
        ttft_ms=90.5,
        ttft_p99_ms=181,
        tpot_ms=7.25,
        tpot_p99_ms=11,
        accept_length=None if change is None else 2.35,
    )


def arm(name: str, state: str, change: float | None = None, **more: object) -> ArmResult:
    """A setting that is faster by so much at each concurrency."""
    levels = [level(at, tok_s * (1 + (change or 0) / 100), change) for at, tok_s in BASE.items()]
    values = {"arm": name, "state": state, "gain_pct": change, "rounds": 5, "levels": levels}
    return ArmResult.model_validate(values | more)


def arms() -> list[ArmResult]:
    return [
        arm("NEXTN 2/1/3", "current"),
        arm("off", "worse", -41, why="clearly worse", rounds=2),
        arm("NEXTN 3/1/4", "winner", 4.8, why="better by 4.8 %"),
        arm("NEXTN 4/1/5", "rejected", 6.1, why="TTFT p99 is 900 ms at 64 in flight"),
        arm("NEXTN 3/4/8", "equal", -0.3),
        arm("NEXTN 5/1/6", "failed", why="out of memory", rounds=0, levels=[]),
    ]


def visit(name: str, round_: int, **more: object) -> Visit:
    one = Measurement(
        level=1,
        requests=16,
        completed=16,
        seconds=20,
        output_tok_s=121,
        ttft_ms=90,
        ttft_p99_ms=180,
        tpot_ms=7,
        tpot_p99_ms=11,
        at="2026-11-30 13:05:59",
    )
    return Visit.model_validate({"arm": name, "round": round_, "levels": [one]} | more)


def report(**more: object) -> TuningReport:
    values: dict[str, object] = {
        "server": "glm",
        "outcome": "replaced",
        "summary": "NEXTN 3/1/4 replaces NEXTN 2/1/3",
        "current": "NEXTN 2/1/3",
        "winner": "NEXTN 3/1/4",
        "minutes": 81.4,
        "estimated_minutes": 117,
        "arms": arms(),
        "visits": [
            visit("NEXTN 2/1/3", 1, ready_s=71.2, token_capacity=412000),
            visit("NEXTN 3/1/4", 1, differing_pct=1.25),
            visit("NEXTN 5/1/6", 1, levels=[], failure="out of memory", detail="CUDA error\nexit"),
        ],
        "refused": {"NEXTN 0/4/8": "without steps the server chooses all three"},
        "proof": "the server says num_steps 3",
        "drop_in": "/etc/systemd/system/sglang.service.d/90-tuning.conf",
        "raw": "/var/lib/gpu-reclaim/tuning/glm",
    }
    return TuningReport.model_validate(values | more)
