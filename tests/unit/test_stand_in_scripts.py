"""What else the lab's checkout has: kernel times, old and new flags, the second script."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_reclaim.moeconfigs import GRID
from lab.bench_site import bench_site, install_in_guest
from lab.guest import sglang_moe
from lab.moe_site import CHECKOUT, SCRIPTS, write_topk_ids
from lab.prompts import MOE_MODEL
from lab.waiting import wait_until
from unit.stand_in import MOE_FILE, make_home, write_moe_table
from unit.tuner import MAIN, SEP, Tuner

DOWN_FILE = MOE_FILE.replace(".json", "_down.json")
SKEWED = "ModuleNotFoundError: No module named 'sglang.srt.layers.moe.moe_runner.triton_utils'"
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "hidden_size": 7168,
    "torch_dtype": "bfloat16",
    "quantization_config": {"weight_block_size": [128, 128]},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("home"))


@pytest.fixture
def tuner(home: Path, tmp_path: Path) -> Iterator[Tuner]:
    tuner = Tuner(home, tmp_path)
    yield tuner
    tuner.end()


def kernel_times(output: str) -> dict[int, tuple[dict[str, int], float]]:
    """Row and microseconds by number of tokens."""
    pattern = r"Batch size: (\d+), config: (\{.*\})\nKernel time: (\d+\.\d\d) us\n"
    return {
        int(tokens): (ast.literal_eval(row), float(taken))
        for tokens, row, taken in re.findall(pattern, output)
    }


def test_without_tune_it_says_how_quick_the_servers_rows_are(tuner: Tuner, tmp_path: Path) -> None:
    status, output, errors = tuner.run("--tp 4 --batch-sizes 16 4096")
    assert status == 0, errors
    before = kernel_times(output)
    assert {size: row for size, (row, _) in before.items()} == {
        size: sglang_moe.heuristic(size) for size in (16, 4096)
    }
    assert f"Config file not found at {tuner.home}" in errors

    write_moe_table(tmp_path, {"16": sglang_moe.best(16)})
    overlay = {"SGLANG_MOE_CONFIG_DIR": str(tmp_path)}
    after = kernel_times(tuner.run("--tp 4 --batch-sizes 16 4096", **overlay)[1])
    assert after[16][0] == sglang_moe.best(16)
    assert after[16][1] == pytest.approx(before[16][1] / 1.25, abs=0.01)
    # The nearest key serves all others, which are worse off for it.
    assert after[4096][0] == sglang_moe.best(16)
    assert after[4096][1] > before[4096][1]
    assert tuner.files() == {}


def test_all_sizes_unless_told_otherwise(tuner: Tuner) -> None:
    tuner.tell(seconds=0.01)
    assert tuple(kernel_times(tuner.run("--tp 4")[1])) == GRID
    tuner.tell({"*": "crashes"})
    assert tuple(kernel_times(tuner.run("--tp 4 --batch-size 8")[1])) == (8,)


@pytest.mark.parametrize("flag", ["--batch-sizes", "--search-space-file"])
def test_old_scripts_have_fewer_flags(tuner: Tuner, flag: str) -> None:
    assert flag in tuner.run("--help")[1]
    tuner.tell(old=True)
    assert flag not in tuner.run("--help")[1]
    status, _, errors = tuner.run(f"--tp 4 --tune {flag} 8")
    assert status == 2
    assert "unrecognized arguments" in errors
    assert tuner.run("--tp 4 --tune --batch-size 8")[0] == 0


@pytest.mark.parametrize("script", [MAIN, SEP])
@pytest.mark.parametrize("flags", ["--help", "--tp 4 --tune --batch-size 8"])
def test_scripts_newer_than_the_package_end_at_once(tuner: Tuner, script: str, flags: str) -> None:
    tuner.tell(skew=True)
    status, output, errors = tuner.run(flags, script)
    assert (status, output) == (1, "")
    assert errors.endswith(f"{SKEWED}\n")


def model(tuner: Tuner, call: str) -> str:
    """What get_model_config says, as a program of its own would ask for it."""
    program = f"from common_utils import get_model_config\nprint(get_model_config({call}))"
    done = subprocess.run(
        [tuner.home / "bin/python", "-c", program],
        env={"PYTHONPATH": str(tuner.scripts)},
        cwd=tuner.work,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    return done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    ("config", "call", "said"),
    [
        (MOE_MODEL, "4",
         "'num_experts': 256, 'topk': 8, 'hidden_size': 3072, 'shard_intermediate_size': 512, "
         "'dtype': torch.bfloat16, 'block_shape': None, "
         "'architecture': 'Qwen3_5MoeForConditionalGeneration'"),
        (MOE_MODEL, "4, ep_size=4", "'num_experts': 64, 'topk': 8, 'hidden_size': 3072, "
         "'shard_intermediate_size': 2048"),
        (DEEPSEEK, "8", "'num_experts': 257, 'topk': 8, 'hidden_size': 7168, "
         "'shard_intermediate_size': 512, 'dtype': torch.bfloat16, 'block_shape': [128, 128]"),
        (DEEPSEEK, "8, 1, False, 'ids'", "'num_experts': 257, 'topk': 9"),
        (DEEPSEEK, "8, disable_shared_experts_fusion=True", "'num_experts': 256, 'topk': 8"),
        (DEEPSEEK | {"architectures": ["NewMoe"]}, "8",
         "AttributeError: 'ModelConfig' object has no attribute 'num_local_experts'"),
        (MOE_MODEL, "3", "AssertionError"),
        (None, "4", "OSError: We couldn't connect to 'https://huggingface.co'"),
    ],
)  # fmt: skip
def test_what_it_knows_of_a_model(
    tuner: Tuner, config: dict[str, Any] | None, call: str, said: str
) -> None:
    if config:
        (tuner.work / "config.json").write_text(json.dumps(config))
    assert said in model(tuner, f"'.', {call}")


def test_quantized_blocks_are_in_the_name_and_limit_the_candidates(tuner: Tuner) -> None:
    (tuner.work / "config.json").write_text(json.dumps(DEEPSEEK))
    flags = "--model . --tp 8 --dtype fp8_w8a8 --batch-size 8 --tune"
    _, output, errors = tuner.run(flags)
    assert "Start tuning over 1280 configurations" in output, errors
    (name,) = tuner.files()
    assert name.startswith("E=257,N=256,")
    assert name.endswith(",dtype=fp8_w8a8,block_shape=[128, 128].json")


def test_another_model_than_asked_for_is_not_there(tuner: Tuner) -> None:
    status, _, errors = tuner.run("--model mistralai/Mixtral-8x7B-Instruct-v0.1 --tune")
    assert status == 1
    assert "OSError: We couldn't connect" in errors


def test_the_second_script_wants_recorded_routing(tuner: Tuner) -> None:
    assert "--topk-ids-dir" in tuner.run("--tp 4 --tune", SEP)[2]
    status, _, errors = tuner.run("--tp 4 --tune --topk-ids-dir ids", SEP)
    assert status == 1
    assert "FileNotFoundError" in errors
    assert "topk_ids_layer3_idx0.pt" in errors


def test_the_second_script_writes_nothing_for_one_size(tuner: Tuner) -> None:
    write_topk_ids(tuner.work / "ids")
    tuner.tell(seconds=1)
    process = tuner.start("--tp 4 --tune --batch-size 64 --topk-ids-dir ids", SEP)
    wait_until("it holds one", lambda: tuner.gpus() == ["nvidia0"])
    assert list(tuner.processes()) == [process.pid]
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Completed tuning for batch_size=64" in output
    assert "Writing" not in output
    assert [path.name for path in tuner.work.iterdir()] == ["ids"]


def test_the_second_script_writes_a_file_for_each_product(tuner: Tuner) -> None:
    write_topk_ids(tuner.work / "ids")
    tuner.tell(seconds=0.01)
    status, output, errors = tuner.run("--tp 4 --tune --topk-ids-dir ids", SEP)
    assert status == 0, errors
    files = tuner.files()
    assert set(files) == {MOE_FILE, DOWN_FILE}
    assert files[MOE_FILE] == {str(size): sglang_moe.best(size) for size in GRID}
    assert {key: row["USE_TMA"] for key, row in files[DOWN_FILE].items()} == {
        str(size): size >= 128 for size in GRID
    }
    assert f"Writing best config to {DOWN_FILE}..." in output
    assert len(list(tuner.work.glob("tuning_result_*.txt"))) == 1


def test_a_guest_gets_all_of_it(tmp_path: Path) -> None:
    install_in_guest(tmp_path, bench_site(f"{sys.version_info.major}.{sys.version_info.minor}"))
    checkout = tmp_path / CHECKOUT.lstrip("/")
    names = {path.name for path in (checkout / SCRIPTS).iterdir()}
    assert names == {MAIN, SEP, "common_utils.py"}
    assert '__version__ = "0.5.9"' in (checkout / "python/sglang/version.py").read_text()
    assert (tmp_path / "opt/sglang/lib/sglang_tuner.py").exists()
