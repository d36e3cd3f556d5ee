"""Before MoE kernels are tuned: all that can refuse it, and what would be done."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpu_reclaim import logbook, moespace, overlays
from gpu_reclaim.errors import BadInput
from gpu_reclaim.finding import Found, check_place, find, number, read_unit, running_requests, text
from gpu_reclaim.lease import MOE_FILE
from gpu_reclaim.moeconfigs import GRID, ConfigName, Row, Table, chosen, parse_table
from gpu_reclaim.moelog import Lookup
from gpu_reclaim.moelooks import (
    Device,
    Environment,
    read_defaults,
    read_devices,
    read_environment,
    read_facts,
    read_lookups,
    read_shape,
    read_tables,
)
from gpu_reclaim.moescript import Facts
from gpu_reclaim.moespace import SPACE, Shape
from gpu_reclaim.plans import MoeTunePlan
from gpu_reclaim.serving import Server
from gpu_reclaim.session import Session

SPACE_FLAG = "--search-space-file"

PRESENT, TUNED = "present", "tuned"
"""Names of the configs in use, and of those that the script makes."""


@dataclass(frozen=True)
class MoeFound:
    """A server whose MoE kernels can be tuned, and what for.

    Attributes:
        found: The server.
        name: Of the file that it wants.
        triton: Version of its Triton.
        base: Folder whose `configs/` it looks in now.
        lookups: What its ranks have said of that file, once each.
        facts: The tuning script.
        shape: The model's.
        devices: GPUs that the file is for.
        env: The server's environment.
        sizes: Token numbers to tune for.
        rows: Search space, where the script takes one; empty: its own.
        before: What the server uses now, by token number.
        candidates: Tables to try as they are, by arm.
        refused: Candidates that are not tried, and why.
        place: Where the tuned sizes are kept on the host.
        overlays: Folder of the unit's overlays there.
    """

    found: Found
    name: ConfigName
    triton: str
    base: str
    lookups: tuple[Lookup, ...]
    facts: Facts
    shape: Shape
    devices: tuple[Device, ...]
    env: Environment = field(repr=False)
    sizes: tuple[int, ...]
    rows: Sequence[Row] = field(repr=False)
    before: Table = field(repr=False)
    candidates: Mapping[str, Table] = field(repr=False)
    refused: Mapping[str, str]
    place: str
    overlays: str

    @property
    def tried(self) -> int:
        """How many rows are tried for each size."""
        return len(self.rows or SPACE)

    @property
    def model(self) -> str:
        """The model's folder or name, as the server has it."""
        return model_of(self.found)

    @property
    def space_text(self) -> str:
        """The search space as the script reads it."""
        return json.dumps([dict(row) for row in self.rows])

    @property
    def expectation(self) -> str:
        """Whether the kernel is bound by memory, for people."""
        return moespace.expectation(self.shape, self.sizes, self.name.dtype)

    @property
    def space(self) -> str:
        """What is tried for each size, for people."""
        whole = f"all {len(SPACE)} rows of SGLang's search space"
        if self.rows:
            return (
                f"{len(self.rows)} of {len(SPACE)} rows: those that fit into the GPU's shared "
                f"memory"
            )
        if SPACE_FLAG not in self.facts.flags:
            return f"{whole}: this script takes no other one"
        return whole

    def row_before(self, tokens: int) -> Row:
        """The row that the server uses now for so many tokens."""
        return chosen(self.before, tokens)


def moe_preflight(
    session: Session, server: Server, plan: MoeTunePlan, gpus: Sequence[int]
) -> MoeFound:
    """Look at everything; touch nothing.

    Args:
        session: The host.
        server: What is tuned.
        plan: What is to be tried.
        gpus: Indexes of the GPUs that may be used; empty: all.

    Raises:
        BadInput: Something speaks against tuning; the message says what.
        BadAnswer: The server's interpreter cannot be run, or systemd does not show the unit.
        TransportError: As `Transport.run`.
    """
    found = find(session, server, plan)
    server, info = found.server, found.info
    unit = read_unit(session, server.unit)
    if plan.mode == "tune" and plan.apply == "if_better":
        check_place(session, unit, MOE_FILE, lasting=plan.persist)
    env = _environment(session, server)
    seen = _lookups(session, found)
    facts = _facts(session, found)
    shape = read_shape(session, server, model_of(found), info, env)
    if isinstance(shape, str):
        raise BadInput(
            f"{session.host}: the tuning script cannot make out the model: {shape}",
            remedy="see whether a newer checkout knows it; its version must be the package's",
        )
    mine = _wanted(session, seen, shape, facts)
    name, triton = mine[0].name, mine[0].triton
    devices = _devices(session, name, gpus)
    rows = _space(plan, facts, name, devices[0])
    before = _before(session, found, mine[0], shape, capability=devices[0].capability, env=env)
    candidates, refused = _candidates(session, plan, name)
    key = {
        "name": str(name),
        "triton": triton,
        "sglang": facts.sglang,
        "shape": [shape.hidden, shape.topk],
        "space": logbook.key_of({"rows": [dict(row) for row in rows]}),
    }
    return MoeFound(
        found=found,
        name=name,
        triton=triton,
        base=mine[0].folder,
        lookups=tuple(mine),
        facts=facts,
        shape=shape,
        devices=tuple(devices),
        env=env,
        sizes=tuple(plan.batch_sizes or _sizes(session, found, plan)),
        rows=rows,
        before=before,
        candidates=candidates,
        refused=refused,
        place=logbook.folder(session, server.unit, f"moe-{logbook.key_of(key)}"),
        overlays=overlays.root(server.unit, session.places),
    )


