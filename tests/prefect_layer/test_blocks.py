"""The blocks: Prefect's own suite, secrets, references, and what they connect to."""

from __future__ import annotations

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from prefect import get_client
from prefect.blocks.core import Block
from prefect.plugins import load_prefect_collections
from prefect.testing.standard_test_suites.blocks import BlockStandardTestSuite
from pydantic import SecretStr, ValidationError

from gpu_reclaim.blocks import GpuHost, LlmServer, ProxmoxApi, ProxmoxGuest, SshAccess, SshJump
from gpu_reclaim.commands import Guard
from gpu_reclaim.errors import BadInput, UnknownHost
from gpu_reclaim.serving import Server
from gpu_reclaim.tasks.host import load_host, load_server

BLOCKS = [GpuHost, LlmServer, ProxmoxApi, ProxmoxGuest, SshAccess, SshJump]
SECRET = "the-secret-nobody-may-see"


class TestStandard(BlockStandardTestSuite):
    @pytest.fixture(params=BLOCKS)
    def block(self, request: pytest.FixtureRequest) -> type[Block]:
        kind: type[Block] = request.param
        return kind

    def test_has_a_valid_image(self, block: type[Block]) -> None:
        """The suite's own check fetches the picture, and no test here leaves the machine."""
        assert str(block._logo_url).startswith("https://")
        assert str(block._logo_url).endswith("-250x250.png")


def access(name: str = "", **changes: object) -> SshAccess:
    block = SshAccess(address="10.129.0.2", password=SecretStr(SECRET), **changes)
    if name:
        block.save(name, overwrite=True)
    return block


def test_every_block_is_exported_and_registered_by_the_entry_point() -> None:
    points = entry_points(group="prefect.collections")

    assert [point.value for point in points if point.name == "gpu_reclaim"] == [
        "gpu_reclaim.blocks"
    ]
    assert "gpu_reclaim" in load_prefect_collections()


def test_whole_host_survives_a_round_trip_through_the_server() -> None:
    node = access("node", port=2222)
    guest = ProxmoxGuest(vmid=129, hostname="gpu-guest", node_ssh=node)
    guest.save("guest", overwrite=True)
    GpuHost(
        ssh=access("guest-ssh", jump=SshJump(address="jump", agent=True)),
        guest=guest,
        units=["sglang-qwen"],
        expected_gpus=4,
    ).save("host", overwrite=True)

    found = load_host("host")

    assert found.units == ["sglang-qwen.service"]
    assert found.ssh is not None
    assert found.ssh.options().password == SECRET
    assert found.ssh.options().jump is not None
    assert found.guest is not None
    assert found.guest.guard() == Guard("gpu-guest", "")
    assert found.guest.node_ssh is not None
    assert found.guest.node_ssh.port == 2222


@pytest.mark.parametrize("field", ["private_key", "password", "passphrase"])
def test_secret_never_leaves_the_server_or_shows_in_text(field: str) -> None:
    values: dict[str, object] = {"address": "10.0.0.9", "agent": True, field: SecretStr(SECRET)}
    block = SshAccess.model_validate(values)
    block.save("secret", overwrite=True)
    GpuHost(ssh=block).save("secret-host", overwrite=True)
    with get_client(sync_client=True) as client:
        shown = [
            client.read_block_document_by_name(name, slug, include_secrets=False)
            for name, slug in (
                ("secret", "gpu-reclaim-ssh-access"),
                ("secret-host", "gpu-reclaim-gpu-host"),
            )
        ]

    assert SECRET not in str([document.model_dump() for document in shown])
    assert SECRET not in repr(block) + str(block) + repr(block.options())


