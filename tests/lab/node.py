"""The stand-in Proxmox node: a second SSH server on this machine, whose PATH begins with `pct`."""

import shutil
import socket
import time
from pathlib import Path

from lab import record
from lab.errors import LabError
from lab.keys import Key
from lab.paths import LXC, NODE, NODE_BIN, PVE, SOURCE
from lab.shell import run

ADDRESS = "127.0.0.1"
# HOME is the node's own folder: the shell start-up files of this machine's root are none of its.
_CONFIG = """\
ListenAddress {address}:{port}
HostKey {host_key}
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
UseDNS no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
PrintMotd no
PrintLastLog no
MaxStartups 100
MaxSessions 100
SetEnv PATH={bin}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME={folder}
"""


def start_node(host_key: Key, client_key: Key) -> int:
    """Starts the node's SSH server.

    Returns:
        Its port on 127.0.0.1.

    Raises:
        LabError: It does not answer.
    """
    port = _free_port()
    NODE_BIN.mkdir(parents=True)
    PVE.mkdir()
    shutil.copy(SOURCE / "node_bin/pct", NODE_BIN / "pct")
    (NODE / "containers").write_text(f"{LXC}\n")
    (NODE / "authorized_keys").write_text(client_key.public + "\n")
    text = _CONFIG.format(
        address=ADDRESS, port=port, host_key=host_key.path, folder=NODE, bin=NODE_BIN
    )
    (NODE / "sshd_config").write_text(text)
    _launch()
    _wait_answering(port)
    return port


def write_container(vmid: int, hostname: str, address: str, lock: str | None) -> None:
    """Writes a container's configuration as `pct config` shall show it."""
    lines = [
        "arch: amd64",
        "cores: 2",
        f"hostname: {hostname}",
        *([f"lock: {lock}"] if lock else []),
        "memory: 8192",
        f"net0: name=eth0,bridge=vmbr0,hwaddr=BC:24:11:00:00:{vmid % 256:02X},"
        f"ip={address}/24,type=veth",
        "ostype: debian",
        "swap: 0",
        *(f"lxc.mount.entry: /dev/nvidia{gpu} dev/nvidia{gpu} none bind" for gpu in range(4)),
    ]
    partial = PVE / f".{vmid}.new"
    partial.write_text("".join(line + "\n" for line in lines))
    partial.replace(PVE / f"{vmid}.conf")


def stop_node() -> None:
    """Ends the recorded SSH server and all its sessions, by their control group."""
    with record.ending("cgroups") as folders:
        for folder in map(Path, folders):
            if not folder.exists():
                continue
            (folder / "cgroup.kill").write_text("1")
            _remove(folder)


def _launch() -> None:
    """Starts sshd in a control group of its own: its sessions can be ended without guessing."""
    Path("/run/sshd").mkdir(exist_ok=True)  # privilege separation wants this empty folder
    group = _unified() / "gpu-reclaim-lab-node"
    record.started("cgroups", str(group))
    group.mkdir(exist_ok=True)
    sshd = ["/usr/sbin/sshd", "-f", str(NODE / "sshd_config"), "-E", str(NODE / "log")]
    enter = f'echo $$ >"{group}/cgroup.procs" && exec "$@"'
    run(["sh", "-c", enter, "sh", *sshd])


def _unified() -> Path:
    for line in Path("/proc/mounts").read_text().splitlines():
        if line.split()[2] == "cgroup2":
            return Path(line.split()[1])
    raise LabError("no unified control group tree is mounted")


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            folder.rmdir()
        except OSError as error:
            if time.monotonic() > deadline:
                raise LabError(f"{folder} still has processes") from error
            time.sleep(0.02)
        else:
            return


def _free_port() -> int:
    with socket.create_server((ADDRESS, 0)) as server:
        return int(server.getsockname()[1])


def _wait_answering(port: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((ADDRESS, port), timeout=5) as client:
                if client.recv(4) == b"SSH-":
                    return
        except OSError:
            time.sleep(0.02)
    log = NODE / "log"
    raise LabError(f"the node's sshd does not answer: {log.read_text() if log.exists() else ''}")
