"""SGLang's files of fused-MoE kernel configs: their names, what is in them, which row is used.

As its loader does it (`fused_moe_triton_config.py`, sglang 0.5.9; `fused_moe_triton` was moved to
`moe_runner/triton_utils` by 0.5.13, the rules are the same).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gpu_reclaim.errors import BadInput

Row = Mapping[str, int | bool]
"""Launch parameters of the kernel, by the names in the files."""

Table = Mapping[int, Row]
"""A row for each number of tokens that one call works at (M)."""

GRID = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""Token numbers that SGLang's tuning script covers unless told otherwise."""

LARGEST_TOKENS = 1 << 20
"""No call works at more tokens than that (a chunked prefill has some thousands)."""

_BLOCKS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
_NAME = re.compile(
    r"E=(?P<experts>[1-9][0-9]*),N=(?P<shard>[1-9][0-9]*),device_name=(?P<device>[^,/ ]+?)"
    r"(?:,dtype=(?P<dtype>[a-z0-9_]+?))?"
    r"(?:,block_shape=\[(?P<block_n>[1-9][0-9]*), (?P<block_k>[1-9][0-9]*)\])?"
    r"(?P<channel>,per_channel_quant=True)?(?P<down>_down)?\.json"
)


@dataclass(frozen=True)
class ConfigName:
    """What a file is for; every part must be the server's own, or it is never read.

    Attributes:
        experts: E: on one rank, with the shared expert where that is fused.
        shard: N: intermediate size of one expert, on one rank.
        device: As torch names the GPU, with `_` for blanks.
        dtype: `fp8_w8a8` and the like; empty for bf16 and fp16.
        block_shape: N and K of quantized blocks; None without those.
        per_channel: Quantized by channel.
        down: For the second (down) product alone.
    """

    experts: int
    shard: int
    device: str
    dtype: str = ""
    block_shape: tuple[int, int] | None = None
    per_channel: bool = False
    down: bool = False

    def __str__(self) -> str:
        """The file's name."""
        parts = [f"E={self.experts}", f"N={self.shard}", f"device_name={self.device}"]
        parts += [f"dtype={self.dtype}"] if self.dtype else []
        parts += [f"block_shape={list(self.block_shape)}"] if self.block_shape else []
        parts += ["per_channel_quant=True"] if self.per_channel else []
        return f"{','.join(parts)}{'_down' if self.down else ''}.json"


def parse_name(name: str) -> ConfigName | None:
    """What a file of that name is for; None where SGLang would never ask for such a name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    block = (int(found["block_n"]), int(found["block_k"])) if found["block_n"] else None
    return ConfigName(
        experts=int(found["experts"]),
        shard=int(found["shard"]),
        device=found["device"],
        dtype=found["dtype"] or "",
        block_shape=block,
        per_channel=bool(found["channel"]),
        down=bool(found["down"]),
    )


def parse_table(text: str, name: ConfigName) -> dict[int, dict[str, int | bool]]:
    """What is in a file, where the loader and the kernel take all of it.

    Raises:
        BadInput: They would not, or it is no such file; the message says what is wrong.
    """
    try:
        found = json.loads(text, object_pairs_hook=_no_key_twice)
    except ValueError as error:
        raise _wrong(name, f"is no JSON: {error}") from None
    if not isinstance(found, dict) or not found:
        raise _wrong(name, "has no rows")
    return {_tokens(key, name): _row(key, row, name) for key, row in found.items()}


def usable_rows(text: str, name: ConfigName) -> dict[int, dict[str, int | bool]]:
    """The rows of a file that a server uses already, without those that its kernel cannot run.

    SGLang itself ships a file with four such rows (0.5.9, `triton_3_5_1`, E=512,N=256, H100).

    Raises:
        BadInput: There is none left.
    """
    try:
        found = json.loads(text)
    except ValueError:
        return parse_table(text, name)
    rows = found.items() if isinstance(found, dict) else ()
    good: dict[int, dict[str, int | bool]] = {}
    for key, row in rows:
        with suppress(BadInput):
            good |= parse_table(json.dumps({key: row}), name)
    return good or parse_table(text, name)


def text_of(table: Table) -> str:
    """The file with that table."""
    return json.dumps({str(m): dict(table[m]) for m in sorted(table)}, indent=4) + "\n"


def chosen(table: Table, tokens: int) -> Row:
    """The row that the server uses for so many tokens: of the nearest key, however far it is."""
    return table[min(table, key=lambda key: abs(key - tokens))]


def filled(
    tuned: Table, before: Callable[[int], Row], grid: Iterable[int] = GRID
) -> dict[int, Row]:
    """The tuned rows, and for all other sizes of the grid what the server used before.

    A table of the tuned rows alone would serve every other size too, by its nearest key: a prefill
    of 8192 tokens by what is best for 64.

    Args:
        tuned: What was measured.
        before: Gives the row that the server used for a number of tokens: `chosen` of its table,
            or its own default.
        grid: The sizes; those of the table in use before belong to them.
    """
    sizes = {*grid, *tuned}
    return {size: tuned[size] if size in tuned else before(size) for size in sorted(sizes)}


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _tokens(key: str, name: ConfigName) -> int:
    # The loader says int(key) to each; what else that takes (" 1_6 ") nobody writes on purpose.
    if not re.fullmatch(r"[1-9][0-9]*", key, re.ASCII) or int(key) > LARGEST_TOKENS:
        raise _wrong(name, f"has the key {key!r:.40}, which is no number of tokens")
    return int(key)


def _row(key: str, row: object, name: ConfigName) -> dict[str, int | bool]:
    if not isinstance(row, dict):
        raise _wrong(name, f"has no row of parameters at {key}")
    for field in (*_BLOCKS, "GROUP_SIZE_M"):
        if field not in row:
            raise _wrong(name, f"lacks {field} at {key}")
    for field, value in row.items():
        if field not in _ACCEPTED:
            raise _wrong(name, f"has {field!r:.40} at {key}, which is no parameter of the kernel")
        if not _ACCEPTED[field](value):
            raise _wrong(name, f"has {field} = {value!r:.40} at {key}")
    # The kernel reads one scale for each step of K.
    if name.block_shape and name.block_shape[1] % row["BLOCK_SIZE_K"]:
        raise _wrong(
            name,
            f"has BLOCK_SIZE_K = {row['BLOCK_SIZE_K']} at {key}, and quantized blocks of "
            f"{name.block_shape[1]}",
        )
    return row


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_TOKENS


def _power_of_two(least: int, most: int) -> Callable[[object], bool]:
    powers = {1 << n for n in range(most.bit_length()) if 1 << n >= least}
    return lambda value: _count(value) and value in powers


_ACCEPTED: Mapping[str, Callable[[object], bool]] = {
    # Triton's ranges are powers of two, and its matrix product takes 16 at least.
    **dict.fromkeys(_BLOCKS, _power_of_two(16, 1024)),
    "GROUP_SIZE_M": _count,
    # A block of CUDA has 1024 threads at most, a warp 32.
    "num_warps": _power_of_two(1, 32),
    "num_stages": _count,
    # A cluster of CUDA has 16 blocks at most.
    "num_ctas": _power_of_two(1, 16),
    "USE_TMA": lambda value: isinstance(value, bool),
}
"""Parameters of the kernel on NVIDIA GPUs, and what each may be."""


def _wrong(name: ConfigName, what: str) -> BadInput:
    return BadInput(
        f"{name} {what}",
        remedy="give a file that SGLang's tuning script wrote for this kernel; one of another "
        "project's has other keys",
    )
