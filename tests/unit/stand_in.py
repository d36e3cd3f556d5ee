"""Runs the stand-in server of the lab, and SGLang's benchmark against it, on this very machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.bench_site import bench_site, install_python, packages_folder

NEXTN_2 = "--speculative-algorithm NEXTN --speculative-num-steps 2 --speculative-eagle-topk 1"
NODES = ("nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(4)))
MOE_FILE = "E=256,N=256,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition.json"
"""What the lab's model is looked up by on 4 GPUs."""
_ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def make_home(folder: Path) -> Path:
    """An interpreter's folder as in the guest, under this machine's Python."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    site = bench_site(version)
    home = folder / "sglang"
    # sys.executable may be a virtual environment's; its own packages must not be seen.
    install_python(home, site, Path(sys.base_prefix) / f"bin/python{version}", version)
    packages_folder(home, version).symlink_to(site / "site-packages")
    return home


def write_moe_table(folder: Path, table: Mapping[str, object], name: str = MOE_FILE) -> Path:
    """A folder for SGLANG_MOE_CONFIG_DIR with one file; returns that."""
    path = folder / "configs/triton_3_6_0" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table))
    return path


class Server:
    """A stand-in server; in a `with` block it is ended at the end, workers and all."""

    def __init__(self, home: Path, folder: Path) -> None:
        """Starts nothing yet."""
        self.home = home
        self.state = folder / "state"
        self._dev = folder / "dev"
        for path in (self.state / "mem", self._dev):
            path.mkdir(parents=True, exist_ok=True)
        for name in NODES:
            (self._dev / name).touch()
        self._environment = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"}
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.main: subprocess.Popen[str]

    def tell(self, name: str, content: Mapping[str, object]) -> None:
        """Writes a state file."""
        (self.state / f"{name}.json").write_text(json.dumps(content))

    def start(self, flags: str = "", **environment: str) -> None:
        """Starts it, in its own process group."""
        here = {"GPU_LAB_DEV": str(self._dev), "GPU_LAB_STATE": str(self.state)}
        argv: list[str | Path] = [self.home / "bin/python", "-m", "sglang.launch_server"]
        argv += ["--model-path", self.home / "model", "--tp", "4", "--port", str(self.port)]
        self.main = subprocess.Popen(
            [*argv, *flags.split()],
            env=self._environment | here | environment,
            cwd=self.home,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_health(self, wanted: int = 200, timeout: float = 20) -> None:
        """Waits for an answer of /health."""
        deadline = time.monotonic() + timeout
        while (status := self.health()) != wanted:
            assert time.monotonic() < deadline, f"/health answers {status}"
            time.sleep(0.02)

    def health(self, timeout: float = 5) -> int:
        """What /health answers; 0 where nothing does."""
        try:
            return int(self.get("/health", timeout)[0])
        except OSError:
            return 0

    def get(self, path: str, timeout: float = 5, **headers: str) -> tuple[int, str]:
        """Status and body of a GET."""
        return self._open(urllib.request.Request(self._url(path), headers=headers), timeout)

    def post(self, path: str, body: dict[str, Any], timeout: float = 5) -> tuple[int, str]:
        """Status and body of a POST."""
        data = json.dumps(body).encode()
        return self._open(urllib.request.Request(self._url(path), data), timeout)

    def generate(self, text: str, tokens: int = 16) -> dict[str, Any]:
        """The answer to a prompt."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        status, body = self.post("/generate", {"text": text, "sampling_params": params})
        assert status == 200, body
        answer: dict[str, Any] = json.loads(body)
        return answer

    def info(self) -> dict[str, Any]:
        """What /server_info says."""
        info: dict[str, Any] = json.loads(self.get("/server_info")[1])
        return info

    def workers(self) -> list[int]:
        """Those that charge the GPUs, and live."""
        pids = [int(path.name) for path in (self.state / "mem").iterdir()]
        return [pid for pid in pids if _lives(pid)]

    def bench(self, concurrency: int, requests: int, *more: str) -> dict[str, Any]:
        """Runs SGLang's benchmark; returns its record, and its exit status as "rc"."""
        output = self.state / "bench.jsonl"
        output.unlink(missing_ok=True)
        argv: list[str | Path] = [self.home / "bin/python", "-m", "sglang.bench_serving"]
        argv += ["--base-url", self._url(""), "--model", self.home / "model", "--seed", "1"]
        argv += ["--dataset-path", self.home / "prompts.json", "--num-prompts", str(requests)]
        argv += ["--max-concurrency", str(concurrency), "--disable-tqdm", "--flush-cache"]
        argv += ["--output-file", output, "--dataset-name", "sharegpt", *more]
        done = subprocess.run(
            argv,
            env=self._environment,
            cwd=self.state,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        record = json.loads(output.read_text()) if output.exists() else {}
        return {**record, "rc": done.returncode, "output": done.stdout + done.stderr}

    def end(self) -> None:
        """Ends whatever is left of it."""
        if hasattr(self, "main"):
            if self.main.poll() is None:
                self.main.kill()
            for pid in self._group():
                os.kill(pid, signal.SIGKILL)
            self.main.communicate()

    def _group(self) -> list[int]:
        """Its processes, with those that lost their parent."""
        stats = ((p, _stat(p)) for p in Path("/proc").iterdir() if p.name.isdigit())
        return [int(p.name) for p, stat in stats if stat[3:4] == [str(self.main.pid)]]

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def _open(self, request: urllib.request.Request, timeout: float) -> tuple[int, str]:
        try:
            with _ask(request, timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


def _stat(process: Path) -> list[str]:
    """Fields of its stat file after the name: state, parent, group, session."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _lives(pid: int) -> bool:
    return _stat(Path(f"/proc/{pid}"))[:1] not in ([], ["Z"])
