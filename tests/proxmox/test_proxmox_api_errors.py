"""What each failure becomes, and that reads are repeated and writes are not."""

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_reclaim.errors import (
    AccessRefused,
    BadAnswer,
    BadInput,
    CommandFailed,
    GpuReclaimError,
    GuestStopped,
    IdentityMismatch,
    Incomplete,
    LinkLost,
    OutcomeUnknown,
    Unreachable,
)
from gpu_reclaim.transport.proxmox_api import RETRY_WAITS_S, GuestPlace, ProxmoxApi
from proxmox.certificates import Certificates, make_certificates
from proxmox.conftest import MakeApi, wait_for
from proxmox.pve_server import TOKEN_SECRET, Fault, PveServer

PLACE = GuestPlace(200, "pve2", "qemu", "running", "llm-vm", "")
QMP = "VM 200 qmp command 'guest-exec' failed - "


def start(api: ProxmoxApi) -> int:
    return api.agent_exec("pve2", 200, ["true"], "")


def failure(kind: type[GpuReclaimError], call: Callable[[], object]) -> str:
    """The text of the error, which must be of exactly this kind and hold no secret."""
    with pytest.raises(GpuReclaimError) as caught:
        call()
    assert type(caught.value) is kind, caught.value
    assert TOKEN_SECRET not in str(caught.value) + repr(caught.value)
    return str(caught.value)


def test_a_wrong_token_is_refused_and_named(make_api: MakeApi, pve: PveServer) -> None:
    api = make_api(token_secret="wrong-one")
    text = failure(AccessRefused, lambda: api.locate(200))
    assert "401 invalid token value!" in text
    assert "token_id (reclaim@pve!gpu)" in text
    assert "wrong-one" not in text
    assert len(pve.requests) == 1


def test_a_missing_privilege_is_named(api: ProxmoxApi, pve: PveServer) -> None:
    pve.privileges = {"VM.GuestAgent.Unrestricted"}
    text = failure(AccessRefused, lambda: api.status(PLACE))
    assert "403 Permission check failed (/vms/200, VM.Audit)" in text
    assert "give the token reclaim@pve!gpu, and its user, the privilege VM.Audit" in text
    pve.privileges = {"VM.Audit"}
    for call in (lambda: start(api), lambda: api.agent_exec_status("pve2", 200, 1)):
        text = failure(AccessRefused, call)
        assert "VM.GuestAgent.Unrestricted (before Proxmox VE 9: VM.Monitor)" in text


def test_a_guest_that_left_the_node_is_another_guest(api: ProxmoxApi, pve: PveServer) -> None:
    pve.guests[2].node = "pve1"
    for call in (lambda: api.status(PLACE), lambda: api.config(PLACE), lambda: start(api)):
        assert "'nodes/pve2/qemu-server/200.conf' does not exist" in failure(IdentityMismatch, call)
    pve.misbehave(Fault("config", 404, "Not Found"))
    failure(IdentityMismatch, lambda: api.config(PLACE))


def test_a_stopped_guest_and_an_absent_agent(api: ProxmoxApi, pve: PveServer) -> None:
    pve.guests[2].agent = "stopped"
    assert "start qemu-guest-agent" in failure(Unreachable, lambda: start(api))
    pve.guests[2].status = "stopped"
    assert "VM 200 is not running" in failure(GuestStopped, lambda: start(api))
    pve.guests[2].agent = ""
    assert "--agent enabled=1" in failure(Unreachable, lambda: start(api))
    assert pve.count("agent/exec") == 3


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (f"{QMP}got timeout", LinkLost),
        (f"{QMP}client closed connection", LinkLost),
        ("something new", LinkLost),
        (f"{QMP}unable to connect to VM 200 qga socket - timeout after 51 retries", Unreachable),
        ("Agent error: Command guest-exec has been disabled", CommandFailed),
    ],
)
def test_the_agents_own_failures(
    api: ProxmoxApi, pve: PveServer, words: str, kind: type[GpuReclaimError]
) -> None:
    pve.misbehave(Fault("agent/exec$", 500, words))
    assert words in failure(kind, lambda: start(api))


def test_a_command_that_the_guest_lacks(api: ProxmoxApi) -> None:
    text = failure(CommandFailed, lambda: api.agent_exec("pve2", 200, ["no-such-tool"], ""))
    assert "Failed to execute child process" in text
    assert "coreutils" in text


