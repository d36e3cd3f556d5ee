"""Before MoE kernels are tuned: all that can refuse it, and what would be done."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpu_reclaim import logbook, moespace, overlays
from gpu_reclaim.errors import BadInput
from gpu_reclaim.finding import Found, check_place, find, number, read_unit, running_requests, text
from gpu_reclaim.lease import MOE_FILE
from gpu_reclaim.moechecks import asked_for, devices_for, environment, script_facts, wanted
from gpu_reclaim.moeconfigs import GRID, ConfigName, Row, Table, chosen, parse_table
from gpu_reclaim.moelog import Lookup
from gpu_reclaim.moelooks import Device, Environment, read_defaults, read_shape, read_tables
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
    env = environment(session, server)
    seen = asked_for(session, found)
    facts = script_facts(session, found)
    shape = read_shape(session, server, model_of(found), info, env)
    if isinstance(shape, str):
        raise BadInput(
            f"{session.host}: the tuning script cannot make out the model: {shape}",
            remedy="see whether a newer checkout knows it; its version must be the package's",
        )
    mine = wanted(session, seen, shape, facts)
    name, triton = mine[0].name, mine[0].triton
    devices = devices_for(session, name, gpus)
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
