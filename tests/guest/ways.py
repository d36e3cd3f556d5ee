"""The ways into the lab's guest, as the library and as the blocks describe them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL

from gpu_reclaim.blocks import GpuHost, ProxmoxGuest, SshAccess
from gpu_reclaim.commands import Guard
from gpu_reclaim.models import Via
from gpu_reclaim.processes import DeviceSet
from gpu_reclaim.session import Session
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.pct import PctTransport
from gpu_reclaim.transport.ssh import SshOptions, SshTransport
from lab.lab import Lab

UNIT = "sglang-qwen.service"
_SAVED: dict[tuple[str, str], UUID] = {}
"""Prefect server and block name to the block document's id."""

DEVICES = DeviceSet(path_prefixes=("/dev/nvidia",))


def guard(lab: Lab) -> Guard:
    """Who the guest must be."""
    return Guard(lab.hostname, lab.machine_id)


def guest_options(lab: Lab) -> SshOptions:
    """The guest's own SSH."""
    return SshOptions(
        lab.guest_address,
        port=lab.guest_port,
        private_key_path=lab.client_key,
        host_key=lab.guest_host_key,
    )


def node_options(lab: Lab) -> SshOptions:
    """The node's SSH."""
    return SshOptions(
        lab.node_address,
        port=lab.node_port,
        private_key_path=lab.client_key,
        host_key=lab.node_host_key,
    )


def links(
    lab: Lab,
    via: Via = "auto",
    *,
    expected: Guard | None = None,
    guest: dict[str, Any] | None = None,
    node: dict[str, Any] | None = None,
    vmid: int = 129,
) -> Links:
    """Both ways, with what a test changes in one of them."""
    who = expected or guard(lab)
    direct = SshTransport(replace(guest_options(lab), **(guest or {})), who)
    through = SshTransport(replace(node_options(lab), **(node or {})))
    return Links(direct, PctTransport(through, vmid, guard=who), through, via=via)


def session(lab: Lab, via: Via = "auto", *, ways: Links | None = None, **changes: Any) -> Session:
    """The guest while it is worked on."""
    values: dict[str, Any] = {
        "units": [UNIT],
        "expected_gpus": 4,
        "vmid": 129,
        "guest_name": lab.hostname,
        "devices": DEVICES,
    }
    return Session("lab", ways or links(lab, via), **(values | changes))


def ssh_access(lab: Lab, **changes: Any) -> SshAccess:
    """The guest's own SSH, as a block."""
    values = {
        "address": lab.guest_address,
        "port": lab.guest_port,
        "private_key_path": str(lab.client_key),
        "host_key": lab.guest_host_key,
    }
    return SshAccess(**(values | changes))


def node_access(lab: Lab, **changes: Any) -> SshAccess:
    """The node's SSH, as a block."""
    values = {
        "address": lab.node_address,
        "port": lab.node_port,
        "private_key_path": str(lab.client_key),
        "host_key": lab.node_host_key,
    }
    return SshAccess(**(values | changes))


def guest_block(lab: Lab, **changes: Any) -> ProxmoxGuest:
    """The guest on its node, as a block."""
    values: dict[str, Any] = {
        "vmid": 129,
        "hostname": lab.hostname,
        "machine_id": lab.machine_id,
        "node_ssh": node_access(lab),
    }
    return ProxmoxGuest(**(values | changes))


def save_host(lab: Lab, name: str = "lab", **changes: Any) -> None:
    """Save the host's block, as a user would."""
    values: dict[str, Any] = {
        "ssh": ssh_access(lab),
        "guest": guest_block(lab),
        "units": [UNIT],
        "expected_gpus": 4,
    }
    host = GpuHost(**(values | changes))
    known = (str(PREFECT_API_URL.value()), name)
    if known not in _SAVED:
        _SAVED[known] = cast("UUID", host.save(name, overwrite=True))
        return
    # Saving again takes Prefect ten seconds, because it computes every schema anew.
    data = host.model_dump(mode="json", include=set(values), context={"include_secrets": True})
    change = {"data": data, "merge_existing_data": False}
    with get_client(sync_client=True) as client:
        path = {"id": str(_SAVED[known])}
        client.request("PATCH", "/block_documents/{id}", path_params=path, json=change)
