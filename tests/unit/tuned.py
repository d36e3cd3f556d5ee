"""A host whose server is tuned, in memory: its answers, and values to begin with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_reclaim.benching import NEEDED, Tool
from gpu_reclaim.commands import Script
from gpu_reclaim.finding import Found
from gpu_reclaim.lease import Places
from gpu_reclaim.plans import SpecDecodePlan, SpecSetting
from gpu_reclaim.servercommand import ServerCommand
from gpu_reclaim.serving import Server
from gpu_reclaim.session import Session
from gpu_reclaim.specpreflight import SpecPreflight
from gpu_reclaim.transport import Transport
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.local import LocalTransport
from gpu_reclaim.transport.scripted import Answer
from gpu_reclaim.tuning import Measurement, Visit
from unit.scenery import Host, Scene, Unit, scene

UNIT = "sglang.service"
KEY = "sk-secret"
PLAN = SpecDecodePlan(levels=[1, 16], rounds=6)
SERVER = Server(
    UNIT,
    "http://127.0.0.1:30000",
    "/opt/sglang/bin/python",
    ready_s=600,
    dataset_path="/data/prompts.json",
    api_key=KEY,
)
TOOL = Tool("sglang.bench_serving", frozenset(NEEDED))

FLAGS = (
    *("--model-path", "/models/glm", "--api-key", KEY, "--speculative-algorithm", "NEXTN"),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
)
HEAD = "/opt/sglang/bin/python -m sglang.launch_server"
FILE = f"/etc/systemd/system/{UNIT}"
PRINT = "4038 99"
"""Checksum of its files."""

INFO: dict[str, Any] = {
    "version": "0.5.9",
    "model_path": "/models/glm",
    "tp_size": 4,
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "max_running_requests": 64,
    "launch_command": f"python --api-key {KEY}",
    "internal_states": [{"memory_usage": {"token_capacity": 412_000}}],
}
"""What /server_info says of `FLAGS`."""

RECORD: dict[str, Any] = {
    "completed": 16,
    "duration": 12.5,
    "output_throughput": 121.5,
    "median_ttft_ms": 90.5,
    "p99_ttft_ms": 181.0,
    "median_tpot_ms": 7.25,
    "p99_tpot_ms": 11.0,
    "accept_length": 2.35,
    "request_rate": float("inf"),
}
"""What sglang 0.5.9's benchmark writes, as far as it is read."""

ACTIVE = {"ActiveState": "active", "SubState": "running"}
SERVES = (200, "")
LOADS = (503, "")


def row(level: int, speed: float, **more: float) -> Measurement:
    given: dict[str, float] = {"requests": 16, "completed": 16, "seconds": 10, "ttft_ms": 100}
    given |= {"ttft_p99_ms": 300, "tpot_ms": 10, "tpot_p99_ms": 20}
    return Measurement.model_validate({**given, **more, "level": level, "output_tok_s": speed})


def visit(
    arm: str,
    turn: int,
    *speeds: float,
    differing: float | None = 0.0,
    failure: str = "",
    **more: float,
) -> Visit:
    """A visit that was measured at 1 and 16 in flight."""
    speeds = speeds or (100, 1000)
    rows = [row(level, speed, **more) for level, speed in zip([1, 16], speeds, strict=True)]
    return Visit(arm=arm, round=turn, levels=rows, differing_pct=differing, failure=failure)


def setting(steps: int) -> SpecSetting:
    return SpecSetting(algorithm="NEXTN", num_steps=steps, eagle_topk=1, num_draft_tokens=steps + 1)


def found_server() -> Found:
    """What `find` tells of a host whose server runs with `FLAGS`."""
    return Found(SERVER, INFO, TOOL, model="/models/glm", parts={"unit": UNIT}, start_s=60)


def before(**more: Any) -> SpecPreflight:
    """What is known before a tuning of that server."""
    trials = (setting(3), SpecSetting(off=True), setting(2))
    found = SpecPreflight(
        found=found_server(),
        arms=tuple(str(one) for one in trials),
        refused={"NEXTN 0/1/0": "without steps, top k must not be given either"},
        parts={"unit": UNIT},
        place=f"/var/lib/gpu-reclaim-tuning/{UNIT}/0123456789ab",
        files=PRINT,
        command=ServerCommand(UNIT, FILE, HEAD, "", variables=False, flags=FLAGS),
        settings={str(one): one for one in trials},
        running=64,
    )
    return replace(found, **more)


def answered(*answers: tuple[int, object]) -> Answer:
    """What several requests print: HTTP status and body of each; 0 for no answer."""
    texts = [body if isinstance(body, str) else json.dumps(body) for _, body in answers]
    lines = [
        f"answer {number} {code} 0.010 {json.dumps(text)}"
        for number, ((code, _), text) in enumerate(zip(answers, texts, strict=True))
    ]
    return {"answers": "\n".join(lines)}


