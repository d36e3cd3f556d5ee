"""How a machine is reached by SSH."""

from __future__ import annotations

from typing import Any

from prefect.blocks.core import Block
from pydantic import Field, SecretStr, model_validator
from pydantic_core import PydanticCustomError

from gpu_reclaim.blocks.common import DOCUMENTATION_URL, LOGO_URL, Careful
from gpu_reclaim.commands import ANY_MACHINE, Guard
from gpu_reclaim.errors import BadInput
from gpu_reclaim.transport.ssh import SshOptions, SshTransport


class SshJump(Careful, Block):
    """A machine on the way to another one, reached by SSH. An unknown host key is refused.

    Example:
        ```python
        from gpu_reclaim.blocks import SshJump

        jump = SshJump.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "SSH Jump Host"
    _block_type_slug = "gpu-reclaim-ssh-jump"
    _logo_url = LOGO_URL
    _documentation_url = DOCUMENTATION_URL
    _description = "A machine through which another one is reached by SSH."

    address: str = Field(description="Host name or IP address, without login or port.")
    port: int = Field(default=22, ge=1, le=65535, description="TCP port of sshd.")
    username: str = Field(default="root", description="Whom to log in as.")
    private_key: SecretStr | None = Field(
        default=None, title="Private key", description="Text of a private key."
    )
    private_key_path: str | None = Field(
        default=None,
        title="Private key path",
        description="File with a private key, on the machine that runs the flow.",
    )
    password: SecretStr | None = Field(default=None, description="Password of the login.")
    agent: bool = Field(default=False, description="Use the keys of the running ssh-agent.")
    passphrase: SecretStr | None = Field(
        default=None, description="Passphrase of the private key, where it is encrypted."
    )
    host_key: str | None = Field(
        default=None,
        title="Host key",
        description="The host's public key, as in /etc/ssh/ssh_host_ed25519_key.pub there. "
        "Where it is given, it alone counts.",
    )
    known_hosts_path: str | None = Field(
        default=None,
        title="known_hosts path",
        description="Read in place of ~/.ssh/known_hosts and /etc/ssh/ssh_known_hosts.",
    )
    sudo: bool = Field(
        default=False, description="Run everything by sudo, which must ask for no password."
    )
    connect_timeout_s: float = Field(
        default=10,
        gt=0,
        le=600,
        title="Connect time limit (s)",
        description="Limit on each step of connecting, in seconds.",
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> SshJump:
        try:
            self.options()
        except BadInput as error:
            raise PydanticCustomError("ssh_access", "{text}", {"text": str(error)}) from error
        return self

    def options(self, **changes: Any) -> SshOptions:
        """The same as plain values, for use without Prefect.

        Args:
            **changes: Fields of `SshOptions` that differ, for example `address`.

        Raises:
            BadInput: A value makes no sense.
        """
        values: dict[str, Any] = {
            "address": self.address,
            "port": self.port,
            "username": self.username,
            "private_key": _reveal(self.private_key),
            "private_key_path": self.private_key_path or None,
            "password": _reveal(self.password),
            "agent": self.agent,
            "passphrase": _reveal(self.passphrase),
            "host_key": self.host_key or None,
            "known_hosts_path": self.known_hosts_path or None,
            "sudo": self.sudo,
            "connect_timeout_s": self.connect_timeout_s,
        }
        return SshOptions(**values | changes)


class SshAccess(SshJump):
    """How a machine is reached by SSH. An unknown host key is refused.

    The jump host is a block class of its own: Prefect's schema of a block that nests its own class
    never ends (RecursionError in 3.9.1). In Python an `SshAccess` is an `SshJump` too.

    Example:
        ```python
        from gpu_reclaim.blocks import SshAccess

        access = SshAccess.load("BLOCK_NAME")
        ```
    """

    _block_type_name = "SSH Access"
    _block_type_slug = "gpu-reclaim-ssh-access"
    _description = "How a machine is reached by SSH: address, login, host key, jump host."

    jump: SshJump | None = Field(default=None, description="The machine to go through.")

    def options(self, **changes: Any) -> SshOptions:
        """As `SshJump.options`, with the jump host."""
        jump = self.jump.options() if self.jump else None
        return super().options(**{"jump": jump, **changes})

    def connect(self, guard: Guard = ANY_MACHINE) -> SshTransport:
        """A transport to the machine; it connects when it is first used.

        Raises:
            BadInput: A key or known_hosts file cannot be used.
        """
        return SshTransport(self.options(), guard)


def _reveal(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() or None if secret else None
