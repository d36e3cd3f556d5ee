"""Into a container through its node: the whole way, with stand-ins for `pct`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_reclaim.commands import ANY_MACHINE, Guard, Result, Script, Section
from gpu_reclaim.containers import LOCKED, RENAMED, STOPPED, not_running, refusal
from gpu_reclaim.errors import (
    CommandFailed,
    GpuReclaimError,
    GuestLocked,
    GuestStopped,
    IdentityMismatch,
    Incomplete,
    TimedOut,
)
from gpu_reclaim.session import Session, check_node
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.local import LocalTransport
from gpu_reclaim.transport.pct import PctTransport
from unit.shells import stub

HOSTNAME = Path("/proc/sys/kernel/hostname").read_text().strip()
STATUS = f"name: {HOSTNAME}\nstatus: running\ntype: lxc\nuptime: 4711\nvmid: 129"

ENTER = '[ "$1 $2" = "129 --" ] || exit 99; shift 2; exec "$@"'
"""The container is this very machine."""


class Node:
    """A node whose `pct` does what it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trace = folder / "trace"

    def pct(self, status: str = STATUS, *, code: int = 0, enter: str = ENTER) -> None:
        (self.folder / "status").write_text(status + "\n")
        stub(
            self.folder,
            "pct",
            f'echo "$@" >> {self.trace}\n'
            f'case "$1" in\n'
            f'status) [ "$2 $3" = "129 --verbose" ] || exit 98; cat {self.folder}/status'
            f"{' >&2' if code else ''}; exit {code};;\n"
            f"exec) shift; {enter};;\n"
            "esac",
        )

    @property
    def entered(self) -> bool:
        return self.trace.exists() and "exec" in self.trace.read_text()


@pytest.fixture
def node(shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    folder = tmp_path / "node"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return Node(folder)


def run(
    *bodies: str, guard: Guard = ANY_MACHINE, timeout_s: float = 60, together: bool = False
) -> Result:
    sections = {f"s{n}": body for n, body in enumerate(bodies)}
    script = Script("act", sections, timeout_s=timeout_s, writes=not together, together=together)
    return PctTransport(LocalTransport(), 129, guard=guard).run(script)


# Through.


def test_a_script_runs_in_the_container(node: Node) -> None:
    node.pct()
    result = run("echo 1; echo err >&2; exit 3", "echo 2", guard=Guard(hostname=HOSTNAME))

    assert result.sections == {"s0": Section("1\n", 3), "s1": Section("2\n", 0)}
    assert result.stderr == "err\n"
    assert result.where == "container 129 through this machine"
    assert result.exit_code == 0
    assert node.entered


def test_sections_side_by_side_run_in_the_container_too(node: Node) -> None:
    node.pct()

    assert run("echo 1", "echo 2; exit 4", together=True).sections["s1"] == Section("2\n", 4)


def test_awkward_text_passes_both_shells_unchanged(node: Node) -> None:
    node.pct()
    text = "'\"`id` $(id) ${HOME} \\n \\\\ %s # EOF\tü"
    quoted = text.replace("'", "'\\''")

    assert run(f"cat <<'EOF'\n{text}\nEOF\nprintf '%s\\n' '{quoted}'").sections["s0"].text == (
        f"{text}\n{text}\n"
    )


def test_a_body_in_the_container_gets_no_input(node: Node) -> None:
    node.pct()

    assert run("cat; echo done").sections["s0"].text == "done\n"


def test_the_container_is_entered_with_its_own_time_limit_and_a_bare_environment(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "s3")
    node.pct()
    result = run("env", timeout_s=30)

    assert "exec 129 -- timeout -k 5 30 sh -s" in node.trace.read_text()
    assert "s3" not in result.sections["s0"].text


def test_any_name_will_do_where_none_is_expected(node: Node) -> None:
    node.pct(STATUS.replace(HOSTNAME, "other"))

    assert run("echo 1").sections["s0"].text == "1\n"


# Refused by the node: nothing is entered.


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (
            "Configuration file 'nodes/pve/lxc/129.conf' does not exist",
            2,
            IdentityMismatch,
            "there is no container 129 on this node",
        ),
        ("unable to open file '/etc/pve/.version'", 255, CommandFailed, "pct failed: unable"),
        (STATUS.replace("running", "stopped"), 0, GuestStopped, "container 129 is stopped"),
        (STATUS.replace("status: running\n", ""), 0, GuestStopped, "is not running"),
        ("", 0, GuestStopped, "is not running"),
        (f"lock: backup\n{STATUS}", 0, GuestLocked, "is locked (backup)"),
        (f"{STATUS}\nlock: migrate", 0, GuestLocked, "is locked (migrate)"),
        (STATUS.replace(HOSTNAME, "other"), 0, IdentityMismatch, "is called 'other'"),
        (STATUS.replace(HOSTNAME, f"{HOSTNAME}2"), 0, IdentityMismatch, "is called"),
        (STATUS.replace(HOSTNAME, f"x{HOSTNAME}"), 0, IdentityMismatch, "is called"),
        (STATUS.replace(f"name: {HOSTNAME}\n", ""), 0, IdentityMismatch, "is called ''"),
        (
            STATUS.replace(HOSTNAME, "x") + f"\ntags: name: {HOSTNAME}",
            0,
            IdentityMismatch,
            "is called 'x'",
        ),
        (
            STATUS.replace("running", "stopped") + "\ntags: status: running",
            0,
            GuestStopped,
            "is stopped",
        ),
    ],
)
def test_a_container_that_is_not_fit_is_not_entered(
    node: Node, status: str, code: int, kind: type[GpuReclaimError], words: str
) -> None:
    touched = node.folder / "touched"
    node.pct(status, code=code)
    with pytest.raises(GpuReclaimError) as caught:
        run(f"echo > {touched}", guard=Guard(hostname=HOSTNAME))

    assert type(caught.value) is kind
    assert words in caught.value.message
    assert "nothing was touched" in caught.value.message
    assert caught.value.remedy
    assert caught.value.result is not None
    assert not node.entered
    assert not touched.exists()


