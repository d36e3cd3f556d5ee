"""The lab tests itself: what other tests rely on."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import wire
from lab.devices import PATHS
from lab.errors import LabError
from lab.lab import Lab
from lab.node import ADDRESS
from lab.paths import RUN
from lab.record import recorded, user_of_lab
from lab.waiting import wait_until

pytestmark = pytest.mark.lab

QUERY = "nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits"


@pytest.fixture(scope="module")
def booted() -> Iterator[Lab]:
    """One lab for all tests here."""
    with Lab() as lab:
        yield lab


@pytest.fixture
def lab(booted: Lab) -> Lab:
    """The lab, idle."""
    booted.reset()
    return booted


def used(lab: Lab) -> list[int]:
    """Returns the MiB in use as the guest's nvidia-smi prints them."""
    return [int(line) for line in lab.do(QUERY).split()]


def ssh(lab: Lab, where: str, command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command over real SSH, on the "guest" or the "node", with its host key pinned."""
    address, port = (ADDRESS, lab.node_port) if where == "node" else (lab.guest_address, 22)
    known = lab.state.parent / f"known_{where}"
    key = lab.node_host_key if where == "node" else lab.guest_host_key
    known.write_text(f"[{address}]:{port} {key}\n" if port != 22 else f"{address} {key}\n")
    options = [f"UserKnownHostsFile={known}", "StrictHostKeyChecking=yes", "BatchMode=yes"]
    argv = ["ssh", "-F", "none", "-i", str(lab.client_key), "-p", str(port)]
    argv += [word for option in options for word in ("-o", option)]
    argv += [f"root@{address}", command]
    return subprocess.run(
        argv, check=False, input=stdin, capture_output=True, text=True, timeout=30
    )


def test_idle_guest_uses_nothing(lab: Lab) -> None:
    assert used(lab) == [0, 0, 0, 0]
    assert lab.server_pids() == {}
    titles = [title for _, title in lab.processes().values()]
    assert "/usr/bin/nvidia-persistenced" in titles
    assert "/usr/bin/python3 /opt/gpu-agent/gpu_agent.py" in titles


def test_guest_is_who_it_says(lab: Lab) -> None:
    assert lab.do("hostname; cat /etc/machine-id").split() == [lab.hostname, lab.machine_id]


def test_server_holds_memory_until_a_worker_is_killed(lab: Lab) -> None:
    pids = lab.start_server()
    assert used(lab) == [90000, 90100, 90200, 90300]
    lab.do(f"kill -9 {pids['sglang::scheduler_TP1']}")
    wait_until("the charge is gone", lambda: used(lab) == [90000, 0, 90200, 90300])
    assert [call.used_mib[1] for call in lab.smi_calls()][-1] == 0


def test_server_tells_its_health(lab: Lab) -> None:
    assert lab.health() == 0
    lab.start_server()
    assert lab.health() == 200
    lab.smi("server.sick", "")
    assert lab.health() == 503
    lab.smi("server.sick", None)
    assert lab.health() == 200
    lab.do("systemctl stop sglang-qwen.service")
    assert lab.health() == 0


def test_workers_outlive_a_stopped_unit(lab: Lab) -> None:
    before = lab.start_server()
    lab.do("systemctl stop sglang-qwen.service")
    after = lab.server_pids()
    assert "launch_server" not in after
    assert {title: before[title] for title in after} == after
    assert len(after) == 5


def test_unit_comes_back_when_its_main_process_is_killed(lab: Lab) -> None:
    before = lab.start_server()
    lab.do(f"kill -9 {' '.join(map(str, before.values()))}")
    wait_until("the server is back", lambda: len(lab.server_pids()) == 6)
    assert not set(lab.server_pids().values()) & set(before.values())


@pytest.mark.parametrize(
    "kind", [["--map-only"], ["--leader-exits"], ["--orphan"], ["--unreaped"], ["--title", "x::y"]]
)
def test_every_kind_of_holder_is_charged(lab: Lab, kind: list[str]) -> None:
    lab.hold("--gpus", "1,3", "--mib", "500", *kind)
    assert used(lab) == [0, 500, 0, 500]


def test_holder_may_ignore_term_and_remember_it(lab: Lab) -> None:
    pid = lab.hold("--gpus", "0", "--ignore-term", "--catch", "/run/caught")
    lab.do(f"kill {pid}")
    wait_until("the signal came", lambda: lab.attach("cat /run/caught").stdout == "TERM\n")
    assert pid in lab.processes()
    lab.do("rm /run/caught")


def test_frozen_holder_survives_kill_until_thawed(lab: Lab) -> None:
    pid = lab.hold("--gpus", "2")
    lab.freeze(pid)
    lab.do(f"kill -9 {pid}; sleep 0.1")
    process = lab.process(pid)
    assert process is not None
    assert process.state == "D"
    assert used(lab)[2] == 1024
    lab.thaw()
    wait_until("it has ended", lambda: lab.process(pid) is None)


def test_memory_lags_behind_its_holder(lab: Lab) -> None:
    lab.smi("lag", "0.5")
    pid = lab.hold("--gpus", "0", "--mib", "300")
    assert used(lab)[0] == 300
    lab.do(f"kill -9 {pid}")
    wait_until("it has ended", lambda: lab.process(pid) is None)
    assert used(lab)[0] == 300
    wait_until("the memory is free", lambda: used(lab)[0] == 0)


def test_state_files_change_what_is_printed(lab: Lab) -> None:
    lab.smi("stuck", "3 77\n")
    lab.smi("missing", "1")
    lab.smi("override", "2 memory.used [N/A]\n")
    assert lab.do(QUERY).split() == ["0", "[N/A]", "77"]
    lab.smi("fail", "9 NVIDIA-SMI has failed")
    assert lab.attach(QUERY).returncode == 9


def test_unknown_field_is_refused(lab: Lab) -> None:
    done = lab.attach("nvidia-smi --query-gpu=index,nonsense --format=csv")
    assert (done.returncode, done.stdout.strip()) == (
        2,
        'Field "nonsense" is not a valid field to query.',
    )


def test_ssh_into_guest_and_node(lab: Lab) -> None:
    assert ssh(lab, "guest", "hostname; id -u").stdout.split() == [lab.hostname, "0"]
    assert ssh(lab, "node", "command -v pct").stdout.strip() == str(lab.node_bin / "pct")


def test_pct_exec_passes_input_streams_and_codes(lab: Lab) -> None:
    done = ssh(lab, "node", "pct exec 129 -- sh -s", "cat /etc/hostname; echo x >&2; exit 37\n")
    assert (done.returncode, done.stdout, done.stderr) == (37, f"{lab.hostname}\n", "x\n")
    done = ssh(lab, "node", "pct exec 129 --keep-env 0 -- sh -c 'echo $PATH; kill -9 $$'")
    assert (done.returncode, done.stdout) == (137, "/sbin:/bin:/usr/sbin:/usr/bin\n")


def test_pct_tells_state_and_lock(lab: Lab) -> None:
    assert ssh(lab, "node", "pct status 129").stdout == "status: running\n"
    lab.set_lock("backup")
    assert "lock: backup\n" in ssh(lab, "node", "pct config 129").stdout
    assert "lock: backup\n" in ssh(lab, "node", "pct status 129 --verbose").stdout
    done = ssh(lab, "node", "pct config 131")
    assert (done.returncode, done.stderr) == (
        2,
        "Configuration file 'nodes/pve/lxc/131.conf' does not exist\n",
    )


def test_reset_undoes_what_tests_do(lab: Lab) -> None:
    lab.hide("/usr/bin/fuser")
    lab.set_hostname_in_guest("impostor")
    lab.stop_guest_sshd()
    lab.start_server()
    lab.do("mkdir -p /run/systemd/system/sglang-qwen.service.d /etc/systemd/system/extra.timer.d")
    lab.do("systemd-run --on-active=1h --unit=gpu-reclaim-deadman true")
    lab.do("setsid sleep 1000 >/dev/null 2>&1 &")
    lab.reset()
    script = "hostname; command -v fuser; ls /run/systemd/transient; ls -d /etc/systemd/system/ex*"
    assert lab.attach(script).stdout.split() == [lab.hostname, "/usr/bin/fuser"]
    assert ssh(lab, "guest", "true").returncode == 0
    assert not [title for _, title in lab.processes().values() if "sleep" in title]


def dial(lab: Lab, where: str, timeout: float = 10) -> socket.socket:
    """Returns a connection to the SSH server of the "guest" or the "node", its banner read."""
    address = (ADDRESS, lab.node_port) if where == "node" else (lab.guest_address, 22)
    connection = socket.create_connection(address, timeout=timeout)
    assert connection.recv(255).startswith(b"SSH-2.0-")
    return connection


@pytest.mark.parametrize("where", ["guest", "node"])
def test_a_cut_wire_hangs_and_heals(lab: Lab, where: str) -> None:
    with dial(lab, where) as old, socket.create_server((ADDRESS, 0)) as other:
        with lab.cut():
            old.sendall(b"SSH-2.0-lab\r\n")
            old.settimeout(0.5)
            with pytest.raises(TimeoutError):
                old.recv(255)
            with pytest.raises(TimeoutError):
                dial(lab, where, timeout=0.5)
            socket.create_connection(other.getsockname(), timeout=5).close()
            assert lab.do("echo still there") == "still there\n"
        old.settimeout(10)
        assert len(old.recv(255)) > 100, "the key exchange that was on its way"
    dial(lab, where).close()


def test_reset_heals_a_wire_that_a_killed_test_left_cut(lab: Lab) -> None:
    wire.drop(lab.guest, lab.node_port)
    with pytest.raises(TimeoutError):
        dial(lab, "guest", timeout=0.3)
    lab.reset()
    dial(lab, "guest").close()
    dial(lab, "node").close()
    assert "gpu_reclaim_lab" not in subprocess.check_output([wire.NFT, "list", "tables"], text=True)


def test_another_guest_shares_the_gpus(lab: Lab) -> None:
    other = lab.add_guest(130, "other-guest")
    lab.hold("--gpus", "0", "--mib", "4000", guest=other)
    assert used(lab)[0] == 4000
    apps = "nvidia-smi --query-compute-apps=pid --format=csv,noheader"
    assert lab.do(apps) == ""
    seen = ssh(lab, "node", "pct list; cat /proc/[0-9]*/cgroup | grep -c lxc/130/ns").stdout
    assert "other-guest" in seen
    assert int(seen.split()[-1]) > 0


def test_only_one_lab_at_a_time(lab: Lab) -> None:
    with pytest.raises(LabError, match=f"in use by process {os.getpid()}"):
        Lab().start(wait=0)


def test_stop_leaves_nothing_behind(booted: Lab) -> None:
    wire.drop(booted.guest, booted.node_port)
    groups = [Path(folder) for folder in recorded()["groups"]]
    assert any(folder.exists() for folder in groups)
    # As if whoever started the lab had been killed with all of its processes.
    for pid in booted.guest.pids():
        os.kill(pid, signal.SIGKILL)
    booted.stop()
    assert [folder for folder in groups if folder.exists()] == []
    assert "gpu_reclaim_lab" not in subprocess.check_output([wire.NFT, "list", "tables"], text=True)
    assert not RUN.exists()
    assert user_of_lab() is None
    assert [path for path in PATHS if path.exists()] == []
    assert "vethlab" not in subprocess.check_output(["ip", "link"], text=True)
    assert str(RUN) not in Path("/proc/mounts").read_text()
    assert str(RUN) not in Path("/proc/net/unix").read_text()
    titles = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [title for title in titles if str(RUN).encode() in title]