def health(answer: tuple[int, str]) -> Answer:
    code, text = answer
    return {"health": f"answer 0 {code} 0.010 {json.dumps(text)}\n"}


def looked(state: Mapping[str, str] = ACTIVE, serves: tuple[int, str] = SERVES) -> Answer:
    """A look at a trial: what systemd says of it, and what /health answers."""
    shown = "\n".join(f"state {name} {value}" for name, value in state.items())
    return {"state": shown, **dict(_sections(health(serves)))}


def _sections(answer: Answer) -> Mapping[str, Any]:
    assert not isinstance(answer, Exception)
    return answer


def benched(record: Mapping[str, object] | None = None, code: int = 0, said: str = "") -> Answer:
    """A benchmark run that ended so, and wrote that on top of `RECORD`."""
    text = json.dumps(RECORD | dict(record or {}))
    lines = [f"exit {code}", f"record {text}", *(f"said {x}" for x in said.split("\n"))]
    return {"bench": "\n".join([*lines, "at 2026-11-30 13:05:59"])}


def shown(
    flags: Sequence[str] = FLAGS,
    reload: str = "no",
    drop_in: str = "",
    *,
    fixed: bool = False,
    files: str = PRINT,
) -> Answer:
    """What is printed about the unit, its file and its main process.

    With a drop-in, its command is there; the unit's own is another one.
    """
    argv = "\0".join([*HEAD.split(), *flags, ""]).encode().hex()
    lines = ["show LoadState=loaded", f"show FragmentPath={FILE}"]
    lines += [f"show DropInPaths={drop_in}"]
    lines += ["show MainPID=50", f"show NeedDaemonReload={reload}"]
    command = f"file ExecStart={HEAD} {' '.join(flags)}"
    lines += [f"file # {FILE}", "file [Service]", "file ExecStart=/other" if drop_in else command]
    if drop_in:
        lines += ["file ", f"file # {drop_in}", "file [Service]", "file ExecStart=", command]
    lines += ["fixed yes"] if fixed else []
    lines += [f"print {files}"]
    return {"unit": "\n".join([*lines, f"argv {argv}", "exe /opt/sglang/bin/python"])}


def texts(*changed: object, count: int = 15) -> Answer:
    """Greedy answers: text 0, text 1, ..., the first ones replaced."""
    bodies = [{"text": f"text {number}"} for number in range(count)]
    return answered(*((200, body) for body in [*changed, *bodies[len(changed) :]]))


def usual() -> dict[str, Answer | list[Answer]]:
    """All is well."""
    help_text = "\n".join(f"help   {flag} X" for flag in NEEDED)
    return {
        "ask for health": health(SERVES),
        "ask for its arguments": answered((200, INFO)),
        "ask for a completion": texts(count=1),
        "ask for greedy answers": texts(),
        "ask for greedy answers at 16": texts(count=16),
        "look for the benchmark": {"tool": f"module sglang.bench_serving\n{help_text}"},
        "look at the prompts": {"prompts": "sum 123 456 /p.json\nprompts 1000"},
        "load the tokenizer": {"tokenizer": "tokenizer loads"},
        "look at the trial": looked(),
        "measure at 1": benched(),
        "measure at 16": benched({"completed": 128}),
        "read its command line": shown(),
        "read its journal": {"journal": "journal its last words"},
        f"start {UNIT} on trial": {"hold": "status taken"},
    }


@dataclass
class TunedHost(Host):
    """Answers a tuning's scripts by their names, and all others as `Host` does.

    Attributes:
        told: Name to answer, or to answers one after the other, of which the last stays.
    """

    told: dict[str, Answer | list[Answer]] = field(default_factory=usual)

    def answer(self, script: Script) -> Answer:
        told = self.told.get(script.name)
        if isinstance(told, list):
            return told.pop(0) if len(told) > 1 else told[0]
        return super().answer(script) if told is None else told


def tuned(told: Mapping[str, Answer | list[Answer]] | None = None) -> Scene:
    """A session with such a host, where some answers are others than usual."""
    own = {name: list(x) if isinstance(x, list) else x for name, x in (told or {}).items()}
    host = TunedHost(told=usual() | own, units={UNIT: Unit()})
    return scene(host, units=["sglang"])


def on_this_machine(folder: Path, way: Transport | None = None) -> Session:
    """A session with this very machine, whose /var/lib is that folder."""
    places = Places(str(folder), str(folder), str(folder))
    return Session("llm", Links(way or LocalTransport()), places=places)
