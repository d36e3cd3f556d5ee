"""A server of large language models on a host."""

from __future__ import annotations

from typing import Literal

from prefect.blocks.core import Block
from pydantic import Field, SecretStr, field_validator
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
    model_path: str = Field(
        default="",
        title="Model path",
        description="The model's folder on the host, for its tokenizer. Empty: as the server says.",
    )
    tp_size: int = Field(
        default=0,
        ge=0,
        le=1024,
        title="TP size",
        description="GPUs that one copy of the model spans. 0: as the server says.",
    )
    sglang_source: str = Field(
        default="",
        title="SGLang source",
        description="A checkout on the host, of the installed version, with the tuning scripts.",
    )
    dataset_name: Literal["sharegpt", "custom"] = Field(
        default="sharegpt",
        title="Dataset kind",
        description="What kind of file the benchmark's prompts are in.",
    )
    dataset_path: str = Field(
        default="",
        title="Dataset path",
        description="That file on the host: real prompts, for noise is guessed badly by any draft.",
    )
    api_key: SecretStr = Field(
        default=SecretStr(""), title="API key", description="Where the server wants one."
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
        return Server(
            self.unit,
            self.base_url,
            self.python,
            self.ready_timeout_s,
            model_path=self.model_path,
            dataset_name=self.dataset_name,
            dataset_path=self.dataset_path,
            api_key=self.api_key.get_secret_value(),
            sglang_source=self.sglang_source,
        )
