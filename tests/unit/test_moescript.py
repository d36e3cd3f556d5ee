"""SGLang's tuning script in a checkout: looked at by a real shell; its command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gpu_reclaim.commands import Section
from gpu_reclaim.errors import BadInput
from gpu_reclaim.moescript import CONFIGS, NEEDED, SCRIPT, Facts, Job, argv, look, parse_look
from unit.shells import here, stub

HELPER = "import os\nassert os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
TUNER = """import argparse, os
import common_utils
assert os.environ["HF_HUB_OFFLINE"] == "1"
parser = argparse.ArgumentParser()
parser.add_argument("--model", default="mistralai/Mixtral-8x7B-Instruct-v0.1")
parser.add_argument("--tp-size", "--tp", type=int, default=2)
parser.add_argument("--ep-size", "--ep", type=int, default=1)
parser.add_argument("--dtype", choices=["auto", "fp8_w8a8", "int8_w8a16"], default="auto")
parser.add_argument("--per-channel-quant", action="store_true")
parser.add_argument("--batch-size", type=int, required=False)
parser.add_argument("--tune", action="store_true")
parser.add_argument("--disable-shared-experts-fusion", action="store_true")
parser.parse_args()
"""
FACTS = Facts(
    found=True,
    script=f"/src/{SCRIPT}",
    flags=frozenset({*NEEDED, "--per-channel-quant", "--disable-shared-experts-fusion"}),
    code=0,
    source_version="0.5.9",
    exact=True,
    sglang="0.5.9",
)
JOB = Job("/models/glm", 4, 64, tune=True)


@dataclass
class Host:
    """A checkout, and an interpreter with a package of SGLang."""

    source: Path
    site: Path
    python: str

    def git(self, *words: str) -> str:
        name = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        line = ["git", "-C", str(self.source), *name, *words]
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, *tags: str) -> str:
        """The commit's number."""
        if not (self.source / ".git").exists():
            self.git("init", "-q")
        self.git("commit", "-q", "--allow-empty", "-m", "x")
        for tag in tags:
            self.git("tag", tag)
        return self.git("rev-parse", "HEAD")

    def install(self, version: str, package: Path, *parts: str) -> None:
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("raise ImportError('it was imported')\n")
        for part in parts:
            (package / part).mkdir(parents=True)
        for name, number in (("sglang", version), ("triton", "3.6.0")):
            folder = self.site / f"{name}-{number}.dist-info"
            folder.mkdir(parents=True)
            (folder / "METADATA").write_text(f"Name: {name}\nVersion: {number}\n")

    def look(self) -> Facts:
        body = look(self.python, str(self.source))
        return parse_look(here({"look": body}).section("look"))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    source, site, own = (tmp_path / name for name in ("it's a checkout", "site", "my venv"))
    (source / SCRIPT).parent.mkdir(parents=True)
    (source / SCRIPT).write_text(TUNER)
    (source / SCRIPT).with_name("common_utils.py").write_text(HELPER)
    own.mkdir()
    text = f"PYTHONPATH='{site}' exec {sys.executable} \"$@\""
    return Host(source, site, str(stub(own, "python", text)))


def test_all_of_it(host: Host) -> None:
    commit = host.commit("v0.5.9", "gateway-v0.9.1")
    package = host.site / "sglang"
    host.install("0.5.9", package, *CONFIGS)
    facts = host.look()

    assert facts == Facts(
        found=True,
        script=str(host.source / SCRIPT),
        flags=facts.flags,
        code=0,
        source_version="0.5.9",
        exact=True,
        commit=commit,
        sglang="0.5.9",
        triton="3.6.0",
        configs=f"{package}/srt/layers/moe/moe_runner/triton_utils/configs",
    )
    assert (facts.missing, facts.skewed) == ([], "")
    assert "--search-space-file" not in facts.flags


def test_nothing_is_left_in_the_checkout(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    host.git("init", "-q")
    host.git("add", ".")
    host.commit("v0.5.9")
    host.look()

    assert host.git("status", "--porcelain", "--ignored") == ""


def test_an_older_package_has_its_files_elsewhere(host: Host) -> None:
    host.install("0.5.9", host.site / "sglang", CONFIGS[1])

    assert host.look().configs == f"{host.site}/sglang/srt/layers/moe/fused_moe_triton/configs"


def test_a_folder_of_that_name_where_it_runs_is_no_package(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here/sglang" / CONFIGS[0]).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")

    assert host.look().configs == ""


def test_no_checkout_and_no_package(tmp_path: Path, host: Host) -> None:
    facts = replace(host, source=tmp_path / "none").look()

    assert facts == Facts()
    assert (facts.missing, facts.skewed) == (list(NEEDED), "")


def test_no_such_interpreter(host: Host) -> None:
    facts = replace(host, python="/opt/no such/python").look()

    assert (facts.found, facts.code, facts.flags) == (True, 127, frozenset())
    assert "/opt/no such/python" in facts.said


def test_a_module_that_the_package_lacks(host: Host) -> None:
    missing = "from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe\n"
    (host.source / SCRIPT).with_name("common_utils.py").write_text(missing)
    facts = host.look()

    assert (facts.code, facts.flags) == (1, frozenset())
    assert facts.skewed == (
        "the tuning script does not run by the server's interpreter: ModuleNotFoundError: No "
        "module named 'sglang'"
    )


def test_a_script_that_lacks_a_flag(host: Host) -> None:
    text = TUNER.replace('parser.add_argument("--tune", action="store_true")\n', "")
    (host.source / SCRIPT).write_text(text)

    assert host.look().missing == ["--tune"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("version", '__version__ = "0.5.3rc1"\n'),
        ("_version", "__version__: str\n__version__ = version = '0.5.3rc1'\n__commit__ = 'g1'\n"),
    ],
)
@pytest.mark.parametrize("git", [False, True])
def test_a_checkout_without_tags(host: Host, name: str, text: str, git: bool) -> None:
    folder = host.source / "python/sglang"
    folder.mkdir(parents=True)
    (folder / f"{name}.py").write_text(text)
    if git:
        host.commit("gateway-v0.9.1")

    facts = host.look()
    assert (facts.source_version, facts.exact) == ("0.5.3rc1", True)


