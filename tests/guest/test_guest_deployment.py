"""`prefect deploy` and a real process worker, against the real guest."""

from __future__ import annotations

import pytest
from prefect.client.schemas.sorting import FlowRunSort

from guest.real_prefect import PREFECT, Prefect
from lab.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.exhaustive]


def test_worker_runs_the_deployment_and_its_artifacts_are_there(lab: Lab, prefect: Prefect) -> None:
    lab.start_server()
    before = lab.server_pids()
    prefect.run(
        PREFECT, "deployment", "run", "reclaim-gpus/reclaim-gpus", "--param", "host=lab", "--watch"
    )
    with prefect.client() as client:
        run = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC)[0]
    artifacts = prefect.artifacts(run.id)

    assert len(before) == 6
    assert run.state is not None
    assert run.state.is_completed(), run.state.message
    assert run.parameters["host"] == "lab"
    assert lab.server_pids() == {}
    assert {"gpu-survey-lab", "verify-nvidia-smi-lab", "gpu-reclaim-lab"} <= set(artifacts)
    assert "# lab: clean" in artifacts["gpu-reclaim-lab"]
    secret = lab.client_key.read_text().splitlines()[3]
    assert secret not in str(artifacts)
    assert secret not in prefect.log.read_text()
