"""The ways to one host: its own SSH (or this machine), and through its hypervisor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from gpu_reclaim.commands import Result, Script
from gpu_reclaim.errors import AccessRefused, BadInput, HostKeyRefused, Unreachable
from gpu_reclaim.models import Via
from gpu_reclaim.transport import Transport

log = logging.getLogger(__name__)


@dataclass
class Links:
    """Reaches one host. Used by one thread; each way opens at most one connection.

    Attributes:
        direct: The host's own SSH, or this machine; None when there is none.
        hypervisor: Into the guest through its node or guest agent; None when there is none.
        node: The Proxmox node itself; None when it is not known.
        via: Which ways may be used.
    """

    direct: Transport | None = None
    hypervisor: Transport | None = None
    node: Transport | None = None
    via: Via = "auto"
    _direct_failed: Unreachable | None = None

    def run(self, script: Script) -> Result:
        """Run a script on the host by the first way that is open.

        Only a way on which certainly nothing was run is left for the other. A refused host key or
        login is no reason to try another door.

        Raises:
            BadInput: No way is configured for this `via`.
            TransportError: As `Transport.run`.
        """
        if self.via != "hypervisor" and self.direct and not self._direct_failed:
            try:
                return self.direct.run(script)
            except (HostKeyRefused, AccessRefused):
                raise
            except Unreachable as error:
                if self.via == "ssh" or self.hypervisor is None:
                    raise
                log.warning("%s; going through %s", error.message, self.hypervisor.name)
                self._direct_failed = error
        return self.through_hypervisor(script)

    def through_hypervisor(self, script: Script) -> Result:
        """Run a script in the guest through its hypervisor.

        Raises:
            BadInput: There is no such way, or the policy excludes it.
            TransportError: As `Transport.run`.
        """
        if self.via == "ssh" or self.hypervisor is None:
            raise BadInput(
                f"there is no way to the host with via={self.via!r}",
                remedy="give the GpuHost block an SshAccess, or a ProxmoxGuest with a node or API",
            )
        try:
            return self.hypervisor.run(script)
        except Unreachable as error:
            if self._direct_failed is None:
                raise
            raise type(error)(
                f"{self._direct_failed.message}; and {error.message}",
                remedy=f"{self._direct_failed.remedy}; or: {error.remedy}",
            ) from error

    def has_hypervisor(self) -> bool:
        """The guest may be entered through its hypervisor."""
        return self.hypervisor is not None and self.via != "ssh"

    def close(self) -> None:
        """Close every connection, and forget which way failed. Never raises."""
        self._direct_failed = None
        for transport in (self.direct, self.hypervisor, self.node):
            if transport is not None:
                transport.close()


class Later:
    """A transport that is made when it is first needed (finding a guest's node asks an API)."""

    def __init__(self, name: str, make: Callable[[], Transport]) -> None:
        self._name = name
        self._make = make
        self._made: Transport | None = None

    @property
    def name(self) -> str:
        """How and where."""
        return self._made.name if self._made else self._name

    def run(self, script: Script) -> Result:
        """Run a script; see `Transport.run`."""
        if self._made is None:
            self._made = self._make()
        return self._made.run(script)

    def close(self) -> None:
        """Close what was made. Never raises."""
        if self._made is not None:
            self._made.close()
