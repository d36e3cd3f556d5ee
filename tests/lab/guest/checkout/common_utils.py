"""What the tuning scripts know of models, and of the files that they write."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lab.guest.package import torch
    from lab.guest.sglang_lookup import LOADER
    from lab.guest.sglang_moe import read_config
    from lab.guest.sglang_tuner import Told
else:
    import torch
    from sglang_lookup import LOADER
    from sglang_moe import read_config
    from sglang_tuner import Told

if Told().skew:
    importlib.import_module("sglang.srt.layers.moe.moe_runner.triton_utils")

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
QWEN = (
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
FUSED = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
"""Their shared expert is one more expert, unless that is disabled."""
DTYPES = ("auto", "fp8_w8a8", "int8_w8a16", "int8_w8a8")
NO_MODEL = (
    "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in "
    "the cached files. ({model})"
)


class ModelConfig:
    """A model's config, by attributes."""

    def __init__(self, content: dict[str, Any]) -> None:
        """Keeps the content."""
        vars(self).update(content)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def get_model_config(
    model_name: str,
    tp_size: int,
    ep_size: int = 1,
    disable_shared_experts_fusion: bool = False,
    topk_ids_dir: str | None = None,
) -> dict[str, Any]:
    """What the kernel of one rank works on.

    A kind of model that is not known is taken for Mixtral, as by the real one: AttributeError.
    """
    content = _content(model_name)
    architecture = content["architectures"][0]
    config = ModelConfig(content.get("text_config", content))
    experts, intermediate = _experts(config, architecture)
    fused = 0 if disable_shared_experts_fusion or architecture not in FUSED else 1
    return {
        "num_experts": experts // ep_size + fused,
        "topk": config.num_experts_per_tok + (fused if topk_ids_dir else 0),
        "hidden_size": config.hidden_size,
        "shard_intermediate_size": _both_shards(intermediate, tp_size, ep_size),
        "dtype": getattr(torch, vars(config).get("torch_dtype", "bfloat16")),
        "block_shape": content.get("quantization_config", {}).get("weight_block_size"),
        "architecture": architecture,
    }


def _content(model_name: str) -> dict[str, Any]:
    try:
        return read_config(Path(model_name))
    except OSError:
        raise OSError(NO_MODEL.format(model=model_name)) from None


def _both_shards(intermediate: int, tp_size: int, ep_size: int) -> int:
    """Of the gate's and of the up product's weights."""
    assert tp_size % ep_size == 0
    assert intermediate % (tp_size // ep_size) == 0
    return 2 * intermediate // (tp_size // ep_size)


def _experts(config: ModelConfig, architecture: str) -> tuple[int, int]:
    if architecture in QWEN:
        return config.num_experts, config.moe_intermediate_size
    if architecture in FUSED:
        return config.n_routed_experts, config.moe_intermediate_size
    return config.num_local_experts, config.intermediate_size


def file_name(model: dict[str, Any], dtype: str, **more: bool) -> str:
    """The file that the server would look for, by its own loader."""
    named = importlib.import_module(LOADER).get_config_file_name
    numbers = (model["num_experts"], model["shard_intermediate_size"] // 2)
    return str(named(*numbers, dtype_name(model, dtype), model["block_shape"], **more))


def dtype_name(model: dict[str, Any], dtype: str) -> str | None:
    """What a file's name says of the numbers; none for bf16."""
    known: Callable[..., str | None] = importlib.import_module(LOADER).get_config_dtype_str
    return known(model["dtype"], **({} if dtype == "auto" else {f"use_{dtype}": True}))


def fitting(space: list[dict[str, int]], block_shape: list[int] | None) -> list[dict[str, int]]:
    """Those candidates whose steps fit into a quantized block."""
    if block_shape is None:
        return space
    return [row for row in space if block_shape[1] % row["BLOCK_SIZE_K"] == 0]
