"""What a tuning's picture shows and how each setting looks in it; nothing is drawn here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from gpu_reclaim.tuning import ArmResult, ArmState, LevelResult

INK, GREY, PAPER = "#1b1f24", "#8b929a", "#ffffff"
WINNER = "#0072b2"
COLOURS = ("#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Okabe and Ito's palette, which colour-blind people can tell apart; the rest is the winner's."""
MARKERS = "s^vPX<>p*hd8"
MOST_ARMS = 24
"""More settings than that are unreadable in one picture; the best of them are drawn."""
LONGEST_NAME = 34
MOST_NAMED = 4
"""So many settings that were never measured are named below the picture."""

STATES: dict[ArmState, str] = {
    "current": "present setting",
    "winner": "better",
    "equal": "no clear difference",
    "worse": "clearly worse",
    "rejected": "not allowed",
    "failed": "not measured",
}


class Look(NamedTuple):
    """How a setting is drawn."""

    colour: str
    marker: str
    line: str
    width: float
    front: int
    bold: bool = False


def sound(arm: ArmResult) -> list[LevelResult]:
    """Its levels with a throughput that can be drawn, in order."""
    levels = [x for x in arm.levels if math.isfinite(x.output_tok_s) and x.output_tok_s > 0]
    return sorted(levels, key=lambda x: x.level)


def best(arms: Sequence[ArmResult]) -> list[ArmResult]:
    """What is drawn: the present setting and the winner, then by gain; those with results only."""
    measured = [arm for arm in arms if sound(arm)]
    first = {"current": 0, "winner": 1}
    return sorted(measured, key=lambda x: (first.get(x.state, 2), -gain(x)))[:MOST_ARMS]


def gain(arm: ArmResult) -> float:
    """Its score in percent; minus infinity where it has none."""
    score = arm.gain_pct
    return -math.inf if score is None or not math.isfinite(score) else score


def places(levels: Sequence[int]) -> dict[int, float]:
    """Where each concurrency is on the x axis: by its logarithm to base 2."""
    if not levels:
        return {}
    # Levels such as 63 and 64 are moved apart, or their numbers would overprint.
    least = 0.07 * max(1.0, math.log2(levels[-1] / levels[0]))
    places = {levels[0]: 0.0}
    for low, high in pairwise(levels):
        places[high] = places[low] + max(math.log2(high / low), least)
    return places


def shifts(count: int, places: dict[int, float]) -> list[float]:
    """Small steps to the side, so that the bars of several settings do not cover each other."""
    gaps = [high - low for low, high in pairwise(places.values())]
    step = min(0.05 * min(gaps, default=1.0), 0.5 * min(gaps, default=1.0) / max(count, 1))
    # The first two are the present setting and the winner: they stay where they belong.
    return [step * (i // 2) * (1 if i % 2 == 0 else -1) for i in range(count)]


def looks(arms: Sequence[ArmResult]) -> list[Look]:
    """The present setting and the winner stand out; what cannot be used is grey and dashed."""
    looks = []
    for i, arm in enumerate(arms):
        marker, colour = MARKERS[i % len(MARKERS)], COLOURS[i % len(COLOURS)]
        if arm.state == "current":
            looks.append(Look(INK, "o", "-", 2.4, 5, bold=True))
        elif arm.state == "winner":
            looks.append(Look(WINNER, "D", "-", 3.0, 6, bold=True))
        elif arm.state in {"rejected", "failed"}:
            looks.append(Look(GREY, marker, "--", 1.3, 2))
        else:
            looks.append(Look(colour, marker, "-", 1.3, 3))
    return looks


def spread(level: LevelResult) -> float:
    """Spread of its throughput in percent; 0 where it is not known."""
    return level.spread_pct if math.isfinite(level.spread_pct) else 0.0


def changed(level: LevelResult) -> float | None:
    """Change against the present setting in percent; None where it is not known."""
    change = level.change_pct
    return change if change is not None and math.isfinite(change) else None


def name(arm: ArmResult) -> str:
    """Its name, of a length that fits beside the panels."""
    # matplotlib leaves a name with an underscore at its start out of a legend.
    text = "".join(x if x.isprintable() else " " for x in arm.arm).strip().lstrip("_") or "?"
    return text if len(text) <= LONGEST_NAME else text[: LONGEST_NAME - 1] + "…"


def status(arm: ArmResult) -> str:
    """What the key says below a name: what became of it, and its score."""
    word = STATES[arm.state]
    score = gain(arm)
    return word if arm.state == "current" or score == -math.inf else f"{score:+.1f} %, {word}"


def end(arm: ArmResult) -> float | None:
    """Where its line ends in the lower panel, in percent."""
    if arm.state == "current":
        return 0.0
    known = [change for x in sound(arm) if (change := changed(x)) is not None]
    return known[-1] if known else None


def beyond(value: float, low: float, high: float) -> str:
    """What is added to the name of a line that ends outside of the panel."""
    return "" if low <= value <= high else f" ({value:+.0f} %)"


def limits(arms: Sequence[ArmResult], max_loss_pct: float) -> tuple[float, float]:
    """Lowest and highest change shown, in percent.

    A setting that is clearly worse may leave the panel: it must not squash the differences of one
    or two percent that the choice is about.
    """
    low, high = -1.6 * max(max_loss_pct, 3.0), 4.0
    for arm in arms:
        for level in sound(arm):
            change = 0.0 if arm.state == "current" else changed(level)
            if change is None:
                continue
            bar = spread(level) * (1 + change / 100)
            high = max(high, change + bar)
            low = low if arm.state == "worse" else min(low, change - bar)
    # Noise or a typing error of a factor must not leave an unreadable axis either.
    return max(low, -100.0) * 1.08, high * 1.12


def apart(wanted: Sequence[float], step: float) -> list[float]:
    """Heights from 0 to 1, in order, moved so that any two are a step apart."""
    places: list[float] = []
    for y in wanted:
        places.append(max(y, places[-1] + step) if places else y)
    # What was pushed out at the top comes down again, and pushes the ones below it.
    most = max(1.0, step * (len(places) - 1))
    for i in range(len(places) - 1, -1, -1):
        places[i] = min(places[i], most)
        most = places[i] - step
    return places


def note(arms: Sequence[ArmResult], drawn: Sequence[ArmResult], low: float) -> str:
    """How to read it, and what is missing in it; `low` is the lowest change shown, in percent."""
    lines = [
        "Bars: robust spread of the repeats. Grey band: that of the present setting; "
        "what lies in it is no difference.",
    ]
    if any((changed(x) or 0.0) < low for arm in drawn for x in sound(arm)):
        lines.append(f"Below {low:.0f} %, not shown: see the tables.")
    missing = [arm for arm in arms if not sound(arm)]
    names = ", ".join(name(arm) for arm in missing[:MOST_NAMED])
    more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
    lines += [f"Never measured: {names}{more}."] if missing else []
    rest = len(arms) - len(missing) - len(drawn)
    lines += [f"Not drawn: the {rest} with the least gain."] if rest else []
    return "\n".join(lines)
