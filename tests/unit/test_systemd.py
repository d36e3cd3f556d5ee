"""Unit names, and what `systemctl show` prints."""

from __future__ import annotations

import os

import pytest

from gpu_reclaim.commands import Section
from gpu_reclaim.errors import BadInput
from gpu_reclaim.models import UnitState
from gpu_reclaim.systemd import (
    DEFAULT_STOP_TIMEOUT_S,
    MAX_STOP_S,
    STOP_MARGIN_S,
    parse_show,
    seconds,
    show,
    stop,
    stop_limit_s,
    unit_name,
)
from unit.shells import here, stub

SERVICE = """\
TimeoutStopUSec=1min 30s
ControlGroup=/system.slice/sglang-qwen.service
Id=sglang-qwen.service
Names=sglang-qwen.service sglang.service
TriggeredBy=sglang-qwen.timer sglang-qwen.socket
LoadState=loaded
ActiveState=active
SubState=running
CanStop=yes"""

INSTANCE = r"""
TimeoutStopUSec=infinity
ControlGroup=/system.slice/system-sglang.slice/sglang@qwen\x2d72b.service
Id=sglang@qwen\x2d72b.service
Names=sglang@qwen\x2d72b.service
TriggeredBy=
LoadState=loaded
ActiveState=deactivating
SubState=stop-sigterm
CanStop=yes"""

NOT_FOUND = """
Id=sglagn.service
Names=sglagn.service
LoadState=not-found
ActiveState=inactive
SubState=dead
CanStop=no"""

MASKED = """
Id=dcgm.service
Names=dcgm.service
LoadState=masked
ActiveState=inactive
SubState=dead"""

SOCKET = """
Id=sglang.socket
Names=sglang.socket
LoadState=loaded
ActiveState=active
SubState=listening
ControlGroup=/system.slice/sglang.socket
TimeoutStopUSec=1min 30s
CanStop=no"""


# Names.


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("sglang", "sglang.service"),
        ("sglang.service", "sglang.service"),
        ("sglang-qwen", "sglang-qwen.service"),
        ("sglang@qwen", "sglang@qwen.service"),
        (r"sglang@qwen\x2d72b", r"sglang@qwen\x2d72b.service"),
        ("sglang.socket", "sglang.socket"),
        ("sglang.timer", "sglang.timer"),
        ("llm.target", "llm.target"),
        ("machine.slice", "machine.slice"),
        ("v0.5", "v0.5.service"),
        ("_x:y", "_x:y.service"),
    ],
)
def test_a_unit_gets_its_full_name(given: str, full: str) -> None:
    assert unit_name(given) == full


@pytest.mark.parametrize(
    "given",
    [
        "",
        " ",
        "*",
        "sglang*",
        "sglang-?.service",
        "sglang[12]",
        "-sglang",
        "--all",
        "--root=/x",
        "a b",
        "a\n",
        "\na",
        "a\tb",
        "a;b",
        "$(reboot)",
        "a'b",
        "/etc/systemd/system/x.service",
        "ünit",
        "x" * 300,
    ],
)
def test_what_is_no_unit_name_is_refused(given: str) -> None:
    with pytest.raises(BadInput, match="no systemd unit name"):
        unit_name(given)


def test_names_reach_systemctl_whole_and_behind_the_options(stub_path: str) -> None:
    names = [r"sglang@qwen\x2d72b.service", "b.service"]
    result = here({"show": show(names), "stop": stop(names)})

    assert result.sections["show"].text.split("\n")[-4:] == ["--", *names, ""]
    assert result.sections["stop"].text.split("\n")[-5:] == ["stop", "--", *names, ""]


