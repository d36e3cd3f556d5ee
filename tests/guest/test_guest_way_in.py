"""The way in on bad days: nobody there, odd shells, a frozen or full guest, a cut in the middle."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gpu_reclaim.commands import Result, Script
from gpu_reclaim.errors import TimedOut
from gpu_reclaim.models import ReclaimPolicy, ReclaimReport, Verdict, Via
from gpu_reclaim.reclaim import reclaim
from gpu_reclaim.transport import Transport
from gpu_reclaim.transport.links import Links
from guest import cutting, ways, witness
from guest.samples import sampled
from lab.lab import Lab
from lab.node import write_container
from lab.paths import LXC, NODE, NODE_BIN, PVE
from lab.processes import processes_in
from lab.shell import run
from lab.waiting import wait_until

pytestmark = pytest.mark.lab

MIB = 1 << 20
BOTH = pytest.mark.parametrize("via", ["ssh", "hypervisor"])


@contextmanager
def rewritten(path: Path, text: str) -> Iterator[None]:
    """A file with another text, and as it was afterwards."""
    before = path.read_text() if path.exists() else None
    path.write_text(text)
    try:
        yield
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_text(before)


@contextmanager
def pct_with(old: str, new: str) -> Iterator[None]:
    """The node's `pct`, changed in one place."""
    text = (NODE_BIN / "pct").read_text()
    assert text.count(old) == 1
    with rewritten(NODE_BIN / "pct", text.replace(old, new)):
        yield


def node_where(lab: Lab) -> str:
    """The node's name in messages."""
    return f"ssh root@{lab.node_address}:{lab.node_port}"


def refused(lab: Lab, via: Via, *, ways_in: Links | None = None, **changes: Any) -> ReclaimReport:
    """Reclaim in vain; nobody was stopped or ended."""
    session = ways.session(lab, via, ways=ways_in, **changes)
    report = witness.refused(session, ReclaimPolicy(via=via, term_grace_s=1))
    assert (report.stopped, report.ended) == ([], [])
    return report


# Nobody there.

REFUSES = (
    "it refuses the connection",
    "check the port; see on the host whether sshd runs: `systemctl status ssh sshd`",
)
SILENT = (
    "no answer within 0.3 s",
    "check that the host is up and no firewall is in between: `ssh -v` from here",
)
CLOSED: dict[str, Any] = {"port": 1}
NOWHERE: dict[str, Any] = {"address": "10.129.0.3", "port": 22, "connect_timeout_s": 0.3}


@pytest.fixture
def nowhere(lab: Lab) -> Iterator[None]:
    """The guest's wire leads there, and what is sent there gets no answer of any kind."""
    neighbour = [NOWHERE["address"], "dev", lab.guest.veth]
    run(["ip", "neigh", "replace", *neighbour, "lladdr", "02:00:00:00:00:03", "nud", "permanent"])
    yield
    run(["ip", "neigh", "delete", *neighbour])


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize(
    ("via", "guest", "node"),
    sampled(
        [
            ("ssh", CLOSED, {}),
            ("ssh", NOWHERE, {}),
            ("hypervisor", {}, CLOSED),
            ("hypervisor", {}, NOWHERE),
            ("auto", CLOSED, NOWHERE),
            ("auto", NOWHERE, CLOSED),
        ],
        keep=3,
    ),
)
def test_nobody_there(lab: Lab, via: Via, guest: dict[str, Any], node: dict[str, Any]) -> None:
    lab.start_server()
    with witness.untouched(lab):
        report = refused(lab, via, ways_in=ways.links(lab, via, guest=guest, node=node))
    tried = [(lab.guest_address, 22, guest), (lab.node_address, lab.node_port, node)]
    told = []
    for address, port, changes in tried:
        if changes:
            place = f"root@{changes.get('address', address)}:{changes.get('port', port)}"
            told.append((place, SILENT if changes is NOWHERE else REFUSES))
    assert report.verdict == Verdict.UNREACHABLE
    assert report.summary == "; and ".join(f"{place}: {words}" for place, (words, _) in told)
    assert report.remedy == "; or: ".join(cure for _, (_, cure) in told)


@pytest.mark.usefixtures("nowhere")
def test_node_that_is_not_there_is_not_needed(lab: Lab) -> None:
    pid = lab.hold("--gpus", "0")
    them, people = {witness.identity(lab, pid)}, witness.everybody(lab)
    links = ways.links(lab, node=NOWHERE)
    report = reclaim(ways.session(lab, ways=links), ReclaimPolicy(term_grace_s=1))
    assert report.verdict == Verdict.CLEAN
    assert witness.ended(report) == set(people) - set(witness.everybody(lab)) == them


