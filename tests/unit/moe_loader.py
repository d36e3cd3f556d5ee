"""Runs SGLang's own loader of MoE kernel configs; argument: what to ask, as JSON.

The loader's file alone is SGLang's. What it imports of torch, Triton and the rest of SGLang is a
version, a GPU's name and two switches, and stands in here. Prints, as JSON, the row for each number
of tokens (null where it has none) and the loader's log lines.
"""

import importlib.util
import json
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any


def _module(name: str, **content: Any) -> None:
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(content)


def main(ask: dict[str, Any]) -> None:
    """Ask, and print."""
    _module("torch", dtype=object)
    _module("triton", __version__=ask["triton"])
    _module("sglang")
    _module("sglang.srt")
    settings = SimpleNamespace(enable_deterministic_inference=False)
    _module("sglang.srt.server_args", get_global_server_args=lambda: settings)
    named = {"get_device_name": lambda: ask["device"], "is_hip": lambda: False}
    _module("sglang.srt.utils", **named)
    folder = "sglang.srt.layers.moe.fused_moe_triton"
    _module(folder, get_config=lambda: None)

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.basicConfig(level=logging.INFO, handlers=[handler])

    spec = importlib.util.spec_from_file_location("loader", ask["loader"])
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    experts, shard = ask["experts"], ask["shard"]
    shapes = (experts, 2 * shard, 4096), (experts, 4096, shard)
    rows = [
        loader.try_get_optimal_moe_config(
            *shapes,
            8,
            ask["dtype"] or None,
            tokens,
            block_shape=ask["block_shape"],
            per_channel_quant=ask["per_channel"],
        )
        for tokens in ask["tokens"]
    ]
    print(json.dumps({"rows": rows, "said": said}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
