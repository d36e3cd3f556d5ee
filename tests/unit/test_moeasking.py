"""What SGLang says of a model's shape and of its default rows: its own loader, and stand-ins."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gpu_reclaim.commands import Section
from gpu_reclaim.moeasking import ask_defaults, ask_shape, parse_defaults, parse_shape
from gpu_reclaim.moeconfigs import GRID, Row
from gpu_reclaim.moescript import FOLDER
from gpu_reclaim.moespace import Shape
from lab.bench_site import bench_site
from lab.moe_site import MOE_LOADER
from unit.shells import here, stub

SHAPE = Shape(256, 256, 4096, 8, None, "bfloat16", "Qwen3MoeForCausalLM")
BLOCKS = replace(SHAPE, block_shape=(128, 128))
BLACKWELL, HOPPER = (12, 0), (9, 0)

COMMON = """
import json, os, sys
print("a library's greeting", end="")
class Number:
    def __str__(self):
        return "torch.bfloat16"
def get_model_config(@PARAMETERS@):
    with open(@SEEN@, "w") as file:
        own = {x: os.environ.get(x) for x in
            ("HF_HOME", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "x-y")}
        json.dump([{x: y for x, y in locals().items() if x not in ("file", "own")}, own], file)
    return {
        "num_experts": 257, "topk": 8, "hidden_size": 4096, "shard_intermediate_size": 512,
        "dtype": Number(), "block_shape": [128, 128], "architecture": "Glm4MoeForCausalLM",
    }
"""
ALL = "model_name, tp_size, ep_size=1, disable_shared_experts_fusion=False, topk_ids_dir=None"


@dataclass
class Host:
    """A checkout, and an interpreter that sees the packages of a folder."""

    home: Path
    site: Path
    python: str

    def common(self, text: str = COMMON, parameters: str = ALL) -> None:
        file = self.home / FOLDER / "common_utils.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        seen = repr(str(self.home / "seen"))
        file.write_text(text.replace("@PARAMETERS@", parameters).replace("@SEEN@", seen))

    def shape(self, ep: int = 2, *, no_fusion: bool = True) -> Shape | str:
        env = {"HF_HOME": "/it's my 'cache'", "x-y": "1", "HF_HUB_OFFLINE": "0"}
        home, model = str(self.home), "/models/it's mine"
        body = ask_shape(self.python, home, model, tp=4, ep=ep, no_fusion=no_fusion, env=env)
        return parse_shape(here({"shape": body}).section("shape"))

    def defaults(
        self, shape: Shape, dtype: str, capability: tuple[int, int] = HOPPER
    ) -> dict[int, Row] | str:
        body = ask_defaults(self.python, shape, dtype, GRID, capability=capability)
        return parse_defaults(here({"rows": body}).section("rows"))

    def module(self, name: str, text: str) -> None:
        """A module of the site; its packages are made too."""
        file = self.site / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in file.parents[: len(file.relative_to(self.site).parts) - 1]:
            (folder / "__init__.py").touch()
        file.write_text(text)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    home, site, own = (tmp_path / name for name in ("it's a checkout", "site", "my venv"))
    for folder in (home, site, own):
        folder.mkdir()
    text = f"PYTHONPATH='{site}' exec {sys.executable} \"$@\""
    return Host(home, site, str(stub(own, "python", text)))


def test_a_shape(host: Host) -> None:
    host.common()

    assert host.shape() == Shape(257, 256, 4096, 8, (128, 128), "bfloat16", "Glm4MoeForCausalLM")
    asked, env = json.loads((host.home / "seen").read_text())
    assert asked == {
        "model_name": "/models/it's mine",
        "tp_size": 4,
        "ep_size": 2,
        "disable_shared_experts_fusion": True,
        "topk_ids_dir": None,
    }
    assert env == {
        "HF_HOME": "/it's my 'cache'",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "x-y": None,
    }


@pytest.mark.parametrize("block", ["None", "[]", "[0, 128]", "[128, 0]"])
def test_blocks_with_a_zero_are_none(host: Host, block: str) -> None:
    host.common(COMMON.replace("[128, 128]", block))

    found = host.shape()
    assert isinstance(found, Shape)
    assert found.block_shape is None


def test_an_older_checkout_is_asked_for_what_it_knows(host: Host) -> None:
    host.common(parameters="model_name, tp_size")

    assert isinstance(host.shape(1, no_fusion=False), Shape)
    assert json.loads((host.home / "seen").read_text())[0] == {
        "model_name": "/models/it's mine",
        "tp_size": 4,
    }


@pytest.mark.parametrize(
    ("ep", "no_fusion", "name"), [(2, False, "ep_size"), (1, True, "disable_shared_experts_fusion")]
)
def test_an_older_checkout_cannot_be_asked_for_more(
    host: Host, ep: int, no_fusion: bool, name: str
) -> None:
    host.common(parameters="model_name, tp_size")

    assert host.shape(ep, no_fusion=no_fusion) == (
        "SGLang does not tell the model's shape: TypeError: this checkout's get_model_config takes "
        f"no {name}"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise SystemExit('no\\nGPU')", "SystemExit: no GPU"),
        ("import sglang.srt", "ModuleNotFoundError: No module named 'sglang'"),
        ("import os; os._exit(3)", "the program ended with status 3 and said nothing"),
        (COMMON.replace("257", "None"), "TypeError: int() argument must be"),
        (COMMON.replace('"topk": 8,', ""), "KeyError: 'topk'"),
    ],
)
def test_no_shape(host: Host, text: str, said: str) -> None:
    host.common(text)

    found = host.shape()
    assert isinstance(found, str)
    assert found.startswith(f"SGLang does not tell the model's shape: {said}")


def test_a_shape_that_cannot_be(host: Host) -> None:
    host.common(COMMON.replace("257", "0"))

    assert "cannot be" in str(host.shape())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "shape",
        "shape [1]",
        'shape {"experts": 1}',
        'shape {"experts": 1, "shard": 1, "hidden": 1, "topk": 1, "block_shape": [1]}',
    ],
)
def test_an_answer_that_is_no_shape(text: str) -> None:
    assert parse_shape(Section(text, 0)).__class__ is str


@pytest.mark.parametrize(
    "text",
    ["", "defaults {}", 'defaults {"1": 2}', 'defaults {"x": {}}', 'defaults {"1": {"a": "b"}}'],
)
def test_an_answer_that_is_no_rows(text: str) -> None:
    assert parse_defaults(Section(text, 0)).__class__ is str


SERVER_ARGS = """
def get_global_server_args():
    raise ValueError("Global server args is not set yet!")