def test_a_checkout_of_another_user(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.commit("v0.5.9")
    # Git's own test suite has it from there that a repository is not the caller's.
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")

    assert (host.look().source_version, host.look().exact) == ("0.5.9", True)


def test_a_folder_in_another_repository_is_not_taken_for_a_checkout(host: Host) -> None:
    outer = replace(host, source=host.source.parent)
    outer.commit("v9.9.9")

    assert (host.look().source_version, host.look().commit) == ("", "")


@pytest.mark.parametrize(
    ("version", "skewed"),
    [
        ("0.5.9", ""),
        (
            "0.5.23",
            "the checkout is of SGLang 0.5.9 with commits after it, and the package that serves is "
            "0.5.23",
        ),
        ("0.5.10.dev1+g@COMMIT@", ""),
        ("0.5.10.dev1+gabcdef012", "the checkout is of SGLang 0.5.9 with commits after it"),
    ],
)
def test_commits_after_a_release(host: Host, version: str, skewed: str) -> None:
    host.commit("v0.5.9")
    commit = host.commit()
    host.install(version.replace("@COMMIT@", commit[:9]), host.site / "sglang")
    facts = host.look()

    assert (facts.source_version, facts.exact, facts.commit) == ("0.5.9", False, commit)
    assert facts.skewed.startswith(skewed)
    assert bool(facts.skewed) == bool(skewed)


def test_the_package_is_the_checkout(host: Host) -> None:
    host.commit("v0.5.9")
    package = host.source / "python/sglang"
    host.install("0.0.0.dev0", package)
    (host.site / "sglang").symlink_to(package)
    facts = host.look()

    assert facts.own
    assert facts.skewed == ""


@pytest.mark.parametrize(
    ("facts", "skewed"),
    [
        (FACTS, ""),
        (replace(FACTS, sglang="0.5.23"), "the checkout is of SGLang 0.5.9, and the package"),
        (replace(FACTS, sglang="0.5.9+cu130"), ""),
        (replace(FACTS, sglang="0.5.9.post1"), "the checkout is of SGLang 0.5.9, and the package"),
        (replace(FACTS, source_version="", sglang="0.5.23"), ""),
        (replace(FACTS, sglang=""), ""),
        (replace(FACTS, code=1, said="x\nImportError: cannot import name 'y'"), "the tuning scri"),
        (replace(FACTS, code=0, said="ImportError: cannot import name 'y'"), ""),
    ],
)
def test_checkout_and_package(facts: Facts, skewed: str) -> None:
    assert facts.skewed.startswith(skewed)
    assert bool(facts.skewed) == bool(skewed)


def test_an_answer_of_nothing() -> None:
    assert parse_look(Section("code x\nhelp", 0)) == Facts()


def test_the_command() -> None:
    assert argv("/opt/python", FACTS, JOB) == [
        *("/opt/python", f"/src/{SCRIPT}", "--model", "/models/glm", "--tp-size", "4"),
        *("--ep-size", "1", "--dtype", "auto", "--batch-size", "64", "--tune"),
    ]


WITH: dict[str, Callable[[Job], Job]] = {
    "--per-channel-quant": lambda job: replace(job, per_channel=True),
    "--disable-shared-experts-fusion": lambda job: replace(job, no_fusion=True),
    "--search-space-file": lambda job: replace(job, space_file="/tmp/rows.json"),
}


@pytest.mark.parametrize("flag", WITH)
def test_a_flag_is_given_where_it_is_asked_for(flag: str) -> None:
    knows = replace(FACTS, flags=FACTS.flags | {flag})
    assert flag in argv("python", knows, WITH[flag](JOB))
    assert flag not in argv("python", knows, JOB)


@pytest.mark.parametrize("flag", [*WITH, *NEEDED])
def test_a_script_without_a_flag_that_is_asked_for(flag: str) -> None:
    lacks = replace(FACTS, flags=(FACTS.flags | set(WITH)) - {flag})
    job = WITH[flag](JOB) if flag in WITH else JOB
    with pytest.raises(BadInput, match=f"tuning script does not know {flag}\n"):
        argv("python", lacks, job)


def test_timing_needs_no_flag_for_tuning() -> None:
    lacks = replace(FACTS, flags=FACTS.flags - {"--tune"})
    words = argv("python", lacks, replace(JOB, tune=False, ep=2, dtype="fp8_w8a8"))
    assert words[-6:] == ["--ep-size", "2", "--dtype", "fp8_w8a8", "--batch-size", "64"]
