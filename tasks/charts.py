"""The picture of a tuning: throughput over concurrency, and the change against the present one."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpu_reclaim.tasks import chart_looks
from gpu_reclaim.tasks.chart_looks import GREY, INK, PAPER, Look
from gpu_reclaim.tuning import ArmResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RAIL = "#b3261e"
# No mathtext, no TeX: names of settings are shown as they are. Text stays text: as paths it would
# be three times as large.
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gpu-reclaim",
    "text.usetex": False,
    "text.parse_math": False,
    "axes.unicode_minus": False,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 10.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "xtick.color": INK,
    "ytick.color": INK,
    "path.simplify": False,
}


def throughput_chart(arms: Sequence[ArmResult], max_loss_pct: float = 0) -> str:
    """Draw throughput over concurrency, and below it the change against the present setting.

    Args:
        arms: The settings, as in a TuningReport.
        max_loss_pct: The guard rail: no concurrency may lose more, in percent. 0: not drawn.

    Returns:
        An SVG document on a white background, the same for equal input, well below 100 KB.
    """
    drawn = chart_looks.best(arms)
    places = chart_looks.places(sorted({x.level for arm in drawn for x in chart_looks.sound(arm)}))
    looks = chart_looks.looks(drawn)
    with _style():
        figure, upper, lower = _canvas(len(drawn), places)
        for arm, look in zip(drawn, looks, strict=True):
            _line(upper, arm, look, places)
        shifts = chart_looks.shifts(len(drawn), places)
        for arm, look, shift in zip(drawn, looks, shifts, strict=True):
            _change(lower, arm, look, {level: x + shift for level, x in places.items()})
        _finish_upper(upper, drawn)
        _finish_lower(lower, drawn, max_loss_pct)
        tall = figure.get_figheight() * lower.get_position().height
        _end_labels(lower, drawn, looks, 0.2 / tall)
        said = chart_looks.note(arms, drawn, lower.get_ylim()[0])
        figure.text(0.01, 0.008, said, fontsize=8.5, color="#57606a", va="bottom")
        file = io.StringIO()
        figure.savefig(file, format="svg", facecolor=PAPER, metadata={"Date": None})
    return file.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    # It takes a second to import, and most runs draw nothing.
    import matplotlib as mpl  # noqa: PLC0415

    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        yield


def _canvas(count: int, places: dict[int, float]) -> tuple[Figure, Axes, Axes]:
    from matplotlib.figure import Figure  # noqa: PLC0415

    tall = 7.6 + 0.2 * max(0, count - 9)
    figure = Figure(figsize=(8.8, tall))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.15])
    figure.subplots_adjust(
        left=0.085, right=0.68, top=1 - 0.35 / tall, bottom=1.08 / tall, hspace=0.2
    )
    for axes in (upper, lower):
        axes.grid(visible=True, color="#e4e7ea", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    lower.set_xticks(list(places.values()), [str(level) for level in places])
    lower.set_xlim(-0.3, max(places.values(), default=0.0) + 0.3)
    lower.set_xlabel("requests in flight")
    return figure, upper, lower


def _line(axes: Axes, arm: ArmResult, look: Look, places: dict[int, float]) -> None:
    levels = chart_looks.sound(arm)
    values = [x.output_tok_s for x in levels]
    # A log axis has no place for a bar down to zero.
    bars = [min(chart_looks.spread(x), 95) / 100 * x.output_tok_s for x in levels]
    _draw(axes, arm, look, xs=[places[x.level] for x in levels], ys=values, bars=bars)


def _change(axes: Axes, arm: ArmResult, look: Look, places: dict[int, float]) -> None:
    """The change per level; for the present setting a band as wide as its own spread."""
    if arm.state == "current":
        levels = chart_looks.sound(arm)
        xs, spreads = [places[x.level] for x in levels], [chart_looks.spread(x) for x in levels]
        low, high = axes.get_xlim()
        xs = [low, *xs, high]
        spreads = [spreads[0], *spreads, spreads[-1]]
        lows = [-x for x in spreads]
        axes.fill_between(xs, lows, spreads, color="#d0d5da", alpha=0.7, linewidth=0)
        axes.axhline(0, color=look.colour, linewidth=look.width, zorder=look.front)
        return
    levels = [x for x in chart_looks.sound(arm) if chart_looks.changed(x) is not None]
    changes = [chart_looks.changed(x) or 0.0 for x in levels]
    bars = [
        max(0.0, chart_looks.spread(x) * (1 + y / 100))
        for x, y in zip(levels, changes, strict=True)
    ]
    _draw(axes, arm, look, xs=[places[x.level] for x in levels], ys=changes, bars=bars)


def _draw(
    axes: Axes,
    arm: ArmResult,
    look: Look,
    *,
    xs: Sequence[float],
    ys: Sequence[float],
    bars: Sequence[float],
) -> None:
    """One line with error bars."""
    axes.errorbar(
        xs,
        ys,
        yerr=bars,
        label=chart_looks.name(arm),
        color=look.colour,
        marker=look.marker,
        linestyle=look.line,
        linewidth=look.width,
        markersize=4.5 + look.width,
        markeredgecolor=PAPER,
        markeredgewidth=0.7,
        elinewidth=1.2,
        capsize=2.5,
        zorder=look.front,
    )


def _finish_upper(axes: Axes, arms: Sequence[ArmResult]) -> None:
    """Plain numbers on the log axis, and the key to both panels."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter  # noqa: PLC0415

    axes.set_title("Throughput (output tokens/s)", loc="left", fontsize=11.5, fontweight="bold")
    if not arms:
        axes.text(0.5, 0.5, "nothing was measured", transform=axes.transAxes, ha="center")
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.4g}"))
    handles, names = axes.get_legend_handles_labels()
    names = [f"{name}\n{chart_looks.status(arm)}" for name, arm in zip(names, arms, strict=True)]
    axes.legend(handles, names, loc="upper left", bbox_to_anchor=(1.02, 1.05), frameon=False)


