"""What a tuning of the MoE kernel tries, how long that takes, and whether it can gain anything.

All of it is arithmetic over a model's shape; nothing is asked of a machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from gpu_reclaim.errors import BadInput
from gpu_reclaim.moeconfigs import Row

SPACE: Sequence[Row] = tuple(
    {
        "BLOCK_SIZE_M": m,
        "BLOCK_SIZE_N": n,
        "BLOCK_SIZE_K": k,
        "GROUP_SIZE_M": group,
        "num_warps": warps,
        "num_stages": stages,
    }
    for stages, m, k, n, warps, group in product(
        (2, 3, 4, 5), (16, 32, 64, 128, 256), (64, 128, 256), (32, 64, 128, 256), (4, 8),
        (1, 16, 32, 64),
    )
)  # fmt: skip
"""The 1920 rows that SGLang's tuning script tries on NVIDIA GPUs unless told otherwise, in its
order (`common_utils.py` beside it; the same in all releases that were read)."""

_KB = 1024
SHARED_MEMORY: Mapping[tuple[int, int], int] = {
    (7, 5): 64 * _KB,
    (8, 0): 163 * _KB,
    (8, 6): 99 * _KB,
    (8, 7): 163 * _KB,
    (8, 9): 99 * _KB,
    (9, 0): 227 * _KB,
    (10, 0): 227 * _KB,
    (10, 3): 227 * _KB,
    (12, 0): 99 * _KB,
    (12, 1): 99 * _KB,
}
"""Bytes of shared memory that one thread block may have, by compute capability (CUDA C++
Programming Guide, "Maximum amount of shared memory per thread block")."""

SECONDS_PER_ROW = 2643.9 / 1920
"""Of one size on one GPU: H100, Mixtral, M = 1, cold Triton cache (SGLang PR #29484)."""

RIDGE = 150.0
"""Floating point operations per byte read above which a GPU can be bound by arithmetic: A100 80 GB,
312 TFLOP/s dense 16-bit and 2.04 TB/s (NVIDIA's data sheets). Later GPUs have more (H200 206, H100
295), so that below it they are bound by reading too; H20 alone has less (37)."""

_BYTES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("", "auto", "bfloat16", "float16"), (2, 2)),
    "float32": (4, 4),
    "fp8_w8a8": (1, 1),
    "int8_w8a8": (1, 1),
    "int8_w8a16": (2, 1),
    "int4_w4a16": (2, 0.5),
}
_HOPPER, _BLACKWELL = 9, 10
_WARP_GROUP_ROWS = 64


@dataclass(frozen=True)
class Shape:
    """The expert layers of a model, on one rank.

    Attributes:
        experts: E: with the shared expert where that is fused.
        shard: N: intermediate size of one expert on one rank.
        hidden: K: what comes in and goes out, per token.
        topk: Experts that each token is sent to.
        block_shape: N and K of quantized blocks; None without those.
        dtype: Of the model, for example `bfloat16`.
        architecture: Its name, for example `Qwen3MoeForCausalLM`.
    """

    experts: int
    shard: int
    hidden: int
    topk: int
    block_shape: tuple[int, int] | None = None
    dtype: str = "bfloat16"
    architecture: str = ""


def element_bytes(dtype: str) -> tuple[float, float]:
    """Bytes of one number of the tokens (A) and of the weights (B).

    Args:
        dtype: As in a file's name or a flag; empty and `auto`: 16 bits.

    Raises:
        BadInput: There is no kernel of that name.
    """
    if dtype not in _BYTES:
        known = ", ".join(name for name in _BYTES if name)
        raise BadInput(f"{dtype!r:.40} is no dtype of the MoE kernel", remedy=f"one of {known}")
    return _BYTES[dtype]


def needed_bytes(row: Row, dtype: str, capability: tuple[int, int] | None = None) -> int:
    """Shared memory that a row needs, in bytes.

    Triton keeps a pair of tiles for each stage but one. Where the matrix unit itself reads from
    shared memory (capability 9.0 and 10.x, 64 rows and more) it keeps one for each stage. So its
    compiler counted in version 3.6.0, to the byte but for 16 to 40 of barriers on 10.x, and so
    says SGLang's issue #28019 of 12.1.

    Args:
        row: Launch parameters.
        dtype: As for `element_bytes`.
        capability: Of the GPU; None: the most that any needs.
    """
    a, b = element_bytes(dtype)
    pair = row["BLOCK_SIZE_M"] * row["BLOCK_SIZE_K"] * a
    pair += row["BLOCK_SIZE_K"] * row["BLOCK_SIZE_N"] * b
    return int(pair * (row["num_stages"] - (not _all_stages(row, dtype, capability))))