# Cut in the middle.

THERE = "/run/gpu-reclaim-there"
"""Made by an acting script at the moment for the cut; goes with `reset`."""
BEFORE = f"echo >{THERE}; sleep 0.5\n{{body}}"
AFTER = f"(\n{{body}}\n)\ncode=$?; echo >{THERE}; sleep 0.5; exit $code"


@dataclass
class Through:
    """A way that notes what goes through it, and may change it.

    Attributes:
        inner: The way itself.
        edit: What becomes of a script.
        sent: What went through.
    """

    inner: Transport
    edit: Callable[[Script], Script] = lambda script: script
    sent: list[Script] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.inner.name

    def run(self, script: Script) -> Result:
        self.sent.append(script)
        return self.inner.run(self.edit(script))

    def close(self) -> None:
        self.inner.close()


def through(links: Links, edit: Callable[[Script], Script] = lambda script: script) -> Links:
    """The same ways, watched."""
    assert links.direct is not None
    assert links.hypervisor is not None
    direct, hypervisor = Through(links.direct, edit), Through(links.hypervisor, edit)
    return replace(links, direct=direct, hypervisor=hypervisor)


@pytest.mark.parametrize("moment", [BEFORE, AFTER], ids=["before", "after"])
@BOTH
def test_cut_before_and_after_it_took_effect(lab: Lab, via: Via, moment: str) -> None:
    pid = lab.hold("--gpus", "0")
    them, people = {witness.identity(lab, pid)}, witness.everybody(lab)

    def edit(script: Script) -> Script:
        body = script.sections.get("end")
        return replace(script, sections={"end": moment.format(body=body)}) if body else script

    sessions = cutting.guest_sessions if via == "ssh" else cutting.node_sessions
    there = lab.guest.rootfs / THERE.lstrip("/")
    policy = ReclaimPolicy(via=via, term_grace_s=1)
    session = ways.session(lab, ways=through(ways.links(lab, via), edit))
    with cutting.cut_once(lab, sessions, there.exists) as killed:
        report = witness.refused(session, policy)
    assert len(killed) == 1
    assert report.verdict == Verdict.UNKNOWN
    where = f"ssh root@{lab.guest_address}" if via == "ssh" else node_where(lab)
    told = f"{where}: the connection ended before end 1 processes did, so nobody knows what it did"
    done = "; earlier steps did what is listed" if moment == AFTER else ""
    assert report.summary == told + done
    assert report.remedy == "look at the host; the next attempt looks before it acts"
    assert {(row.pid, row.outcome) for row in report.ended} == (
        {(pid, "gone")} if moment == AFTER else set()
    )
    again = reclaim(ways.session(lab, via), policy)
    assert again.verdict == Verdict.CLEAN
    # What was cut before it took effect goes on there, and may be the quicker one.
    assert witness.ended(again) <= (set() if moment == AFTER else them)
    assert set(people) - set(witness.everybody(lab)) == them


def test_answer_through_the_node_that_is_cut(lab: Lab) -> None:
    lab.start_server()
    # The other stream is lost too: it may tell of a process that ended while it was looked at.
    cut = 'exec) load_config && enter "$@" 2>/dev/null | head -c -2 ;;'
    with witness.untouched(lab), pct_with('exec) load_config && enter "$@" ;;', cut):
        report = refused(lab, "hypervisor")
    assert report.verdict == Verdict.UNKNOWN
    assert report.summary == (
        f"container 129 through {node_where(lab)}: survey did not finish (exit status 0), so "
        "nobody knows what it did"
    )
    assert report.remedy == "look at the host; the next attempt looks before it acts"


@BOTH
def test_both_streams_far_beyond_any_window(lab: Lab, via: Via) -> None:
    write = f"head -c {3 * MIB + 1} /dev/zero | tr '\\0'"
    links = ways.links(lab, via)
    result = links.run(Script("big", {"a": f"{write} o\n{write} e >&2"}))
    links.close()
    assert result.section("a").text == "o" * (3 * MIB + 1)
    assert result.stderr == "e" * (3 * MIB + 1)


# Shells.

NOISE = """\
echo 'Welcome to the machine'
echo '@gr-0123456789abcdef end'
printf 'pct status: stopped\\npct lock: backup\\n'
echo 'bash: something: command not found' >&2
"""


