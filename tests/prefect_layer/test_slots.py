"""One run at a time on a host, by a concurrency limit of a real Prefect server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from prefect import flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import (
    GlobalConcurrencyLimitCreate,
    GlobalConcurrencyLimitUpdate,
    VariableUpdate,
)
from prefect.client.schemas.objects import FlowRun
from prefect.runtime import flow_run
from prefect.states import Cancelled

from gpu_reclaim.errors import BadInput, HeldByOther, HoldLost
from gpu_reclaim.tasks import slots
from gpu_reclaim.tasks.slots import Slot, free_slot_of, host_slot, limit_name, read_slot
from unit.actors import in_a_thread, wait_for
from unit.values import said

LIMIT_S = 30
"""Of every wait here; generous, so that no result hangs on a slow machine."""


@pytest.fixture
def host() -> str:
    """A name that no other test uses."""
    return f"box-{uuid4().hex[:8]}"


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as made:
        yield made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are renewed, and asked for, many times a second."""
    monkeypatch.setattr(slots, "RENEW_S", 0.02)
    monkeypatch.setattr(slots, "POLL_S", 0.05)


def in_use(client: SyncPrefectClient, host: str) -> int:
    return client.read_global_concurrency_limit_by_name(limit_name(host)).active_slots


def slot_of(client: SyncPrefectClient, host: str) -> Slot:
    slot = read_slot(client, host)
    assert slot is not None
    return slot


def free(client: SyncPrefectClient, host: str) -> bool:
    """Nobody has it, and nobody is named."""
    return in_use(client, host) == 0 and read_slot(client, host) is None


def take(host: str, wait_minutes: float = 0) -> None:
    with host_slot(host, wait_minutes):
        pass


def outside(do: Callable[[], object]) -> Exception | None:
    """Do it as another run would, which has none of our slots; its error."""
    thread, found = in_a_thread(do)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    return next(iter(found), None)


def test_a_limit_is_made_when_it_is_missing(host: str, client: SyncPrefectClient) -> None:
    with host_slot(host):
        limit = client.read_global_concurrency_limit_by_name(limit_name(host))

        assert (limit.name, limit.limit, limit.active) == (f"gpu-reclaim-{host}", 1, True)
        assert limit.active_slots == 1
    assert free(client, host)


def test_a_limit_that_is_there_is_used(host: str, client: SyncPrefectClient) -> None:
    made = GlobalConcurrencyLimitCreate(name=limit_name(host), limit=1)
    before = client.create_global_concurrency_limit(made)
    take(host)

    assert client.read_global_concurrency_limit_by_name(limit_name(host)).id == before


def test_a_second_run_is_refused_and_told_who_has_it(host: str, client: SyncPrefectClient) -> None:
    with host_slot(host):
        slot = slot_of(client, host)
        error = outside(lambda: take(host))

        assert in_use(client, host) == 1
    assert isinstance(error, HeldByOther)
    assert slot.owner in error.message
    assert "pid " in slot.owner
    assert f"since {slot.since}" in error.message
    assert "nothing was touched" in error.message
    assert "wait_minutes" in error.remedy
    assert f"prefect gcl update {limit_name(host)} --active-slots 0" in error.remedy
    assert outside(lambda: take(host)) is None


def test_a_second_run_waits_until_the_first_is_over(
    host: str, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "gpu_reclaim.tasks.slots"):
        reached = threading.Event()
        with host_slot(host):

            def second() -> None:
                take(host, 1)
                reached.set()

            waiting, found = in_a_thread(second)
            wait_for(lambda: any("waiting, up to" in x for x in said(caplog)), "the wait")
            assert not reached.wait(0.2)
        waiting.join(LIMIT_S)

    assert (found, reached.is_set()) == ([], True)
    assert sum("waiting, up to" in x for x in said(caplog)) == 1


def test_a_wait_has_an_end(host: str, quick: None) -> None:
    with host_slot(host):
        error = outside(lambda: take(host, 0.2 / 60))

    assert isinstance(error, HeldByOther)


def test_nested_it_does_nothing(host: str, client: SyncPrefectClient) -> None:
    with host_slot(host):
        lease = slot_of(client, host).lease
        with host_slot(host), host_slot(host):
            assert in_use(client, host) == 1
        assert (in_use(client, host), slot_of(client, host).lease) == (1, lease)
    assert free(client, host)