def test_an_unknown_parameter_is_named(api: ProxmoxApi, pve: PveServer) -> None:
    pve.misbehave(Fault("config", 400, "Parameter verification failed.", b'{"errors":{"x":"odd"}}'))
    assert "400 Parameter verification failed. {'x': 'odd'}" in failure(
        CommandFailed, lambda: api.config(PLACE)
    )


def test_the_stand_in_checks_parameters(api: ProxmoxApi) -> None:
    assert "command" in failure(CommandFailed, lambda: api.agent_exec("pve2", 200, [], ""))


@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"<html>", b"\xff"])
def test_an_error_with_an_odd_body_is_still_that_error(
    api: ProxmoxApi, pve: PveServer, body: bytes
) -> None:
    pve.misbehave(Fault("config", 501, "Not implemented", body))
    assert "501 Not implemented" in failure(CommandFailed, lambda: api.config(PLACE))


@pytest.mark.parametrize("code", [502, 503, 504, 595, 596])
def test_reads_are_repeated_past_a_gateway(
    api: ProxmoxApi, pve: PveServer, sleeps: list[float], code: int
) -> None:
    pve.misbehave(Fault("config", code, "No route to host", times=2))
    assert api.config(PLACE).name == "llm-vm"
    assert pve.count("config") == 3
    assert sleeps == list(RETRY_WAITS_S)
    pve.misbehave(Fault("config", code, "No route to host", times=9))
    assert f"{code} No route to host" in failure(Unreachable, lambda: api.config(PLACE))
    assert pve.count("config") == 6


def test_reads_are_repeated_past_cut_connections(
    api: ProxmoxApi, pve: PveServer, sleeps: list[float]
) -> None:
    pve.misbehave(Fault("config", cut="before", times=2))
    assert api.config(PLACE).name == "llm-vm"
    assert pve.count("config") == 3
    assert sleeps == list(RETRY_WAITS_S)


@pytest.mark.parametrize("code", [597, 598, 599])
def test_other_broken_links_are_not_asked_again(api: ProxmoxApi, pve: PveServer, code: int) -> None:
    pve.misbehave(Fault("config", code, "broken"))
    failure(Unreachable, lambda: api.config(PLACE))
    assert pve.count("config") == 1


def test_answers_that_say_no_are_not_asked_again(api: ProxmoxApi, pve: PveServer) -> None:
    pve.misbehave(Fault("config", 500, "odd"))
    failure(CommandFailed, lambda: api.config(PLACE))
    assert pve.count("config") == 1


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_write_is_never_repeated(
    api: ProxmoxApi, pve: PveServer, sleeps: list[float], cut: str
) -> None:
    pve.misbehave(Fault("agent/exec$", cut=cut, times=9))
    assert "may have started" in failure(LinkLost, lambda: start(api))
    assert pve.count("agent/exec") == 1
    assert sleeps == []


@pytest.mark.parametrize(
    ("code", "kind"),
    [(595, Unreachable), (596, LinkLost), (597, LinkLost), (502, LinkLost), (504, LinkLost)],
)
def test_a_write_behind_a_gateway(
    api: ProxmoxApi, pve: PveServer, code: int, kind: type[GpuReclaimError]
) -> None:
    pve.misbehave(Fault("agent/exec$", code, "no", times=9))
    failure(kind, lambda: start(api))
    assert pve.count("agent/exec") == 1


def test_nobody_listens(make_api: MakeApi, pve: PveServer, sleeps: list[float]) -> None:
    api = make_api()
    pve.__exit__(None, None, None)
    assert "no answer" in failure(Unreachable, lambda: api.locate(200))
    assert sleeps == list(RETRY_WAITS_S)
    assert issubclass(LinkLost, OutcomeUnknown)
    failure(Unreachable, lambda: start(api))


def test_silence_ends_by_the_time_limit(make_api: MakeApi, pve: PveServer) -> None:
    api = make_api(timeout_s=1)
    pve.misbehave(Fault("config", silent=True), Fault("agent/exec$", silent=True))
    assert "timeout=1" in failure(Unreachable, lambda: api.config(PLACE))
    assert pve.count("config") == 1
    assert "timeout=1" in failure(LinkLost, lambda: start(api))
    assert pve.count("agent/exec") == 1


