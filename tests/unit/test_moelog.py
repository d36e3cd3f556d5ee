"""What a server's log says of its MoE kernel configs."""

from __future__ import annotations

import pytest

from gpu_reclaim.moeconfigs import ConfigName
from gpu_reclaim.moelog import Lookup, lookups

GPU = "NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition"
NAME = ConfigName(256, 256, GPU)
PACKAGE = "/opt/sglang/lib/python3.12/site-packages/sglang/srt/layers/moe/fused_moe_triton"
WANTED = f"{PACKAGE}/configs/triton_3_6_0/{NAME}"
OLDER = f"{PACKAGE}/configs/triton_3_4_0/{NAME}"
HEAD = "[2026-11-30 13:05:59 TP2] "
URL = "you can create them with https://github.com/sgl-project/sglang/tree/main/benchmark"
DEFAULT = "Using default MoE kernel config. Performance might be sub-optimal! Config file not found"
BLOCKS = ConfigName(256, 256, GPU, "fp8_w8a8", (128, 128), down=True)
DOWN = f"{PACKAGE}/configs/triton_3_6_0/{BLOCKS}"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            f"{HEAD}Using MoE kernel config from {WANTED}.",
            Lookup("own", WANTED, WANTED, NAME, "TP2"),
        ),
        (
            f"{HEAD}Config file not found at {WANTED}. Fallback to triton version 3.4.0 and use "
            f"MoE kernel config from {OLDER}. Performance might be sub-optimal!",
            Lookup("other", WANTED, OLDER, NAME, "TP2"),
        ),
        (f"{HEAD}{DEFAULT} at {WANTED}, {URL}", Lookup("none", WANTED, "", NAME, "TP2")),
        (
            "[2026-11-30 13:05:59] Using MoE kernel config with down_moe=False. Performance might "
            f"be sub-optimal! Config file not found at {DOWN}, {URL}",
            Lookup("none", DOWN, "", BLOCKS),
        ),
        (
            f"{HEAD}Down MoE config file not found at {DOWN}; reusing the tuned up-projection "
            "config without TMA.",
            Lookup("none", DOWN, "", BLOCKS, "TP2"),
        ),
    ],
)
def test_a_line(line: str, expected: Lookup) -> None:
    assert lookups([line]) == [expected]
    assert (expected.folder, expected.triton) == (PACKAGE, "3.6.0")


@pytest.mark.parametrize(
    "line",
    [
        "",
        f"{HEAD}Using default MoE kernel config.",
        f"{HEAD}Using MoE kernel config from /somewhere/E=1.json.",
        f"{HEAD}Using MoE kernel config from {WANTED[:-5]}.bak.",
        f"{HEAD}{DEFAULT} at /x/configs/triton_3_6_0/other.json, {URL}",
        f"{HEAD}Decode batch, #running-req: 1, gen throughput (token/s): 122.0",
    ],
)
def test_no_lookup(line: str) -> None:
    assert lookups([line]) == []


def test_each_rank_is_told_once() -> None:
    lines = [f"[x TP{rank}] {DEFAULT} at {WANTED}, {URL}" for rank in (0, 1, 1, 0, 3)]
    assert [found.rank for found in lookups(lines)] == ["TP0", "TP1", "TP3"]
