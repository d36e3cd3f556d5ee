"""`prefect deploy` and a real process worker, against the real guest."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings

from lab.lab import Lab
from lab.waiting import wait_until

pytestmark = pytest.mark.lab

ROOT = Path(__file__).resolve().parents[2]
PREFECT = Path(sys.executable).with_name("prefect")

BLOCKS = """
import sys
from pathlib import Path
from gpu_reclaim.blocks import GpuHost, ProxmoxGuest, SshAccess

key, address, host_key, node, node_port, node_key, hostname, machine_id = sys.argv[1:]
secret = Path(key).read_text()
way = SshAccess(address=node, port=int(node_port), private_key=secret, host_key=node_key)
way.save("lab-node")
guest = ProxmoxGuest(vmid=129, hostname=hostname, machine_id=machine_id, node_ssh=way)
guest.save("lab-guest")
ssh = SshAccess(address=address, private_key=secret, host_key=host_key)
ssh.save("lab-ssh")
GpuHost(ssh=ssh, guest=guest, units=["sglang-qwen"], expected_gpus=4).save("lab")
"""


class Prefect:
    """A server, and the commands that speak to it."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "PYTEST_"))},
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "GPU_RECLAIM_DEVICE_PREFIXES": '["/dev/nvidia"]',
        }
        self.log = home / "log"

    def spawn(self, *argv: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [PREFECT, *argv], env=self.env, stdout=log, stderr=log, cwd=ROOT
            )

    def run(self, *argv: str | Path) -> str:
        done = subprocess.run(
            [str(word) for word in argv],
            check=False,
            capture_output=True,
            text=True,
            env=self.env,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.log.read_text()[-4000:]
        return done.stdout

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(timeout=60)


@pytest.fixture
def prefect(tmp_path: Path) -> Iterator[Prefect]:
    server = Prefect(tmp_path)
    argv = ("server", "start", "--host", "127.0.0.1", "--port", str(server.port))
    process = server.spawn(*argv)
    try:
        wait_until("the Prefect server", server.healthy, 120)
        yield server
    finally:
        end(process)


@pytest.fixture
def worker(prefect: Prefect) -> Iterator[Prefect]:
    prefect.run(PREFECT, "work-pool", "create", "gpu-ops", "--type", "process")
    prefect.run(PREFECT, "--no-prompt", "deploy", "--all")
    process = prefect.spawn("worker", "start", "--pool", "gpu-ops", "--type", "process")
    yield prefect
    end(process)


def save_blocks(lab: Lab, prefect: Prefect) -> None:
    values = (
        lab.client_key,
        lab.guest_address,
        lab.guest_host_key,
        lab.node_address,
        lab.node_port,
        lab.node_host_key,
        lab.hostname,
        lab.machine_id,
    )
    prefect.run(sys.executable, "-c", BLOCKS, *[str(value) for value in values])


def newest_run() -> FlowRun:
    with get_client(sync_client=True) as client:
        return client.read_flow_runs()[0]


def test_worker_runs_the_deployment_and_its_artifacts_are_there(lab: Lab, worker: Prefect) -> None:
    save_blocks(lab, worker)
    lab.start_server()
    before = lab.server_pids()
    worker.run(
        PREFECT, "deployment", "run", "reclaim-gpus/reclaim-gpus", "--param", "host=lab", "--watch"
    )
    with temporary_settings({PREFECT_API_URL: worker.url}), get_client(sync_client=True) as client:
        run = newest_run()
        artifacts = client.read_artifacts()

    assert len(before) == 6
    assert run.state is not None
    assert run.state.is_completed(), run.state.message
    assert run.parameters["host"] == "lab"
    assert lab.server_pids() == {}
    keys = {artifact.key for artifact in artifacts if artifact.flow_run_id == run.id}
    assert {"gpu-survey-lab", "verify-nvidia-smi-lab", "gpu-reclaim-lab"} <= keys
    page = next(str(x.data) for x in artifacts if x.key == "gpu-reclaim-lab")
    assert "# lab: clean" in page
    secret = lab.client_key.read_text().splitlines()[3]
    assert secret not in str([artifact.data for artifact in artifacts])
    assert secret not in worker.log.read_text()
