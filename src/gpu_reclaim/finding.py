"""A server that serves, as every tuning needs it: what can refuse one refuses it here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpu_reclaim import logbook, measuring, serverunit, sglang
from gpu_reclaim.benching import SEED, Tool
from gpu_reclaim.commands import Script
from gpu_reclaim.errors import BadInput
from gpu_reclaim.plans import TrialPlan
from gpu_reclaim.prompts import look_at_prompts, look_at_tokenizer
from gpu_reclaim.serving import Server, ask_health
from gpu_reclaim.session import Session, look

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


STEADY = ("version", "model_path", "tp_size", "dp_size", "max_running_requests", "launch_command")
"""What of /server_info says that a server is the same as before; so does all that begins with
`speculative`."""


@dataclass(frozen=True)
class Found:
    """A server that serves, and what both tunings need of it.

    Attributes:
        server: What is tuned.
        info: Its /server_info.
        tool: The benchmark client.
        model: Folder with its tokenizer.
        parts: What must be the same so that measurements may be compared.
        start_s: Seconds that a start took last time, or is guessed to take.
    """

    server: Server
    info: Mapping[str, Any] = field(repr=False)
    tool: Tool = field(repr=False)
    model: str
    parts: Mapping[str, object] = field(repr=False)
    start_s: float


def requests_at(plan: TrialPlan, level: int) -> int:
    """Requests of one measurement."""
    return max(plan.least_requests, plan.requests_per_stream * level)


def find(session: Session, server: Server, plan: TrialPlan) -> Found:
    """Look at a server that serves; touch nothing.

    Raises:
        BadInput: Something speaks against tuning; the message says what.
        BadAnswer: The server's interpreter cannot be run, or systemd does not show the unit.
        TransportError: As `Transport.run`.
    """
    gpus, server = _gpus(session), _by_its_own_name(session, server)
    info = _serving(session, server)
    if number(info.get("nnodes")) > 1:
        raise BadInput(
            f"{session.host}: {server.unit} is a part of a server on several hosts",
            remedy="only a server on one host can be tuned here",
        )
    model = server.model_path or text(info.get("tokenizer_path")) or text(info.get("model_path"))
    if not model:
        raise BadInput(
            f"{session.host}: the server does not say where its model is",
            remedy="set model_path in the LlmServer block",
        )
    look_at_tokenizer(session, server, model)
    prompts = look_at_prompts(session, server, max(requests_at(plan, x) for x in plan.levels))
    parts = {
        "unit": server.unit,
        "version": text(info.get("version")),
        "model": text(info.get("model_path")) or model,
        "resolved": {x: info[x] for x in RESOLVED if isinstance(info.get(x), Scalar)},
        "gpus": gpus,
        "prompts": prompts,
        "levels": {str(level): requests_at(plan, level) for level in plan.levels},
        "seed": SEED,
        "greedy": logbook.key_of({"prompts": measuring.PROMPTS, "long": long_tokens(info)}),
    }
    took = info.get("startup_time")
    return Found(
        server=server,
        info=info,
        tool=measuring.find_tool(session, server),
        model=model,
        parts=parts,
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


def read_unit(session: Session, unit: str) -> serverunit.Unit:
    """What systemd and /proc show of a unit.

    Raises:
        BadAnswer: systemd does not show it.
        TransportError: As `Transport.run`.
    """
    body = serverunit.show_server(unit, session.places)
    # Its answer holds the command line, so it is never shown.
    script = Script("read its command line", {"unit": body}, together=True)
    return serverunit.parse_server(session.links.run(script).section("unit"), unit)


def check_place(session: Session, unit: serverunit.Unit, file: str, *, lasting: bool) -> None:
    """Refuse where a winner's drop-in could not be kept.

    Args:
        session: The host.
        unit: The server's.
        file: Name of the drop-in.
        lasting: It shall outlive a reboot.

    Raises:
        BadInput: The place is read-only, or another file would hide it.
    """
    if lasting and unit.fixed:
        raise BadInput(
            f"{session.host}: /etc/systemd/system cannot be written to, so no winner could be kept",
            remedy="use persist = false (until a reboot) or apply = never",
        )
    there = f"/etc/systemd/system/{unit.name}.d/{file}"
    if not lasting and there in unit.properties.get("DropInPaths", "").split():
        raise BadInput(
            f"{session.host}: {there} is there, and would hide a winner's file in /run",
            remedy="keep the winner after a reboot too (persist)",
        )


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


def running_requests(session: Session, info: Mapping[str, Any]) -> int:
    """How many requests the server works at now.

    Raises:
        BadInput: It does not say so.
    """
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states else {}
    per_rank = state.get(_EFFECTIVE) if isinstance(state, dict) else None
    # The flag is divided among the ranks of DP attention alone (`max_running_requests // dp_size`).
    ranks = (number(info.get("dp_size")) or 1) if info.get("enable_dp_attention") else 1
    found = number(info.get("max_running_requests")) or ranks * number(per_rank)
    if not found:
        raise BadInput(
            f"{session.host}: the server does not say how many requests it works at",
            remedy="give max_running_requests in the plan: unset, speculative decoding makes it 48",
        )
    return found


def long_tokens(info: Mapping[str, Any]) -> int:
    """Length of a prompt that fills a prefill's chunk, in tokens; 0 where none is known."""
    chunk, longest = number(info.get("chunked_prefill_size")), number(info.get("context_length"))
    return min(chunk, longest // 2) if longest else chunk


def text(value: object) -> str:
    """A text; empty where it is none."""
    return value if isinstance(value, str) else ""


def number(value: object) -> int:
    """A whole number above 0; 0 where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def changed(session: Session, found: Found) -> list[str]:
    """Where the server that serves now differs from the one that was found first.

    Raises:
        TransportError: As `Transport.run`.
    """
    info = measuring.server_info(session, found.server)
    if not info:
        return ["it does not answer /server_info"]
    names = [x for x in found.info if x in STEADY or x.startswith("speculative")]
    return [
        f"{name} was {found.info[name]!r:.100} and is {info.get(name)!r:.100}"
        for name in names
        if name != "launch_command" and info.get(name) != found.info[name]
    ] + (
        ["its command line is another"]
        if info.get("launch_command") != found.info.get("launch_command")
        else []
    )