@BOTH
def test_shells_that_talk(lab: Lab, via: Via) -> None:
    """A motd, and start-up files that print although nobody is there to read."""
    pid = lab.hold("--gpus", "0")
    them, people = {witness.identity(lab, pid)}, witness.everybody(lab)
    root = lab.guest.rootfs
    with ExitStack() as stack:
        for path in (root / "root/.bashrc", root / "etc/motd", NODE / ".bashrc"):
            stack.enter_context(rewritten(path, NOISE))
        report = reclaim(ways.session(lab, via), ReclaimPolicy(via=via))
    assert report.verdict == Verdict.CLEAN
    assert witness.ended(report) == them
    assert set(people) - set(witness.everybody(lab)) == them


ODD_SHELL = """#!/usr/bin/python3
import os, shlex, sys
if sys.argv[1] != "-c" or set("$;&|<>(){}=`") & set(sys.argv[2]):
    sys.exit("odd-shell: what is that?")
words = shlex.split(sys.argv[2])
os.execvp(words[0], words)
"""


@contextmanager
def login_shell(lab: Lab, shell: str) -> Iterator[None]:
    """Root's login shell in the guest."""
    users = lab.guest.rootfs / "etc/passwd"
    text = users.read_text()
    with rewritten(users, text.replace("root:/root:/bin/bash", f"root:/root:{shell}")):
        assert users.read_text() != text
        yield


def test_login_shell_that_is_no_posix_shell(lab: Lab) -> None:
    pid = lab.hold("--gpus", "0")
    them, people = {witness.identity(lab, pid)}, witness.everybody(lab)
    odd = lab.guest.rootfs / "usr/local/bin/odd-shell"
    with rewritten(odd, ODD_SHELL), login_shell(lab, "/usr/local/bin/odd-shell"):
        odd.chmod(0o755)
        report = reclaim(ways.session(lab, "ssh"), ReclaimPolicy(via="ssh"))
    assert report.verdict == Verdict.CLEAN
    assert set(witness.vias(report).values()) <= {f"ssh root@{lab.guest_address}", ""}
    assert witness.ended(report) == them
    assert set(people) - set(witness.everybody(lab)) == them


@pytest.mark.parametrize("via", ["ssh", "auto"])
def test_login_that_has_no_shell(lab: Lab, via: Via) -> None:
    lab.start_server()
    with witness.untouched(lab), login_shell(lab, "/usr/sbin/nologin"):
        report = refused(lab, via)
    assert report.verdict == Verdict.UNREACHABLE
    assert report.summary == (
        f"ssh root@{lab.guest_address}: root has no login shell there (nologin); nothing was run"
    )
    assert report.remedy == (
        "log in as somebody else and set sudo, or give root a shell: `chsh -s /bin/sh root` on "
        "the host"
    )


# The node says no.


def test_node_without_pct(lab: Lab, tmp_path: Path) -> None:
    lab.start_server()
    pct = NODE_BIN / "pct"
    shutil.move(pct, tmp_path / "pct")
    try:
        with witness.untouched(lab):
            report = refused(lab, "auto")
    finally:
        shutil.move(tmp_path / "pct", pct)
    assert report.verdict == Verdict.UNKNOWN
    words = re.escape(f"{node_where(lab)}: pct failed: sh: ") + r"\d+: pct: not found"
    assert re.fullmatch(words + "; nothing was touched", report.summary)
    assert report.remedy == "check that this is a Proxmox node and that the login is root there"


@pytest.mark.parametrize(
    ("via", "lock"), [("hypervisor", "backup"), ("auto", "migrate"), ("hypervisor", "snapshot")]
)
def test_every_lock_is_respected(lab: Lab, via: Via, lock: str) -> None:
    lab.start_server()
    lab.set_lock(lock)
    with witness.untouched(lab):
        report = refused(lab, via)
    assert report.verdict == Verdict.GUEST_LOCKED
    assert report.summary == (
        f"{node_where(lab)}: container 129 is locked ({lock}); nothing was touched"
    )
    assert report.remedy == f"wait until the {lock} is over; see `pct status 129 --verbose`"


def test_guest_that_has_moved_to_another_node(lab: Lab) -> None:
    lab.start_server()
    (PVE / "129.conf").unlink()
    with witness.untouched(lab):
        report = refused(lab, "hypervisor")
    assert report.verdict == Verdict.IDENTITY_MISMATCH
    assert report.summary == (
        f"{node_where(lab)}: there is no container 129 on this node (Configuration file "
        "'nodes/pve/lxc/129.conf' does not exist); nothing was touched"
    )
    assert report.remedy == "check the vmid; after a migration, give the node it runs on now"


