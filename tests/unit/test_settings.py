"""Where settings come from, and what is said of those that make no sense."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_reclaim.errors import BadInput
from gpu_reclaim.models import ReclaimPolicy
from gpu_reclaim.processes import NVIDIA, scan
from gpu_reclaim.settings import Settings, load


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder and an environment without any setting of ours."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.upper().startswith("GPU_RECLAIM_"):
            monkeypatch.delenv(name)
    return tmp_path


def toml(place: Path, text: str) -> None:
    (place / "gpu-reclaim.toml").write_text(text)


def dotenv(place: Path, text: str) -> None:
    (place / ".env").write_text(text)


def test_without_any_setting_everything_has_a_default() -> None:
    settings = Settings()

    assert settings.policy == ReclaimPolicy()
    assert settings.host == ""
    assert settings.devices == NVIDIA


def test_environment_then_dotenv_then_toml(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml(place, 'host = "toml"\nlog_level = "DEBUG"\nscript_timeout_s = 7')
    dotenv(place, "GPU_RECLAIM_HOST=dotenv\nGPU_RECLAIM_LOG_LEVEL=ERROR\nOTHER=1\n")
    monkeypatch.setenv("GPU_RECLAIM_HOST", "environment")
    settings = Settings()

    assert settings.host == "environment"
    assert settings.log_level == "ERROR"
    assert settings.script_timeout_s == 7
    assert Settings(host="given").host == "given"


def test_a_policy_may_come_in_parts_from_everywhere(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml(place, '[policy]\nresidue_mib = 1\nstable_samples = 2\nprotect = ["ollama*"]')
    dotenv(place, "GPU_RECLAIM_POLICY__RESIDUE_MIB=3\n")
    monkeypatch.setenv("GPU_RECLAIM_POLICY__TERM_GRACE_S", "4")

    assert Settings().policy == ReclaimPolicy(
        residue_mib=3, stable_samples=2, term_grace_s=4, protect=["ollama*"]
    )


def test_devices_of_a_test_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_RECLAIM_DEVICE_PREFIXES", '["/dev/fake-gpu"]')
    devices = Settings().devices

    assert devices.majors == ()
    assert devices.driver_names == ()
    assert devices.path_prefixes == ("/dev/fake-gpu",)
    assert devices.nodes == ("/dev/fake-gpu",)


@pytest.mark.parametrize("prefix", ["", "/", "/dev/"])
def test_a_prefix_that_would_cover_everything_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    monkeypatch.setenv("GPU_RECLAIM_DEVICE_PREFIXES", f'["{prefix}"]')
    with pytest.raises(BadInput, match="device prefix"):
        scan(Settings().devices)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SCRIPT_TIMEOUT_S", "soon", "script_timeout_s"),
        ("SCRIPT_TIMEOUT_S", "0", "script_timeout_s"),
        ("POLICY__RESIDUE_MIB", "-1", "residue_mib"),
        ("POLICY__RESIDUE_MIB", "many", "residue_mib"),
        ("POLICY__RESIDUE", "1", "residue"),
        ("POLICY__VIA", "telnet", "via"),
        ("POLICY__MATCH", '["("]', "no regular expression"),
        ("POLICY__MATCH", "python3", "policy"),
        ("POLICY", "{", "policy"),
        ("DEVICE_PREFIXES", "/dev/fake", "device_prefixes"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(f"GPU_RECLAIM_{name}", value)
    with pytest.raises(ValueError, match=words):
        Settings()


@pytest.mark.parametrize("text", ["host = ", "[policy", "host = 'x' y"])
def test_a_file_that_is_no_toml_is_named(place: Path, text: str) -> None:
    toml(place, text)
    with pytest.raises(BadInput, match=r"gpu-reclaim\.toml is no TOML: .*(line 1|end of document)"):
        Settings()


def test_a_value_in_the_file_that_makes_no_sense_is_named(place: Path) -> None:
    toml(place, "[policy]\nresidue_mib = 'many'")
    with pytest.raises(ValueError, match=r"policy\.residue_mib"):
        Settings()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("GPU_RECLAIM_LOG_LEVEL", "loud", "GPU_RECLAIM_LOG_LEVEL: Input should be"),
        ("GPU_RECLAIM_POLICY__TERM_GRACE_S", "soon", "GPU_RECLAIM_POLICY__TERM_GRACE_S: Input"),
        ("GPU_RECLAIM_POLICY__PROTECT", "ollama", "lists are given as JSON"),
        ("GPU_RECLAIM_SCRIPT_TIMEOUT_S", "0", "GPU_RECLAIM_SCRIPT_TIMEOUT_S: Input"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)

    with pytest.raises(BadInput) as caught:
        load()
    assert said in str(caught.value)


def test_a_level_may_be_written_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_RECLAIM_LOG_LEVEL", "debug")

    assert load().log_level == "DEBUG"
