"""The wheel in an empty environment, used by a foreign project with a `flows/` of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "tests" / "lab" / "guest" / "nvidia_smi.py"

PIPELINE = '''
"""Somebody else's pipeline: its package is called `flows`, like ours is not."""

from prefect import flow

from flows.settings import HOST
from gpu_reclaim.blocks import GpuHost
from gpu_reclaim.flows import reclaim_gpus


@flow
def evaluation() -> str:
    GpuHost(expected_gpus=4).save(HOST, overwrite=True)
    report = reclaim_gpus(HOST)
    return f"{report.verdict} after ending {[row.pid for row in report.ended]}"


if __name__ == "__main__":
    print(evaluation())
'''


def run(*argv: str | Path, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [str(x) for x in argv], check=False, capture_output=True, text=True, env=env, cwd=cwd
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # From an sdist, so that nothing a former build left in the tree can get in.
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return next(folder.glob("*.whl"))


def test_wheel_holds_one_package_and_its_metadata(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()

    assert {name.split("/")[0].split("-")[0] for name in names} == {"gpu_reclaim"}
    assert "gpu_reclaim/py.typed" in names
    for part in ("flows/reclaim.py", "tasks/release.py", "blocks/hosts.py", "transport/ssh.py"):
        assert f"gpu_reclaim/{part}" in names
    assert len([x for x in names if x.endswith(".py")]) == len(list_sources())


def list_sources() -> list[Path]:
    folders = [ROOT / "src" / "gpu_reclaim", ROOT / "blocks", ROOT / "tasks", ROOT / "flows"]
    return [path for folder in folders for path in folder.rglob("*.py")]


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A real process that holds a private device file."""
    device = tmp_path / "dev" / "nvidia2"
    device.parent.mkdir()
    device.write_text("")
    for name in ("nvidia0", "nvidia1", "nvidia3"):
        (device.parent / name).write_text("")
    body = f"f = open({str(device)!r}); print('ready', flush=True); import time; time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()


def test_foreign_project_reclaims_as_a_subflow(
    wheel: Path, tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    project = tmp_path / "project"
    (project / "flows").mkdir(parents=True)
    (project / "flows" / "__init__.py").write_text("")
    (project / "flows" / "settings.py").write_text('HOST = "evaluation-box"\n')
    (project / "flows" / "pipeline.py").write_text(PIPELINE)
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {STAND_IN} "$@"\n')
    smi.chmod(0o755)
    env = {
        "PATH": f"{smi.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "GPU_LAB_DEV": str(tmp_path / "dev"),
        "GPU_LAB_STATE": str(tmp_path / "state"),
        "GPU_RECLAIM_DEVICE_PREFIXES": f'["{tmp_path}/dev/nvidia"]',
        "GPU_RECLAIM_HOLD_FOLDER": str(tmp_path),
    }
    said = run(python, "-m", "flows.pipeline", env=env, cwd=project)

    assert f"clean after ending [{holder.pid}]" in said
    assert holder.wait(timeout=60) == -15