def test_a_connection_that_is_not_made_in_time_is_not_tried_again(
    make_api: MakeApi, sleeps: list[float]
) -> None:
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # fill the queue of the listener, so that the kernel drops the next
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        api = make_api(port=full.getsockname()[1], timeout_s=0.1)
        for call in (lambda: api.locate(200), lambda: start(api)):
            assert "connect timeout=0.1" in failure(Unreachable, call)
    assert sleeps == []


@pytest.mark.parametrize(
    "fault",
    [
        Fault("", 200, "OK", b"<html>Please log in</html>"),
        Fault("", 200, "OK", b"\xff\xfe"),
        Fault("", 200, "OK", b'["data"]'),
        Fault("", 200, "OK", b'{"success":1}'),
        Fault("", 200, "OK", b'{"data":null}'),
        Fault("", 200, "OK", b'{"data":"text"}'),
        Fault("", 200, "OK", b'{"data":{}}'),
        Fault("", 304, "Not Modified", b""),
        Fault("", 302, "Found", location="https://portal.example/"),
    ],
)
def test_what_is_no_answer_is_an_odd_answer(api: ProxmoxApi, pve: PveServer, fault: Fault) -> None:
    for call in (
        lambda: api.locate(200),
        lambda: api.status(PLACE),
        lambda: api.config(PLACE),
        lambda: api.agent_exec_status("pve2", 200, 1),
    ):
        pve.misbehave(fault)
        failure(BadAnswer, call)
    assert len(pve.requests) == 4


def test_a_login_page_is_called_one(api: ProxmoxApi, pve: PveServer) -> None:
    pve.misbehave(Fault("", 200, "OK", b"<html>Please log in</html>"))
    assert "a login page?" in failure(BadAnswer, lambda: api.config(PLACE))


@pytest.mark.parametrize(
    "body", [b'{"data":{}}', b'{"data":{"pid":"x"}}', b'{"data":[]}', b"<html>"]
)
def test_a_start_without_a_pid_may_have_happened(
    api: ProxmoxApi, pve: PveServer, body: bytes
) -> None:
    pve.misbehave(Fault("agent/exec$", 200, "OK", body))
    failure(Incomplete, lambda: start(api))


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"exited": "maybe"},
        {"exited": 1, "exitcode": "x"},
        {"exited": 1, "exitcode": []},
        {"exited": 1, "out-data": {}},
        {"exited": 1, "out-truncated": 2},
    ],
)
def test_a_command_status_with_odd_fields(
    api: ProxmoxApi, pve: PveServer, answer: dict[str, object]
) -> None:
    pve.doctor = lambda _: answer
    pid = start(api)
    with pytest.raises(BadAnswer):
        wait_for(lambda: api.agent_exec_status("pve2", 200, pid))


def test_an_unknown_ca_is_refused_with_the_way_out(make_api: MakeApi, pve: PveServer) -> None:
    for change in ({"ca_path": ""}, {"ca_path": None}, {"address": "localhost"}):
        text = failure(Unreachable, lambda change=change: make_api(**change).locate(200))  # type: ignore[misc]
        assert "set ca_path to a copy of the cluster's /etc/pve/pve-root-ca.pem" in text
    failure(Unreachable, lambda: start(make_api(ca_path="")))
    assert pve.requests == []
    assert make_api().locate(200) == PLACE


def test_another_cas_certificate_is_refused(
    make_api: MakeApi, certificates: Certificates, tmp_path: Path, sleeps: list[float]
) -> None:
    other = make_certificates(tmp_path)
    assert other.ca.read_bytes() != certificates.ca.read_bytes()
    text = failure(Unreachable, lambda: make_api(ca_path=str(other.ca)).locate(200))
    assert "not trusted" in text
    assert sleeps == []


def test_a_ca_file_that_is_not_there(make_api: MakeApi, pve: PveServer) -> None:
    api = make_api(ca_path="/no/such/file")
    assert "no file /no/such/file (ca_path)" in failure(BadInput, lambda: api.locate(200))
    assert pve.requests == []


def test_a_ca_file_without_a_certificate(make_api: MakeApi, pve: PveServer, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing here")
    api = make_api(ca_path=str(tmp_path / "ca.pem"))
    assert "ca_path" in failure(Unreachable, lambda: api.locate(200))
    assert pve.requests == []
