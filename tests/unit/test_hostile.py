"""What a hostile user found: each kind once, with the right value."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from gpu_reclaim.commands import Result, Script, Section
from gpu_reclaim.errors import BadInput, CommandFailed
from gpu_reclaim.evidence import Evidence
from gpu_reclaim.models import ReclaimPolicy, Verdict
from gpu_reclaim.processes import parse_scan
from gpu_reclaim.protected import never_stopped
from gpu_reclaim.session import Session, look
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.local import LocalTransport, family
from gpu_reclaim.verdict import decide
from gpu_reclaim.victims import choose
from unit.scenery import scan_text
from unit.test_processes_parse import named
from unit.values import app, process, reading, table

IN_GUEST = ["/lxc/129/ns/system.slice/sglang.service"]


def test_guests_process_seen_from_its_node_is_never_a_victim() -> None:
    text = scan_text([process(71, cgroups=IN_GUEST)]) + "own 0::/user.slice\n"
    seen = parse_scan(Result(Script("look", {}), "node", text, "", 0), Section(text, 0))
    choice = choose(seen, reading(500), ReclaimPolicy(), units=["sglang.service"])

    assert choice.victims == []
    assert [row.reason for row in choice.spared] == [
        "it belongs to guest 129, which is another machine"
    ]


def test_same_process_is_a_victim_for_whoever_is_in_that_guest() -> None:
    text = scan_text([process(71, cgroups=IN_GUEST)]) + "own 0::/lxc/129/ns/.lxc\n"
    seen = parse_scan(Result(Script("look", {}), "guest", text, "", 0), Section(text, 0))

    assert [x.pid for x in choose(seen, reading(500), ReclaimPolicy()).victims] == [71]


def test_family_is_this_process_and_its_ancestors() -> None:
    me = family()

    assert me.pids[:2] == (os.getpid(), os.getppid())
    assert me.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_run_is_spared_on_its_own_machine_whatever_the_way() -> None:
    """A look that is no child of ours, as over SSH to this very machine."""
    session = Session("here", Links(direct=LocalTransport()))
    seen = look(session, "survey", everybody=True).table
    detached = replace(session.me, pids=(os.getpid(),))
    seen.ourselves = seen.ourselves[:1]
    session = Session("here", Links(direct=LocalTransport()), me=detached)
    again = look(session, "survey", everybody=True).table

    assert os.getpid() in again.ourselves
    assert (again.boot_id, again.pid_namespace) == (detached.boot_id, detached.namespace)


@pytest.mark.parametrize(
    ("evidence", "verdict"),
    [
        (Evidence(ReclaimPolicy(), reading(0), reading(0), blind=True), Verdict.UNKNOWN),
        (
            Evidence(
                ReclaimPolicy(gpus=[0]),
                reading(0),
                reading(0).model_copy(update={"apps_known": False}),
            ),
            Verdict.UNKNOWN,
        ),
        (Evidence(ReclaimPolicy(), reading(0), reading(0)), Verdict.CLEAN),
    ],
)
def test_what_cannot_be_seen_is_never_clean(evidence: Evidence, verdict: Verdict) -> None:
    assert decide(evidence).verdict == verdict


def test_holders_that_nvidia_smi_does_not_list_are_named() -> None:
    finding = decide(
        Evidence(ReclaimPolicy(gpus=[0]), reading(900), reading(900), unlisted=["worker (pid 5)"])
    )

    assert finding.verdict == Verdict.HELD_UNSEEN
    assert "worker (pid 5)" in finding.summary
    assert "reboot" not in finding.remedy


def test_listed_pid_that_is_no_holder_here_names_nobody() -> None:
    seen = table(process(5), process(6))
    listed = reading(900, 900, apps=[app(0, 5), app(1, 7001)])

    assert choose(seen, listed, ReclaimPolicy(gpus=[0])).victims == []


@pytest.mark.parametrize(
    "unit", ["system.slice", "sysinit.target", "home.mount", "init.scope", "ssh.socket"]
)
def test_unit_that_would_take_the_machine_down_is_never_stopped(unit: str) -> None:
    assert never_stopped(unit)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("/usr/bin/python3 serve.py --api-key sk-SECRET",), "python3 serve.py"),
        (("/opt/x/serve --token a/b/sk-SECRET",), "serve"),
        (("/usr/bin/node", "/app/x.js?token=sk-SECRET"), "node x.js"),
        (("sglang::scheduler_TP0",), "sglang::scheduler_TP0"),
    ],
)
def test_name_for_people_holds_no_option(words: tuple[str, ...], shown: str) -> None:
    assert named(*words) == shown


def test_error_shows_nothing_that_a_look_printed() -> None:
    script = Script("survey", {"processes": ""}, together=True)
    noise = "stat: cannot statx '311/fd/4': No such file or directory\n"
    result = Result(script, "a host", "12/cmdline:--api-key sk-SECRET\n", noise, 1)
    error = CommandFailed("a host: it failed", result=result)

    assert "sk-SECRET" not in str(error) + repr(error) + repr(result)
    assert "statx" not in str(error)


@pytest.mark.parametrize("pattern", ["a*", "|", "x?", "(foo)?"])
def test_match_that_fits_everything_is_refused(pattern: str) -> None:
    with pytest.raises(ValidationError, match="every process"):
        ReclaimPolicy(match=[pattern])


def test_shell_that_stops_its_own_time_limit_is_ended() -> None:
    script = Script("stuck", {"x": "kill -STOP $PPID; sleep 600"}, timeout_s=1)
    with pytest.raises(Exception, match="did not"):
        LocalTransport().run(script)


def test_bad_input_is_a_value_error() -> None:
    assert issubclass(BadInput, ValueError)


@pytest.mark.parametrize(
    "title", ["server api_key=sk-SECRET123", "srv https://user:SECRETpw@host/x", "a b=SECRET c"]
)
def test_a_set_title_shows_no_secret(title: str) -> None:
    assert "SECRET" not in named(title)
    assert named(title)


def test_what_a_script_printed_of_processes_is_in_no_message() -> None:
    result = Result(Script("end", {"end": "", "processes": ""}), "a host", "1/cmdline:x", "", 1)

    assert result.words(9) == ""
