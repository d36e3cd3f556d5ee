"""fuser's second opinion, where it is installed and where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_reclaim.commands import Section
from gpu_reclaim.fuser import look, parse
from unit.actors import MAP_ONLY, OPEN, Stage
from unit.shells import here, need, stub, without


@pytest.fixture(params=("dash", "bash"))
def psmisc(
    request: pytest.FixtureRequest, tool_paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fuser of psmisc, under two shells."""
    need("fuser")
    monkeypatch.setenv("PATH", tool_paths[request.param])


def test_holders_of_several_nodes_are_named_once_each_in_order(psmisc: None, stage: Stage) -> None:
    first, second = stage.file("gpu0"), stage.file("gpu 1")
    both = stage.start(f"a = {OPEN.format(path=first)}\nb = {OPEN.format(path=second)}")
    mapper = stage.start(MAP_ONLY.format(path=second))
    stage.start(OPEN.format(path=stage.file("other")))
    result = here({"fuser": look([f"{stage.folder}/gpu"])})

    assert parse(result.sections["fuser"]) == sorted([both, mapper])


def test_who_stands_in_a_folder_of_devices_is_not_named(psmisc: None, stage: Stage) -> None:
    (stage.folder / "gpu-caps").mkdir()
    stage.start(f"os.chdir({str(stage.folder / 'gpu-caps')!r})")
    result = here({"fuser": look([f"{stage.folder}/gpu"])})

    assert parse(result.sections["fuser"]) == []


def test_nodes_without_holder_and_no_nodes_name_nobody(psmisc: None, stage: Stage) -> None:
    stage.file("gpu0")
    held = here({"fuser": look([f"{stage.folder}/gpu"])}).sections["fuser"]
    none = here({"fuser": look([f"{stage.folder}/nothing"])}).sections["fuser"]

    assert parse(held) == []
    assert none == Section("", 0)


def test_without_fuser_nobody_is_named_and_nothing_fails(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", without(folder, "fuser"))
    stage.start(OPEN.format(path=stage.file("gpu0")))
    body = look([f"{stage.folder}/gpu"])
    # The usual folders are added to PATH on the far side; here they would bring fuser back.
    result = here({"fuser": f"PATH={folder}\n{body}"})

    assert result.sections["fuser"] == Section("", 0)
    assert result.stderr == ""


def test_the_fuser_of_busybox_is_understood_too(
    stage: Stage, tool_paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", tool_paths["busybox"])
    holder = stage.start(OPEN.format(path=stage.file("gpu0")))
    result = here({"fuser": look([f"{stage.folder}/gpu"])})

    assert parse(result.sections["fuser"]) == [holder]


def test_a_fuser_that_fails_names_nobody(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, psmisc: None
) -> None:
    stub(tmp_path, "fuser", "echo 'gpu0: cannot look' >&2; exit 1")
    stage.file("gpu0")
    result = here({"fuser": f"PATH={tmp_path}:$PATH\n{look([f'{stage.folder}/gpu'])}"})

    assert parse(result.sections["fuser"]) == []
    assert "cannot look" in result.stderr


@pytest.mark.parametrize(
    ("text", "pids"),
    [
        ("", []),
        ("fuser \n", []),
        ("fuser  12 34\n", [12, 34]),
        ("fuser  34  12 34\n", [12, 34]),
        ("12 34\n", []),
        ("fuser 12m 34\n", [12, 34]),
    ],
)
def test_pids(text: str, pids: list[int]) -> None:
    assert parse(Section(text, 0)) == pids