@pytest.fixture
def stub_path(
    shell: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A systemctl that prints its arguments, a line each."""
    folder = tmp_path_factory.mktemp("systemctl")
    stub(folder, "systemctl", r"""printf '%s\n' "$@" """)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return str(folder)


# Blocks.


def states(*blocks: str, code: int = 0) -> list[UnitState]:
    return parse_show(Section("\n".join(blocks) + "\n", code))


def test_a_service_with_alias_and_triggers() -> None:
    assert states(SERVICE) == [
        UnitState(
            name="sglang-qwen.service",
            names=["sglang-qwen.service", "sglang.service"],
            load_state="loaded",
            active_state="active",
            sub_state="running",
            triggered_by=["sglang-qwen.timer", "sglang-qwen.socket"],
            control_group="/system.slice/sglang-qwen.service",
            stop_timeout_s=90,
            can_stop=True,
        )
    ]


def test_blocks_come_in_their_order_whatever_their_state() -> None:
    found = states(SERVICE, INSTANCE, NOT_FOUND, MASKED, SOCKET)

    assert [(x.name, x.load_state, x.active) for x in found] == [
        ("sglang-qwen.service", "loaded", True),
        (r"sglang@qwen\x2d72b.service", "loaded", True),
        ("sglagn.service", "not-found", False),
        ("dcgm.service", "masked", False),
        ("sglang.socket", "loaded", True),
    ]
    assert [x.can_stop for x in found] == [True, True, False, True, False]


@pytest.mark.parametrize(
    ("state", "active"),
    [
        ("active", True),
        ("reloading", True),
        ("activating", True),
        ("deactivating", True),
        ("maintenance", True),
        ("refreshing", True),
        ("inactive", False),
        ("failed", False),
    ],
)
def test_a_unit_counts_as_active_in_every_state_but_two(state: str, active: bool) -> None:
    found = states(SERVICE.replace("ActiveState=active", f"ActiveState={state}"))

    assert found[0].active is active


@pytest.mark.parametrize("missing", ["Id", "LoadState", "ActiveState"])
def test_a_block_without_state_is_left_out(missing: str) -> None:
    lines = [line for line in SERVICE.split("\n") if not line.startswith(f"{missing}=")]

    assert states("\n".join(lines), SOCKET) == states(SOCKET)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "System has not been booted with systemd as init system (PID 1). Can't operate.",
        "sh: systemctl: not found",
        "Failed to connect to bus: No such file or directory",
    ],
)
def test_what_is_no_block_gives_no_state(text: str) -> None:
    assert states(text, code=1) == []


# Time limits.


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ("1min 30s", 90),
        ("5s", 5),
        ("500ms", 0.5),
        ("1.500000s", 1.5),
        ("1min 30.500000s", 90.5),
        ("2h 3min 4s", 7384),
        ("1d", 86400),
        ("1w 1d", 8 * 86400),
        ("250us", 0.00025),
        ("", 0),
        ("0", 0),
        ("[not set]", 0),
    ],
)
def test_spans_as_systemd_prints_them(span: str, expected: float) -> None:
    assert seconds(span) == pytest.approx(expected)


@pytest.mark.parametrize("span", ["infinity", "1month 1w 2d 13h 30min", "1y", "2month"])
def test_the_longest_spans_are_at_least_the_longest_that_is_waited_for(span: str) -> None:
    assert seconds(span) >= MAX_STOP_S


def unit(span: str) -> UnitState:
    return states(SERVICE.replace("1min 30s", span))[0]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], DEFAULT_STOP_TIMEOUT_S + STOP_MARGIN_S),
        ([""], DEFAULT_STOP_TIMEOUT_S + STOP_MARGIN_S),
        (["5s"], 5 + STOP_MARGIN_S),
        (["5s", "3min"], 180 + STOP_MARGIN_S),
        (["5s", ""], DEFAULT_STOP_TIMEOUT_S + STOP_MARGIN_S),
        (["1.500000s"], 1.5 + STOP_MARGIN_S),
        (["infinity"], MAX_STOP_S),
        (["5s", "infinity"], MAX_STOP_S),
        (["3h"], MAX_STOP_S),
    ],
)
def test_stopping_may_take_as_long_as_the_slowest_unit(spans: list[str], expected: float) -> None:
    assert stop_limit_s([unit(span) for span in spans]) == pytest.approx(expected)
