"""A pretend host whose server can be tuned: it runs with the flags it is given, and is measured."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from gpu_reclaim.benching import NEEDED
from gpu_reclaim.commands import Section
from prefect_layer.pretend_host import Holder, PretendHost, daemon, workers

SECRET = "sk-do-not-show"
"""The server's API key, in the block and among the unit's flags."""

NOW, BEST, OFF = "NEXTN 1/1/2", "NEXTN 2/1/3", "off"
UNIT_FILE = "/etc/systemd/system/sglang.service"
HEAD = "/opt/sglang/bin/python -m sglang.launch_server"
OWN_FLAGS = (
    f"--model-path /models/qwen --api-key {SECRET} --max-running-requests 64 "
    "--speculative-algorithm NEXTN --speculative-num-steps 1 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 2"
)


@dataclass
class PretendServer(PretendHost):
    """The same host, and an SGLang server in its unit.

    Attributes:
        speeds: Of a setting, as a factor; 1 where none is given.
        faults: Of a setting: `dies` at start, `mute` to requests, `breaks` the benchmark, `wrong`
            in its answers.
        flags: What the server runs with now.
        trial: The unit is on trial.
        kept: The drop-in of a winner, by its folder.
        said: What /server_info says otherwise.
        after: The same, once the server was put back.
        conversations: In the file of prompts.
        book: The files of the logbook, by path.
        visits: The settings in the order of their starts.
        files: Checksum of the unit's files.
    """

    speeds: dict[str, float] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    flags: str = OWN_FLAGS
    trial: bool = False
    kept: dict[str, str] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)
    conversations: int = 500
    book: dict[str, str] = field(default_factory=dict)
    visits: list[str] = field(default_factory=list)
    files: str = "4038 99"

    @property
    def arm(self) -> str:
        """Name of the setting that the server runs with."""
        values = _values(self.flags)
        if "--speculative-algorithm" not in values:
            return OFF
        names = ("num-steps", "eagle-topk", "num-draft-tokens")
        numbers = "/".join(values.get(f"--speculative-{name}", "0") for name in names)
        return f"{values['--speculative-algorithm']} {numbers}"

    @property
    def fault(self) -> str:
        """What is wrong with that setting."""
        return self.faults.get(self.arm, "")

    @property
    def measured(self) -> list[tuple[str, int]]:
        """Settings and rounds in the logbook."""
        texts = [text for path, text in self.book.items() if path.endswith("/visits.jsonl")]
        rows = [json.loads(line) for text in texts for line in text.split("\n") if line]
        return [(row["arm"], row["round"]) for row in rows]

    def _hold(self, script: str, body: str) -> str:
        said = super()._hold(script, body)
        if "status taken" not in said:
            return said
        if script == "start sglang.service on trial":
            self._begin(_texts(body)[1])
        elif script == "keep the setting of sglang.service":
            folder = "/etc" if '"$ETC/' in body.rpartition("same()")[2] else "/run"
            self.kept, self.trial = {folder: _texts(body)[1]}, False
        return said

    def _begin(self, text: str) -> None:
        line = next(x for x in text.split("\n") if x.startswith("ExecStart=/"))
        self.flags = line.partition(f"{HEAD} ")[2]
        self.visits.append(self.arm)
        self.trial, self.active = True, self.fault != "dies"
        if self.active:
            self.holders = [daemon(), *workers()]

    def _put_back(self, whose: str) -> str:
        said = super()._put_back(whose)
        if "status done" in said or "status failed" in said:
            self.flags = self.flags if self.kept else OWN_FLAGS
            self.trial, self.said = False, self.after
        return said

    def _section(self, name: str, body: str) -> Section:
        texts: dict[str, Callable[[str], str]] = {
            "answers": self._answers,
            "bench": self._bench,
            "book": self._book,
            "journal": lambda _: (
                f"journal ServerArgs(api_key='{SECRET}')\njournal key {SECRET}"
                "\njournal RuntimeError: no kernel"
            ),
            "prompts": lambda _: f"sum 4038 99 x\nprompts {self.conversations}",
            "state": self._state,
            "tokenizer": lambda _: "tokenizer loads",
            "tool": lambda _: "module sglang.bench_serving\nhelp " + " ".join(NEEDED),
            "unit": self._shown,
        }
        if name not in texts:
            return super()._section(name, body)
        # As a real shell does: what is printed ends with a newline.
        return Section(f"{texts[name](body)}\n", 0)

    def _health(self) -> str:
        return super()._health() if self.active else 'answer 0 0 0.1 "Connection refused"'

    def _state(self, _: str) -> str:
        return f"state ActiveState {'active' if self.active else 'failed'}"

    def _shown(self, _: str) -> str:
        argv = "\0".join([*shlex.split(f"{HEAD} {OWN_FLAGS}"), ""])
        lines = [f"# {UNIT_FILE}", "[Service]", f"ExecStart={HEAD} {OWN_FLAGS}"]
        shown = {"LoadState": "loaded", "FragmentPath": UNIT_FILE, "DropInPaths": ""}
        shown |= {"MainPID": "100", "NeedDaemonReload": "no"}
        return "\n".join(
            [
                *(f"show {name}={value}" for name, value in shown.items()),
                *(f"file {line}" for line in lines),
                f"argv {argv.encode().hex()}",
                "exe /usr/bin/python3.11",
                f"print {self.files}",
            ]
        )

    def _answers(self, body: str) -> str:
        found = re.search(r"^ASKED = (.*)$", body, re.M)
        assert found
        asked = json.loads(json.loads(found[1]))
        assert asked["key"] == SECRET
        rows = []
        for number, one in enumerate(asked["asks"]):
            code, value = self._answer(one)
            rows.append(f"answer {number} {code} 0.1 {json.dumps(json.dumps(value))}")
        return "\n".join(rows)

    def _answer(self, one: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if one["path"] == "/server_info":
            return 200, self._info()
        if self.fault == "mute":
            return 500, {}
        other = " for others" if self.fault == "wrong" else ""
        return 200, {"text": f"an answer{other} to {one['body']['text']}"}

    def _info(self) -> dict[str, Any]:
        values = _values(self.flags)
        names = ("num_steps", "eagle_topk", "num_draft_tokens")
        numbers = {x: values.get(f"--speculative-{x.replace('_', '-')}") for x in names}
        return {
            "version": "0.5.23",
            "model_path": "/models/qwen",
            "launch_command": f"{HEAD} {self.flags}",
            "max_running_requests": int(values["--max-running-requests"]),
            "speculative_algorithm": "EAGLE" if self.arm != OFF else None,
            **{f"speculative_{x}": int(y) if y else None for x, y in numbers.items()},
            "internal_states": [{"memory_usage": {"token_capacity": 400_000}}],
        } | self.said

    def _bench(self, body: str) -> str:
        if self.fault == "breaks":
            return f"exit 1\nsaid ValueError: Bearer {SECRET} was refused\nat 2026-11-30 13:05:59"
        level, requests = (
            int(re.findall(rf"{flag} (\d+)", body)[0])
            for flag in ("--max-concurrency", "--num-prompts")
        )
        speed = 100 * level**0.6 * self.speeds.get(self.arm, 1)
        times = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
        record = dict.fromkeys(times, 10.0) | {"duration": 1.0, "output_throughput": speed}
        record["completed"] = requests
        return f"exit 0\nrecord {json.dumps(record)}\nat 2026-11-30 13:05:59"

    def _book(self, body: str) -> str:
        place = re.findall(r"^(?:umask 077; .*)?cd (\S+) ", body, re.M)[0]
        if "mv visits.jsonl" in body:
            if f"{place}/visits.jsonl" in self.book:
                self.book[f"{place}/visits-before.jsonl"] = self.book.pop(f"{place}/visits.jsonl")
            return "written yes"
        if "printf" not in body:
            pairs = (("visit", "visits.jsonl"), ("answers", "answers.json"))
            return "\n".join(
                f"{word} {line}"
                for word, file in pairs
                for line in self.book.get(f"{place}/{file}", "").split("\n")
            )
        text = token(body.partition("printf '%s' ")[2])
        sign, name = re.findall(r"(>+)(\S+) && echo written yes$", body)[0]
        path = f"{place}/{name}"
        self.book[path] = (self.book.get(path, "") if sign == ">>" else "") + text
        return "written yes"


def _values(flags: str) -> dict[str, str]:
    words = shlex.split(flags)
    return dict(pairwise(words))


def token(text: str) -> str:
    """The first shell word of a text."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    return next(lexer)


def _texts(body: str) -> Sequence[str]:
    """UNIT and TEXT of a script of a trial."""
    _, _, rest = body.partition("\nUNIT=")
    unit, _, text = rest.partition(" TEXT=")
    return unit, token(text)


def intruder() -> Holder:
    """Somebody who comes while the GPUs are held."""
    return Holder(301, "stray.py", 0, unit="session-3.scope")


def tunable() -> PretendServer:
    """A server that holds both GPUs, beside a persistence daemon."""
    return PretendServer([daemon(), *workers()])
