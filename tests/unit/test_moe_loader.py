"""Our rules for MoE kernel configs, beside SGLang's own loader and all the files it ships."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_reclaim.errors import BadInput
from gpu_reclaim.moeconfigs import (
    GRID,
    ConfigName,
    chosen,
    filled,
    parse_name,
    parse_table,
    text_of,
    usable_rows,
)
from gpu_reclaim.moelog import Lookup, lookups
from lab.bench_site import bench_site
from lab.moe_site import MOE_CONFIGS, MOE_LOADER

TRITON = "3.6.0"
GPU = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
NAME = ConfigName(256, 256, GPU.replace(" ", "_"))
ROW = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
ASKED = [*GRID, 3, 5, 7, 12, 33, 40, 80, 100, 200, 700, 5000, 8192, 65536]


@pytest.fixture(scope="module")
def site() -> Path:
    return bench_site(f"{sys.version_info.major}.{sys.version_info.minor}")


def shipped_file(configs: Path) -> Path:
    """One that another Triton and another GPU would find."""
    return min((configs / "triton_3_4_0").glob("E=*NVIDIA_H200*.json"))


def load(site: Path, name: ConfigName, folder: Path | None = None, **more: Any) -> dict[str, Any]:
    """What SGLang's loader finds, with SGLANG_MOE_CONFIG_DIR where a folder is given."""
    ask = {
        "loader": str(site / MOE_LOADER),
        "triton": TRITON,
        "device": GPU,
        "experts": name.experts,
        "shard": name.shard,
        "dtype": name.dtype,
        "block_shape": name.block_shape,
        "per_channel": name.per_channel,
        "tokens": ASKED,
    } | more
    env = dict(os.environ) | ({"SGLANG_MOE_CONFIG_DIR": str(folder)} if folder else {})
    program = Path(__file__).with_name("moe_loader.py")
    argv = [sys.executable, str(program), json.dumps(ask)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_file_it_ships_for_nvidia_gpus_is_read(site: Path) -> None:
    """One of them is wrong by its own kernel: it steps over two quantized blocks at once."""
    refused, read, wrong = [], 0, []
    for path in sorted((site / MOE_CONFIGS).glob("triton_*/E=*NVIDIA*.json")):
        name = parse_name(path.name)
        assert name is not None, path.name
        assert str(name) == path.name
        try:
            table = parse_table(path.read_text(), name)
        except BadInput as error:
            refused.append(error.message)
            wrong.append((path, name))
        else:
            read += 1
            assert parse_table(text_of(table), name) == table
    assert read > 200
    assert [message.split(".json ")[1] for message in refused] == [
        "has BLOCK_SIZE_K = 256 at 64, and quantized blocks of 128"
    ]
    # A server that uses it is tuned all the same: its other rows are usable.
    ((path, name),) = wrong
    rows = {int(key): row for key, row in json.loads(path.read_text()).items()}
    usable = {key: row for key, row in rows.items() if row["BLOCK_SIZE_K"] != 256}
    assert usable_rows(path.read_text(), name) == usable
    assert set(rows) - set(usable) == {64, 128, 256, 512}


@pytest.mark.parametrize(
    "name", [NAME, ConfigName(128, 768, NAME.device, "fp8_w8a8", (128, 128)), ConfigName(8, 1, "x")]
)
def test_it_asks_for_the_file_of_our_name(site: Path, name: ConfigName) -> None:
    found = load(site, name, device=name.device.replace("_", " "))
    path = f"{site / MOE_CONFIGS}/triton_3_6_0/{name}"
    assert found["said"][0].startswith("WARNING Using default MoE kernel config.")
    assert lookups(found["said"]) == [Lookup("none", path, "", name)]


def test_of_our_overlay_it_uses_the_rows_that_we_say(site: Path, tmp_path: Path) -> None:
    """The built-in files are all there too, and other shapes find theirs."""
    overlay = tmp_path / "configs"
    shutil.copytree(site / MOE_CONFIGS, overlay)
    dice = random.Random(20261201)
    before = {size: {**ROW, "num_stages": dice.randint(1, 5)} for size in (1, 16, 48, 512, 4096)}
    tuned = {size: {**ROW, "num_warps": 8, "num_stages": size % 7 + 1} for size in (4, 64, 256)}
    table = filled(tuned, lambda tokens: chosen(before, tokens), {*GRID, *before})
    (overlay / "triton_3_6_0").mkdir(exist_ok=True)
    (overlay / "triton_3_6_0" / str(NAME)).write_text(text_of(table))

    found = load(site, NAME, tmp_path)
    assert found["said"] == [f"INFO Using MoE kernel config from {overlay}/triton_3_6_0/{NAME}."]
    assert lookups(found["said"])[0].found == "own"
    assert found["rows"] == [chosen(table, tokens) for tokens in ASKED]
    # A prefill is served as before, however few tokens were tuned for.
    assert found["rows"][-1] == before[4096]

    other = shipped_file(overlay)
    name = parse_name(other.name)
    assert name is not None
    shipped = load(site, name, tmp_path, device=name.device.replace("_", " "), triton="3.4.0")
    assert shipped["said"] == [f"INFO Using MoE kernel config from {other}."]

    newer = load(site, name, tmp_path, device=name.device.replace("_", " "))
    wanted = f"{overlay}/triton_3_6_0/{name}"
    assert lookups(newer["said"]) == [Lookup("other", wanted, str(other), name)]


def test_a_folder_with_our_file_alone_would_hide_all_others(site: Path, tmp_path: Path) -> None:
    """That is why an overlay is a full copy."""
    other = shipped_file(site / MOE_CONFIGS)
    name = parse_name(other.name)
    assert name is not None
    (tmp_path / "configs").mkdir()
    found = load(site, name, tmp_path, device=name.device.replace("_", " "), triton="3.4.0")
    assert found["said"][0].startswith("WARNING Using default MoE kernel config.")