def test_two_hosts_do_not_wait_for_each_other(host: str, client: SyncPrefectClient) -> None:
    with host_slot(host), host_slot(f"{host}2"):
        assert in_use(client, host) == in_use(client, f"{host}2") == 1
    assert free(client, host)
    assert free(client, f"{host}2")


class Cut(BaseException):
    """As a cancel comes."""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Cut])
def test_it_is_freed_however_the_block_ends(
    host: str, client: SyncPrefectClient, error: type[BaseException]
) -> None:
    with pytest.raises(error), host_slot(host):
        raise error

    assert free(client, host)
    take(host)


def test_it_is_freed_when_nobody_can_be_named(
    host: str, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise httpx.ConnectError("the server is away")

    monkeypatch.setattr(slots, "_write", fail)
    with pytest.raises(httpx.ConnectError):
        take(host)

    assert free(client, host)


def test_the_slot_stays_ours_beyond_its_lease(
    host: str, client: SyncPrefectClient, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed = threading.Semaphore(0)
    real = slots._renew

    def count(name: str, lease: UUID) -> None:
        real(name, lease)
        renewed.release()

    monkeypatch.setattr(slots, "_renew", count)
    with host_slot(host):
        assert all(renewed.acquire(timeout=LIMIT_S) for _ in range(3))


def test_a_lost_slot_is_told_from_another_thread(
    host: str, client: SyncPrefectClient, quick: None
) -> None:
    told: list[Exception] = []
    heard = threading.Event()

    def lost(error: Exception) -> None:
        told.append(error)
        heard.set()

    with host_slot(host, lost=lost):
        client.release_concurrency_slots_with_lease(slot_of(client, host).lease)
        assert heard.wait(LIMIT_S)
    assert [type(error) for error in told] == [HoldLost]
    assert limit_name(host) in str(told[0])
    assert "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE" in str(told[0])
    assert free(client, host)


def test_a_server_that_is_away_for_a_while_is_no_loss(
    host: str, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Exception] = []
    tried = threading.Semaphore(0)

    class Away:
        def __enter__(self) -> None:
            tried.release()
            raise httpx.ConnectError("connection refused")

        def __exit__(self, *_: object) -> None:
            pass

    with host_slot(host, lost=told.append), monkeypatch.context() as patch:
        patch.setattr(slots, "get_client", lambda **_: Away())
        assert all(tried.acquire(timeout=LIMIT_S) for _ in range(3))
    assert told == []


def test_the_slot_of_another_run_is_not_freed_with_our_lost_one(
    host: str, client: SyncPrefectClient
) -> None:
    """Ours was given away, another run has it by now, and then our block ends."""
    with host_slot(host):
        client.release_concurrency_slots_with_lease(slot_of(client, host).lease)
        other = acquired(client, host)
    assert in_use(client, host) == 1
    assert slot_of(client, host).lease == other
    client.release_concurrency_slots_with_lease(other)


def test_the_name_goes_while_nobody_else_can_have_the_slot(
    host: str, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards it may be the next run's name already."""
    real, then = SyncPrefectClient.delete_variable_by_name, []

    def delete(self: SyncPrefectClient, name: str) -> None:
        then.append(in_use(client, host))
        real(self, name)

    monkeypatch.setattr(SyncPrefectClient, "delete_variable_by_name", delete)
    take(host)

    assert then == [1]


def acquired(client: SyncPrefectClient, host: str, runs: list[str] | None = None) -> UUID:
    """Another run takes the slot, names itself, and never lives to free it."""
    lease = slots._acquire(client, host, 0)
    slots._write(client, host, lease)
    if runs is not None:
        slot = slot_of(client, host).model_copy(update={"runs": [UUID(run) for run in runs]})
        value = slot.model_dump(mode="json")
        client.update_variable(VariableUpdate(name=slots._variable(host), value=value))
    return lease


def a_run(client: SyncPrefectClient, *, over: bool) -> str:
    @flow
    def evaluation() -> None:
        pass

    made: FlowRun = client.create_flow_run(evaluation)
    if over:
        client.set_flow_run_state(made.id, Cancelled(), force=True)
    return str(made.id)


def test_the_slot_of_a_run_that_is_over_is_freed_at_once(
    host: str, client: SyncPrefectClient
) -> None:
    """Without waiting for its lease, and without wait_minutes."""
    slots._ensure(client, host)
    acquired(client, host, [a_run(client, over=False), a_run(client, over=True)])
    with host_slot(host):
        assert in_use(client, host) == 1
    assert free(client, host)


def test_the_slot_of_a_run_that_is_no_more_is_freed(host: str, client: SyncPrefectClient) -> None:
    slots._ensure(client, host)
    acquired(client, host, [str(uuid4())])
    take(host)

    assert free(client, host)


def test_the_slot_of_a_run_that_goes_on_is_left_alone(host: str, client: SyncPrefectClient) -> None:
    slots._ensure(client, host)
    acquired(client, host, [a_run(client, over=False)])
    with pytest.raises(HeldByOther):
        take(host)

    assert in_use(client, host) == 1


def test_a_slot_that_cannot_be_freed_is_no_endless_loop(
    host: str, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots._ensure(client, host)
    acquired(client, host, [a_run(client, over=True)])
    monkeypatch.setattr(slots, "_free", lambda *_: None)
    with pytest.raises(HeldByOther):
        take(host)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"active": False}, "inactive"), ({"limit": 2}, "is 2")],
    ids=["inactive", "two"],
)
def test_a_limit_that_protects_nothing_is_refused(
    host: str, client: SyncPrefectClient, change: dict[str, Any], said: str
) -> None:
    name = limit_name(host)
    client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
    client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(**change))
    reached = []
    with pytest.raises(BadInput, match=said) as caught, host_slot(host):
        reached.append("inside")

    assert (reached, in_use(client, host)) == ([], 0)
    assert f"prefect gcl update {name} --limit 1" in caught.value.remedy


