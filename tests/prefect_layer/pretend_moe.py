"""A pretend host whose server's MoE kernels can be tuned: each folder of configs has its speed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from gpu_reclaim.commands import Script, Section
from gpu_reclaim.jobs import JobState
from gpu_reclaim.moeconfigs import GRID, text_of
from gpu_reclaim.moefound import PRESENT
from prefect_layer.pretend_host import daemon, workers
from prefect_layer.pretend_server import SECRET, PretendServer, token
from unit.moe_host import (
    NAME,
    PACKAGE,
    ROW,
    SEARCH,
    environment,
    path_of,
    script_answer,
    shape_answer,
    with_file,
    without_file,
)

L40S = replace(NAME, device="NVIDIA_L40S")
OVERLAYS = "/var/lib/gpu-reclaim-moe/sglang.service"
VARIABLE = "SGLANG_MOE_CONFIG_DIR"
SLOWEST_US = 100.0


@dataclass
class PretendMoe(PretendServer):
    """The same host, with a checkout of SGLang beside the server.

    Attributes:
        folder: Where the server looks for its configs; a winner's, once it is kept.
        overlays: Folders that were made: what for, and the text of our file.
        sizes: What the tuning script does for a size: `fails`, `other name`, `other size`; well
            where nothing is said.
        jobs: Jobs that were started, with their commands.
        stray: This arm's second rank uses the package's file.
        disk_full: No overlay can be made.
        name: Of the script that is answered.
    """

    folder: str = PACKAGE
    overlays: dict[str, tuple[str, str]] = field(default_factory=dict)
    sizes: dict[int, str] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)
    stray: str = ""
    disk_full: bool = False
    name: str = ""

    @property
    def arm(self) -> str:
        """Name of the configs that the server uses."""
        return self.overlays.get(self.folder, (PRESENT, ""))[0]

    def _carry_out(self, script: Script) -> dict[str, str | Section]:
        self.name = script.name
        return super()._carry_out(script)

    def _hold(self, script: str, body: str) -> str:
        said = super()._hold(script, body)
        if "status taken" in said and script.startswith("start job "):
            self.jobs[script.removeprefix("start job ")] = body
        return said

    def _begin(self, text: str) -> None:
        found = re.search(rf'^Environment="{VARIABLE}=(.+)"$', text, re.M)
        self.folder = found[1] if found else self._own
        self.visits.append(self.arm)
        self.trial, self.active = True, self.fault != "dies"
        if self.active:
            self.holders = [daemon(), *workers()]

    @property
    def _own(self) -> str:
        """The folder that the unit itself names."""
        text = "".join(self.kept.values())
        return text.partition(f'"{VARIABLE}=')[2].partition('"')[0] or PACKAGE

    def _put_back(self, whose: str) -> str:
        said = super()._put_back(whose)
        if "status done" in said or "status failed" in said:
            self.folder = self._own
        return said

    def _section(self, name: str, body: str) -> Section:
        texts: dict[str, Callable[[str], str]] = {
            "env": self._environment,
            "file": self._file,
            "files": self._files,
            "jobs": self._looked,
            "log": self._log,
            "made": self._made,
            "rows": lambda _: f"defaults {json.dumps(dict.fromkeys(GRID, ROW))}",
            "seen": lambda _: "",
            "script": lambda _: _only(script_answer(SEARCH, version="v0.5.23", sglang="0.5.23")),
            "shape": lambda _: _only(shape_answer()),
            "tidy": self._tidy,
        }
        if self.name == "read what GPUs can do":
            return Section("\n".join(f"gpu {n}, NVIDIA L40S, 8.9" for n in range(2)), 0)
        if name not in texts:
            return super()._section(name, body)
        return Section(f"{texts[name](body)}\n", 0)

    def _info(self) -> dict[str, Any]:
        more = {"tp_size": 2, "moe_runner_backend": "auto", "chunked_prefill_size": 2048}
        return more | super()._info()

    def _environment(self, _: str) -> str:
        if self.folder == PACKAGE:
            return _only(environment("HF_HOME=/models"))
        return _only(environment(f"{VARIABLE}={self.folder}", of_unit="1"))

    def _log(self, _: str) -> str:
        lines = []
        for rank in range(2):
            ours = self.folder in self.overlays and not (rank == 1 and self.arm == self.stray)
            line = with_file if ours else without_file
            lines.append(f"line {line(L40S, rank, base=self.folder)}")
        return "\n".join(lines)

    def _files(self, body: str) -> str:
        paths = [shlex.split(line)[3] for line in body.split("\n")[:-1]]
        held = {path_of(L40S, base=x): text for x, (_, text) in self.overlays.items()}
        held |= {"/configs/other.json": text_of({8: {**ROW, "num_stages": 4}})}
        return "\n".join(
            f"file {n} {held[path].encode().hex()}" for n, path in enumerate(paths) if path in held
        )

    def _made(self, body: str) -> str:
        if self.disk_full:
            return "said No space left on device"
        target = token(body.removeprefix("TARGET="))
        text = token(body.partition(" TEXT=")[2])
        self.overlays[target] = (self.name.removeprefix("make an overlay for "), text)
        return "built yes"

    def _tidy(self, body: str) -> str:
        kept = token(body.partition("KEPT=")[2]).split()
        self.overlays = {x: y for x, y in self.overlays.items() if x.rpartition("/")[2] in kept}
        return ""

    def _looked(self, body: str) -> str:
        names = re.findall(r"^look_at (\S+) ", body, re.M)
        return "\n".join(f"{name} {line}" for name in names for line in self._job(name))

    def _job(self, name: str) -> list[str]:
        if name not in self.jobs:
            return ["state inactive"]
        tokens = self._tokens(name)
        state = self._tuned(tokens) if name.startswith("moe-") else self._timed(name, tokens)
        lines = ["state inactive", f"code {state.code}", "began 0", "ended 600"]
        lines += [f"gpu {self._word(name, 'CUDA_VISIBLE_DEVICES')}", f"token {self.token}"]
        lines += ["from 0", f"hex {state.text.encode().hex()}"]
        return [*lines, *(f"file {file}" for file in state.files)]

    def _word(self, name: str, variable: str) -> str:
        found = re.search(rf"export {variable}=(\S+)", self.jobs[name])
        return found[1] if found else ""

    def _tokens(self, name: str) -> int:
        return int(re.findall(r"--batch-size (\d+)", self.jobs[name])[0])

    def _tuned(self, tokens: int) -> JobState:
        fault = self.sizes.get(tokens, "")
        if fault == "fails":
            said = f"api_key='{SECRET}'\nValueError: no kernel at {tokens}"
            return JobState(active=False, code=1, text=said)
        name = replace(L40S, shard=999) if fault == "other name" else L40S
        said = f"Start tuning over 976 configurations to create {name}...\n"
        return JobState(active=False, code=0, text=said, files=(str(L40S), "space.json"))

    def _timed(self, name: str, tokens: int) -> JobState:
        folder = self._word(name, VARIABLE) or self.folder
        arm = self.overlays.get(folder, (PRESENT, ""))[0]
        us = SLOWEST_US / self.speeds.get(arm, 1)
        said = f"Batch size: {tokens}, config: {{}}\nKernel time: {us} us\n"
        return JobState(active=False, code=0, text=said)

    def _file(self, body: str) -> str:
        tokens = int(token(body.removeprefix("FILE=")).split("/")[-2])
        tokens += self.sizes.get(tokens) == "other size"
        return f"hex {text_of({tokens: {**ROW, 'num_stages': 3}}).encode().hex()}"

    def _book(self, body: str) -> str:
        if "sizes.jsonl" in body and "printf" not in body:
            place = re.findall(r"^cd (\S+) ", body, re.M)[0]
            lines = self.book.get(f"{place}/sizes.jsonl", "").split("\n")
            return "\n".join(f"size {line}" for line in lines)
        return super()._book(body)

    @property
    def tuned(self) -> list[int]:
        """The sizes that were put on record."""
        texts = [text for path, text in self.book.items() if path.endswith("/sizes.jsonl")]
        return [json.loads(x)["tokens"] for text in texts for x in text.split("\n") if x]


def _only(answer: object) -> str:
    """The one text of an answer."""
    assert isinstance(answer, dict)
    return str(next(iter(answer.values())))


def moe_tunable() -> PretendMoe:
    """A server that holds both GPUs, beside a persistence daemon."""
    return PretendMoe([daemon(), *workers()])
