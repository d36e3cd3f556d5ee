"""The picture of a tuning is read back from its SVG."""

from __future__ import annotations

import math
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from gpu_reclaim.tasks import chart_looks
from gpu_reclaim.tasks.charts import throughput_chart
from gpu_reclaim.tuning import ArmResult
from unit.tunings import BASE, arm, arms, level

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return ["".join(x.itertext()).strip() for x in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_every_level_and_every_setting_is_in_it() -> None:
    svg = throughput_chart(arms(), 3)
    said = texts(svg)
    assert {str(at) for at in BASE} <= set(said)
    for one in arms()[:-1]:
        assert one.arm in said
    # In the key and where its line ends; where it ends outside of the panel, with its number.
    assert said.count("NEXTN 3/1/4") == 2
    assert "off (-41 %)" in said
    assert "Never measured: NEXTN 5/1/6." in said
    assert "most loss allowed: -3 %" in said
    assert "+4.8 %, better" in said
    assert "+6.1 %, not allowed" in said


def test_equal_input_gives_equal_bytes() -> None:
    svg = throughput_chart(arms(), 3)
    assert svg == throughput_chart(arms(), 3)
    assert "<dc:date>" not in svg


def test_it_is_small_and_opaque() -> None:
    many = [arm(f"NEXTN {n}/1/{n + 1}", "equal", n / 10) for n in range(11)]
    svg = throughput_chart([arms()[0], *many], 3)
    assert len(svg) * 4 / 3 < 150_000
    assert len(texts(svg)) > 30
    assert "fill: #ffffff; opacity" not in svg
    background = ElementTree.fromstring(svg).find(f".//{SVG}g[@id='patch_1']/{SVG}path")
    assert background is not None
    assert background.get("style") == "fill: #ffffff"


@pytest.mark.parametrize(
    "some",
    [
        [],
        [arm("NEXTN 2/1/3", "current")],
        [arm("NEXTN 2/1/3", "current", levels=[level(1, 122)])],
        [arm("a", "equal", 1, levels=[level(7, 1e-9, math.nan), level(9, math.inf, 1)])],
        [arm("a", "equal", math.nan, levels=[level(1, 122, math.inf, spread=math.nan)])],
        [arm("a", "current", levels=[level(n, math.nan) for n in BASE])],
        [arm(f"NEXTN {n}/1/{n + 1}", "worse", -n) for n in range(40)],
        [arm("$x$ \\frac{ <b>&amp;\x00\x1b[31m", "winner", 3)],
        [arm("_hidden", "winner", 3), arm("", "equal", 3), arm("x" * 400, "equal", 3)],
        [arm("a", "winner", 1e9), arm("b", "equal", -100)],
    ],
)
def test_nothing_makes_it_fail(some: list[ArmResult]) -> None:
    said = texts(throughput_chart(some, 3))
    assert "Throughput (output tokens/s)" in said


def test_names_are_shown_as_they_are() -> None:
    said = texts(throughput_chart([arm("$x$ <b>_y", "winner", 3)]))
    assert said.count("$x$ <b>_y") == 2
    assert not any("most loss" in x for x in said)


def test_without_anything_measured_it_says_so() -> None:
    assert "nothing was measured" in texts(throughput_chart([]))


def test_the_present_setting_and_the_winner_stand_out() -> None:
    drawn = chart_looks.best(arms())
    assert [x.state for x in drawn] == ["current", "winner", "rejected", "equal", "worse"]
    looks = dict(zip([x.state for x in drawn], chart_looks.looks(drawn), strict=True))
    assert [state for state, look in looks.items() if look.bold] == ["current", "winner"]
    assert min(looks["current"].width, looks["winner"].width) > looks["equal"].width
    assert (looks["rejected"].line, looks["rejected"].colour) == ("--", chart_looks.GREY)
    assert len({(look.colour, look.marker) for look in looks.values()}) == len(looks)


def test_the_best_are_drawn_where_there_are_too_many() -> None:
    many = [arm(f"NEXTN {n}", "equal", n) for n in range(40)]
    drawn = chart_looks.best([*many, arms()[0]])
    assert [x.arm for x in drawn[:2]] == ["NEXTN 2/1/3", "NEXTN 39"]
    assert "Not drawn: the 17 with the least gain." in texts(throughput_chart([*many, arms()[0]]))


def test_levels_are_placed_by_their_logarithm_and_never_overprint() -> None:
    assert chart_looks.places([1, 4, 16, 64]) == {1: 0, 4: 2, 16: 4, 64: 6}
    close = list(chart_looks.places([1, 63, 64]).values())
    assert min(high - low for low, high in pairwise(close)) > 0.4


def test_a_bad_setting_does_not_squash_the_small_differences() -> None:
    low, high = chart_looks.limits(arms(), 3)
    assert -8 < low < -3
    assert 6.1 < high < 8
    assert chart_looks.limits([arm("a", "rejected", -30)], 3)[0] < -30


def test_labels_are_moved_apart_and_stay_in_order() -> None:
    moved = chart_looks.apart([0.5, 0.5, 0.51, 1.0, 1.0], 0.1)
    assert moved == sorted(moved)
    assert min(high - low for low, high in pairwise(moved)) > 0.099
    assert max(moved) <= 1