def test_template(lab: Lab) -> None:
    lab.start_server()
    write_container(131, lab.hostname, "10.131.0.2", None)
    links = ways.links(lab, vmid=131)
    with witness.untouched(lab), pct_with("lock=$(value lock)", "echo template: 1; lock="):
        report = refused(lab, "auto", ways_in=links, vmid=131)
    assert report.verdict == Verdict.IDENTITY_MISMATCH
    assert report.summary == (
        f"{node_where(lab)}: container 131 is a template, which never runs; nothing was touched"
    )
    assert report.remedy == "check the vmid: give that of a container made from it"


# Frozen: what enters it hangs.


@contextmanager
def frozen(lab: Lab) -> Iterator[None]:
    """The guest frozen, unless it is so already; thawed afterwards."""
    named = ["-P", str(LXC), "-n", str(lab.vmid)]
    run(["lxc-freeze", *named])
    try:
        yield
    finally:
        run(["lxc-unfreeze", *named])


@contextmanager
def thawed_afterwards(lab: Lab) -> Iterator[None]:
    """For a guest that something in between freezes."""
    try:
        yield
    finally:
        run(["lxc-unfreeze", "-P", str(LXC), "-n", str(lab.vmid)])


def left_behind(lab: Lab) -> dict[tuple[int, int], str]:
    """What runs on the node beside its listener, or was started in the guest by us.

    By host pid and start time: other tests' connections may still be open.
    """
    ours = str(Path("/proc/self/ns/pid").readlink())
    here = list(processes_in(ours))
    node = [x for x in here if "gpu-reclaim-lab-node" in x.cgroups]
    hung = [x for x in here if f"lxc-attach -P {LXC} " in x.title]
    ending = r"^lxc-attach |^timeout -k|^sh -s|/pct |^sshd: root"
    found = [x for x in [*node, *hung, *lab.guest.processes()] if re.search(ending, x.title)]
    return {(x.host_pid, x.start): x.title for x in found}


@contextmanager
def nothing_left_behind(lab: Lab) -> Iterator[None]:
    """Whatever is started meanwhile is gone soon after."""
    before = set(left_behind(lab))
    yield
    wait_until("nothing is left", lambda: not set(left_behind(lab)) - before)


def test_frozen_guest_is_not_entered(lab: Lab) -> None:
    lab.start_server()
    with witness.untouched(lab), frozen(lab), nothing_left_behind(lab):
        started = time.monotonic()
        report = refused(lab, "auto")
        assert time.monotonic() - started < 5
    assert report.verdict == Verdict.GUEST_STOPPED
    assert report.summary == f"{node_where(lab)}: container 129 is frozen; nothing was touched"
    assert report.remedy == (
        "let it go on (`pct resume 129`), or wait for the backup that froze it"
    )


def test_frozen_guest_by_its_own_ssh(lab: Lab) -> None:
    lab.start_server()
    links = ways.links(lab, "ssh", guest={"connect_timeout_s": 1})
    with witness.untouched(lab), frozen(lab):
        started = time.monotonic()
        report = refused(lab, "ssh", ways_in=links)
        assert time.monotonic() - started < 5
    assert report.verdict == Verdict.UNREACHABLE
    assert report.summary == (
        f"root@{lab.guest_address}:22: it accepts connections but sent no SSH greeting within 1 s"
    )
    assert report.remedy == (
        "check the port; if it is right, see whether the host hangs (memory, disk, sshd), or is "
        "a frozen guest"
    )


FREEZE = 'lxc-freeze -P "$containers" -n "$vmid"; exec lxc-attach -P'


