"""What must be so before MoE kernels are tuned; else it is refused, and nothing was touched."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_reclaim.errors import BadInput
from gpu_reclaim.finding import Found, text
from gpu_reclaim.moeconfigs import ConfigName
from gpu_reclaim.moelog import Lookup
from gpu_reclaim.moelooks import (
    Device,
    Environment,
    read_devices,
    read_environment,
    read_facts,
    read_lookups,
    sees_the_same,
)
from gpu_reclaim.moescript import Facts
from gpu_reclaim.moespace import Shape
from gpu_reclaim.serving import Server
from gpu_reclaim.session import Session

QUIET = ("warning", "error", "critical")
"""Log levels at which SGLang does not tell of a file that it uses."""


def environment(session: Session, server: Server) -> Environment:
    """The server's environment.

    Raises:
        BadInput: A drop-in could not change where it looks for configs.
        TransportError: As `Transport.run`.
    """
    env = read_environment(session, server.unit)
    if env.folder and not env.of_unit:
        raise BadInput(
            f"{session.host}: SGLANG_MOE_CONFIG_DIR of {server.unit} is set outside of its unit, "
            "where a drop-in cannot change it",
            remedy="move it from the environment file or the command line into an Environment= of "
            "the unit, and restart it",
        )
    return env


def asked_for(session: Session, found: Found) -> list[Lookup]:
    """What the server says of its configs.

    Raises:
        BadInput: It uses none.
        TransportError: As `Transport.run`.
    """
    info, unit = found.info, found.server.unit
    if info.get("enable_deterministic_inference"):
        raise BadInput(
            f"{session.host}: {unit} runs with deterministic inference, which reads no configs",
            remedy="there is nothing to tune while it does",
        )
    runner = text(info.get("moe_runner_backend"))
    if runner not in ("", "auto", "triton"):
        raise BadInput(
            f"{session.host}: {unit} runs its experts by {runner}, which reads no Triton configs; "
            "tuning would change nothing",
            remedy="--moe-runner-backend triton is what the tuning is for",
        )
    level = text(info.get("log_level"))
    if level in QUIET:
        raise BadInput(
            f"{session.host}: {unit} runs with --log-level {level}, so it does not say which "
            "configs it uses, and nothing could be proven",
            remedy="let it log at info, and restart it",
        )
    seen = [x for x in read_lookups(session, unit) if not x.name.down]
    if not seen:
        raise BadInput(
            f"{session.host}: the journal of {unit} has no line on MoE kernel configs, so it does "
            f"not seem to use the Triton kernel (moe_runner_backend is {runner or 'unknown'})",
            remedy="if its log goes elsewhere, or --log-level is above info, or the journal was "
            "cleaned since its start, correct that and restart it; else tuning changes nothing",
        )
    return seen


def check_folder(
    session: Session, lookup: Lookup, facts: Facts, env: Environment, *, unit: str
) -> None:
    """Refuse where a drop-in would not lead the server to a folder of ours.

    Raises:
        BadInput: Somebody else chooses its folder, or it sees other files than we do.
        TransportError: As `Transport.run`.
    """
    own = facts.configs.rpartition("/")[0]
    if own and lookup.folder not in (own, env.folder.rstrip("/")):
        raise BadInput(
            f"{session.host}: {unit} looks for configs in {lookup.folder}, which is neither its "
            f"package's folder ({own}) nor one that its unit names",
            remedy="take SGLANG_MOE_CONFIG_DIR out of the script that starts it",
        )
    others = sees_the_same(session, unit, [f"{lookup.folder}/configs", session.places.lib])
    if others:
        raise BadInput(
            f"{session.host}: {unit} does not see {' and '.join(others)} as the host does",
            remedy="a server in a container, or with a root of its own, cannot be tuned here",
        )


def script_facts(session: Session, found: Found) -> Facts:
    """The tuning script, of the release that is installed and that runs.

    Raises:
        BadInput: There is none, or it is of another one.
        TransportError: As `Transport.run`.
    """
    server, host = found.server, session.host
    if not server.sglang_source:
        raise BadInput(
            f"{host}: no checkout with SGLang's tuning script is named",
            remedy="clone the release that is installed there, and set sglang_source in the "
            "LlmServer block",
        )
    facts = read_facts(session, server)
    if not facts.found:
        raise BadInput(
            f"{host}: {server.sglang_source} has no tuning script for the fused MoE kernel",
            remedy="it is in SGLang's repository, not in its package: name a checkout",
        )
    if facts.skewed:
        raise BadInput(
            f"{host}: {facts.skewed}",
            remedy="check out the release that is installed: what one makes the other cannot read",
        )
    if facts.missing:
        said = facts.said or "its --help does not name them"
        raise BadInput(
            f"{host}: the tuning script lacks {', '.join(facts.missing)}: {said}",
            remedy="see what its --help says there",
        )
    running = text(found.info.get("version"))
    if running and facts.sglang and running != facts.sglang:
        raise BadInput(
            f"{host}: the server runs SGLang {running}, and its interpreter has {facts.sglang} now",
            remedy="restart the server first, so that it is the one that is tuned for",
        )
    return facts


def wanted(session: Session, seen: list[Lookup], shape: Shape, facts: Facts) -> list[Lookup]:
    """The lookups of the file that the script would make.

    Raises:
        BadInput: The server does not ask for it.
    """
    # As SGLang does it: a block shape with a zero is none in a file's name.
    block = shape.block_shape if shape.block_shape and all(shape.block_shape) else None
    made = (shape.experts, shape.shard, block)
    mine = [x for x in seen if (x.name.experts, x.name.shard, x.name.block_shape) == made]
    names = sorted({str(x.name) for x in (mine or seen)})
    if not mine:
        raise BadInput(
            f"{session.host}: the server asks for {' and '.join(names)}; the script would make a "
            f"file for E={shape.experts},N={shape.shard}, block shape {shape.block_shape}, which "
            "it would never read",
            remedy="the checkout's common_utils.py does not know this model as the server does: "
            "try the one of another release of the same version",
        )
    if len(names) > 1 or len({x.wanted for x in mine}) > 1:
        raise BadInput(
            f"{session.host}: the server asks for several files of that shape: {', '.join(names)}",
            remedy="they differ by GPU, number format or folder; this cannot be tuned here",
        )
    if facts.triton and facts.triton != mine[0].triton:
        raise BadInput(
            f"{session.host}: the server runs with Triton {mine[0].triton}, and its interpreter "
            f"has {facts.triton} now",
            remedy="restart the server first; a config is for one Triton",
        )
    return mine


def devices_for(session: Session, name: ConfigName, gpus: Sequence[int]) -> list[Device]:
    """The GPUs that a file is for.

    Args:
        session: The host.
        name: The file's.
        gpus: Indexes of those that may be used; empty: all.

    Raises:
        BadInput: There is none.
        TransportError: As `Transport.run`.
    """
    devices = [x for x in read_devices(session) if not gpus or x.index in gpus]
    mine = [device for device in devices if device.name == name.device]
    if not mine:
        found = ", ".join(sorted({device.name for device in devices})) or "none"
        raise BadInput(
            f"{session.host}: the server asks for a file for {name.device}, and the GPUs are "
            f"{found}",
            remedy="a config for one GPU does not serve another",
        )
    return mine
