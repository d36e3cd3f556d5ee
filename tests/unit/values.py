"""Short ways to the values that decisions are made from."""

from __future__ import annotations

import pytest

from gpu_reclaim.models import Gpu, GpuApp, GpuReading, Process, ProcessTable

UUIDS = [f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abcdef"]


def gpu(index: int, used: int | None = 0, **more: object) -> Gpu:
    values = {
        "index": index,
        "uuid": UUIDS[index],
        "name": "L40S",
        "memory_used_mib": used,
        "memory_total_mib": 46068,
    }
    return Gpu.model_validate(values | more)


def reading(*used: int | None, apps: list[GpuApp] | None = None, problem: str = "") -> GpuReading:
    """GPUs 0, 1, ... with that much memory in use."""
    gpus = [gpu(index, mib) for index, mib in enumerate(used)]
    return GpuReading(gpus=gpus, apps=apps or [], problem=problem)


def app(index: int, pid: int, used: int | None = 500) -> GpuApp:
    return GpuApp(gpu_uuid=UUIDS[index], pid=pid, memory_used_mib=used)


def process(pid: int = 50, *, holds: bool = True, unit: str = "", **more: object) -> Process:
    """A worker that holds /dev/nvidia0, in a unit's control group if one is named."""
    values: dict[str, object] = {
        "pid": pid,
        "start_time": pid * 10,
        "ppid": 1,
        "state": "S",
        "exe": "/opt/llm/bin/python3.11",
        "comm": "python3.11",
        "name": "sglang::scheduler",
        "command_line": "sglang::scheduler",
        "cgroups": [f"/system.slice/{unit}" if unit else "/user.slice"],
        "devices": ["/dev/nvidia0 (fd)"] if holds else [],
    }
    return Process.model_validate(values | more)


def table(*processes: Process, **more: object) -> ProcessTable:
    values: dict[str, object] = {
        "pid_namespace": "pid:[4026531836]",
        "ourselves": [900, 899],
        "processes": list(processes),
    }
    return ProcessTable.model_validate(values | more)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, each line once: a logger that propagates nothing is captured twice."""
    return [x.getMessage() for x in {id(x): x for x in caplog.records}.values()]
