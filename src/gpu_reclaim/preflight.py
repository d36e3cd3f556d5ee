"""All that is looked at before a server is taken down: what can refuse a tuning refuses it here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpu_reclaim import logbook, measuring, serverunit, sglang
from gpu_reclaim.benching import SEED, Load, Tool
from gpu_reclaim.commands import Script
from gpu_reclaim.errors import BadInput
from gpu_reclaim.execstart import locate
from gpu_reclaim.lease import TUNED_FILE
from gpu_reclaim.prompts import look_at_prompts, look_at_tokenizer
from gpu_reclaim.servercommand import ServerCommand, drop_in, hides_secrets
from gpu_reclaim.serving import Server, ask_health
from gpu_reclaim.session import Session, look
from gpu_reclaim.spectrials import trials
from gpu_reclaim.speculation import read_flags, with_setting
from gpu_reclaim.tuning import SpecDecodePlan, SpecSetting

OUTPUT_TOKENS = 220
"""Mean answer of a ShareGPT conversation, in tokens: what a benchmark's length is guessed from
until one was measured."""

ONE_STREAM_TOK_S, STREAMS_POWER = 122, 0.61
"""Output tokens per second of N streams are guessed as 122 N^0.61: Qwen3.5-122B on four RTX PRO
6000 made 122 at one request and 1566 at 64."""

_EFFECTIVE = "effective_max_running_requests_per_dp"

RESOLVED = (
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    *("sampling_backend", "grammar_backend", "moe_runner_backend", "moe_a2a_backend"),
    *("dtype", "quantization", "kv_cache_dtype", "load_format", "revision", "tokenizer_path"),
    *("tp_size", "dp_size", "pp_size", "ep_size", "enable_dp_attention", "page_size"),
    *("mem_fraction_static", "context_length", "chunked_prefill_size", "max_prefill_tokens"),
    *("schedule_policy", "schedule_conservativeness", "cuda_graph_max_bs", "disable_cuda_graph"),
    *("disable_radix_cache", "disable_overlap_schedule", "enable_torch_compile"),
    *("speculative_draft_model_path", "speculative_attention_mode"),
)
"""What of /server_info says how quick a server is, wherever it was set: in a flag, a configuration
file, the environment, or by the server itself. The rest differs from start to start (a random seed,
ports), or is tried."""

Scalar = str | int | float | bool

START_S = 300
"""A start is guessed to take so long, in seconds, where the server does not say how long its last
one took."""


@dataclass(frozen=True)
class Preflight:
    """A server before it is tuned, and what will be tried.

    Attributes:
        server: What is tuned.
        command: Its command line.
        settings: The trials by name, in order of preference, the present setting first.
        refused: Settings that will not be tried, and why.
        info: Its /server_info.
        tool: The benchmark client.
        running: --max-running-requests of every trial.
        model: Folder with its tokenizer.
        parts: What must be the same so that measurements may be compared.
        place: Where its logbook is on the host.
        start_s: Seconds that a start took last time, or is guessed to take.
    """

    server: Server
    command: ServerCommand = field(repr=False)
    settings: Mapping[str, SpecSetting]
    refused: Mapping[str, str]
    info: Mapping[str, Any] = field(repr=False)
    tool: Tool = field(repr=False)
    running: int
    model: str
    parts: Mapping[str, object] = field(repr=False)
    place: str
    start_s: float

    @property
    def current(self) -> str:
        """Name of the present setting."""
        return next(iter(self.settings))

    def flags(self, arm: str) -> list[str]:
        """The server's flags with that setting."""
        return self._with(self.command.flags, arm)

    @property
    def trial_flags(self) -> dict[str, list[str]]:
        """The flags that are different from trial to trial, by setting."""
        return {arm: self._with([], arm) for arm in self.settings}

    def _with(self, words: Sequence[str], arm: str) -> list[str]:
        return with_setting(
            words,
            self.settings[arm],
            current_algorithm=read_flags(self.command.flags).algorithm,
            max_running_requests=self.running,
        )

    def tuned_file(self, *, lasting: bool) -> str:
        """Where a winner's drop-in is on the host."""
        root = "/etc" if lasting else "/run"
        return f"{root}/systemd/system/{self.server.unit}.d/{TUNED_FILE}"

    def drop_in(self, arm: str) -> str:
        """Text of the drop-in that gives the unit that setting."""
        return drop_in(self.command, self.flags(arm))


def load_of(before: Preflight, plan: SpecDecodePlan, level: int, name: str) -> Load:
    """What one measurement sends."""
    server = before.server
    return Load(
        level=level,
        requests=requests_at(plan, level),
        base_url=server.base_url,
        model=before.model,
        dataset_name=server.dataset_name,
        dataset_path=server.dataset_path,
        timeout_s=plan.measure_timeout_s,
        folder=before.place,
        name=name,
        api_key=server.api_key,
    )


def requests_at(plan: SpecDecodePlan, level: int) -> int:
    """Requests of one measurement."""
    return max(plan.least_requests, plan.requests_per_stream * level)


def ladder_s(plan: SpecDecodePlan) -> float:
    """Guessed seconds of one visit's measurements."""
    rates = {level: ONE_STREAM_TOK_S * math.pow(level, STREAMS_POWER) for level in plan.levels}
    return sum(requests_at(plan, x) * OUTPUT_TOKENS / rate for x, rate in rates.items())