def model_of(found: Found) -> str:
    """The model's folder or name, as the server has it."""
    return text(found.info.get("model_path")) or found.model


def _environment(session: Session, server: Server) -> Environment:
    env = read_environment(session, server.unit)
    if env.folder and not env.of_unit:
        raise BadInput(
            f"{session.host}: SGLANG_MOE_CONFIG_DIR of {server.unit} is set outside of its unit, "
            "where a drop-in cannot change it",
            remedy="move it from the environment file or the command line into an Environment= of "
            "the unit, and restart it",
        )
    return env


def _lookups(session: Session, found: Found) -> list[Lookup]:
    """What the server says of its configs; nothing: it would use none."""
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
    seen = [x for x in read_lookups(session, unit) if not x.name.down]
    if not seen:
        raise BadInput(
            f"{session.host}: the journal of {unit} has no line on MoE kernel configs, so it does "
            f"not seem to use the Triton kernel (moe_runner_backend is {runner or 'unknown'})",
            remedy="if its log goes elsewhere, or --log-level is above info, or the journal was "
            "cleaned since its start, correct that and restart it; else tuning changes nothing",
        )
    return seen


def _facts(session: Session, found: Found) -> Facts:
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


def _wanted(session: Session, seen: list[Lookup], shape: Shape, facts: Facts) -> list[Lookup]:
    """The lookups of the file that the script would make."""
    made = (shape.experts, shape.shard, shape.block_shape)
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


def _devices(session: Session, name: ConfigName, gpus: Sequence[int]) -> list[Device]:
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


def _space(plan: MoeTunePlan, facts: Facts, name: ConfigName, device: Device) -> list[Row]:
    if plan.full_space or SPACE_FLAG not in facts.flags:
        return []
    fit = moespace.fitting(name.dtype, device.capability, name.block_shape)
    return fit if len(fit) < len(SPACE) else []


def _sizes(session: Session, found: Found, plan: MoeTunePlan) -> list[int]:
    info = found.info
    draft = number(info.get("speculative_num_draft_tokens"))
    try:
        running = running_requests(session, info)
    except BadInput:
        running = 0
    chunk = number(info.get("chunked_prefill_size"))
    return moespace.default_sizes(plan.levels, draft, chunk, running)


def _before(
    session: Session,
    found: Found,
    lookup: Lookup,
    shape: Shape,
    *,
    capability: tuple[int, int],
    env: Environment,
) -> Mapping[int, Row]:
    """What the server uses now: the file's rows, else its own default for each usual size."""
    if lookup.used:
        held = read_tables(session, [lookup.used])
        if lookup.used not in held:
            raise BadInput(
                f"{session.host}: {lookup.used}, which the server uses, cannot be read now",
                remedy="restart the server first, so that it says what it finds",
            )
        return parse_table(held[lookup.used], lookup.name)
    rows = read_defaults(
        session, found.server, shape, lookup.name.dtype, GRID, capability=capability, env=env
    )
    if isinstance(rows, str):
        raise BadInput(
            f"{session.host}: what the server uses without a file cannot be asked: {rows}",
            remedy="without it sizes that are not tuned could get worse; use a release of SGLang "
            "from 0.5.5 on",
        )
    return rows


def _candidates(
    session: Session, plan: MoeTunePlan, name: ConfigName
) -> tuple[dict[str, Table], dict[str, str]]:
    """The given files that kernel and loader take, by arm, and why others are not tried."""
    texts = read_tables(session, plan.candidates) if plan.candidates else {}
    tables: dict[str, Table] = {}
    refused: dict[str, str] = {}
    for path in plan.candidates:
        short = path.rpartition("/")[2]
        arm = path if short in {PRESENT, TUNED, *tables, *refused} else short
        try:
            if path not in texts:
                raise BadInput(f"{path} cannot be read on the host")
            tables[arm] = parse_table(texts[path], name)
        except BadInput as error:
            refused[arm] = error.message
    return tables, refused
