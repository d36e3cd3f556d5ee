"""Unit names, and what `systemctl show` prints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_reclaim.commands import Section
from gpu_reclaim.errors import BadInput
from gpu_reclaim.models import UnitState
from gpu_reclaim.systemd import (
    REFUSED,
    UNSHOWN,
    dependents,
    live_triggers,
    parse_show,
    show,
    show_tree,
    stop,
    unit_name,
)
from unit.shells import here, stub

SERVICE = """\
ControlGroup=/system.slice/sglang-qwen.service
Id=sglang-qwen.service
Names=sglang-qwen.service sglang.service
TriggeredBy=sglang-qwen.timer sglang-qwen.socket
LoadState=loaded
ActiveState=active
SubState=running
CanStop=yes"""

INSTANCE = r"""
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


class Systemctl:
    """A stand-in: shows blocks from files, and keeps its arguments, a call a line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        stub(
            folder,
            "systemctl",
            f"printf '%s|' \"$@\" >> {folder}/calls; echo >> {folder}/calls\n"
            'case " $* " in *" show "*) ;; *) exit 0;; esac\n'
            'while [ "$1" != -- ]; do shift; done; shift\n'
            f'for unit in "$@"; do cat {folder}/"$unit"; echo; done',
        )

    def unit(
        self,
        name: str,
        triggers: str = "",
        *,
        load: str = "loaded",
        can_stop: str = "yes",
        more: str = "",
        active: str = "active",
    ) -> None:
        (self.folder / name).write_text(
            f"Id={name}\nNames={name}\nLoadState={load}\nActiveState={active}\n"
            f"TriggeredBy={triggers}\nCanStop={can_stop}\n{more}"
        )

    @property
    def stopped(self) -> list[str]:
        """Arguments of the calls that stop."""
        calls = (self.folder / "calls").read_text().splitlines()
        return [call for call in calls if "|stop|" in call or call.startswith("stop|")]


@pytest.fixture
def systemctl(shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemctl:
    folder = tmp_path / "systemctl"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return Systemctl(folder)


def test_names_reach_systemctl_whole_and_behind_the_options(systemctl: Systemctl) -> None:
    names = [r"sglang@qwen\x2d72b.service", "b.service"]
    for name in names:
        systemctl.unit(name)
    shown = here({"show": show(names)}).sections["show"]
    result = here({"stop": stop(names)}).sections["stop"]

    assert [state.name for state in parse_show(shown)] == names
    assert [state.name for state in parse_show(result)] == names
    assert result.code == 0
    assert systemctl.stopped == [f"--no-ask-password|stop|--|{'|'.join(names)}|"]


def test_triggers_are_shown_and_stopped_before_their_units(systemctl: Systemctl) -> None:
    systemctl.unit("a.service", triggers="a.socket a.timer")
    systemctl.unit("b.service")
    systemctl.unit("c.service", triggers=r"c\x2d1.path")
    for name in ("a.socket", "a.timer", r"c\x2d1.path"):
        systemctl.unit(name)
    result = here({"stop": stop(["a.service", "b.service", "c.service"])}).sections["stop"]

    assert [state.name for state in parse_show(result)] == [
        "a.service",
        "b.service",
        "c.service",
        "a.socket",
        "a.timer",
        r"c\x2d1.path",
    ]
    assert systemctl.stopped == [
        r"--no-ask-password|stop|--|a.socket|a.timer|c\x2d1.path|",
        "--no-ask-password|stop|--|a.service|b.service|c.service|",
    ]


def test_what_is_stopped_along_is_shown_to_the_end(systemctl: Systemctl) -> None:
    systemctl.unit("a.service", more="RequiredBy=b.service multi-user.target\nBoundBy=c.service\n")
    systemctl.unit("b.service", triggers="b.socket", more="ConsistsOf=d.service a.service\n")
    for name in ("c.service", "d.service", "multi-user.target", "b.socket"):
        systemctl.unit(name, can_stop="no", load="loaded")
    shown = parse_show(here({"show": show_tree(["a.service"])}).sections["show"])
    result = here({"stop": stop(["a.service"])}).sections["stop"]

    names = ["a.service", "b.service", "multi-user.target", "c.service", "d.service"]
    assert [state.name for state in shown] == [*names[:4], "b.socket", "d.service"]
    assert [state.name for state in parse_show(result)] == [*names[:4], "b.socket", "d.service"]
    # Who is stopped along may itself refuse a stop by hand; its socket would bring it back.
    assert result.code == 0
    assert systemctl.stopped == [
        "--no-ask-password|stop|--|b.socket|",
        "--no-ask-password|stop|--|a.service|",
    ]
    assert dependents(shown, ["a.service"]) == {
        "b.service": "a.service",
        "multi-user.target": "a.service",
        "c.service": "a.service",
        "d.service": "b.service",
    }


def test_a_unit_whose_file_is_gone_while_it_runs_is_stopped(systemctl: Systemctl) -> None:
    systemctl.unit("a.service", load="not-found")
    result = here({"stop": stop(["a.service"])}).sections["stop"]

    assert result.code == 0
    assert systemctl.stopped == ["--no-ask-password|stop|--|a.service|"]


def test_the_trigger_of_one_that_would_not_stop_is_left_alone(systemctl: Systemctl) -> None:
    """backup.timer starts backup.service, which requires ours, and does not run now."""
    systemctl.unit("a.service", more="RequiredBy=backup.service\n")
    systemctl.unit("backup.service", triggers="backup.timer", active="inactive")
    systemctl.unit("backup.timer")
    here({"stop": stop(["a.service"])})

    assert systemctl.stopped == ["--no-ask-password|stop|--|a.service|"]


def test_nothing_is_stopped_when_systemctl_shows_nothing(systemctl: Systemctl) -> None:
    systemctl.unit("a.service", more="RequiredBy=b.service\n")
    text = (systemctl.folder / "systemctl").read_text()
    failing = '#!/bin/sh\ncase "$*" in *"-- b.service") exit 1;; esac\n'
    (systemctl.folder / "systemctl").write_text(text.replace("#!/bin/sh\n", failing))
    systemctl.unit("b.service")
    result = here({"stop": stop(["a.service"])}).sections["stop"]

    assert result.code == UNSHOWN
    assert systemctl.stopped == []


def test_triggers_that_do_not_run_are_not_named() -> None:
    states = [
        UnitState(
            name="a.service",
            load_state="loaded",
            active_state="active",
            triggered_by=["a.socket", "a.timer", "unknown.path"],
        ),
        UnitState(name="a.socket", load_state="loaded", active_state="active"),
        UnitState(name="a.timer", load_state="loaded", active_state="inactive"),
    ]

    assert live_triggers(states)[0].triggered_by == ["a.socket", "unknown.path"]


@pytest.mark.skipif(os.geteuid() != 0, reason="writes below /run/systemd, as root")
@pytest.mark.parametrize("ending", ["", "sh -c 'kill -TERM $PPID'", "exit 1"])
def test_no_trace_of_what_forbids_kill_is_left(systemctl: Systemctl, ending: str) -> None:
    """The drop-in is there while the unit stops, and gone afterwards, also when it is cut."""
    name = "gpu-reclaim-test-dcgm.service"
    folder = f"/run/systemd/system/{name}.d"
    systemctl.unit(name)
    text = (systemctl.folder / "systemctl").read_text()
    look = f'#!/bin/sh\ncase " $* " in *" stop "*) cat {folder}/*;; esac\n'
    (systemctl.folder / "systemctl").write_text(text.replace("#!/bin/sh\n", look))
    result = here({"stop": f"{stop([name], never_kill=[name])}\n{ending}"}).sections["stop"]

    assert "SendSIGKILL=no" in result.text
    assert not Path(folder).exists()
    assert (systemctl.folder / "calls").read_text().count("daemon-reload") == 2


def test_two_units_that_require_each_other_are_shown_once(systemctl: Systemctl) -> None:
    systemctl.unit("a.service", more="RequiredBy=b.service\n")
    systemctl.unit("b.service", more="RequiredBy=a.service\n")
    shown = parse_show(here({"show": show_tree(["a.service"])}).sections["show"])

    assert [state.name for state in shown] == ["a.service", "b.service"]
    assert dependents(shown, ["a.service"]) == {"b.service": "a.service"}
    assert dependents(shown, ["a.service", "b.service"]) == {}


def test_a_hanging_stop_is_left_after_its_limit(systemctl: Systemctl) -> None:
    systemctl.unit("a.service")
    text = (systemctl.folder / "systemctl").read_text()
    hang = '#!/bin/sh\ncase " $* " in *" stop "*) exec sleep 600;; esac\n'
    (systemctl.folder / "systemctl").write_text(text.replace("#!/bin/sh\n", hang))
    result = here({"stop": stop(["a.service"], limit_s=0.5)}).sections["stop"]

    assert result.code in (124, 137, 143)
    assert [state.name for state in parse_show(result)] == ["a.service"]


@pytest.mark.parametrize(("load", "can_stop"), [("not-found", "yes"), ("loaded", "no")])
def test_nothing_is_stopped_when_one_unit_is_unknown_or_refuses(
    systemctl: Systemctl, load: str, can_stop: str
) -> None:
    systemctl.unit("a.service", triggers="a.socket")
    systemctl.unit("b.service", load=load, can_stop=can_stop, active="inactive")
    result = here({"stop": stop(["a.service", "b.service"])}).sections["stop"]

    assert result.code == REFUSED
    assert [state.name for state in parse_show(result)] == ["a.service", "b.service"]
    assert systemctl.stopped == []


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
