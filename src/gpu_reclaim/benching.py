"""SGLang's own benchmark client (`sglang.bench_serving`): its command, and what it wrote.

It runs on the host, by the server's interpreter. Which module it is, and which flags it knows, is
asked by `--help`: newer releases call it `sglang.benchmark.serving`.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from gpu_reclaim.commands import Section
from gpu_reclaim.restoring import STAGE_COMMAND
from gpu_reclaim.tuning import Measurement

MODULES = ("sglang.benchmark.serving", "sglang.bench_serving")
"""Newest name first (sglang 0.5.23 keeps the second as a deprecated alias)."""

NEEDED = (
    "--backend",
    "--base-url",
    "--dataset-name",
    "--dataset-path",
    "--num-prompts",
    "--max-concurrency",
    "--output-file",
    "--flush-cache",
    "--warmup-requests",
    "--seed",
    "--tokenizer",
    "--model",
)
"""Without one of these a measurement would not be what it is taken for (all in sglang 0.5.5 to
0.5.23)."""

HELP_S = 120
"""Longest time for `--help`, in seconds: newer releases import torch first."""

OFFLINE = "export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1"
"""What the client runs with: nothing is fetched while a server is on trial, and nothing is left
among the package's files."""

SEED = 1
"""Always given: its default differs between releases."""

SAID_LINES = 15
"""Last lines of what the client said, kept for people."""


@dataclass(frozen=True)
class Tool:
    """The benchmark client of a host.

    Attributes:
        module: For `python -m`.
        flags: The flags it knows.
    """

    module: str
    flags: frozenset[str]

    @property
    def missing(self) -> list[str]:
        """Needed flags that it does not know."""
        return [flag for flag in NEEDED if flag not in self.flags]


@dataclass(frozen=True)
class Load:
    """What a measurement sends.

    Attributes:
        level: Requests in flight.
        requests: All in all.
        base_url: Of the server, as seen from the host.
        model: Folder with the tokenizer, on the host.
        dataset_name: As the client's flag.
        dataset_path: File on the host.
        timeout_s: Longest time, in seconds.
        folder: Where its record is kept on the host; made where it is missing, for root alone.
        name: Of the record there, without an ending.
        api_key: Given to it in its environment.
    """

    level: int
    requests: int
    base_url: str
    model: str
    dataset_name: str
    dataset_path: str
    timeout_s: float
    folder: str
    name: str
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True)
class Run:
    """How the client ended.

    Attributes:
        code: Exit status; 124 or 137 when its time was over.
        record: What it wrote, as the client's own names; empty where it wrote nothing.
        said: Its last lines, for people.
        at: When, by the host's clock.
    """

    code: int
    record: dict[str, Any]
    said: str = ""
    at: str = ""


def find_tool(python: str) -> str:
    """Shell text that asks which client there is, and what it knows."""
    tries = [
        f"if text=$(timeout -k 5 {HELP_S} {shlex.quote(python)} -m {module} --help 2>&1); then "
        f"echo 'module {module}'; printf '%s\\n' \"$text\" | sed 's/^/help /'; exit 0; fi; "
        f"printf '%s\\n' \"$text\" | tail -n 3 | sed 's/^/said {module}: /'"
        for module in MODULES
    ]
    return "\n".join([OFFLINE, *tries])


def parse_tool(section: Section) -> Tool | None:
    """The client; None where none could be run."""
    module = section.value("module")
    flags = re.findall(r"--[a-z][a-z0-9-]*", "\n".join(section.lines("help")))
    return Tool(module, frozenset(flags)) if module else None


def run(python: str, tool: Tool, load: Load) -> str:
    """Shell text that measures once; the client is the stage's own, and ends with it."""
    argv = [python, "-m", tool.module, "--backend", "sglang", "--base-url", load.base_url]
    argv += ["--model", load.model, "--tokenizer", load.model]
    argv += ["--dataset-name", load.dataset_name, "--dataset-path", load.dataset_path]
    argv += ["--num-prompts", str(load.requests), "--max-concurrency", str(load.level)]
    argv += ["--warmup-requests", str(load.level), "--flush-cache", "--seed", str(SEED)]
    argv += ["--output-file", f"{load.name}.jsonl", *_where("--disable-tqdm", tool)]
    limit = ["timeout", "-k", "5", f"{load.timeout_s:g}"]
    folder = shlex.quote(load.folder)
    lines = [
        f"umask 077; mkdir -p {folder} && cd {folder} || exit 1",
        f'file={shlex.quote(load.name)}; rm -f "$file.jsonl"',
        f"{OFFLINE} no_proxy='*' NO_PROXY='*'",
        # The client reads it from its environment, so it is in no command line.
        f"export OPENAI_API_KEY={shlex.quote(load.api_key)}" if load.api_key else "",
        f'{shlex.join([*STAGE_COMMAND, *limit, *argv])} >"$file.log" 2>&1; echo "exit $?"',
        '[ ! -e "$file.jsonl" ] || { tail -n 1 "$file.jsonl" | sed \'s/^/record /\'; echo; }',
        f"tail -n {SAID_LINES} \"$file.log\" | sed 's/^/said /'; echo",
        "date '+at %Y-%m-%d %H:%M:%S'",
    ]
    return "\n".join(lines)


def _where(flag: str, tool: Tool) -> list[str]:
    return [flag] if flag in tool.flags else []


def parse_run(section: Section) -> Run:
    """How it ended."""
    code = section.value("exit")
    try:
        record = json.loads(section.value("record"))
    except ValueError:
        record = {}
    return Run(
        int(code) if code.isdigit() else -1,
        record if isinstance(record, dict) else {},
        "\n".join(section.lines("said")),
        section.value("at"),
    )


def measurement(ran: Run, load: Load) -> Measurement | None:
    """The measurement; None where the record lacks a number that is needed.

    The client ends with status 0 even where half of the requests failed (tried with 0.5.9), so
    `completed` is to be looked at.
    """
    numbers = {
        "completed": "completed",
        "seconds": "duration",
        "output_tok_s": "output_throughput",
        "ttft_ms": "median_ttft_ms",
        "ttft_p99_ms": "p99_ttft_ms",
        "tpot_ms": "median_tpot_ms",
        "tpot_p99_ms": "p99_tpot_ms",
    }
    found = {ours: _number(ran.record.get(theirs)) for ours, theirs in numbers.items()}
    if any(value is None for value in found.values()):
        return None
    values = {
        **found,
        "level": load.level,
        "requests": load.requests,
        "accept_length": _number(ran.record.get("accept_length")),
        "at": ran.at,
        "record": {
            k: v for k, v in ran.record.items() if isinstance(v, str) or _number(v) is not None
        },
    }
    try:
        return Measurement.model_validate(values)
    except ValidationError:  # `completed` is no whole number
        return None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # An integer may be beyond any float.
    return value if -sys.float_info.max <= value <= sys.float_info.max else None
