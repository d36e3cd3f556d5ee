"""Proxmox: its API, and a guest on one of its nodes."""

from __future__ import annotations

from typing import Literal

from prefect.blocks.core import Block
from pydantic import Field, SecretStr, model_validator
from pydantic_core import PydanticCustomError

from gpu_reclaim.blocks.common import DOCUMENTATION_URL, LOGO_URL, Careful
from gpu_reclaim.blocks.ssh import SshAccess
from gpu_reclaim.commands import Guard
from gpu_reclaim.errors import BadInput, IdentityMismatch
from gpu_reclaim.transport import Transport
from gpu_reclaim.transport import proxmox_api as api
from gpu_reclaim.transport.guest_agent import GuestAgentTransport
from gpu_reclaim.transport.links import Later
from gpu_reclaim.transport.pct import PctTransport
from gpu_reclaim.transport.ssh import SshTransport


class ProxmoxApi(Careful, Block):
    """A Proxmox VE API, by token.

    Example:
        ```python
        from gpu_reclaim.blocks import ProxmoxApi

        cluster = ProxmoxApi.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "Proxmox API"
    _block_type_slug = "gpu-reclaim-proxmox-api"
    _logo_url = LOGO_URL
    _documentation_url = DOCUMENTATION_URL
    _description = "A Proxmox VE API: finds a guest's node, and enters VMs by their guest agent."

    address: str = Field(description="Name or IP address of a node, as its certificate has it.")
    port: int = Field(default=8006, ge=1, le=65535, description="TCP port of the API.")
    token_id: str = Field(title="Token ID", description="The token, as user@realm!name.")
    token_secret: SecretStr = Field(title="Token secret", description="The token's UUID.")
    ca_path: str | None = Field(
        default=None,
        title="CA path",
        description="File with the CA of the certificate; a cluster's own is "
        "/etc/pve/pve-root-ca.pem. Empty: the system's CAs.",
    )
    verify: bool = Field(
        default=True, description="Check the certificate. Turning it off logs a warning each time."
    )
    timeout_s: float = Field(
        default=30, gt=0, le=600, title="Time limit (s)", description="Limit per call, in seconds."
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> ProxmoxApi:
        try:
            self.options()
        except BadInput as error:
            raise PydanticCustomError("proxmox_api", "{text}", {"text": str(error)}) from error
        return self

    def options(self) -> api.ProxmoxApiOptions:
        """The same as plain values, for use without Prefect.

        Raises:
            BadInput: A value makes no sense.
        """
        return api.ProxmoxApiOptions(
            address=self.address,
            port=self.port,
            token_id=self.token_id,
            token_secret=self.token_secret.get_secret_value(),
            ca_path=self.ca_path or None,
            verify=self.verify,
            timeout_s=self.timeout_s,
        )

    def connect(self) -> api.ProxmoxApi:
        """A client; it connects when it is first used."""
        return api.ProxmoxApi(self.options())


class ProxmoxGuest(Careful, Block):
    """A guest on Proxmox, and who it must be.

    Example:
        ```python
        from gpu_reclaim.blocks import ProxmoxGuest

        guest = ProxmoxGuest.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "Proxmox Guest"
    _block_type_slug = "gpu-reclaim-proxmox-guest"
    _logo_url = LOGO_URL
    _documentation_url = DOCUMENTATION_URL
    _description = "An LXC container or VM on Proxmox: its number, who it must be, the way in."

    vmid: int = Field(ge=100, le=999_999_999, title="VMID", description="The guest's number.")
    kind: Literal["lxc", "qemu"] = Field(
        default="lxc", description="lxc for a container, qemu for a VM."
    )
    hostname: str = Field(
        min_length=1,
        description="Expected hostname. Another one answering is refused before anything is done.",
    )
    machine_id: str | None = Field(
        default=None, title="Machine ID", description="Expected content of /etc/machine-id."
    )
    node_ssh: SshAccess | None = Field(
        default=None, title="Node SSH", description="SSH to the node, as root or with sudo."
    )
    node_addresses: dict[str, str] = Field(
        default={},
        title="Node addresses",
        description="Node name to SSH address, for clusters whose API says where the guest is.",
    )
    api: ProxmoxApi | None = Field(default=None, title="API", description="The cluster's API.")

    def guard(self) -> Guard:
        """Who the guest must be."""
        return Guard(self.hostname, self.machine_id or "")

    def node(self) -> Transport | None:
        """The way to the guest's node, if there is one; it is found and opened when first used."""
        if self.node_ssh is None:
            return None
        if self.api is None:
            return self.node_ssh.connect()
        return Later(f"the node of guest {self.vmid}", self._find_node)

    def inside(self, node: Transport | None) -> Transport | None:
        """The way into the guest through its hypervisor, if there is one.

        Args:
            node: What `node` returned, whose connection is shared.
        """
        if self.kind == "lxc":
            return PctTransport(node, self.vmid, guard=self.guard()) if node else None
        if self.api is None:
            return None
        return GuestAgentTransport(
            self.api.connect(), self.vmid, guard=self.guard(), expected_name=self.hostname
        )

    def _find_node(self) -> Transport:
        if self.api is None or self.node_ssh is None:
            raise BadInput(f"guest {self.vmid}: no API or no node_ssh is given")
        client = self.api.connect()
        try:
            place = client.locate(self.vmid)
        finally:
            client.close()
        if place.kind != self.kind:
            raise IdentityMismatch(
                f"{client.name}: guest {self.vmid} is of kind {place.kind}, expected {self.kind}; "
                "nothing was touched",
                remedy="check the vmid in the ProxmoxGuest block",
            )
        if self.node_addresses and place.node not in self.node_addresses:
            raise BadInput(
                f"guest {self.vmid} is on node {place.node}, which node_addresses does not list",
                remedy=f"add {place.node} and its SSH address to the ProxmoxGuest block",
            )
        address = self.node_addresses.get(place.node, self.node_ssh.address)
        return SshTransport(self.node_ssh.options(address=address), Guard(place.node))
