"""How good a row of MoE kernel parameters is here: one rule for the server and the tuning scripts.

At each number of tokens one row of SGLang's search space is the best:

    tokens       BLOCK_SIZE_M  BLOCK_SIZE_N  BLOCK_SIZE_K  GROUP_SIZE_M  num_warps  num_stages
    up to 32               16           128            64             1          4           4
    up to 256              32           128            64            16          4           3
    up to 1024             64           128            64            16          4           3
    more                  128           128            64            32          8           3

Its quality is 1. That of another falls with how many steps it is away, to 0 at what SGLang's own
heuristic gives there, below 0 beyond that, and -1 at the worst and for a row that cannot run.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
NAMES = (
    "BLOCK_SIZE_M",
    "BLOCK_SIZE_N",
    "BLOCK_SIZE_K",
    "GROUP_SIZE_M",
    "num_warps",
    "num_stages",
)
BEST = (
    (32, (16, 128, 64, 1, 4, 4)),
    (256, (32, 128, 64, 16, 4, 3)),
    (1024, (64, 128, 64, 16, 4, 3)),
    (None, (128, 128, 64, 32, 8, 3)),
)
"""For up to so many tokens."""
WEIGHTS = (2.0, 1.0, 1.0, 0.25, 0.5, 0.5)
"""What a step costs: twice or half as much, for the stages one more or less."""
TRITONS_OWN = {"num_warps": 4, "num_stages": 3}
"""Where a row does not say."""
SHARED_MEMORY = 101376
"""Bytes that a kernel may use on this GPU."""
BYTES = 2
"""Of a number in bf16."""
KERNEL_GAIN = 0.25
"""How much quicker the best row makes the kernel alone."""


def search_space() -> list[dict[str, int]]:
    """All 1,920 candidates, in the order in which they are tried."""
    blocks = product((2, 3, 4, 5), (16, 32, 64, 128, 256), (64, 128, 256), (32, 64, 128, 256))
    return [
        dict(zip(NAMES, (m, n, k, group, warps, stages), strict=True))
        for (stages, m, k, n), warps, group in product(blocks, (4, 8), (1, 16, 32, 64))
    ]


def best(tokens: int) -> dict[str, int]:
    """The best row for so many tokens."""
    values = next(row for most, row in BEST if most is None or tokens <= most)
    return dict(zip(NAMES, values, strict=True))


def heuristic(tokens: int, experts: int = 256) -> dict[str, int]:
    """What SGLang takes where it has no file, for bf16."""
    small = tokens <= experts
    return dict(zip(NAMES[:4], (16, 32, 64, 1) if small else (64, 64, 32, 8), strict=True))


def quality(row: Row, tokens: int) -> float:
    """How good it is for so many tokens: 1 the best, 0 the heuristic, -1 the worst."""
    if not _runs(row):
        return -1.0
    return max(-1.0, 1 - _distance(row, tokens) / _distance(heuristic(tokens), tokens))


def kernel_us(row: Row, tokens: int) -> float:
    """How long the kernel takes alone."""
    return (60 + tokens / 4) / (1 + KERNEL_GAIN * quality(row, tokens))


def shared_memory(row: Row) -> int:
    """Bytes that a row needs: the tiles of both factors, once for each stage."""
    m, n, k = (int(row[name]) for name in NAMES[:3])
    return (m * k + k * n) * BYTES * int(row.get("num_stages", TRITONS_OWN["num_stages"]))


def _runs(row: Row) -> bool:
    values = [_value(row, name) for name in NAMES]
    if not all(isinstance(value, int) and value > 0 for value in values):
        return False
    sizes = all(value >= 16 and value & (value - 1) == 0 for value in values[:3])
    return sizes and shared_memory(row) <= SHARED_MEMORY


def _value(row: Row, name: str) -> Any:
    return row.get(name, TRITONS_OWN.get(name))


def _distance(row: Row, tokens: int) -> float:
    wanted = best(tokens)
    steps = [abs(math.log2(_value(row, name) / wanted[name])) for name in NAMES[:-1]]
    steps.append(abs(_value(row, NAMES[-1]) - wanted[NAMES[-1]]))
    return sum(weight * step for weight, step in zip(WEIGHTS, steps, strict=True))


@dataclass(frozen=True)
class Shape:
    """What the kernel of one rank works on.

    Attributes:
        experts: How many it has.
        shard: Its part of an expert's intermediate size.
        hidden: Hidden size.
        topk: Experts of a token.
    """

    experts: int
    shard: int
    hidden: int
    topk: int


def read_config(model: Path) -> dict[str, Any]:
    """A model's config.

    Raises:
        OSError: There is none.
    """
    content: dict[str, Any] = json.loads((model / "config.json").read_text())
    return content


def read_shape(model: Path, tp_size: int, ep_size: int = 1) -> Shape | None:
    """What the model's config makes of it; none where it has no experts, or no config."""
    try:
        config = read_config(model)
    except OSError:
        return None
    text = config.get("text_config", config)
    if "num_experts" not in text:
        return None
    return Shape(
        experts=text["num_experts"] // ep_size,
        shard=text["moe_intermediate_size"] // (tp_size // ep_size),
        hidden=text["hidden_size"],
        topk=text["num_experts_per_tok"],
    )
