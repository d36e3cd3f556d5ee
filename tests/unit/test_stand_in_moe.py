"""The lab's MoE kernel parameters: SGLang's loader under the stand-ins, and what a row is worth."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpu_reclaim.moeconfigs import GRID
from lab.guest import nvidia_smi, sglang_moe
from lab.guest.package import torch
from lab.moe_site import MOE_CONFIGS
from unit.stand_in import MOE_FILE, make_home

LOADER = "sglang.srt.layers.moe.fused_moe_triton.fused_moe_triton_config"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("home"))


def python(home: Path, *argv: str, **environment: str) -> str:
    """What the server's interpreter prints."""
    done = subprocess.run(
        [home / "bin/python", *argv],
        env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"} | environment,
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import importlib.metadata as m; print(m.version('sglang'), m.version('triton'))",
         "0.5.9 3.6.0"),
        (f"import {LOADER} as c; print(c.get_config_file_name(256, 256, None))", MOE_FILE),
        (f"import torch, {LOADER} as c; print(c.get_config_dtype_str(torch.bfloat16))", "None"),
        (f"import torch, {LOADER} as c; print(c.get_config_dtype_str(torch.float))", "float32"),
        ("import transformers as t; print(t.utils.is_torch_available())", "False"),
        ("import transformers as t; print(len(t.AutoTokenizer.from_pretrained('model')('the of')"
         ".input_ids))", "2"),
        ("from sglang.srt.layers.moe.fused_moe_triton import *\n"
         "with override_config({'BLOCK_SIZE_M': 16}): print(get_config())\n"
         "print(get_config())", "{'BLOCK_SIZE_M': 16}\nNone"),
        ("import sglang.srt.utils as u; print(u.get_device_name(), u.is_hip())",
         f"{nvidia_smi.NAME} False"),
    ],
)  # fmt: skip
def test_sglangs_loader_is_to_be_had_without_a_gpu(home: Path, program: str, said: str) -> None:
    assert python(home, "-c", program) == said


def test_the_package_has_what_sglang_ships_with(home: Path) -> None:
    folders = sorted(path.name for path in (home / "lib" / MOE_CONFIGS).iterdir())
    assert "triton_3_4_0" in folders
    assert all(name.startswith("triton_") for name in folders)
    assert torch.NAME == nvidia_smi.NAME
    program = "import sglang.srt.utils as u; print(u.get_device_name())"
    assert python(home, "-c", program, CUDA_VISIBLE_DEVICES="") == "None"


def test_the_benchmark_still_starts(home: Path) -> None:
    assert "--max-concurrency" in python(home, "-m", "sglang.bench_serving", "--help")


@pytest.mark.parametrize("tokens", [*GRID, 3, 100, 257, 8192])
def test_one_row_is_the_best_and_the_heuristic_is_worth_nothing(tokens: int) -> None:
    space = sglang_moe.search_space()
    ranked = sorted(space, key=lambda row: -sglang_moe.quality(row, tokens))
    worth = [sglang_moe.quality(row, tokens) for row in ranked]
    assert len(space) == 1920
    assert ranked[0] == sglang_moe.best(tokens)
    assert worth[0] == 1 > worth[1]
    assert worth[-1] == -1
    assert sglang_moe.quality(sglang_moe.heuristic(tokens), tokens) == 0
    assert any(-1 < each < 0 for each in worth)


@pytest.mark.parametrize("tokens", [16, 64, 512, 4096])
def test_the_heuristic_is_the_loaders_own(home: Path, tokens: int) -> None:
    program = f"import {LOADER} as c, sglang.srt.server_args as a, types\n"
    program += "a.set_global_server_args_for_scheduler(types.SimpleNamespace("
    program += "enable_deterministic_inference=False))\n"
    program += f"print(c.get_default_config({tokens}, 256, 256, 3072, 8, None, False))"
    assert python(home, "-c", program) == str(sglang_moe.heuristic(tokens))


@pytest.mark.parametrize(
    "change",
    [{"BLOCK_SIZE_M": 24}, {"BLOCK_SIZE_K": 256}, {"num_stages": "4"}, {"BLOCK_SIZE_M": None}],
)
def test_a_row_that_cannot_run_is_the_worst(change: dict[str, Any]) -> None:
    assert sglang_moe.quality(sglang_moe.best(16) | change, 16) == -1


def test_a_better_row_is_a_quicker_kernel() -> None:
    rows = (sglang_moe.best(16), sglang_moe.heuristic(16), sglang_moe.best(4096))
    times = [sglang_moe.kernel_us(row, 16) for row in rows]
    assert times == sorted(times)
    assert len(set(times)) == 3
