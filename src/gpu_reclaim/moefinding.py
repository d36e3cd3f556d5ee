"""Before MoE kernels are tuned: all that can refuse it, and what would be done."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gpu_reclaim import logbook, moespace, overlays
from gpu_reclaim.errors import BadInput
from gpu_reclaim.finding import Found, check_place, find, number, read_unit, running_requests
from gpu_reclaim.lease import MOE_FILE
from gpu_reclaim.moechecks import (
    asked_for,
    check_folder,
    devices_for,
    environment,
    script_facts,
    wanted,
)
from gpu_reclaim.moeconfigs import GRID, ConfigName, Row, Table, parse_table, usable_rows
from gpu_reclaim.moefound import PRESENT, SPACE_FLAG, TUNED, MoeFound, model_of
from gpu_reclaim.moelog import Lookup
from gpu_reclaim.moelooks import (
    Device,
    Environment,
    ranks,
    read_defaults,
    read_shape,
    read_tables,
)
from gpu_reclaim.moescript import Facts
from gpu_reclaim.moespace import SPACE, Shape
from gpu_reclaim.plans import MoeTunePlan
from gpu_reclaim.serving import Server
from gpu_reclaim.session import Session


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
    server = found.server
    unit = read_unit(session, server.unit)
    if plan.mode == "tune" and plan.apply == "if_better":
        check_place(session, unit, MOE_FILE, lasting=plan.persist)
    env = environment(session, server)
    seen = asked_for(session, found)
    facts = script_facts(session, found)
    shape, no_fusion, mine = _shape(session, found, seen, facts, env)
    name, triton = mine[0].name, mine[0].triton
    check_folder(session, mine[0], facts, env, unit=server.unit)
    if plan.mode == "kernels" and name.dtype == "int8_w8a8":
        raise BadInput(
            f"{session.host}: SGLang's script times int8_w8a8 kernels without their configs",
            remedy="compare them by mode = tune, on the server itself",
        )
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
    moe = MoeFound(
        found=found,
        name=name,
        triton=triton,
        base=mine[0].folder,
        lookups=tuple(mine),
        facts=facts,
        shape=shape,
        no_fusion=no_fusion,
        devices=tuple(devices),
        env=env,
        sizes=tuple(plan.batch_sizes or _sizes(session, found, plan)),
        rows=rows,
        before=before,
        candidates=candidates,
        refused=refused,
        place=logbook.folder(session, server.unit, f"moe-{logbook.key_of(key)}"),
        overlays=overlays.root(server.unit, session.places),
        files=unit.print,
    )
    # A flag that the script lacks is told now.
    moe.script(moe.sizes[0], tune=plan.mode == "tune")
    return moe


def _shape(
    session: Session, found: Found, seen: list[Lookup], facts: Facts, env: Environment
) -> tuple[Shape, bool, list[Lookup]]:
    """The model's shape, with or without a fused shared expert, as the server has it."""
    said = bool(found.info.get("disable_shared_experts_fusion"))
    first: BadInput | None = None
    # The server may leave out the fusion by itself, and its flag does not say so.
    for no_fusion in dict.fromkeys((said, True)):
        shape = read_shape(
            session, found.server, model_of(found), found.info, env, no_fusion=no_fusion
        )
        if isinstance(shape, str):
            first = first or BadInput(
                f"{session.host}: the tuning script cannot make out the model: {shape}",
                remedy="see whether its files can be read by root there, and whether a newer "
                "checkout knows it; the version must be the package's",
            )
            continue
        try:
            return shape, no_fusion, wanted(session, seen, shape, facts)
        except BadInput as error:
            first = first or error
    raise first or BadInput(f"{session.host}: the model's shape is not known")


def _space(plan: MoeTunePlan, facts: Facts, name: ConfigName, device: Device) -> list[Row]:
    if plan.full_space or SPACE_FLAG not in facts.flags:
        return []
    fit = moespace.fitting(name.dtype, device.capability, name.block_shape)
    return fit if len(fit) < len(SPACE) else []


def _sizes(session: Session, found: Found, plan: MoeTunePlan) -> list[int]:
    info, dp = found.info, ranks(found.info, "dp_size")
    draft = number(info.get("speculative_num_draft_tokens"))
    try:
        running = running_requests(session, info)
    except BadInput:
        running = 0
    chunk = number(info.get("chunked_prefill_size"))
    levels = plan.levels
    if info.get("enable_dp_attention"):
        # The experts see the tokens of all ranks together.
        chunk *= dp
    else:
        levels = [math.ceil(level / dp) for level in levels]
    return moespace.default_sizes(levels, draft, chunk, running)


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
        return usable_rows(held[lookup.used], lookup.name)
    # SGLang's rule changes where there are more tokens than experts.
    sizes = sorted({*GRID, shape.experts, shape.experts + 1})
    rows = read_defaults(
        session, found.server, shape, lookup.name.dtype, sizes, capability=capability, env=env
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