def _all_stages(row: Row, dtype: str, capability: tuple[int, int] | None) -> bool:
    if capability is None:
        return True
    a, b = element_bytes(dtype)
    # Weights that are widened first, and 8-bit integers on 10.x, take the other way.
    direct = a == b and not (capability[0] == _BLACKWELL and dtype == "int8_w8a8")
    wide = row["BLOCK_SIZE_M"] >= _WARP_GROUP_ROWS
    return direct and wide and capability[0] in (_HOPPER, _BLACKWELL)


def fitting(
    dtype: str, capability: tuple[int, int], block_shape: tuple[int, int] | None = None
) -> list[Row]:
    """The rows of `SPACE` that a GPU can run; the others cost a compilation each, and then fail.

    Args:
        dtype: As for `element_bytes`.
        capability: Of the GPU; of one that is not in `SHARED_MEMORY` no row is dropped for memory.
        block_shape: N and K of quantized blocks; the kernel reads one scale for each step of K.
    """
    most = SHARED_MEMORY.get(capability, math.inf)
    block_k = block_shape[1] if block_shape else 0
    return [
        row
        for row in SPACE
        if block_k % row["BLOCK_SIZE_K"] == 0 and needed_bytes(row, dtype, capability) <= most
    ]


def default_sizes(
    levels: Iterable[int], draft_tokens: int, chunked_prefill: int, running: int
) -> list[int]:
    """Numbers of tokens that one call works at under a load.

    Args:
        levels: Requests in flight.
        draft_tokens: Verified at once for each request; 0 or 1 without speculation.
        chunked_prefill: Tokens of a prefill's chunk; not above 0: unknown, or not chunked.
        running: Most requests that run at once; not above 0: unknown.
    """
    each = max(1, draft_tokens)
    sizes = {(min(level, running) if running > 0 else level) * each for level in levels}
    return sorted(sizes | ({chunked_prefill} if chunked_prefill > 0 else set()))


def minutes(sizes: int, gpus: int, rows: int, seconds_per_row: float = SECONDS_PER_ROW) -> float:
    """Minutes that a tuning takes, each GPU at one size after the other.

    Args:
        sizes: How many numbers of tokens.
        gpus: How many GPUs tune at the same time.
        rows: How many rows are tried for each size.
        seconds_per_row: For compiling and timing one.
    """
    return math.ceil(sizes / gpus) * rows * seconds_per_row / 60


def expectation(shape: Shape, sizes: Sequence[int], dtype: str, ridge: float = RIDGE) -> str:
    """Whether reading weights or arithmetic bounds the expert layers, for people.

    Tokens are taken to choose experts by chance, and all experts of the model to be on the rank;
    what tokens themselves take to read is left out, so that the ratio is the highest possible.

    Args:
        shape: The model's.
        sizes: Numbers of tokens; the smallest and the largest are told of.
        dtype: As for `element_bytes`.
        ridge: FLOP per byte above which arithmetic may bound the GPU.
    """
    ends = sorted({min(sizes), max(sizes)}) if sizes else []
    told = [_told(shape, tokens, dtype, ridge) for tokens in ends]
    return f"An expectation, by arithmetic alone: {'; '.join(told)}." if told else ""


def _told(shape: Shape, tokens: int, dtype: str, ridge: float) -> str:
    expert = 3 * shape.shard * shape.hidden
    missed = 1 - min(1.0, shape.topk / shape.experts)
    active = shape.experts * (1 - missed**tokens)
    read = active * expert * element_bytes(dtype)[1]
    ratio = 2 * tokens * shape.topk * expert / read
    bound = (
        f"under {ridge:.0f}, so bound by reading weights, and tuning can gain little there"
        if ratio < ridge
        else f"not under {ridge:.0f}, so it may be bound by arithmetic, and tuning can gain there"
    )
    return (
        f"at M = {tokens} a layer reads {active:.1f} of {shape.experts} experts "
        f"({read / 1e6:.1f} MB on each rank) at {ratio:.1f} FLOP/byte, {bound}"
    )
