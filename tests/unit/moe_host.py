"""A host whose server's MoE kernels are tuned, in memory: its answers, and values to begin with."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpu_reclaim.commands import Script
from gpu_reclaim.moeconfigs import GRID, ConfigName, Table, text_of
from gpu_reclaim.moefinding import moe_preflight
from gpu_reclaim.moefound import MoeFound
from gpu_reclaim.moescript import NEEDED, SCRIPT
from gpu_reclaim.plans import MoeTunePlan
from gpu_reclaim.transport.scripted import Answer
from gpu_reclaim.tuning import TunedSize
from unit.scenery import Scene, Unit, scene
from unit.tuned import INFO, SERVER, UNIT, TunedHost, answered, usual

GPU = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
NAME = ConfigName(256, 256, GPU.replace(" ", "_"))
BLOCKS = replace(NAME, dtype="fp8_w8a8", block_shape=(128, 128))
PACKAGE = "/opt/sglang/lib/python3.12/site-packages/sglang/srt/layers/moe/fused_moe_triton"
SOURCE = "/src/sglang"
URL = "you can create them with https://github.com/sgl-project/sglang/tree/main/benchmark"
SERVED = replace(SERVER, sglang_source=SOURCE)
PLAN = MoeTunePlan(levels=[1, 16], rounds=6)
SEARCH = "--search-space-file"
ROW: dict[str, int | bool] = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
}
GOOD: Table = {1: {**ROW, "num_warps": 4}, 64: {**ROW, "num_warps": 8, "num_stages": 3}}

MOE_INFO: dict[str, Any] = {
    **INFO,
    "ep_size": 1,
    "moe_runner_backend": "auto",
    "chunked_prefill_size": 8192,
}
"""What /server_info says of such a server."""

SHAPE: dict[str, Any] = {
    "experts": 256,
    "shard": 256,
    "hidden": 4096,
    "topk": 8,
    "block_shape": None,
    "dtype": "torch.bfloat16",
    "architecture": "Qwen3MoeForCausalLM",
}


def path_of(name: ConfigName = NAME, base: str = PACKAGE, triton: str = "3.6.0") -> str:
    return f"{base}/configs/triton_{triton.replace('.', '_')}/{name}"


def without_file(name: ConfigName = NAME, rank: int = 0, **more: str) -> str:
    """A rank's line where it finds none."""
    return (
        f"[2026-11-30 13:05:59 TP{rank}] Using default MoE kernel config. Performance might be "
        f"sub-optimal! Config file not found at {path_of(name, **more)}, {URL}"
    )


def with_file(name: ConfigName = NAME, rank: int = 0, **more: str) -> str:
    return f"[2026-11-30 13:05:59 TP{rank}] Using MoE kernel config from {path_of(name, **more)}."


def other_file(name: ConfigName = NAME, rank: int = 0) -> str:
    """A rank's line where it finds one for another Triton."""
    older = path_of(name, triton="3.4.0")
    return (
        f"[2026-11-30 13:05:59 TP{rank}] Config file not found at {path_of(name)}. Fallback to "
        f"triton version 3.4.0 and use MoE kernel config from {older}. Performance might be "
        "sub-optimal!"
    )


def logged(*lines: str) -> Answer:
    return {"log": "\n".join(f"line {line}" for line in lines)}


def environment(*variables: str, of_unit: str = "0") -> Answer:
    return {"env": "\n".join([*(f"variable {x}" for x in variables), f"set {of_unit}"])}


def script_answer(*flags: str, without: Sequence[str] = (), **changes: str) -> Answer:
    """What a look for the tuning script prints; an empty value leaves its line out."""
    known = {"script": "yes", "at": f"{SOURCE}/{SCRIPT}", "code": "0", "version": "v0.5.9"}
    known |= {"exact": "yes", "commit": "0123abc", "sglang": "0.5.9", "triton": "3.6.0"}
    known |= {"configs": f"{PACKAGE}/configs"} | changes
    flags = (*NEEDED, "--per-channel-quant", "--disable-shared-experts-fusion", *flags)
    lines = [f"{word} {value}" for word, value in known.items() if value]
    return {"script": "\n".join([*lines, *(f"help   {x} X" for x in flags if x not in without)])}


def shape_answer(**changes: object) -> Answer:
    return {"shape": f"shape {json.dumps(SHAPE | changes)}"}


def gpus_answer(*names: str) -> Answer:
    return {"gpus": "\n".join(f"gpu {n}, {name}, 12.0" for n, name in enumerate(names))}


def defaults() -> Table:
    """Its own rows: small blocks for few tokens."""
    return {m: {**ROW, "BLOCK_SIZE_M": 16 if m <= 256 else 64} for m in GRID}


def info(**more: object) -> dict[str, Answer | list[Answer]]:
    """The server says something else of itself; `...` leaves it out."""
    values = {name: value for name, value in {**MOE_INFO, **more}.items() if value is not ...}
    return {"ask for its arguments": answered((200, values))}


def moe_usual() -> dict[str, Answer | list[Answer]]:
    """All is well; the server finds no file."""
    return usual() | {
        **info(),
        "read a part of its environment": environment("HF_HOME=/models/hf"),
        "read its log": logged(*(without_file(rank=rank) for rank in range(4))),
        "look for the tuning script": script_answer(SEARCH),
        "ask for the model's shape": shape_answer(),
        "look what it sees": {"seen": ""},
        "read what GPUs can do": gpus_answer(*[GPU] * 4),
        "ask for its default rows": {"rows": f"defaults {json.dumps(defaults())}"},
    }


@dataclass
class MoeHost(TunedHost):
    """The same host, and files on it.

    Attributes:
        files: Path to content, for what is read of config files.
    """

    told: dict[str, Answer | list[Answer]] = field(default_factory=moe_usual)
    files: dict[str, bytes] = field(default_factory=dict)

    def answer(self, script: Script) -> Answer:
        if script.name != "read config files":
            return super().answer(script)
        asked = [shlex.split(line)[3] for line in script.sections["files"].split("\n")[:-1]]
        found = {n: self.files[path] for n, path in enumerate(asked) if path in self.files}
        return {"files": "\n".join(f"file {n} {data.hex()}" for n, data in found.items())}


def moe_scene(
    told: Mapping[str, Answer | list[Answer]] | None = None,
    files: Mapping[str, str] | None = None,
) -> Scene:
    """A session with such a host; files are of /configs."""
    own = {name: list(x) if isinstance(x, list) else x for name, x in (told or {}).items()}
    held = {f"/configs/{name}": text.encode() for name, text in (files or {}).items()}
    host = MoeHost(told=moe_usual() | own, files=held, units={UNIT: Unit()})
    return scene(host, units=["sglang"])


def moe_found(
    told: Mapping[str, Answer | list[Answer]] | None = None,
    plan: MoeTunePlan = PLAN,
    *,
    gpus: Sequence[int] = (),
    files: Mapping[str, str] | None = None,
) -> MoeFound:
    return moe_preflight(moe_scene(told, files).session, SERVED, plan, gpus)


def file_of(table: Table = GOOD) -> str:
    return text_of(table)


def size(tokens: int, failure: str = "", **more: Any) -> TunedSize:
    """A size that was tuned, in a way that is no default."""
    row = {} if failure else {**ROW, "num_warps": 8, "num_stages": 2}
    values = {"tokens": tokens, "row": row, "failure": failure, "seconds": 600, "limit_s": 5400}
    return TunedSize.model_validate(values | {"gpu": "0", "at": "2026-11-30 13:05:59"} | more)