def test_guest_frozen_just_before_it_is_entered(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check came too early: the time limit on the node holds, and nothing is caught up on."""
    monkeypatch.setattr("gpu_reclaim.transport.pct.REMOTE_SLACK_S", 1)
    lab.start_server()
    trap = pct_with("exec lxc-attach -P", FREEZE)
    with witness.untouched(lab), trap, nothing_left_behind(lab), thawed_afterwards(lab):
        started = time.monotonic()
        report = refused(lab, "hypervisor", script_timeout_s=1)
        assert time.monotonic() - started < 9
    assert report.verdict == Verdict.UNKNOWN
    assert report.summary == (
        f"container 129 through {node_where(lab)}: survey did not begin within 1 s: entering the "
        "container hangs"
    )
    assert report.remedy == (
        "see on the node whether it is frozen (`lxc-info -n 129 -s`): `pct resume 129` lets it go "
        "on; else see its memory and the node's load"
    )


def test_script_that_was_refused_entry_does_not_run_later(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the thaw nothing comes of what nobody waits for any more."""
    monkeypatch.setattr("gpu_reclaim.transport.pct.REMOTE_SLACK_S", 0.5)
    links = ways.links(lab, "hypervisor")
    act = Script("act", {"a": f"echo >{THERE}"}, timeout_s=1, writes=True)
    trap = pct_with("exec lxc-attach -P", FREEZE)
    with trap, nothing_left_behind(lab), thawed_afterwards(lab):
        with pytest.raises(TimedOut, match=r"act did not begin within 1 s"):
            links.run(act)
        links.close()
    assert not (lab.guest.rootfs / THERE.lstrip("/")).exists()


# Clocks and disks.

CLOCK_WORDS = re.compile(
    r"\bdate\b|EPOCH|-newer|-[acm]min\b|-[acm]time\b|strftime|timedatectl|on-calendar|\bat now\b"
)
DAY_S = 86_400
LOCKS = ("lock the host", "unlock the host")


@pytest.mark.parametrize(("via", "days"), [("ssh", -3650), ("hypervisor", 3650)])
def test_clocks_may_differ(lab: Lab, via: Via, days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is years earlier or later than there, and there nobody can tell the time."""
    stubborn = lab.hold("--gpus", "0", "--ignore-term")
    lab.start_server()
    them = {witness.identity(lab, stubborn), *witness.of_unit(lab, ways.UNIT)}
    people = witness.everybody(lab)
    lab.hide("/usr/bin/date")
    really = time.time
    monkeypatch.setattr(time, "time", lambda: really() + days * DAY_S)
    links = through(ways.links(lab, via))
    report = reclaim(ways.session(lab, ways=links), ReclaimPolicy(via=via, term_grace_s=0.5))
    assert report.verdict == Verdict.CLEAN
    assert witness.ended(report) == set(people) - set(witness.everybody(lab)) == them
    assert witness.row(report, stubborn).signal == "KILL"
    assert 0.5 < report.seconds < 30
    sent = [each for way in (links.direct, links.hypervisor) for each in sent_through(way)]
    assert {"survey", "settle"} <= {script.name for script in sent}
    # The lock's times are for people; its lease goes by the host's uptime.
    others = [script for script in sent if script.name not in LOCKS]
    texts = [text for script in others for text in script.sections.values()]
    assert [text for text in texts if CLOCK_WORDS.search(text)] == []


def sent_through(way: Transport | None) -> list[Script]:
    assert isinstance(way, Through)
    return way.sent


FULL = ("/tmp", "/var/tmp", "/var/lib")
NO_WRITES = "ulimit -S -f 0\n"
MAY_WRITE = "#!/bin/sh\nulimit -S -f unlimited\n"
# The stand-in notes its calls in a file; the real one writes nothing.
SMI = f'{MAY_WRITE}exec /usr/bin/nvidia-smi.hidden-by-lab "$@"\n'


def unwriting(script: Script) -> Script:
    """The same, and who writes a byte to a file gets a deadly signal; but for the lock's own."""
    if script.name in LOCKS:
        return script
    sections = {name: NO_WRITES + body for name, body in script.sections.items()}
    return replace(script, sections=sections)


@contextmanager
def full_disks(lab: Lab) -> Iterator[None]:
    """Not a byte is left in these folders of the guest."""
    fill = "mount -t tmpfs -o size=4k none {0}; head -c 4096 /dev/zero >{0}/full"
    try:
        lab.do("; ".join(fill.format(folder) for folder in FULL))
        yield
    finally:
        lab.attach("; ".join(f"umount {folder}" for folder in FULL))


@BOTH
def test_full_disks_and_not_a_byte_is_written(lab: Lab, via: Via) -> None:
    stubborn = lab.hold("--gpus", "0", "--ignore-term")
    lab.start_server()
    them = {witness.identity(lab, stubborn), *witness.of_unit(lab, ways.UNIT)}
    people = witness.everybody(lab)
    links = through(ways.links(lab, via), unwriting)
    lab.hide("/usr/bin/nvidia-smi")
    smi = lab.guest.rootfs / "usr/bin/nvidia-smi"
    with ExitStack() as stack:
        stack.enter_context(rewritten(smi, SMI))
        smi.chmod(0o755)
        stack.enter_context(rewritten(NODE / ".bashrc", NO_WRITES))
        # lxc-attach writes into control groups.
        stack.enter_context(pct_with("#!/bin/sh\n", MAY_WRITE))
        stack.enter_context(full_disks(lab))
        probe = links.run(Script("probe", {"a": "echo x >/run/x"})).section("a")
        report = reclaim(ways.session(lab, ways=links), ReclaimPolicy(via=via, term_grace_s=0.5))
    assert probe.code != 0
    assert report.verdict == Verdict.CLEAN
    assert witness.ended(report) == set(people) - set(witness.everybody(lab)) == them