def forget(client: SyncPrefectClient, host: str, lease: UUID) -> None:
    """As a server does that keeps leases in memory, and starts anew: the slot stays counted."""
    client.release_concurrency_slots_with_lease(lease)
    client.increment_concurrency_slots([limit_name(host)], 1, "concurrency")


def test_slots_of_a_server_that_forgot_their_leases_are_repaired(
    host: str, client: SyncPrefectClient
) -> None:
    with host_slot(host):
        forget(client, host, slot_of(client, host).lease)
        assert in_use(client, host) == 1
    assert free(client, host)


def test_the_forgotten_slot_of_a_run_that_is_over_is_repaired(
    host: str, client: SyncPrefectClient
) -> None:
    slots._ensure(client, host)
    forget(client, host, acquired(client, host, [a_run(client, over=True)]))
    take(host)

    assert free(client, host)


def test_a_hook_frees_the_slot_of_its_own_run_alone(host: str, client: SyncPrefectClient) -> None:
    slots._ensure(client, host)
    ours, theirs = str(uuid4()), a_run(client, over=False)
    free_slot_of(host, ours)
    acquired(client, host, [theirs])
    free_slot_of(host, ours)
    assert in_use(client, host) == 1
    free_slot_of(host, theirs)

    assert free(client, host)


def test_what_a_person_wrote_into_the_variable_names_nobody(
    host: str, client: SyncPrefectClient
) -> None:
    with host_slot(host):
        for value in ("somebody", {"owner": "x"}):
            client.update_variable(VariableUpdate(name=slots._variable(host), value=value))
            assert read_slot(client, host) is None
            error = outside(lambda: take(host))
            assert isinstance(error, HeldByOther)
            assert "held by another run" in error.message
    assert in_use(client, host) == 0


def test_a_run_is_named_with_those_around_it(host: str, client: SyncPrefectClient) -> None:
    found: list[tuple[Slot, str]] = []

    @flow
    def stage() -> None:
        with host_slot(host):
            found.append((slot_of(client, host), str(flow_run.id)))

    @flow
    def pipeline() -> str:
        stage()
        return str(flow_run.id)

    whole = pipeline()
    slot, part = found[0]

    assert slot.runs == [UUID(part), UUID(whole)]
    assert slot.owner.startswith("Prefect run ")
    assert part in slot.url


def test_two_at_once_are_one_after_the_other(
    host: str, client: SyncPrefectClient, quick: None
) -> None:
    inside, most, done = [0], [0], []
    start = threading.Barrier(2)

    def work() -> None:
        start.wait(LIMIT_S)
        with host_slot(host, 1):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            threading.Event().wait(0.1)
            inside[0] -= 1
        done.append(1)

    both = [in_a_thread(work) for _ in range(2)]
    for thread, _ in both:
        thread.join(LIMIT_S)

    assert [error for _, error in both] == [[], []]
    assert (most, len(done)) == ([1], 2)
    assert free(client, host)
