"""Which rows of MoE kernel parameters the stand-in server runs with, by SGLang's own loader."""

import importlib
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lab.guest.sglang_flags import Setting
    from lab.guest.sglang_moe import Row, Shape, read_shape
else:
    from sglang_moe import read_shape

LOADER = "sglang.srt.layers.moe.fused_moe_triton.fused_moe_triton_config"
RUNNER = "triton"
"""The only MoE runner that looks for files."""
DTYPES = {"fp8": "fp8_w8a8", "w8a8_int8": "int8_w8a8"}
"""What a file's name says of a quantization."""


class Rows:
    """The rows for one shape and one type of numbers (none: bf16)."""

    def __init__(self, shape: "Shape", dtype: str | None, deterministic: bool = False) -> None:
        """Loads the loader, and looks nothing up yet."""
        known = SimpleNamespace(enable_deterministic_inference=deterministic)
        arguments = importlib.import_module("sglang.srt.server_args")
        arguments.set_global_server_args_for_scheduler(known)
        self._loader: Any = importlib.import_module(LOADER)
        self._dtype = dtype
        self._shape = shape
        self._known: dict[int, Row] = {}

    def chosen(self, tokens: int) -> "Row":
        """The one for so many tokens."""
        if tokens not in self._known:
            self._known[tokens] = self._ask(tokens)
        return self._known[tokens]

    def tuned(self, tokens: int) -> bool:
        """Whether it is another one than without any file."""
        shape = self._shape
        numbers = (shape.experts, shape.shard, shape.hidden, shape.topk)
        default = self._loader.get_default_config(tokens, *numbers, self._dtype, False, None)
        return bool(self.chosen(tokens) != default)

    def look_up(self) -> None:
        """As one rank, for both products, as if nothing had been looked up in this process.

        Raises:
            ValueError: A file is unreadable.
            AssertionError: The files for both products do not go together.
        """
        self._loader.get_moe_configs.cache_clear()
        self._ask(1, return_down_config=True)

    def _ask(self, tokens: int, **more: bool) -> Any:
        shape = self._shape
        first = (shape.experts, 2 * shape.shard, shape.hidden)
        second = (shape.experts, shape.hidden, shape.shard)
        ask = self._loader.try_get_optimal_moe_config
        return ask(first, second, shape.topk, self._dtype, tokens, **more)


def look_up(setting: "Setting") -> Rows | None:
    """Looks up the rows as every rank does, with its log lines; none where nobody asks for any.

    Raises:
        ValueError: As the loader does.
        AssertionError: As the loader does.
    """
    args: dict[str, Any] = setting.resolved
    shape = read_shape(Path(args["model_path"]), args["tp_size"], args["ep_size"])
    if shape is None or args["moe_runner_backend"] != RUNNER:
        return None
    dtype = DTYPES.get(args["quantization"] or "")
    rows = Rows(shape, dtype, args["enable_deterministic_inference"])
    for rank in range(args["tp_size"]):
        _log_as(f" TP{rank}" if args["tp_size"] > 1 else "")
        rows.look_up()
    return rows


def _log_as(rank: str) -> None:
    layout = f"[%(asctime)s{rank}] %(message)s"
    logging.basicConfig(
        stream=sys.stdout, level="INFO", format=layout, datefmt="%Y-%m-%d %H:%M:%S", force=True
    )
