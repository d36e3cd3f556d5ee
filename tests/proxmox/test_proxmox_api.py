"""What the API tells, and how it asks for it."""

import logging
import subprocess
import sys
import warnings

import pytest

from gpu_reclaim.errors import BadAnswer, BadInput, IdentityMismatch
from gpu_reclaim.transport.proxmox_api import (
    INPUT_LIMIT,
    ExecStatus,
    GuestConfig,
    GuestPlace,
    GuestStatus,
    ProxmoxApi,
    ProxmoxApiOptions,
)
from proxmox.cluster import Guest
from proxmox.conftest import MakeApi, wait_for
from proxmox.pve_server import TOKEN_ID, TOKEN_SECRET, Fault, PveServer

PLACE = GuestPlace(200, "pve2", "qemu", "running", "llm-vm", "")


def test_a_guest_is_found_on_whichever_node_it_is(api: ProxmoxApi, pve: PveServer) -> None:
    assert api.locate(200) == PLACE
    assert api.locate(100).node == "pve1"
    assert pve.requests[0].params == {"type": ["vm"]}


def test_a_moved_guest_is_found_on_its_new_node(api: ProxmoxApi, pve: PveServer) -> None:
    api.locate(200)
    pve.guests[2].node = "pve1"
    assert api.locate(200).node == "pve1"


def test_a_container_and_its_lock_are_told(api: ProxmoxApi, pve: PveServer) -> None:
    pve.guests[1].lock = "backup"
    place = api.locate(129)
    assert place == GuestPlace(129, "pve2", "lxc", "running", "llm-ct", "backup")
    assert api.status(place) == GuestStatus("running", "backup", "")
    assert api.config(place) == GuestConfig("llm-ct", "backup", "d1ce5")


def test_status_and_config_of_a_vm(api: ProxmoxApi, pve: PveServer) -> None:
    pve.guests[2].qmp_status = "paused"
    assert api.status(PLACE) == GuestStatus("running", "", "paused")
    assert api.config(PLACE) == GuestConfig("llm-vm", "", "d1ce5")


def test_a_guest_that_is_not_shown_may_only_be_hidden(api: ProxmoxApi, pve: PveServer) -> None:
    pve.hidden = {200}
    with pytest.raises(IdentityMismatch, match=r"no guest 200 is shown(.|\n)*VM\.Audit"):
        api.locate(200)


def test_a_guest_listed_twice_is_an_odd_answer(api: ProxmoxApi, pve: PveServer) -> None:
    pve.guests.append(Guest(200, node="pve1"))
    with pytest.raises(BadAnswer, match="listed twice"):
        api.locate(200)


@pytest.mark.parametrize("vmid", [0, 99, 1_000_000_000])
def test_no_vmid_is_not_asked_for(api: ProxmoxApi, pve: PveServer, vmid: int) -> None:
    with pytest.raises(BadInput, match="no vmid"):
        api.locate(vmid)
    assert pve.requests == []


@pytest.mark.parametrize(
    ("field", "value"), [("node", "pve2/../x"), ("node", ""), ("kind", "openvz"), ("status", None)]
)
def test_a_row_that_is_not_of_the_schema_is_not_used(
    api: ProxmoxApi, pve: PveServer, field: str, value: str
) -> None:
    setattr(pve.guests[2], field, value)
    with pytest.raises(BadAnswer, match="cluster/resources"):
        api.locate(200)


def test_a_command_gets_its_words_and_input_unchanged(api: ProxmoxApi, pve: PveServer) -> None:
    argv = ["sh", "-c", 'printf "%s|" "$@"; cat', "sh", "a b", "&;=+%41", "'\"$HOME"]
    pid = api.agent_exec("pve2", 200, argv, "in & out; 50%+1=?\n")
    status = wait_for(lambda: api.agent_exec_status("pve2", 200, pid))
    out = "a b|&;=+%41|'\"$HOME|in & out; 50%+1=?\n"
    assert status == ExecStatus(True, 0, None, out, "", False)


def test_exit_code_signal_and_both_streams_are_told(api: ProxmoxApi) -> None:
    pid = api.agent_exec("pve2", 200, ["sh", "-s"], "echo out; echo err >&2; exit 3\n")
    status = wait_for(lambda: api.agent_exec_status("pve2", 200, pid))
    assert (status.exit_code, status.stdout, status.stderr) == (3, "out\n", "err\n")
    pid = api.agent_exec("pve2", 200, ["sh", "-s"], "kill -9 $$\n")
    status = wait_for(lambda: api.agent_exec_status("pve2", 200, pid))
    assert (status.exit_code, status.signal) == (None, 9)


def test_bytes_of_the_guest_are_read_as_utf8(api: ProxmoxApi) -> None:
    pid = api.agent_exec("pve2", 200, ["printf", r"gr\303\266\303\237e \377"], "")
    status = wait_for(lambda: api.agent_exec_status("pve2", 200, pid))
    assert status.stdout == "größe \\xff"