def test_secret_of_a_nested_block_that_was_never_saved_is_masked() -> None:
    way = SshAccess(
        address="h",
        password=SecretStr(SECRET),
        jump=SshJump(address="j", password=SecretStr(SECRET)),
    )
    guest = ProxmoxGuest(vmid=129, hostname="g", node_ssh=way)
    GpuHost(ssh=way, guest=guest).save("inline", overwrite=True)
    with get_client(sync_client=True) as client:
        shown = client.read_block_document_by_name(
            "inline", "gpu-reclaim-gpu-host", include_secrets=False
        )

    assert SECRET not in str(shown.model_dump())
    found = load_host("inline")
    assert found.guest is not None
    assert found.guest.node_ssh is not None
    assert found.guest.node_ssh.options().jump is not None
    assert found.guest.node_ssh.options().password == SECRET


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (SshAccess, {"address": "10.0.0.9"}, "nothing to log in with"),
        (SshAccess, {"address": "root@10.0.0.9", "agent": True}, "more than a host name"),
        (
            SshAccess,
            {"address": "h", "agent": True, "host_key": "ssh-ed25519 nonsense"},
            "host_key",
        ),
        (SshAccess, {"address": "h", "agent": True, "port": 0}, "greater than or equal to 1"),
        (ProxmoxApi, {"address": "pve", "token_id": "root", "token_secret": "x"}, "user@realm"),
        (ProxmoxGuest, {"vmid": 7, "hostname": "g"}, "greater than or equal to 100"),
        (ProxmoxGuest, {"vmid": 129, "hostname": ""}, "at least 1 character"),
        (GpuHost, {"units": ["sglang*"]}, "no systemd unit name"),
        (GpuHost, {"units": ["--all"]}, "no systemd unit name"),
        (GpuHost, {"expected_gpus": 0}, "greater than or equal to 1"),
        (LlmServer, {"host": GpuHost(), "unit": "sglang*"}, "no systemd unit name"),
        (LlmServer, {"host": GpuHost(), "unit": ""}, "unit"),
        (LlmServer, {"host": GpuHost(), "unit": "a", "base_url": "127.0.0.1:30000"}, "http://"),
        (LlmServer, {"host": GpuHost(), "unit": "a", "ready_timeout_s": 0}, "greater than 0"),
        (LlmServer, {"unit": "a"}, "host"),
    ],
)
def test_wrong_value_is_refused_when_the_block_is_made(
    kind: type[Block], values: dict[str, object], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        kind.model_validate(values)


def test_secret_is_not_in_a_validation_error() -> None:
    for values in ({"address": "", "password": SECRET}, {"password": SECRET}, {"pasword": SECRET}):
        with pytest.raises(ValidationError) as caught:
            SshAccess.model_validate(values)

        assert SECRET[-8:] not in str(caught.value)


def test_misspelt_field_is_refused_with_the_right_name() -> None:
    with pytest.raises(ValidationError, match="did you mean address"):
        SshAccess.model_validate({"adress": "10.0.0.9", "agent": True})


def guest(**changes: object) -> ProxmoxGuest:
    values: dict[str, object] = {"vmid": 129, "hostname": "gpu-guest", **changes}
    return ProxmoxGuest.model_validate(values)


def test_ways_follow_from_the_blocks() -> None:
    ssh, api = (
        access(),
        ProxmoxApi(address="p", token_id="root@pam!tuning", token_secret=SecretStr("ab")),
    )
    cases = [
        (GpuHost(), "this machine", None, None),
        (GpuHost(ssh=ssh), "ssh root@10.129.0.2", None, None),
        (GpuHost(guest=guest()), None, None, None),
        (
            GpuHost(ssh=ssh, guest=guest(node_ssh=access(port=23))),
            "ssh root@10.129.0.2",
            "container 129 through ssh root@10.129.0.2:23",
            "ssh root@10.129.0.2:23",
        ),
        (
            GpuHost(guest=guest(node_ssh=ssh, api=api)),
            None,
            "container 129 through the node of guest 129",
            "the node of guest 129",
        ),
        (
            GpuHost(guest=guest(kind="qemu", api=api)),
            None,
            "guest agent of VM 129 by Proxmox API p:8006",
            None,
        ),
    ]
    for host, *expected in cases:
        links = host.session("h").links
        found = [way.name if way else None for way in (links.direct, links.hypervisor, links.node)]

        assert found == expected


@pytest.mark.parametrize("via", ["hypervisor", "ssh"])
def test_via_without_such_a_way_is_refused(via: str) -> None:
    host = GpuHost(guest=guest()) if via == "ssh" else GpuHost(ssh=access())
    with pytest.raises(BadInput, match=via):
        host.session("h", via=via)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "never-saved"])
def test_unknown_host_is_named_with_the_cure(name: str) -> None:
    with pytest.raises(UnknownHost) as caught:
        load_host(name)

    assert "GpuHost" in caught.value.remedy
    if name:
        assert "host" in caught.value.remedy.split(";")[0]


def test_server_survives_a_round_trip_and_hides_the_secrets_of_its_host() -> None:
    host = GpuHost(ssh=access(), units=["sglang"])
    made = LlmServer(
        host=host,
        unit="sglang",
        python="/opt/sglang/bin/python",
        api_key=SecretStr(SECRET),
        dataset_path="/data/prompts.json",
    )
    made.save("llm", overwrite=True)
    with get_client(sync_client=True) as client:
        shown = client.read_block_document_by_name(
            "llm", "gpu-reclaim-llm-server", include_secrets=False
        )

    assert SECRET not in str(shown.model_dump())
    assert load_server("llm") == Server(
        "sglang.service",
        "http://127.0.0.1:30000",
        "/opt/sglang/bin/python",
        1800,
        dataset_path="/data/prompts.json",
        api_key=SECRET,
    )
    assert SECRET not in repr(load_server("llm"))


@pytest.mark.parametrize("name", ["", "never-saved"])
def test_unknown_server_is_named_with_the_cure(name: str) -> None:
    with pytest.raises(UnknownHost) as caught:
        load_server(name)

    assert "LlmServer(host=" in caught.value.remedy


def test_default_host_comes_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    GpuHost(units=["a"]).save("by-default", overwrite=True)
    monkeypatch.setenv("GPU_RECLAIM_HOST", "by-default")

    assert load_host("").units == ["a.service"]


def test_entry_point_is_the_one_declared() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())

    assert project["project"]["entry-points"]["prefect.collections"] == {
        "gpu_reclaim": "gpu_reclaim.blocks"
    }
