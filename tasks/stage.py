"""Pieces of `exclusive_gpus`: the watch beside a stage, and what is done when it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime

from prefect.events import emit_event

from gpu_reclaim import causes
from gpu_reclaim.errors import BadInput, GpuReclaimError, HoldLost, HoldRefused, NotRestored
from gpu_reclaim.guarded import put_back
from gpu_reclaim.keeper import Keeper
from gpu_reclaim.models import Intruder, ReclaimPolicy, ReclaimReport, RestoreReport
from gpu_reclaim.restoring import STAGE_COMMAND
from gpu_reclaim.serving import Server, wait_healthy
from gpu_reclaim.session import Session
from gpu_reclaim.stopper import Pulse, Stopped, Stopper
from gpu_reclaim.tasks import artifacts
from gpu_reclaim.tasks.host import load_host, short

log = logging.getLogger(__name__)

HOLD_MINUTES = 5
"""How long the host waits for a sign of life where the policy does not say: longer than a network
or a Prefect server is away for a restart, shorter than anybody likes to be without the service."""

JOIN_S = 15
"""Longest wait, at the end of a stage, for a look at the host that is under way, in seconds."""


@dataclass
class Exclusive:
    """A host's GPUs for the length of a block.

    Attributes:
        host: Name of the GpuHost block.
        report: How they were freed.
        intruders: Who else used them meanwhile.
        restored: What was put back; None while the block runs.
        over: The block is left.
        moments: What happened when, as (`13:05:59`, sentence), by the worker's clock.
    """

    host: str
    report: ReclaimReport | None = None
    intruders: list[Intruder] = field(default_factory=list)
    restored: RestoreReport | None = None
    moments: list[tuple[str, str]] = field(default_factory=list)
    over: bool = False
    stopper: Stopper = field(default_factory=Stopper, repr=False)

    def command(self, *argv: str) -> list[str]:
        """A command for the host, marked as this block's own.

        Its processes are no intruders, and whatever is left of them is ended when the block is.
        """
        return [*STAGE_COMMAND, *argv]

    def check(self) -> None:
        """Ask, between two steps, whether the GPUs are still ours.

        The block is ended at once anyway when they are not; but a thread in a long call is not.

        Raises:
            HoldRefused: They are not.
        """
        if self.stopper.error is not None:
            raise self.stopper.error

    def note(self, what: str) -> None:
        """Keep what happened, for the page."""
        self.moments.append((f"{datetime.now():%H:%M:%S}", what))


_blocks: ContextVar[tuple[Exclusive, ...]] = ContextVar("gpu_reclaim_exclusive", default=())


def around(host: str) -> Exclusive | None:
    """The block on this host that we are in already."""
    # A context is copied into tasks and threads, which may outlive the block.
    return next((x for x in _blocks.get() if x.host == host and not x.over), None)


def stage_policy(policy: ReclaimPolicy) -> ReclaimPolicy:
    """The policy, with a hold.

    Raises:
        BadInput: It only plans.
    """
    if policy.mode == "plan":
        raise BadInput(
            "exclusive_gpus frees GPUs, and the policy's mode is plan; nothing was touched",
            remedy="use mode='reclaim'; reclaim_gpus shows a plan",
        )
    return policy.model_copy(update={"hold_minutes": policy.hold_minutes or HOLD_MINUTES})


def check_server(session: Session, server: Server | None) -> None:
    """Refuse to wait for a server that is none of the host's.

    Raises:
        BadInput: Its unit is not among the host's.
    """
    if server is not None and server.unit not in session.units:
        raise BadInput(
            f"{session.host}: {server.unit} is none of its units ({', '.join(session.units)}); "
            "nothing was touched",
            remedy="name an LlmServer block of this host, or add the unit to the GpuHost block",
        )


@contextmanager
def kept(exclusive: Exclusive, session: Session, policy: ReclaimPolicy) -> Iterator[None]:
    """Beside a stage: the hold is renewed, and intruders are named; what goes wrong ends it."""
    block = load_host(exclusive.host)

    def tell(intruder: Intruder) -> None:
        exclusive.intruders.append(intruder)
        exclusive.note(f"intruder: {intruder}")
        event(exclusive.host, "intruder", intruder.model_dump(mode="json"))

    def lost(error: Exception) -> None:
        exclusive.note(f"the GPUs are not ours any more: {short(error)}")
        event(exclusive.host, "lost", {"why": short(error)})

    def failed(error: Exception) -> None:
        lost(error)
        exclusive.stopper.stop(error)

    keeper = Keeper(session, lambda: block.session(session.host, via=policy.via), policy, tell)
    pulse = Pulse(f"keeper of {exclusive.host}", keeper.beat, keeper.every_s, failed)
    event(
        exclusive.host, "held", {"until": exclusive.report.held_until if exclusive.report else ""}
    )
    exclusive.note("the GPUs are ours, and the hold is proven")
    token = _blocks.set((*_blocks.get(), exclusive))
    try:
        pulse.start()
        yield
        if pulse.end(JOIN_S):
            # What was lost since the last look was not ours to the end.
            try:
                # Its connection belongs to the thread that has just ended.
                keeper.close()
                keeper.beat()
            except HoldRefused as error:
                lost(error)
                raise
    finally:
        exclusive.over = True
        pulse.end(JOIN_S)
        keeper.close()
        with suppress(ValueError):  # left in another context than it was entered in
            _blocks.reset(token)


@contextmanager
def put_back_at_the_end(
    exclusive: Exclusive, session: Session, server: Server | None
) -> Iterator[None]:
    """However the block ends: what was stopped is put back, looked at, and told.

    Raises:
        NotRestored: The block went well, and something did not come back.
    """
    try:
        yield
    except Stopped:
        _finish(exclusive, session, None)
        if exclusive.stopper.error is None:
            raise  # a block around this one is stopped
        raise exclusive.stopper.error from None
    except BaseException as error:
        # Whatever others' errors say may hold secrets; the run's state has it anyway.
        said = f": {short(error)}" if isinstance(error, GpuReclaimError) else ""
        exclusive.note(f"the block ended with {type(error).__name__}{said}")
        # Who cancels does not wait for a model to load.
        _finish(exclusive, session, server if isinstance(error, Exception) else None, error)
        raise
    held = bool(session.held)
    _finish(exclusive, session, server)
    report = exclusive.restored
    if report is not None and not report.complete:
        raise NotRestored(report)
    if report is not None and held and not report.ours:
        raise HoldLost(
            f"{exclusive.host}: at the end of the block the hold was not ours: {report.summary}",
            remedy=causes.HOLD_LOST.advice(),
        )


def _finish(
    exclusive: Exclusive,
    session: Session,
    server: Server | None,
    error: BaseException | None = None,
) -> None:
    if session.held is None:
        return
    exclusive.note("putting back what was stopped")
    report = put_back(session, tries=error is None or isinstance(error, Exception))
    exclusive.restored = report
    exclusive.note(report.summary)
    back = {x.unit for x in report.restored if x.outcome in ("started", "running")}
    if server is not None and server.unit not in back:
        exclusive.note(f"{server.unit} was not put back, so it is not waited for")
    elif server is not None and report.complete:
        exclusive.restored = report = _healthy(session, server, report)
        exclusive.note(report.summary)
    if not report.complete:
        log.error("%s: %s", exclusive.host, report.summary)
    # The service is back; what only tells of it must not keep anybody.
    rows = [row.model_dump(mode="json") for row in report.restored]
    event(exclusive.host, "restored", {"complete": report.complete, "units": rows})
    _quietly(lambda: artifacts.show_exclusive(exclusive.host, exclusive.moments, report))


def _healthy(session: Session, server: Server, report: RestoreReport) -> RestoreReport:
    try:
        serves, said = wait_healthy(session, server)
    except GpuReclaimError as error:
        serves, said = False, error.message
    log.log(logging.INFO if serves else logging.ERROR, "%s: %s", session.host, said)
    advice = "" if serves else f"see `journalctl -u {server.unit}` on the host"
    change = {"complete": serves, "summary": f"{report.summary}; {said}"}
    return report.model_copy(update=change | ({"remedy": advice} if advice else {}))


def event(host: str, what: str, payload: dict[str, object]) -> None:
    """Tell automations; without a server nobody hears it."""
    resource = {"prefect.resource.id": f"gpu-reclaim.host.{host}", "prefect.resource.name": host}
    _quietly(lambda: emit_event(f"gpu-reclaim.{what}", resource, payload=payload))


def _quietly(tell: Callable[[], object]) -> None:
    try:
        tell()
    except Exception as error:
        log.warning("this could not be told to Prefect: %s", short(error))
