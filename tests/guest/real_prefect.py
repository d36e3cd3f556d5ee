"""A real Prefect for tests: a server and a process worker, which can be killed and come back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Cancelling

from lab.lab import Lab
from lab.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PREFECT = Path(sys.executable).with_name("prefect")
POOL = "gpu-ops"

FAST = {
    "PREFECT_WORKER_QUERY_SECONDS": "1",
    "PREFECT_WORKER_HEARTBEAT_SECONDS": "5",
    "PREFECT_WORKER_CANCELLATION_POLL_SECONDS": "1",
    "PREFECT_RUNNER_POLL_FREQUENCY": "1",
    "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "0.3",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "2",
}
"""How often each looks: as often as tests want to see what happens."""

FINAL = (StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED)
UNFINISHED = FlowRunFilter(
    state=FlowRunFilterState(type=FlowRunFilterStateType(not_any_=list(FINAL)))
)
PAUSE_S = 0.2
"""Between two looks: each costs, and both processors are wanted by what is waited for."""

LOG_PAGE = 200
"""How many log lines the server gives at once."""

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
    """A server with a database of its own, a worker, and what is asked of them.

    Attributes:
        url: Of the server's API; the same for all its lives.
        env: For every process that is started.
        log: What they all print.
        server: The process of the server's latest life.
        worker: The worker's.
    """

    def __init__(self, home: Path, **settings: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/api"
        leases = "prefect.server.concurrency.lease_storage.filesystem"
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "PYTEST_"))},
            "PREFECT_HOME": str(home),
            "PREFECT_API_URL": self.url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_ENABLED": "false",
            # Saving a block registers it; doing so at the start takes five seconds more.
            "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
            # Leases in memory do not outlive the server.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": leases,
            "GPU_RECLAIM_DEVICE_PREFIXES": '["/dev/nvidia"]',
            **FAST,
            **settings,
        }
        self.log = home / "log"
        self.server: subprocess.Popen[bytes] | None = None
        self.worker: subprocess.Popen[bytes] | None = None

    # Processes

    def spawn(self, *argv: str) -> subprocess.Popen[bytes]:
        """Start a `prefect` command."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [PREFECT, *argv], env=self.env, stdout=log, stderr=log, cwd=ROOT
            )

    def run(self, *argv: str | Path) -> str:
        """Run a command that must succeed; its output."""
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
        """The server answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def start_server(self) -> None:
        """Start the server, or start it again: same port, same database."""
        argv = ("server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        self.server = self.spawn(*argv)
        wait_until("the Prefect server", self.healthy, 120, PAUSE_S)

    def stop_server(self) -> None:
        """End the server as an administrator would."""
        _end(self.server)

    def kill_server(self) -> None:
        """End the server as a power cut would."""
        _kill(self.server)

    def start_worker(self) -> None:
        """Start a worker, and wait until the server knows it."""
        before = self._workers()
        self.worker = self.spawn("worker", "start", "--pool", POOL, "--type", "process")
        wait_until("the worker", lambda: bool(self._workers() - before), 60, PAUSE_S)

    def stop_worker(self) -> None:
        """End the worker as an administrator would; it ends its flow runs."""
        _end(self.worker)

    def kill_worker(self) -> None:
        """End the worker alone, as the kernel does for want of memory; its flow runs go on."""
        _kill(self.worker)

    def repair(self) -> None:
        """Start again what a test has ended, and forget the runs and limits it has left behind."""
        self._kill_flow_runs()
        if not _lives(self.server):
            self.start_server()
        with self.client() as client:
            for run in client.read_flow_runs(flow_run_filter=UNFINISHED):
                client.set_flow_run_state(run.id, Cancelled(), force=True)
            for limit in client.read_global_concurrency_limits():
                client.delete_global_concurrency_limit_by_name(limit.name)
        if not _lives(self.worker):
            self.start_worker()

    def close(self) -> None:
        """End everything; the flow runs too."""
        self.kill_worker()
        self._kill_flow_runs()
        self.stop_server()

    def _kill_flow_runs(self) -> None:
        for pid in self.flow_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _workers(self) -> set[UUID]:
        with self.client() as client:
            path = {"work_pool_name": POOL}
            found = client.request(
                "POST", "/work_pools/{work_pool_name}/workers/filter", path_params=path, json={}
            ).json()
        return {UUID(row["id"]) for row in found}

    # Deployments and runs

    @contextlib.contextmanager
    def client(self) -> Iterator[SyncPrefectClient]:
        """A client of this server."""
        with temporary_settings({PREFECT_API_URL: self.url}), get_client(sync_client=True) as one:
            yield one

    def deploy(self, entrypoint: str, name: str = "") -> UUID:
        """Register a flow for the worker: quicker than the command, and without its schema.

        Args:
            entrypoint: "/path/of/file.py:function" or "package.module.function".
            name: Of flow and deployment; the function's by default.

        Returns:
            The deployment, for `submit`.
        """
        title = name or entrypoint.replace(":", ".").rpartition(".")[2]
        with self.client() as client:
            flow = client.create_flow_from_name(title)
            return client.create_deployment(
                flow,
                title,
                work_pool_name=POOL,
                entrypoint=entrypoint,
                enforce_parameter_schema=False,
            )

    def submit(
        self,
        deployment: UUID | str,
        parameters: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
    ) -> UUID:
        """Have a deployment run.

        Args:
            deployment: Its id, or "flow/deployment".
            parameters: Of the flow.
            env: For the flow run's process, on top of the worker's.

        Returns:
            The flow run.
        """
        with self.client() as client:
            if isinstance(deployment, str):
                deployment = client.read_deployment_by_name(deployment).id
            return client.create_flow_run_from_deployment(
                deployment, parameters=parameters, job_variables={"env": env or {}}
            ).id

    def flow_run(self, run: UUID) -> FlowRun:
        """The flow run as the server knows it."""
        with self.client() as client:
            return client.read_flow_run(run)

    def subflows(self, run: UUID) -> list[FlowRun]:
        """The runs of flows that this one called."""
        parent = FlowRunFilterParentFlowRunId(any_=[run])
        with self.client() as client:
            return client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=parent))

    def state(self, run: UUID) -> State[Any]:
        """A flow run's state; the server must answer."""
        state = self.flow_run(run).state
        assert state is not None
        return state

    def wait(self, run: UUID, *kinds: StateType, timeout: float = 120) -> State[Any]:
        """Wait until a flow run is in a state; while the server is away, too.

        Args:
            run: The flow run.
            kinds: The states; any final one by default.
            timeout: Seconds after which to give up.

        Raises:
            LabError: It was not in time.
        """
        seen: list[State[Any]] = []

        def there() -> bool:
            with contextlib.suppress(httpx.TransportError):
                seen.append(self.state(run))
            return bool(seen) and seen[-1].type in (kinds or FINAL)

        wait_until(f"run {run} is {kinds or 'at its end'}", there, timeout, PAUSE_S)
        return seen[-1]

    def cancel(self, run: UUID) -> None:
        """Ask for a flow run's end, as the button in the UI does."""
        with self.client() as client:
            client.set_flow_run_state(run, Cancelling(), force=True)

    def artifacts(self, run: UUID) -> dict[str, str]:
        """What a flow run has left: key to text."""
        only = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
        with self.client() as client:
            found = client.read_artifacts(artifact_filter=only)
        return {str(artifact.key): str(artifact.data) for artifact in found}

    def logs(self, run: UUID) -> list[str]:
        """A flow run's log, the oldest line first."""
        only = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run]))
        lines: list[str] = []
        with self.client() as client:
            while page := client.read_logs(only, limit=LOG_PAGE, offset=len(lines)):
                lines += [line.message for line in page]
        return lines

    # Flow runs' own processes

    def flow_processes(self, run: UUID | None = None) -> list[int]:
        """Processes in which Prefect's engine runs this flow run, or any of this server's."""
        sign = f"PREFECT__FLOW_RUN_ID={run or ''}".encode()
        ours = f"PREFECT_API_URL={self.url}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes().split(b"\0")
                if run is not None and b"prefect.engine" not in command:
                    continue
                environment = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if ours in environment and any(word.startswith(sign) for word in environment):
                found.append(int(folder.name))
        return found

    def process_of(self, run: UUID, timeout: float = 60) -> int:
        """The pid of a flow run's own process, once it has one.

        Raises:
            LabError: It had none in time.
        """
        has_one = f"run {run} has a process"
        wait_until(has_one, lambda: bool(self.flow_processes(run)), timeout, PAUSE_S)
        return self.flow_processes(run)[0]

    def wait_gone(self, run: UUID, timeout: float = 60) -> None:
        """Wait until a flow run's process has been and gone, whatever the server knows of it.

        Raises:
            LabError: It was not in time.
        """
        self.process_of(run)
        self._wait_none(run, timeout)

    def _wait_none(self, run: UUID, timeout: float = 10) -> None:
        wait_until(f"run {run} is gone", lambda: not self.flow_processes(run), timeout, PAUSE_S)

    def kill(self, run: UUID) -> None:
        """End a flow run's own process as the kernel does for want of memory."""
        os.kill(self.process_of(run), signal.SIGKILL)
        self._wait_none(run)


def save_blocks(lab: Lab, prefect: Prefect) -> None:
    """Save the lab's host as "lab", its secrets as secrets, each block on its own."""
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


def started(home: Path, lab: Lab) -> Prefect:
    """A Prefect set up by the README's commands, its worker running; to be closed."""
    prefect = Prefect(home)
    try:
        prefect.start_server()
        prefect.run(PREFECT, "work-pool", "create", POOL, "--type", "process")
        prefect.run(PREFECT, "--no-prompt", "deploy", "--all")
        save_blocks(lab, prefect)
        prefect.start_worker()
    except BaseException:
        prefect.close()
        raise
    return prefect


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.terminate()
        try:
            process.wait(timeout=60)
        finally:
            _kill(process)


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.kill()
        process.wait(timeout=60)


def _lives(process: subprocess.Popen[bytes] | None) -> bool:
    return process is not None and process.poll() is None
