"""A server of large language models on a host."""

from __future__ import annotations

from prefect.blocks.core import Block
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from gpu_reclaim.blocks.common import DOCUMENTATION_URL, LOGO_URL, Careful, full_unit_name
from gpu_reclaim.blocks.hosts import GpuHost
from gpu_reclaim.serving import Server


class LlmServer(Careful, Block):
    """A server of large language models on a host.

    Example:
        ```python
        from gpu_reclaim.blocks import LlmServer

        server = LlmServer.load("BLOCK_NAME")
        print(server.server())
        ```
    """

    _block_type_name = "LLM Server"
    _block_type_slug = "gpu-reclaim-llm-server"
    _logo_url = LOGO_URL
    _documentation_url = DOCUMENTATION_URL
    _description = "An SGLang server on a GPU host: its unit, its address, its interpreter."

    host: GpuHost = Field(description="The machine it runs on.")
    unit: str = Field(description="Its systemd unit, one of the host's.")
    base_url: str = Field(
        default="http://127.0.0.1:30000",
        title="Base URL",
        description="Where it answers, as seen from the host itself.",
    )
    python: str = Field(
        default="/usr/bin/python3",
        description="Its own interpreter on the host, for example /opt/sglang/bin/python.",
    )
    ready_timeout_s: float = Field(
        default=1800,
        gt=0,
        le=86_400,
        title="Ready time limit (s)",
        description="Longest time from its start until it serves, in seconds.",
    )

    @field_validator("unit")
    @classmethod
    def _unit(cls, unit: str) -> str:
        return full_unit_name(unit)

    @field_validator("base_url")
    @classmethod
    def _url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise PydanticCustomError("url", "base_url: begin it with http:// or https://")
        return url

    def server(self) -> Server:
        """What is asked whether it serves."""
        return Server(self.unit, self.base_url, self.python, self.ready_timeout_s)