"""
UTILS = "get_device_name = None\nis_hip = lambda: False\n"


@pytest.fixture
def older(host: Host) -> Host:
    """SGLang 0.5.9's own loader; what it imports stands in."""
    site = bench_site(f"{sys.version_info.major}.{sys.version_info.minor}")
    host.module(MOE_LOADER.removesuffix(".py").replace("/", "."), "")
    shutil.copyfile(site / MOE_LOADER, host.site / MOE_LOADER)
    host.module("torch", "dtype = object\n")
    host.module("triton", "__version__ = '3.5.1'\n")
    host.module("sglang.srt.server_args", SERVER_ARGS)
    host.module("sglang.srt.utils", UTILS)
    return host


def test_rows_of_0_5_9_for_16_bits(older: Host) -> None:
    rows = older.defaults(SHAPE, "")

    assert isinstance(rows, dict)
    assert list(rows) == list(GRID)
    small = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    large = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}
    assert rows == {m: small if m <= 256 else large for m in GRID}


def test_rows_of_0_5_9_for_fp8(older: Host) -> None:
    rows = older.defaults(SHAPE, "fp8_w8a8", BLACKWELL)

    assert isinstance(rows, dict)
    assert [rows[m]["BLOCK_SIZE_M"] for m in (1, 256, 512)] == [64, 64, 128]
    blocks = older.defaults(BLOCKS, "fp8_w8a8")
    assert isinstance(blocks, dict)
    assert blocks[1] == {
        "BLOCK_SIZE_M": 64,
        "BLOCK_SIZE_N": 128,
        "BLOCK_SIZE_K": 128,
        "GROUP_SIZE_M": 32,
        "num_warps": 4,
        "num_stages": 3,
    }


CONTEXT = "def get_exec():\n    raise RuntimeError('no context')\n"
NEWER = """
import torch
from sglang.srt.runtime_context import get_exec
def _get_cuda_shared_memory_per_block_optin():
    return None
def get_default_config(M, E, N, K, topk, dtype, is_marlin, block_shape=None):
    assert get_exec().deterministic.enable_deterministic_inference is False
    limit = _get_cuda_shared_memory_per_block_optin()
    return {
        "M": M, "E": E, "N": N, "K": K, "topk": topk, "fp8": dtype == "fp8_w8a8",
        "none": dtype is None, "marlin": is_marlin, "block": block_shape[1] if block_shape else 0,
        "low": limit is not None and limit < 128 * 1024,
        "major": torch.cuda.get_device_capability()[0],
    }
"""
MODULE = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config"


@pytest.fixture
def newer(host: Host) -> Host:
    """As 0.5.23 is made: where its loader lies, and what it asks."""
    host.module("torch", "class cuda:\n    get_device_capability = None\n")
    host.module("sglang.srt.runtime_context", CONTEXT)
    host.module(MODULE, NEWER)
    return host


@pytest.mark.parametrize(
    ("capability", "low"), [(BLACKWELL, True), (HOPPER, False), ((13, 0), False)]
)
def test_a_newer_loader_is_told_of_the_gpu(
    newer: Host, capability: tuple[int, int], low: bool
) -> None:
    rows = newer.defaults(BLOCKS, "fp8_w8a8", capability)

    assert isinstance(rows, dict)
    asked = {"E": 256, "N": 256, "K": 4096, "topk": 8, "marlin": False, "block": 128}
    told = {"low": low, "major": capability[0], "fp8": True, "none": False}
    assert rows == {m: {"M": m, **asked, **told} for m in GRID}


def test_16_bits_have_no_name(newer: Host) -> None:
    rows = newer.defaults(SHAPE, "")

    assert isinstance(rows, dict)
    assert (rows[1]["none"], rows[1]["block"]) == (True, 0)


def test_the_newer_place_is_looked_at_first(older: Host) -> None:
    older.module(MODULE, "def get_default_config(*given):\n    return {'newer': 1}\n")

    rows = older.defaults(SHAPE, "")
    assert isinstance(rows, dict)
    assert rows[1] == {"newer": 1}


def test_what_a_newer_loader_lacks_is_not_an_older_release(newer: Host) -> None:
    newer.module(MODULE, "import nothing_of_that_name\n")

    assert newer.defaults(SHAPE, "") == (
        "SGLang does not tell the rows that the server uses without a file: ModuleNotFoundError: "
        "No module named 'nothing_of_that_name'"
    )


def test_no_loader_at_all(host: Host) -> None:
    assert "ModuleNotFoundError: there is no sglang.srt" in str(host.defaults(SHAPE, ""))


def test_no_such_interpreter(host: Host) -> None:
    gone = replace(host, python="/opt/no such/python")

    assert "ended with status 127" in str(gone.defaults(SHAPE, ""))
    assert "ended with status 127" in str(gone.shape())
