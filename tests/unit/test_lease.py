"""A unit's fingerprint: what of its files counts as an edit by somebody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_reclaim.lease import MOE_FILE, TRIAL_FILE, TUNED_FILE
from gpu_reclaim.restoring import functions
from unit.shells import SHELLS, here, stub, tool_path

OWN = "# /etc/systemd/system/llm.service\n[Service]\nExecStart=/opt/py\n"
OTHERS = "# /etc/systemd/system/llm.service.d/limits.conf\n[Service]\nLimitNOFILE=9\n"
FOLDER = "/etc/systemd/system/llm.service.d"


def drop_in(name: str, text: str = "[Service]\nEnvironment=A=1\n") -> str:
    return f"# {FOLDER}/{name}\n{text}"


def print_of(tmp_path: Path, text: str) -> str:
    (tmp_path / "shown").write_text(text)
    body = f'{functions()}\nprintf "print "; print_of llm.service'
    return here({"print": body}).section("print").value("print")


@pytest.fixture(params=SHELLS)
def shown(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", tool_path(tools, request.param))
    stub(tools, "systemctl", f"cat '{tmp_path}/shown'")
    return tmp_path


@pytest.mark.parametrize(
    "more",
    [
        drop_in(TUNED_FILE),
        drop_in(MOE_FILE),
        drop_in(MOE_FILE) + "\n" + drop_in(TUNED_FILE),
        drop_in(MOE_FILE) + drop_in(TUNED_FILE, "# Written by gpu-reclaim\n[Service]\n"),
    ],
)
def test_files_of_ours_are_no_edit(shown: Path, more: str) -> None:
    assert print_of(shown, f"{OWN}\n{OTHERS}{more}") == print_of(shown, f"{OWN}\n{OTHERS}")
    assert print_of(shown, f"{OWN}{more}\n{OTHERS}") == print_of(shown, f"{OWN}\n{OTHERS}")


@pytest.mark.parametrize(
    "more",
    [
        drop_in("override.conf"),
        drop_in("zz-gpu-reclaim.conf.bak"),
        drop_in("my-zz-gpu-reclaim.conf2"),
        drop_in(TRIAL_FILE),
        drop_in(MOE_FILE) + drop_in("zzz-late.conf"),
        "ExecStartPre=/bin/true\n",
    ],
)
def test_files_of_others_are(shown: Path, more: str) -> None:
    assert print_of(shown, f"{OWN}{more}") != print_of(shown, OWN)
