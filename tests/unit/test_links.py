"""The ways to a host: which is taken, and when another one may be."""

from __future__ import annotations

import pytest

from gpu_reclaim.commands import Script
from gpu_reclaim.errors import (
    AccessRefused,
    BadInput,
    GpuReclaimError,
    HostKeyRefused,
    IdentityMismatch,
    Incomplete,
    LinkLost,
    TimedOut,
    Unreachable,
)
from gpu_reclaim.models import Via
from gpu_reclaim.transport.links import Later, Links
from gpu_reclaim.transport.scripted import ScriptedTransport

SCRIPT = Script("look", {"a": "echo"})
WRITE = Script("act", {"a": "echo"}, writes=True)


def way(name: str, error: GpuReclaimError | None = None) -> ScriptedTransport:
    return ScriptedTransport(lambda _: error or {"a": name}, name=name)


def via(links: Links, script: Script = SCRIPT) -> str:
    return links.run(script).section("a").text


def test_the_hosts_own_ssh_comes_first() -> None:
    direct, hypervisor = way("direct"), way("hypervisor")

    assert via(Links(direct, hypervisor)) == "direct"
    assert hypervisor.asked == []


@pytest.mark.parametrize(
    ("which", "expected"), [("auto", "direct"), ("ssh", "direct"), ("hypervisor", "hypervisor")]
)
def test_the_policy_chooses_the_way(which: Via, expected: str) -> None:
    assert via(Links(way("direct"), way("hypervisor"), via=which)) == expected


@pytest.mark.parametrize("script", [SCRIPT, WRITE])
def test_an_unreachable_host_is_reached_through_its_hypervisor_and_stays_so(
    script: Script,
) -> None:
    direct, hypervisor = way("direct", Unreachable("ssh: no route")), way("hypervisor")
    links = Links(direct, hypervisor)

    assert [via(links, script) for _ in range(3)] == ["hypervisor"] * 3
    assert len(direct.asked) == 1
    assert len(hypervisor.asked) == 3


@pytest.mark.parametrize("kind", [HostKeyRefused, AccessRefused])
def test_a_refused_key_or_login_is_no_reason_to_try_another_door(
    kind: type[GpuReclaimError],
) -> None:
    hypervisor = way("hypervisor")
    with pytest.raises(kind):
        via(Links(way("direct", kind("ssh: refused")), hypervisor))

    assert hypervisor.asked == []


@pytest.mark.parametrize("kind", [LinkLost, TimedOut, Incomplete, IdentityMismatch])
def test_what_may_have_run_is_not_run_again_elsewhere(kind: type[GpuReclaimError]) -> None:
    hypervisor = way("hypervisor")
    with pytest.raises(kind):
        via(Links(way("direct", kind("ssh: odd")), hypervisor), WRITE)

    assert hypervisor.asked == []


@pytest.mark.parametrize("which", ["ssh", "auto"])
def test_without_another_way_unreachable_is_unreachable(which: Via) -> None:
    with pytest.raises(Unreachable, match="no route"):
        via(Links(way("direct", Unreachable("ssh: no route")), via=which))


def test_with_via_ssh_the_hypervisor_is_never_asked() -> None:
    hypervisor = way("hypervisor")
    links = Links(way("direct", Unreachable("ssh: no route")), hypervisor, via="ssh")
    with pytest.raises(Unreachable):
        via(links)

    assert hypervisor.asked == []
    assert not links.has_hypervisor()
    with pytest.raises(BadInput):
        links.through_hypervisor(SCRIPT)


@pytest.mark.parametrize(
    ("links", "has"),
    [
        (Links(way("direct"), way("hypervisor")), True),
        (Links(None, way("hypervisor"), via="hypervisor"), True),
        (Links(way("direct")), False),
        (Links(way("direct"), node=way("node")), False),
    ],
)
def test_whether_there_is_a_hypervisor(links: Links, has: bool) -> None:
    assert links.has_hypervisor() is has


@pytest.mark.parametrize(
    "links", [Links(), Links(way("direct"), via="hypervisor"), Links(node=way("node"))]
)
def test_no_way_at_all_is_bad_input(links: Links) -> None:
    with pytest.raises(BadInput, match="there is no way to the host") as caught:
        via(links)

    assert "GpuHost" in caught.value.remedy


@pytest.mark.parametrize("kind", [Unreachable, HostKeyRefused, AccessRefused])
def test_when_both_ways_fail_both_are_told_and_the_kind_is_kept(
    kind: type[GpuReclaimError],
) -> None:
    links = Links(
        way("direct", Unreachable("ssh: no route", remedy="check the cable")),
        way("hypervisor", kind("pve: closed", remedy="open it")),
    )
    with pytest.raises(Unreachable) as caught:
        via(links)

    assert type(caught.value) is kind
    assert caught.value.message == "ssh: no route; and pve: closed"
    assert caught.value.remedy == "check the cable; or: open it"


def test_closing_closes_every_way() -> None:
    closed: list[str] = []

    class Closing(ScriptedTransport):
        def close(self) -> None:
            closed.append(self.name)

    direct, hypervisor, node = (
        Closing(lambda _: {}, name=name) for name in ("direct", "hypervisor", "node")
    )
    Links(direct, hypervisor, node).close()
    Links().close()

    assert closed == ["direct", "hypervisor", "node"]


# Made when first needed.


def test_a_way_is_made_when_it_is_first_needed_and_once() -> None:
    made: list[ScriptedTransport] = []

    def make() -> ScriptedTransport:
        made.append(way("found"))
        return made[-1]

    later = Later("a node to be found", make)
    later.close()
    name = later.name
    later.run(SCRIPT)
    later.run(SCRIPT)

    assert name == "a node to be found"
    assert later.name == "found"
    assert len(made) == 1
    assert len(made[0].asked) == 2


def test_a_way_that_could_not_be_made_is_tried_again_next_time() -> None:
    answers: list[GpuReclaimError | None] = [Unreachable("api: away"), None]

    def make() -> ScriptedTransport:
        error = answers.pop(0)
        if error:
            raise error
        return way("found")

    later = Later("a node", make)
    with pytest.raises(Unreachable):
        later.run(SCRIPT)

    assert later.run(SCRIPT).where == "found"