def test_text_that_proxmox_decoded_itself_stays(api: ProxmoxApi, pve: PveServer) -> None:
    pve.doctor = lambda answer: {**answer, "out-data": "→ ö"}
    pid = api.agent_exec("pve2", 200, ["true"], "")
    assert wait_for(lambda: api.agent_exec_status("pve2", 200, pid)).stdout == "→ ö"


@pytest.mark.parametrize("text", ["x" * (INPUT_LIMIT + 1), "größe"])
def test_input_that_would_arrive_damaged_is_refused(
    api: ProxmoxApi, pve: PveServer, text: str
) -> None:
    with pytest.raises(BadInput, match="65536 at most, all ASCII"):
        api.agent_exec("pve2", 200, ["cat"], text)
    assert pve.requests == []


def test_the_longest_input_arrives_whole(api: ProxmoxApi) -> None:
    pid = api.agent_exec("pve2", 200, ["wc", "-c"], "%" * INPUT_LIMIT)
    status = wait_for(lambda: api.agent_exec_status("pve2", 200, pid))
    assert status.stdout.strip() == str(INPUT_LIMIT)


@pytest.mark.parametrize(
    "change",
    [
        {"address": ""},
        {"address": "https://pve1"},
        {"address": "pve1:8006"},
        {"address": "root@pve1"},
        {"port": 0},
        {"port": 65536},
        {"token_id": "reclaim@pve"},
        {"token_id": "reclaim!gpu"},
        {"token_id": "reclaim@pve!gpu\r\nX: y"},
        {"token_secret": ""},
        {"token_secret": "sec\r\nret"},
        {"timeout_s": 0},
    ],
)
def test_options_that_cannot_be_right_are_refused(
    make_api: MakeApi, change: dict[str, object]
) -> None:
    with pytest.raises(BadInput, match=next(iter(change))) as caught:
        make_api(**change)
    assert "ret" not in str(caught.value).replace("token_secret", "")


@pytest.mark.parametrize("address", ["pve1", "pve-1.lab.example", "10.0.0.9", "fd00::9", "[::1]"])
def test_names_and_addresses_are_taken(make_api: MakeApi, address: str) -> None:
    assert address in make_api(address=address).name


def test_the_secret_is_in_no_repr() -> None:
    options = ProxmoxApiOptions(address="pve1", token_id=TOKEN_ID, token_secret=TOKEN_SECRET)
    assert TOKEN_ID in repr(options)
    assert TOKEN_SECRET not in repr(options) + repr(ProxmoxApi(options)) + str(options)


def test_neither_secret_nor_script_reaches_the_log(
    api: ProxmoxApi, pve: PveServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    api.locate(200)
    caplog.set_level(logging.DEBUG, logger="proxmoxer.core")
    caplog.set_level(logging.DEBUG, logger="proxmoxer.backends.https")
    pve.misbehave(Fault("resources", cut="before"))
    api.locate(200)
    pid = api.agent_exec("pve2", 200, ["sh", "-s"], "echo out''word\n")
    assert wait_for(lambda: api.agent_exec_status("pve2", 200, pid)).stdout == "outword\n"
    assert "asking again" in caplog.text
    assert TOKEN_SECRET not in caplog.text
    assert "out''word" not in caplog.text
    assert "outword" not in caplog.text


def test_closing_twice_and_using_again_works(api: ProxmoxApi) -> None:
    api.locate(200)
    api.close()
    api.close()
    assert api.locate(200) == PLACE


def test_loading_leaves_the_warnings_of_others_alone() -> None:
    code = """
import sys, warnings
from urllib3.exceptions import HTTPWarning
from gpu_reclaim import errors
from gpu_reclaim.transport.proxmox_api import ProxmoxApi, ProxmoxApiOptions
assert "proxmoxer.backends.https" not in sys.modules
options = ProxmoxApiOptions(address="127.0.0.1", port=1, token_id="ab@pve!cd", token_secret="c")
try:
    ProxmoxApi(options, sleep=lambda s: None).locate(100)
except errors.Unreachable as error:
    assert "no answer" in str(error), error
assert "proxmoxer.backends.https" in sys.modules
assert not [f for f in warnings.filters if f[0] == "ignore" and f[2] is HTTPWarning]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def warned(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Each record once, though several handlers may have caught it."""
    records = {id(record): record for record in caplog.records}.values()
    return [record for record in records if "verify=False" in record.getMessage()]


def test_an_unchecked_certificate_is_warned_of_once_per_connection(
    make_api: MakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    api = make_api(verify=False, ca_path="")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        api.locate(200)
        api.locate(200)
        assert [record.levelname for record in warned(caplog)] == ["WARNING"]
        api.close()
        api.locate(200)
    assert len(warned(caplog)) == 2
