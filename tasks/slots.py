"""One run at a time on a host: a global concurrency limit of Prefect's for each, made when missing.

Prefect's own `concurrency()` keeps to itself which lease it got. That is needed here: to free the
slot of a run that is over although nobody freed it, and to notice within seconds that a slot was
lost. Who has the slot is kept in a Prefect variable beside it, for the API does not tell.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from httpx import HTTPError, HTTPStatusError
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import (
    GlobalConcurrencyLimitCreate,
    VariableCreate,
    VariableUpdate,
)
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.runtime import flow_run
from pydantic import BaseModel, ValidationError

from gpu_reclaim.commands import printable
from gpu_reclaim.errors import BadInput, HeldByOther, HoldLost, HoldRefused
from gpu_reclaim.stopper import Pulse
from gpu_reclaim.tasks.host import short
from gpu_reclaim.tasks.runs import this_run

log = logging.getLogger(__name__)

LEASE_S = 300
"""After so many seconds without a renewal Prefect frees the slot; its own default, at least 60."""

RENEW_S = 10
"""How often the slot is renewed: it is noticed within so many seconds that it was lost."""

POLL_S = 2
"""How often a taken slot is asked for, in seconds."""

MOST = 500
"""Most characters of a name or address that are kept."""

LOCKED, GONE = 423, 410
"""HTTP: all slots are taken; the lease is no longer known."""


@dataclass
class _Having:
    """A slot that this run has; a context is copied into tasks and threads that may outlive it."""

    host: str
    over: bool = False


_held: ContextVar[tuple[_Having, ...]] = ContextVar("gpu_reclaim_slots", default=())
"""Limits are not re-entrant: what this run has already, it must not ask for again."""


class Slot(BaseModel):
    """Who has a host's slot."""

    lease: UUID
    owner: str
    runs: list[UUID] = []
    url: str = ""
    since: str

    def __str__(self) -> str:
        """For people."""
        return f"{self.owner} {self.url}".strip() + f" since {self.since}"


def limit_name(host: str) -> str:
    """The name of a host's concurrency limit."""
    return f"gpu-reclaim-{host}"


@contextmanager
def host_slot(
    host: str, wait_minutes: float = 0, lost: Callable[[Exception], object] = lambda _: None
) -> Iterator[None]:
    """Have a host's slot, as soon as no other run has it; nested in itself it does nothing.

    Args:
        host: Name of the GpuHost block.
        wait_minutes: Longest wait for another run.
        lost: Called from another thread when the slot is no longer ours.

    Raises:
        HeldByOther: Another run has it, `wait_minutes` long.
        HoldRefused: Prefect's server does not give it.
        BadInput: Somebody has changed the limit so that it protects nothing.
    """
    if any(x.host == host and not x.over for x in _held.get()):
        yield
        return
    with get_client(sync_client=True) as client:
        try:
            _ensure(client, host)
            lease = _acquire(client, host, wait_minutes * 60)
        except HTTPError as error:
            raise HoldRefused(
                f"{host}: Prefect's server gave no slot of the limit {limit_name(host)} "
                f"({type(error).__name__}: {short(error)}); nothing was touched",
                remedy="see whether it answers (`prefect config view` shows PREFECT_API_URL), and "
                "run this again; without a server the library reclaims, see gpu_reclaim.reclaim",
            ) from error
        try:
            _write(client, host, lease)
            with _renewed(host, lease, lost):
                yield
        finally:
            _free(client, host, lease)


@contextmanager
def _renewed(host: str, lease: UUID, lost: Callable[[Exception], object]) -> Iterator[None]:
    this = _Having(host)
    pulse = Pulse(f"slot of {host}", lambda: _renew(host, lease), RENEW_S, lost)
    token = _held.set((*_held.get(), this))
    try:
        pulse.start()
        yield
    finally:
        this.over = True
        pulse.end(0)
        with suppress(ValueError):  # left in another context than it was entered in
            _held.reset(token)


def free_slot_of(host: str, run: str) -> None:
    """Free a host's slot, if that run has it; for runs that ended without doing so."""
    with get_client(sync_client=True) as client:
        slot = read_slot(client, host)
        if slot is not None and UUID(run) in slot.runs:
            _free(client, host, slot.lease)


def read_slot(client: SyncPrefectClient, host: str) -> Slot | None:
    """Who has a host's slot; None where nobody is named."""
    found = client.read_variable_by_name(_variable(host))
    if found is None or not isinstance(found.value, Mapping):
        return None
    try:
        return Slot.model_validate(found.value)
    except ValidationError:
        return None


def _variable(host: str) -> str:
    return limit_name(host).replace("-", "_")


def _ensure(client: SyncPrefectClient, host: str) -> None:
    name = limit_name(host)
    try:
        found = client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound:
        with suppress(ObjectAlreadyExists):  # another run was quicker
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
        return
    if not found.active or found.limit != 1:
        state = "inactive" if not found.active else f"{found.limit}"
        raise BadInput(
            f"{host}: the concurrency limit {name} is {state}, so it does not keep two runs apart; "
            "nothing was touched",
            remedy=f"once no run uses the host: prefect gcl update {name} --limit 1 --active-slots "
            f"0 --enable",
        )


