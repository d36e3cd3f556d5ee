"""prefect.yaml: what it names exists, and nothing secret can be in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.flows import Flow, load_flow_from_entrypoint

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "prefect.yaml").read_text())[
    "deployments"
]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda x: str(x["name"]))
def test_entrypoint_is_a_module_path_that_loads(deployment: dict[str, Any]) -> None:
    assert ":" not in deployment["entrypoint"]
    found: Flow[Any, Any] = load_flow_from_entrypoint(
        deployment["entrypoint"], use_placeholder_flow=False
    )

    assert found.name == deployment["name"]


def test_no_block_is_resolved_at_deploy_time() -> None:
    """Prefect writes what it resolves then, secrets too, in clear into the deployment."""
    text = (ROOT / "prefect.yaml").read_text()

    assert "prefect.blocks" not in text
    assert "$ref" not in text


def test_readme_names_every_deployment_and_make_target_it_uses() -> None:
    readme = (ROOT / "README.md").read_text()
    targets = (ROOT / "Makefile").read_text()

    for deployment in DEPLOYMENTS:
        assert f"{deployment['name']}/{deployment['name']}" in readme
    for target in ("demo", "test", "benchmark"):
        assert f"make {target}" in readme
        assert f"\n{target}:" in targets