def _finish_lower(axes: Axes, arms: Sequence[ArmResult], max_loss_pct: float) -> None:
    """The guard rail, and limits that leave room for small differences."""
    axes.set_title(
        "Change against the present setting (%)", loc="left", fontsize=11.5, fontweight="bold"
    )
    axes.yaxis.set_major_formatter(lambda x, _: f"{x:+g}" if x else "0")
    axes.set_ylim(*chart_looks.limits(arms, max_loss_pct))
    if max_loss_pct > 0:
        _guard_rail(axes, max_loss_pct)


def _guard_rail(axes: Axes, max_loss_pct: float) -> None:
    axes.axhline(-max_loss_pct, color=RAIL, linestyle=(0, (6, 3)), linewidth=1.4, zorder=1)
    axes.annotate(
        f"most loss allowed: -{max_loss_pct:g} %",
        (0.01, -max_loss_pct),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, -3),
        textcoords="offset points",
        va="top",
        fontsize=8.5,
        color=RAIL,
    )


def _end_labels(axes: Axes, arms: Sequence[ArmResult], looks: Sequence[Look], step: float) -> None:
    """Each setting's name where its line ends; at least a step (of the axes' height) apart."""
    low, high = axes.get_ylim()
    ends = [chart_looks.end(arm) for arm in arms]
    known = [
        (end, arm, look)
        for end, arm, look in zip(ends, arms, looks, strict=True)
        if end is not None
    ]
    known.sort(key=lambda x: x[0])
    wanted = [min(max((end - low) / (high - low), 0.0), 1.0) for end, _, _ in known]
    for y, at, (end, arm, look) in zip(chart_looks.apart(wanted, step), wanted, known, strict=True):
        colour = GREY if look.colour == GREY else INK
        text = chart_looks.name(arm) + chart_looks.beyond(end, low, high)
        style: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False}
        axes.plot((1.0, 1.025), (at, y), color=look.colour, linewidth=1, **style)
        weight = "bold" if look.bold else "normal"
        axes.text(1.03, y, text, va="center", fontsize=9.5, color=colour, weight=weight, **style)