def _acquire(client: SyncPrefectClient, host: str, wait_s: float) -> UUID:
    name, end, said = limit_name(host), time.monotonic() + wait_s, False
    holder = ConcurrencyLeaseHolder(type="flow_run", id=UUID(flow_run.id)) if flow_run.id else None
    freed: UUID | None = None
    while True:
        try:
            answer = client.increment_concurrency_slots_with_lease(
                [name], 1, "concurrency", LEASE_S, holder
            ).json()
        except HTTPStatusError as error:
            if error.response.status_code != LOCKED:
                raise
        else:
            if answer["limits"]:
                return UUID(answer["lease_id"])
            _ensure(client, host)  # somebody has just removed it
            continue
        slot = read_slot(client, host)
        if slot is not None and slot.lease != freed and _is_over(client, slot):
            # Whoever has just got the slot may not have written down its name yet.
            time.sleep(POLL_S)
            if read_slot(client, host) == slot:
                log.warning("%s: freeing the slot of a run that is over: %s", host, slot)
                _free(client, host, slot.lease)
                freed = slot.lease
            continue
        left = end - time.monotonic()
        if left <= 0:
            raise _taken(host, slot)
        if not said:
            log.info("%s: waiting, up to %.0f s, for %s", host, left, slot or "another run")
            said = True
        time.sleep(min(POLL_S, left))


def _taken(host: str, slot: Slot | None) -> HeldByOther:
    name = limit_name(host)
    return HeldByOther(
        f"{host}: held by {slot or 'another run'} (concurrency limit {name}); nothing was touched",
        remedy="wait until it is over, or cancel it; the policy's wait_minutes waits. If that run "
        f"is dead, its slot is free {LEASE_S} s after its last sign of life; a stuck one is freed "
        f"by `prefect gcl update {name} --active-slots 0`",
    )


def _is_over(client: SyncPrefectClient, slot: Slot) -> bool:
    """One of its runs has ended: they share a process."""
    for run in slot.runs:
        try:
            state = client.read_flow_run(run).state
        except ObjectNotFound:
            return True
        if state is not None and state.is_final():
            return True
    return False


def _write(client: SyncPrefectClient, host: str, lease: UUID) -> None:
    who = this_run()
    slot = Slot(
        lease=lease,
        owner=printable(who.name, limit=MOST),
        runs=[UUID(run) for run in who.runs],
        url=printable(who.url, limit=MOST),
        since=f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}",
    )
    name, value = _variable(host), slot.model_dump(mode="json")
    try:
        client.create_variable(VariableCreate(name=name, value=value))
    except ObjectAlreadyExists:
        client.update_variable(VariableUpdate(name=name, value=value))
    except HTTPError as error:
        log.warning("%s: who has the slot could not be written down: %s", host, short(error))


def _renew(host: str, lease: UUID) -> None:
    """Renew the slot.

    Raises:
        HoldLost: It is no longer ours, or keeps nobody off any more.
    """
    name = limit_name(host)
    try:
        with get_client(sync_client=True) as client:
            client.renew_concurrency_lease(lease, LEASE_S)
            limit = client.read_global_concurrency_limit_by_name(name)
        if not limit.active or limit.limit != 1:
            raise HoldLost(
                f"{host}: the concurrency limit {name} was changed meanwhile, and keeps nobody off",
                remedy=f"prefect gcl update {name} --limit 1 --enable; then run this again",
            )
    except ObjectNotFound as error:
        raise HoldLost(
            f"{host}: the concurrency limit {name} was removed meanwhile, and keeps nobody off",
            remedy="run this again, which makes it anew",
        ) from error
    except HTTPStatusError as error:
        if error.response.status_code == GONE:
            raise HoldLost(
                f"{host}: Prefect gave our slot away (concurrency limit {limit_name(host)})",
                remedy="did the server start anew? It forgets slots unless it keeps them in files "
                "(PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE); then run this again",
            ) from error
        log.debug("%s: the slot could not be renewed: %s", host, error)
    except HTTPError as error:
        # While the server is down it gives the slot to nobody; once it is up, it tells.
        log.debug("%s: the slot could not be renewed: %s", host, error)


def _free(client: SyncPrefectClient, host: str, lease: UUID) -> None:
    """Free a slot and forget who had it; leases end by themselves, so a failure is only logged."""
    name = limit_name(host)
    try:
        known, slot = _known(client, lease), read_slot(client, host)
        named = slot is not None and slot.lease == lease
        if named:
            # First of all: as soon as the slot is free, another run's name may stand there.
            client.delete_variable_by_name(_variable(host))
        client.release_concurrency_slots_with_lease(lease)
        if (
            named
            and not known
            and client.read_global_concurrency_limit_by_name(name).active_slots > 0
        ):
            # A server that forgot the lease counts its slot for ever.
            client.release_concurrency_slots([name], 1, occupancy_seconds=1)
    except (HTTPError, ObjectNotFound) as error:
        log.warning("%s: the slot could not be freed (%s); it is within %d s", host, error, LEASE_S)


def _known(client: SyncPrefectClient, lease: UUID) -> bool:
    try:
        client.renew_concurrency_lease(lease, LEASE_S)
    except HTTPStatusError as error:
        if error.response.status_code == GONE:
            return False
        raise
    return True
