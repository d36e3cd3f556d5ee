"""The machine whose GPUs are wanted."""

from __future__ import annotations

from prefect.blocks.core import Block
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from gpu_reclaim.blocks.common import DOCUMENTATION_URL, LOGO_URL, Careful, full_unit_name
from gpu_reclaim.blocks.proxmox import ProxmoxGuest
from gpu_reclaim.blocks.ssh import SshAccess
from gpu_reclaim.commands import ANY_MACHINE, Guard
from gpu_reclaim.errors import BadInput
from gpu_reclaim.models import ReclaimPolicy, Survey, Via
from gpu_reclaim.session import Session
from gpu_reclaim.settings import load as load_settings
from gpu_reclaim.steps import survey
from gpu_reclaim.transport import Transport
from gpu_reclaim.transport.guest_agent import GuestAgentTransport
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.local import LocalTransport


class GpuHost(Careful, Block):
    """The machine whose GPUs are wanted.

    Example:
        ```python
        from gpu_reclaim.blocks import GpuHost

        host = GpuHost.load("BLOCK_NAME")
        print(host.survey())
        ```
    """

    _block_type_name = "GPU Host"
    _block_type_slug = "gpu-reclaim-gpu-host"
    _logo_url = LOGO_URL
    _documentation_url = DOCUMENTATION_URL
    _description = "A machine with GPUs: the ways to it, the units to stop, who is never touched."

    ssh: SshAccess | None = Field(
        default=None,
        title="SSH",
        description="The host's own SSH. Without it and without a guest: this very machine.",
    )
    guest: ProxmoxGuest | None = Field(
        default=None, description="What the host is on Proxmox; the way in when its SSH is down."
    )
    units: list[str] = Field(
        default=[], description="systemd units to stop, for example sglang-qwen.service."
    )
    expected_gpus: int | None = Field(
        default=None,
        ge=1,
        title="Expected GPUs",
        description="How many GPUs must answer. Empty: as many as at the start.",
    )
    protect: list[str] = Field(
        default=[],
        description="Executables, process names or units never touched, with wildcards. "
        "Adds to the built-in list.",
    )

    @field_validator("units")
    @classmethod
    def _units(cls, units: list[str]) -> list[str]:
        return list(dict.fromkeys(map(full_unit_name, units)))

    @field_validator("protect")
    @classmethod
    def _protect(cls, names: list[str]) -> list[str]:
        if any(not name.strip() for name in names):
            raise PydanticCustomError("protect", "protect: an empty name protects nothing")
        return names

    def session(self, host: str = "", *, via: Via = "auto") -> Session:
        """A session on the host; connections are opened when first used. Close its `links`.

        Args:
            host: The host's name for people; the block document's by default.
            via: Which ways may be used.

        Raises:
            BadInput: There is no way to it, or a key file cannot be used.
        """
        guard = self.guest.guard() if self.guest else ANY_MACHINE
        node = self.guest.node() if self.guest else None
        inside = self.guest.inside(node) if self.guest else None
        links = Links(direct=self._direct(guard), hypervisor=inside, node=node, via=via)
        settings = load_settings()
        name = host or self._block_document_name or "this machine"
        if (via == "hypervisor" and inside is None) or (via == "ssh" and links.direct is None):
            raise BadInput(
                f"{name}: via={via!r} is asked for, and the host has no such way",
                remedy="use via='auto', or give the GpuHost block "
                + ("an ssh" if via == "ssh" else "a guest with node_ssh (or an api, for a VM)"),
            )
        return Session(
            host=name,
            links=links,
            units=self.units,
            expected_gpus=self.expected_gpus,
            protect=self.protect,
            vmid=self.guest.vmid if self.guest and self.guest.kind == "lxc" else None,
            fit=inside.check if isinstance(inside, GuestAgentTransport) and via != "ssh" else None,
            guest_name=self.guest.hostname if self.guest else "",
            devices=settings.devices,
            places=settings.places,
            script_timeout_s=settings.script_timeout_s,
        )

    def _direct(self, guard: Guard) -> Transport | None:
        if self.ssh:
            return self.ssh.connect(guard)
        return None if self.guest else LocalTransport(guard=guard)

    def survey(self) -> Survey:
        """Read everything about the host once; touch nothing.

        Raises:
            GpuReclaimError: It could not be read; see `gpu_reclaim.errors`.
        """
        session = self.session()
        try:
            return survey(session, ReclaimPolicy())
        finally:
            session.links.close()
