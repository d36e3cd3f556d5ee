"""The Prefect flow on the lab: with saved blocks, as a user has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import Artifact
from pydantic import ValidationError

from gpu_reclaim.errors import BadInput, GpusNotReclaimed, UnknownHost, UnknownUnit
from gpu_reclaim.flows import reclaim_gpus
from gpu_reclaim.models import ReclaimPolicy, Verdict
from guest import ways, witness
from lab.lab import Lab
from lab.shell import run

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("prefect_server", "stand_in_devices")]

EACH_WAY = pytest.mark.parametrize(
    "via",
    ["auto", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("ssh", "hypervisor"))],
)


@pytest.fixture
def server(lab: Lab) -> Iterator[dict[str, int]]:
    """A running server that a refused run must leave as it is."""
    pids = lab.start_server()
    with witness.untouched(lab):
        yield pids


def artifacts() -> dict[str, Artifact]:
    with get_client(sync_client=True) as client:
        found = client.request("POST", "/artifacts/latest/filter", json={}).json()
    return {row["key"]: row for row in found}


def test_flow_ends_the_server_and_nobody_else(lab: Lab) -> None:
    ways.save_host(lab)
    lab.start_server()
    server, before = witness.of_unit(lab, ways.UNIT), witness.everybody(lab)
    report = reclaim_gpus("lab")
    assert report.verdict == Verdict.CLEAN
    assert [gpu.memory_used_mib for gpu in report.gpus_after] == [0, 0, 0, 0]
    assert witness.memory(lab) == [0, 0, 0, 0]
    assert witness.state_of(lab) == "inactive"
    assert witness.ended(report) == set(server)
    assert set(before) - set(witness.everybody(lab)) == set(server)
    assert [step.attempts for step in report.steps] == [1] * 6
    page = artifacts()["gpu-reclaim-lab"]
    assert "lab: clean" in str(page)


def test_flow_goes_through_the_node_when_sshd_is_down(lab: Lab) -> None:
    ways.save_host(lab)
    lab.start_server()
    lab.stop_guest_sshd()
    report = reclaim_gpus("lab")
    through = f"container 129 through ssh root@127.0.0.1:{lab.node_port}"
    assert set(witness.vias(report).values()) == {through}
    assert report.verdict == Verdict.CLEAN


def test_flow_twice(lab: Lab) -> None:
    ways.save_host(lab)
    lab.start_server()
    assert len(reclaim_gpus("lab").ended) == 6
    second = reclaim_gpus("lab")
    assert (second.verdict, second.stopped, second.ended) == (Verdict.CLEAN, [], [])


@pytest.mark.usefixtures("server")
def test_unknown_block() -> None:
    with pytest.raises(UnknownHost, match="'nobody': the GpuHost block cannot be") as caught:
        reclaim_gpus("nobody")
    assert ".save(" in caught.value.remedy


@pytest.mark.usefixtures("server")
def test_unknown_unit(lab: Lab) -> None:
    ways.save_host(lab, units=[ways.UNIT, "sglang-qwem"])
    with pytest.raises(UnknownUnit) as caught:
        reclaim_gpus("lab")
    assert caught.value.message == (
        "lab: systemd there knows no unit sglang-qwem.service; nothing was touched"
    )
    assert "correct the units in the GpuHost block" in caught.value.remedy


def test_impossible_unit_name(lab: Lab) -> None:
    with pytest.raises(ValidationError, match=r"'\*' is no systemd unit name"):
        ways.save_host(lab, units=["*"])


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("policy", "word"),
    [
        ({"settle_timeout_s": -1}, "settle_timeout_s"),
        ({"match": ["("]}, "is no regular expression"),
        # A test of the library has each of these; here it is the way through the flow.
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in (
                ({"match": [""]}, "would match every process"),
                ({"via": "telnet"}, "via"),
                ({"grace": 3}, "grace"),
                ({"gpus": [-1]}, "gpus"),
            )
        ),
    ],
)
def test_impossible_policy(lab: Lab, policy: dict[str, Any], word: str) -> None:
    ways.save_host(lab)
    with pytest.raises(Exception, match=word):
        reclaim_gpus("lab", cast("Any", policy))


@pytest.mark.usefixtures("server")
def test_policy_that_is_not_supported_yet(lab: Lab) -> None:
    ways.save_host(lab)
    with pytest.raises(BadInput, match="is not supported yet"):
        reclaim_gpus("lab", ReclaimPolicy(approve=True))


@pytest.mark.usefixtures("server")
def test_unknown_gpu(lab: Lab) -> None:
    ways.save_host(lab)
    with pytest.raises(BadInput) as caught:
        reclaim_gpus("lab", ReclaimPolicy(gpus=[0, 7]))
    assert caught.value.message == (
        "lab: there is no GPU 7 (there are [0, 1, 2, 3]); nothing was touched"
    )
    assert "nvidia-smi -L" in caught.value.remedy


def refused_flow(policy: ReclaimPolicy | None = None) -> GpusNotReclaimed:
    with pytest.raises(GpusNotReclaimed) as caught:
        reclaim_gpus("lab", policy or ReclaimPolicy())
    assert (caught.value.report.stopped, caught.value.report.ended) == ([], [])
    return caught.value


@pytest.mark.usefixtures("server")
@EACH_WAY
def test_wrong_key(lab: Lab, tmp_path: Path, via: Any) -> None:
    key = str(tmp_path / "stranger")
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key])
    guest = ways.guest_block(lab, node_ssh=ways.node_access(lab, private_key_path=key))
    ways.save_host(lab, ssh=ways.ssh_access(lab, private_key_path=key), guest=guest)
    error = refused_flow(ReclaimPolicy(via=via))
    assert error.report.verdict == Verdict.UNREACHABLE
    place = "root@127.0.0.1" if via == "hypervisor" else f"root@{lab.guest_address}"
    assert place in error.message or "root@127.0.0.1" in error.message
    assert "authorized_keys" in error.remedy


@pytest.mark.usefixtures("server")
@EACH_WAY
def test_unknown_host_key(lab: Lab, via: Any) -> None:
    swapped = ways.guest_block(lab, node_ssh=ways.node_access(lab, host_key=lab.guest_host_key))
    access = ways.ssh_access(lab, host_key=lab.node_host_key)
    ways.save_host(lab, ssh=access, guest=swapped)
    error = refused_flow(ReclaimPolicy(via=via))
    assert error.report.verdict == Verdict.UNREACHABLE
    assert "SHA256:" in error.message
    assert "host_key" in error.remedy


@pytest.mark.usefixtures("server")
def test_unpinned_host_key(lab: Lab, tmp_path: Path) -> None:
    empty = tmp_path / "known_hosts"
    empty.write_text("")
    ways.save_host(
        lab, ssh=ways.ssh_access(lab, host_key=None, known_hosts_path=str(empty)), guest=None
    )
    error = refused_flow(ReclaimPolicy(via="ssh"))
    assert error.report.verdict == Verdict.UNREACHABLE
    assert f"root@{lab.guest_address}" in error.message
    assert "SHA256:" in str(error)


@pytest.mark.usefixtures("server")
def test_refused_port(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    ways.save_host(lab, ssh=ways.ssh_access(lab, port=1), guest=None)
    error = refused_flow()
    assert error.report.verdict == Verdict.UNREACHABLE
    assert f"root@{lab.guest_address}:1: it refuses the connection" in error.message
    assert "check the port" in error.remedy


@pytest.mark.usefixtures("server")
def test_both_ways_refused(lab: Lab) -> None:
    guest = ways.guest_block(lab, node_ssh=ways.node_access(lab, port=1))
    ways.save_host(lab, ssh=ways.ssh_access(lab, port=1), guest=guest)
    error = refused_flow()
    assert error.report.verdict == Verdict.UNREACHABLE
    assert f"root@{lab.guest_address}:1" in error.message
    assert "root@127.0.0.1:1" in error.message


@pytest.mark.usefixtures("server")
def test_wrong_vmid(lab: Lab) -> None:
    ways.save_host(lab, guest=ways.guest_block(lab, vmid=777))
    error = refused_flow()
    assert error.report.verdict == Verdict.IDENTITY_MISMATCH
    assert "there is no container 777 on this node" in error.message
    assert "check the vmid" in error.remedy


def test_no_credentials(lab: Lab) -> None:
    with pytest.raises(ValidationError, match="there is nothing to log in with") as caught:
        ways.ssh_access(lab, private_key_path=None)
    assert "give a private_key, private_key_path or password" in str(caught.value)
    assert lab.guest_address in str(caught.value)


@pytest.mark.usefixtures("server")
def test_key_file_that_is_not_there(lab: Lab) -> None:
    ways.save_host(lab, ssh=ways.ssh_access(lab, private_key_path="/nowhere/id"))
    with pytest.raises(BadInput, match="/nowhere/id cannot be read") as caught:
        reclaim_gpus("lab")
    assert "correct private_key_path" in caught.value.remedy


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(("via", "gone"), [("hypervisor", "guest"), ("ssh", "ssh")])
def test_via_without_such_a_way(lab: Lab, via: Any, gone: str) -> None:
    ways.save_host(lab, "lab", **{gone: None})
    with pytest.raises(BadInput, match=f"lab: via='{via}' is asked for") as caught:
        reclaim_gpus("lab", ReclaimPolicy(via=via))
    way = "an ssh" if via == "ssh" else "a guest with node_ssh"
    assert f"use via='auto', or give the GpuHost block {way}" in caught.value.remedy