def test_a_node_without_pct_is_told_apart(shell: str) -> None:
    with pytest.raises(CommandFailed, match=r"pct failed: .*not found") as caught:
        run("echo 1")

    assert "check that this is a Proxmox node" in caught.value.remedy


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (STATUS, None),
        (STATUS.replace("running", "stopped"), GuestStopped),
        (f"{STATUS}\nlock: backup", GuestLocked),
        (STATUS.replace(HOSTNAME, "other"), IdentityMismatch),
    ],
)
def test_the_first_look_asks_the_node_the_same(
    node: Node, status: str, kind: type[GpuReclaimError] | None
) -> None:
    node.pct(status)
    links = Links(node=LocalTransport())
    session = Session("llm", links, vmid=129, guest_name=HOSTNAME)
    if kind is None:
        check_node(session)
    else:
        with pytest.raises(kind):
            check_node(session)

    assert not node.entered


# Refused or cut inside.


def test_another_machine_inside_runs_no_section(node: Node, tmp_path: Path) -> None:
    node.pct()
    guard = Guard(hostname=HOSTNAME, machine_id="0" * 32)
    with pytest.raises(IdentityMismatch, match="its machine-id is") as caught:
        run(f"echo > {tmp_path}/touched", guard=guard)

    assert "container 129 through" in caught.value.message
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("enter", "kind", "words"),
    [
        ("echo \"container '129' not running!\" >&2; exit 255", GuestStopped, "stopped meanwhile"),
        ("cat > /dev/null; exit 1", Incomplete, "did not finish"),
        ("echo lxc-attach: failed to attach >&2; exit 1", Incomplete, "lxc-attach: failed"),
        ("exec head -n 3", Incomplete, "did not finish"),
        ("cat > /dev/null; exit 124", TimedOut, "did not end within 60 s"),
        ("cat > /dev/null; exit 137", Incomplete, "did not finish"),
        ("exit 0", Incomplete, "did not finish"),
    ],
)
def test_an_inner_script_without_its_end_mark(
    node: Node, enter: str, kind: type[GpuReclaimError], words: str
) -> None:
    node.pct(enter=enter)
    with pytest.raises(GpuReclaimError) as caught:
        run("echo 1")

    assert type(caught.value) is kind
    assert words in str(caught.value)


@pytest.mark.parametrize("shell", ["dash", "bash"], indirect=True)  # busybox: only the shell ends
def test_an_inner_script_that_outstays_its_limit_is_ended_inside(
    node: Node, tmp_path: Path
) -> None:
    node.pct()
    with pytest.raises(TimedOut) as caught:
        run(f"echo $$ > {tmp_path}/pid; sleep 600", timeout_s=1)

    assert caught.value.result is not None
    assert caught.value.result.exit_code == 124
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


# The table of refusals.


@pytest.mark.parametrize("code", [0, 1, 77, 89, 94, 124, 127, 137, 255])
def test_other_exit_statuses_are_no_refusal(code: int) -> None:
    assert refusal("node", 129, "llm", Section("pct status: running\n", code)) is None


@pytest.mark.parametrize(
    ("code", "kind"), [(STOPPED, GuestStopped), (LOCKED, GuestLocked), (RENAMED, IdentityMismatch)]
)
def test_a_refusal_without_words_is_still_one(code: int, kind: type[GpuReclaimError]) -> None:
    assert type(refusal("node", 129, "llm", Section("", code))) is kind


@pytest.mark.parametrize(
    ("stderr", "expected"),
    [
        ("container '129' not running!\n", True),
        ("perl: warning\ncontainer '129' not running!", True),
        ("", False),
        ("the server is not running", False),
    ],
)
def test_words_of_a_container_that_stopped_meanwhile(stderr: str, expected: bool) -> None:
    assert not_running(stderr) is expected