def preflight(session: Session, server: Server, plan: SpecDecodePlan) -> Preflight:
    """Look at everything; touch nothing.

    Raises:
        BadInput: Something speaks against tuning; the message says what.
        BadAnswer: The server's interpreter cannot be run, or systemd does not show the unit.
        TransportError: As `Transport.run`.
    """
    gpus, server = _gpus(session), _by_its_own_name(session, server)
    info = _serving(session, server)
    command = _command(session, server, plan)
    current = read_flags(command.flags)
    chosen, refused = trials(plan, current, command.flags, info)
    model = server.model_path or _text(info.get("tokenizer_path")) or _text(info.get("model_path"))
    if not model:
        raise BadInput(
            f"{session.host}: the server does not say where its model is",
            remedy="set model_path in the LlmServer block",
        )
    look_at_tokenizer(session, server, model)
    prompts = look_at_prompts(session, server, max(requests_at(plan, x) for x in plan.levels))
    running = plan.max_running_requests or _running(session, info)
    parts = {
        "unit": server.unit,
        "version": _text(info.get("version")),
        "model": _text(info.get("model_path")) or model,
        "flags": logbook.key_of(
            {
                "flags": with_setting(
                    command.flags,
                    # Not off: that would leave out the draft model too.
                    SpecSetting(algorithm="NEXTN"),
                    current_algorithm="",
                    max_running_requests=running,
                )
            }
        ),
        "resolved": {x: info[x] for x in RESOLVED if isinstance(info.get(x), Scalar)},
        "running": running,
        "gpus": gpus,
        # Visits are compared with those of the present setting in the same round.
        "settings": [str(one) for one in chosen],
        "prompts": prompts,
        "levels": {str(level): requests_at(plan, level) for level in plan.levels},
        "seed": SEED,
        "greedy": logbook.key_of({"prompts": measuring.PROMPTS}),
    }
    took = info.get("startup_time")
    return Preflight(
        server=server,
        command=command,
        settings={str(one): one for one in chosen},
        refused=refused,
        info=info,
        tool=measuring.find_tool(session, server),
        running=running,
        model=model,
        parts=parts,
        place=logbook.folder(session, server.unit, logbook.key_of(parts)),
        start_s=float(took) if isinstance(took, int | float) and took > 0 else START_S,
    )


def _serving(session: Session, server: Server) -> Mapping[str, Any]:
    health = ask_health(session, server)
    if health.code != sglang.OK:
        raise BadInput(
            f"{session.host}: {server.unit} does not serve at {server.base_url}: {health}",
            remedy="what it runs with now is what others are compared with, so let it serve first; "
            "or correct base_url and python in the LlmServer block",
        )
    info = measuring.server_info(session, server)
    if not info:
        raise BadInput(
            f"{session.host}: {server.base_url} does not answer /server_info",
            remedy="give its API key in the LlmServer block if it wants one; "
            "sglang before 0.5.5 cannot be tuned here",
        )
    return info


def _unit(session: Session, unit: str) -> serverunit.Unit:
    body = serverunit.show_server(unit, session.places)
    # Its answer holds the command line, so it is never shown.
    script = Script("read its command line", {"unit": body}, together=True)
    return serverunit.parse_server(session.links.run(script).section("unit"), unit)


def _gpus(session: Session) -> list[str]:
    reading = look(session, "read the GPUs").reading
    return [f"{gpu.name} {gpu.uuid}" for gpu in reading.gpus]


def _by_its_own_name(session: Session, server: Server) -> Server:
    """The server, its unit named as systemd's files are: the host was looked at before."""
    names = {alias: name for name, others in session.aliases.items() for alias in (name, *others)}
    unit = names.get(server.unit, server.unit)
    if unit not in session.units:
        raise BadInput(
            f"{session.host}: {server.unit} is none of its units ({', '.join(session.units)})",
            remedy="add the unit to the GpuHost block of the LlmServer block",
        )
    return replace(server, unit=unit)


def _command(session: Session, server: Server, plan: SpecDecodePlan) -> ServerCommand:
    """The server's command line.

    Raises:
        BadInput: A drop-in of ours would not be what systemd goes by, or would tell a secret.
    """
    unit = _unit(session, server.unit)
    command = locate(unit)
    name = command.file.rpartition("/")[2]
    if name.endswith(".conf") and name > TUNED_FILE:
        raise BadInput(
            f"{session.host}: ExecStart= of {server.unit} is in {name}, which systemd reads after "
            f"{TUNED_FILE}",
            remedy="rename that drop-in, for example to override.conf",
        )
    applies = plan.mode == "tune" and plan.apply == "if_better"
    if applies and not plan.persist and command.file.startswith("/etc/") and name == TUNED_FILE:
        raise BadInput(
            f"{session.host}: {command.file} is there, and would hide a winner's file in /run",
            remedy="keep the winner after a reboot too (persist)",
        )
    if applies and plan.persist and unit.fixed:
        raise BadInput(
            f"{session.host}: /etc/systemd/system cannot be written to, so no winner could be kept",
            remedy="use persist = false (until a reboot) or apply = never",
        )
    if applies and command.from_process and hides_secrets(command.flags):
        raise BadInput(
            f"{session.host}: a secret of {server.unit} is in its environment, and a winner's file "
            "would have it in clear",
            remedy="use apply = never, and edit the environment file yourself",
        )
    return command


def _running(session: Session, info: Mapping[str, Any]) -> int:
    """How many requests the server works at now."""
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states else {}
    per_rank = state.get(_EFFECTIVE) if isinstance(state, dict) else None
    # The flag is divided among the ranks of DP attention alone (`max_running_requests // dp_size`).
    ranks = (_number(info.get("dp_size")) or 1) if info.get("enable_dp_attention") else 1
    found = _number(info.get("max_running_requests")) or ranks * _number(per_rank)
    if not found:
        raise BadInput(
            f"{session.host}: the server does not say how many requests it works at",
            remedy="give max_running_requests in the plan: unset, speculative decoding makes it 48",
        )
    return found


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
