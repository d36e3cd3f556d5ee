"""A unit on trial: waited for by the scripted clock, and what is said where it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import pytest

from gpu_reclaim import trial
from gpu_reclaim.errors import BadAnswer, CommandFailed, HoldLost, LinkLost, Unreachable
from gpu_reclaim.lease import MOE_FILE, TUNED_FILE
from gpu_reclaim.session import Session
from gpu_reclaim.transport.scripted import Answer
from gpu_reclaim.trial import Failure, wait_ready, without
from unit.scenery import Scene
from unit.tuned import KEY, LOADS, SERVER, UNIT, looked, tuned
from unit.values import said

LOOK, JOURNAL = "look at the trial", "read its journal"
LOADING = looked(serves=LOADS)
STARTING = looked({"ActiveState": "activating"}, (0, "Connection refused"))
UP = looked()
SILENT: Answer = {"state": "state ActiveState active", "health": ""}


def journal(*lines: str) -> Answer:
    return {"journal": "".join(f"journal {line}\n" for line in lines)}


def waited(*looks: Answer, words: Answer | None = None) -> tuple[Scene, float | Failure]:
    """A trial that looks so, one look after the other; the last one stays."""
    made = tuned({LOOK: list(looks), **({} if words is None else {JOURNAL: words})})
    return made, wait_ready(made.session, SERVER)


@pytest.mark.parametrize("state", ["inactive", "deactivating"])
def test_a_start_that_is_only_queued_is_no_end(state: str) -> None:
    made, found = waited(looked({"ActiveState": state}, (0, "Connection refused")), UP)

    assert found == trial.POLL_S
    assert made.clock.sleeps == [trial.POLL_S]


def test_it_is_waited_for_until_it_serves() -> None:
    made, ready = waited(STARTING, SILENT, LOADING, UP)

    assert ready == 6
    assert made.clock.sleeps == [trial.POLL_S] * 3
    assert made.asked == [LOOK] * 4
    assert made.writes == []


def test_who_serves_at_once_is_not_waited_for() -> None:
    assert waited(UP)[1] == 0


def test_another_server_on_its_port_is_not_it() -> None:
    """It answers, and the unit is not up yet."""
    _, ready = waited(looked({"ActiveState": "activating"}), UP)

    assert ready == 2


@pytest.mark.parametrize("look", [LOADING, SILENT, looked({}), looked(serves=(500, ""))])
def test_who_never_serves_is_given_up_in_time(look: Answer) -> None:
    made, ready = waited(look)

    assert isinstance(ready, Failure)
    assert ready.why.startswith("it did not serve within 602 s: ")
    assert ready.detail == "its last words"
    assert sum(made.clock.sleeps) == 602


def test_an_interpreter_that_says_nothing_is_named() -> None:
    _, found = waited(SILENT)

    assert isinstance(found, Failure)
    assert found.why.endswith(": its interpreter gave no answer")


def test_the_log_says_now_and_then_that_we_wait(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        waited(LOADING)

    assert said(caplog) == [f"llm: {UNIT} does not serve yet: HTTP 503"] * 9


def died(state: Mapping[str, str], *lines: str) -> Failure:
    made, found = waited(LOADING, looked(state, (0, "refused")), words=journal(*lines))
    assert sum(made.clock.sleeps) <= trial.BEGIN_S + trial.POLL_S
    assert isinstance(found, Failure)
    return found


FAILED = {"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": "3"}


@pytest.mark.parametrize("state", ["failed", "inactive", "deactivating"])
def test_who_ended_is_not_waited_for(state: str) -> None:
    found = died({**FAILED, "ActiveState": state}, "bye")

    assert found == Failure("it ended at start: exit status 3", "bye")


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        "cudaErrorMemoryAllocation",
    ],
)
def test_out_of_memory(line: str) -> None:
    found = died(FAILED, "before", line, "ValueError: follows from it", "after")

    assert found.why == "out of memory at start"
    assert line in found.detail


def test_killed_for_the_hosts_memory() -> None:
    assert died({**FAILED, "Result": "oom-kill"}, "bye").why == "out of memory at start"


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (
            ["ValueError: first", "  torch.cuda.SomeError: last", "bye"],
            "torch.cuda.SomeError: last",
        ),
        (["AssertionError"], "AssertionError"),
        (["requests.exceptions.ConnectionError: x"], "requests.exceptions.ConnectionError: x"),
        (["Errors: none", "no error"], "exit status 3"),
        ([], "exit status 3"),
    ],
)
def test_the_last_error_line(lines: list[str], why: str) -> None:
    assert died(FAILED, *lines).why == f"it ended at start: {why}"


def test_an_unknown_status() -> None:
    assert died({"ActiveState": "failed"}).why == "it ended at start: exit status ?"


def test_errors_after_a_very_long_line_are_seen() -> None:
    """SGLang prints all its arguments in one line."""
    found = died(FAILED, f"server_args={'x, ' * 5000}", "ValueError: at the end")

    assert found.why == "it ended at start: ValueError: at the end"
    assert found.detail.endswith("...\nValueError: at the end")
    assert len(found.detail) < 1000


def test_control_characters_are_shown() -> None:
    assert died(FAILED, "\x1b[31mred").detail == "\\x1b[31mred"


def test_a_lost_link_is_survived() -> None:
    made, ready = waited(LinkLost("gone"), Unreachable("no"), LOADING, UP)

    assert ready == 6
    assert made.clock.sleeps == [trial.POLL_S] * 3


def test_who_cannot_be_reached_for_all_that_time_is_an_error() -> None:
    made = tuned({LOOK: Unreachable("no way")})
    with pytest.raises(Unreachable, match="no way"):
        wait_ready(made.session, SERVER)

    assert sum(made.clock.sleeps) == 602


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f"ServerArgs(api_key='{KEY}', tp_size=4)", "ServerArgs(api_key=***, tp_size=4)"),
        ('ServerArgs(api_key="it\'s", port=1)', "ServerArgs(api_key=***, port=1)"),
        (r"ServerArgs(api_key='a\'b\"c', port=1)", "ServerArgs(api_key=***, port=1)"),
        ("ServerArgs(admin_api_key='x y', port=1)", "ServerArgs(admin_api_key=***, port=1)"),
        ("Args(ssl_keyfile_password='x', p=1)", "Args(ssl_keyfile_password=***, p=1)"),
        ("api_key=abc, api_key=def)", "api_key=***, api_key=***)"),
        (f"launched with --api-key {KEY} --x", "launched with --api-key *** --x"),
        ("tokens=3 key=4", "tokens=3 key=4"),
    ],
)
def test_keys_are_blotted_out(line: str, shown: str) -> None:
    assert without(["a", line, "b"], ["", KEY]) == f"a\n{shown}\nb"


def test_the_servers_key_is_in_no_word_of_a_failure() -> None:
    lines = [f"ServerArgs({'x' * 390}, api_key='{KEY}')", f"ValueError: {KEY}"]
    found = died(FAILED, *lines)

    assert found.why == "it ended at start: ValueError: ***"
    assert KEY[:4] not in found.detail


# What writes.

DROP_IN = "[Service]\nExecStart=x\n"
ACTS: dict[str, Callable[[Session], None]] = {
    f"start {UNIT} on trial": lambda session: trial.begin(session, UNIT, DROP_IN),
    "close the trial": trial.close,
    f"keep the setting of {UNIT}": lambda session: trial.keep(
        session, UNIT, DROP_IN, file=TUNED_FILE, lasting=True
    ),
}


def acted(name: str, answer: str) -> Scene:
    made = tuned({name: {"hold": answer}})
    ACTS[name](made.session)
    return made


@pytest.mark.parametrize("name", ACTS)
def test_each_is_one_script_that_writes(name: str) -> None:
    assert acted(name, "status taken").writes == [name]


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("status unset\nwhy it could not be started", "it could not be started"),
        ("status running\nwhy it is active", "it is active"),
        ("status unset", "a file could not be written"),
    ],
)
def test_a_tool_that_says_no(name: str, answer: str, why: str) -> None:
    with pytest.raises(CommandFailed) as caught:
        acted(name, answer)

    assert caught.value.message == f"llm: {name}: {why}"
    assert "systemctl status" in caught.value.remedy


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("status lost", HoldLost),
        ("status busy", BadAnswer),
        ("", BadAnswer),
        ("nothing", BadAnswer),
    ],
)
def test_a_host_that_is_not_ours(name: str, answer: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        acted(name, answer)


def test_the_session_knows_what_is_on_trial() -> None:
    """Also where nobody knows whether it was started."""
    start, _, keep = ACTS
    made = tuned({start: LinkLost("gone"), keep: {"hold": "status taken"}})
    with pytest.raises(LinkLost):
        ACTS[start](made.session)
    assert made.session.on_trial == {UNIT}

    # What is kept runs on: its server is no more of an intruder than before.
    ACTS[keep](made.session)
    assert made.session.on_trial == {UNIT}


@pytest.mark.parametrize(("lasting", "folder"), [(True, "$ETC"), (False, "$UNITS")])
def test_where_a_setting_is_kept(lasting: bool, folder: str) -> None:
    name = f"keep the setting of {UNIT}"
    made = tuned({name: {"hold": "status taken"}})
    trial.keep(made.session, UNIT, DROP_IN, file=MOE_FILE, lasting=lasting)

    text = made.direct.asked[0].sections["hold"]
    assert f'file="{folder}/$UNIT.d/zz-gpu-reclaim-moe.conf"' in text
    assert DROP_IN in text
