"""Defaults from the environment, then `.env`, then a TOML file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from gpu_reclaim.errors import BadInput
from gpu_reclaim.lease import Places, places_in
from gpu_reclaim.models import ReclaimPolicy
from gpu_reclaim.processes import NVIDIA, DeviceSet

TOML_FILE = Path("gpu-reclaim.toml")


def _upper(text: object) -> object:
    return text.upper() if isinstance(text, str) else text


class Settings(BaseSettings):
    """Settings of this installation; each is read from `GPU_RECLAIM_<NAME>`.

    Attributes:
        host: Name of the GpuHost block used where none is given.
        policy: Default policy, for example `GPU_RECLAIM_POLICY__RESIDUE_MIB=50`.
        log_level: Level of the library's own log lines.
        script_timeout_s: Limit for a script that only reads, in seconds.
        device_prefixes: Beginnings of paths that count as GPU devices, and nothing else then does:
            for test machines without a driver, where a real GPU's processes must be safe. Empty
            in production: device numbers decide.
        hold_folder: A folder of the host that stands in for /run and /var/lib, where lease and
            record are: for test machines where the login is not root.
    """

    model_config = SettingsConfigDict(
        env_prefix="GPU_RECLAIM_",
        env_nested_delimiter="__",
        env_file=".env",
        toml_file=TOML_FILE,
        extra="ignore",
    )

    host: str = ""
    policy: ReclaimPolicy = ReclaimPolicy()
    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(_upper)
    ] = "INFO"
    # nvidia-smi may need a minute without persistence mode; a look asks it twice.
    script_timeout_s: float = Field(default=150, gt=0, le=3600)
    device_prefixes: list[str] = []
    hold_folder: str = ""

    @property
    def devices(self) -> DeviceSet:
        """What counts as a GPU device."""
        if not self.device_prefixes:
            return NVIDIA
        prefixes = tuple(self.device_prefixes)
        return DeviceSet(majors=(), driver_names=(), path_prefixes=prefixes, nodes=prefixes)

    @property
    def places(self) -> Places:
        """Where lease and record are on a host."""
        return places_in(self.hold_folder)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment, then .env, then TOML.

        Raises:
            BadInput: The file is no TOML.
        """
        try:
            toml = TomlConfigSettingsSource(settings_cls)
        except tomllib.TOMLDecodeError as error:
            raise BadInput(f"{TOML_FILE} is no TOML: {error}", remedy="mend the file") from error
        return init_settings, env_settings, dotenv_settings, toml


def load() -> Settings:
    """The settings of this installation.

    Raises:
        BadInput: One of them makes no sense; it is named.
    """
    try:
        return Settings()
    except ValidationError as error:
        rows = [
            f"GPU_RECLAIM_{'__'.join(str(part).upper() for part in row['loc'])}: {row['msg']}"
            for row in error.errors(include_input=False, include_url=False)
        ]
        text = f"the settings make no sense: {'; '.join(rows)}"
    except SettingsError as error:
        text = f"the settings cannot be read: {error}"
    raise BadInput(
        text,
        remedy="correct it in the environment, .env or gpu-reclaim.toml; lists are given as JSON, "
        """for example '["ollama*"]'""",
    )
