"""What SGLang itself says of a model: its shape for the MoE kernel, and the rows without a file.

Both are asked by the server's interpreter, on no GPU. The shape is read by the code beside the
tuning script, so it is the one that the script would tune for.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from gpu_reclaim.benching import HELP_S
from gpu_reclaim.commands import Section
from gpu_reclaim.moeconfigs import Row
from gpu_reclaim.moescript import FOLDER, UNSEEN
from gpu_reclaim.moespace import SHARED_MEMORY, Shape
from gpu_reclaim.sglang import by_python

LOADERS = (
    "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config",
    "sglang.srt.layers.moe.fused_moe_triton.fused_moe_triton_config",
)
"""Modules with the default rows: from 0.5.13 on, and before (0.5.5 to 0.5.9 were read)."""

_SHAPE = """
import inspect, json, sys
asked = json.loads(ASKED)
sys.path[:] = [asked["folder"], *(x for x in sys.path if x)]
try:
    from common_utils import get_model_config
    known = inspect.signature(get_model_config).parameters
    wanted = asked["wanted"]
    for name, value in wanted.items():
        if name not in known and value != asked["usual"].get(name):
            raise TypeError("this checkout's get_model_config takes no " + name)
    found = get_model_config(**{x: wanted[x] for x in wanted if x in known})
    block = found.get("block_shape")
    print("\\nshape", json.dumps({
        "experts": int(found["num_experts"]),
        "shard": int(found["shard_intermediate_size"]) // 2,
        "hidden": int(found["hidden_size"]),
        "topk": int(found["topk"]),
        "block_shape": list(block) if block and all(block) else None,
        "dtype": str(found.get("dtype", "")),
        "architecture": str(found.get("architecture", "")),
    }))
except BaseException as error:
    print("\\nsaid", type(error).__name__ + ":", " ".join(str(error).split())[:600])
"""
# The two switches stand for the running server's: 0.5.9 asks the former, 0.5.23 the latter. How
# much shared memory there is 0.5.23 asks of a GPU, and none is seen here.
_DEFAULTS = """
import importlib, json, sys, types
asked = json.loads(ASKED)
sys.path[:] = [x for x in sys.path if x]
try:
    for name in asked["loaders"]:
        try:
            loader = importlib.import_module(name)
            break
        except ModuleNotFoundError as error:
            if not (name + ".").startswith(str(error.name) + "."):
                raise
    else:
        raise ModuleNotFoundError("there is no " + " and no ".join(asked["loaders"]))
    off = types.SimpleNamespace(enable_deterministic_inference=False)
    stand_in = {
        "get_global_server_args": off,
        "get_exec": types.SimpleNamespace(deterministic=off),
        "_get_cuda_shared_memory_per_block_optin": asked["shared"],
    }
    for name, value in stand_in.items():
        if hasattr(loader, name):
            setattr(loader, name, lambda value=value: value)
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None:
        cuda.get_device_capability = lambda *ignored: tuple(asked["capability"])
    rows = {m: loader.get_default_config(m, *asked["rest"]) for m in asked["sizes"]}
    print("\\ndefaults", json.dumps(rows))
except BaseException as error:
    print("\\nsaid", type(error).__name__ + ":", " ".join(str(error).split())[:600])
"""


def ask_shape(
    python: str,
    source: str,
    model: str,
    *,
    tp: int,
    ep: int,
    no_fusion: bool,
    env: Mapping[str, str],
) -> str:
    """Shell text that asks the code beside the tuning script for a model's shape.

    Args:
        python: The server's interpreter.
        source: Folder of the checkout.
        model: The model's folder or name; code that comes with it is run, as the server does.
        tp: Tensor-parallel ranks.
        ep: Expert-parallel ranks.
        no_fusion: Shared experts are not fused.
        env: The server's environment, for example with HF_HOME; names that no shell takes are
            left out.
    """
    asked = {
        "folder": f"{source}/{FOLDER}",
        "wanted": {
            "model_name": model,
            "tp_size": tp,
            "ep_size": ep,
            "disable_shared_experts_fusion": no_fusion,
        },
        "usual": {"ep_size": 1, "disable_shared_experts_fusion": False},
    }
    return _asking(python, _SHAPE, asked, env)


def ask_defaults(
    python: str,
    shape: Shape,
    dtype: str,
    sizes: Iterable[int],
    *,
    capability: tuple[int, int],
    env: Mapping[str, str] | None = None,
) -> str:
    """Shell text that asks which rows the server uses where it finds no file.

    Args:
        python: The server's interpreter.
        shape: The model's.
        dtype: As in a file's name; empty for 16 bits.
        sizes: Numbers of tokens.
        capability: Compute capability of the GPU: some rows depend on its shared memory.
        env: The server's environment.
    """
    block = list(shape.block_shape) if shape.block_shape else None
    numbers = [shape.experts, shape.shard, shape.hidden, shape.topk]
    asked = {
        "loaders": LOADERS,
        "sizes": sorted(set(sizes)),
        "rest": [*numbers, dtype or None, False, block],
        "capability": capability,
        "shared": SHARED_MEMORY.get(capability),
    }
    return _asking(python, _DEFAULTS, asked, env or {})


def _asking(python: str, program: str, asked: Mapping[str, Any], env: Mapping[str, str]) -> str:
    given = [
        f"export {name}={shlex.quote(value)}"
        for name, value in env.items()
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII)
    ]
    head = f"ASKED = {json.dumps(json.dumps(asked))}"
    run = f"timeout -k 5 {HELP_S} {by_python(python, f'{head}{program}')}"
    return "\n".join([*given, UNSEEN, run])


def parse_shape(section: Section) -> Shape | str:
    """The shape, or why there is none, for people."""
    found = _json(section.value("shape"))
    try:
        block = found["block_shape"]
        shape = Shape(
            **{name: int(found[name]) for name in ("experts", "shard", "hidden", "topk")},
            block_shape=(int(block[0]), int(block[1])) if block else None,
            dtype=str(found["dtype"]).removeprefix("torch."),
            architecture=str(found["architecture"]),
        )
    except (KeyError, TypeError, ValueError, IndexError):
        return _said(section, "the model's shape")
    return (
        shape
        if min(shape.experts, shape.shard, shape.hidden, shape.topk) > 0
        else (f"SGLang's tuning code reads a shape from the model that cannot be: {found}")
    )


def parse_defaults(section: Section) -> dict[int, Row] | str:
    """The row for each number of tokens, or why there are none, for people."""
    rows = _json(section.value("defaults"))
    if not rows or not all(re.fullmatch(r"[0-9]+", m) and _is_row(row) for m, row in rows.items()):
        return _said(section, "the rows that the server uses without a file")
    return {int(key): row for key, row in rows.items()}


def _is_row(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(x, int) for x in value.values())


def _said(section: Section, what: str) -> str:
    said = section.value("said") or f"the program ended with status {section.code} and said nothing"
    return f"SGLang does not tell {what}: {said}"


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
