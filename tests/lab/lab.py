"""The lab: one guest with a server on stand-in GPUs, and the Proxmox node it belongs to."""

import os
import shutil
import subprocess
import uuid
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from lab import freezer, gpu_state, record, wire
from lab.actors import Actors
from lab.bench_site import bench_site
from lab.container import Container, stop_containers
from lab.devices import make_nodes, remove_nodes
from lab.errors import LabError
from lab.guest_files import Identity
from lab.keys import Key, make_key
from lab.node import ADDRESS, start_node, stop_node, write_container
from lab.paths import NODE_BIN, RUN, STATE
from lab.rootfs import cached_rootfs

HOSTNAME = "gpu-guest"
VMID = 129
TOOLS = (
    "lxc-start",
    "debootstrap",
    "/usr/sbin/sshd",
    "ip",
    "gcc",
    "ssh-keygen",
    "fuser",
    wire.NFT,
    "nsenter",
)
"""What a start needs on the host; install.sh brings them."""


class Lab(Actors):
    """One guest and its node. Start it once for many tests, and `reset` before each.

    Attributes:
        vmid: The guest's number on the node.
        hostname: The guest's name, unless a test changes it.
        machine_id: The guest's machine id.
        guest: The container itself.
        guest_address: Where the guest's own SSH server is; root, with `client_key`.
        guest_port: Its port.
        guest_host_key: Its key, as "ssh-ed25519 AAAA...".
        node_address: Where the node's SSH server is; root, with `client_key`.
        node_port: Its port.
        node_host_key: Its key.
        node_bin: The folder with `pct`, the first on the node's PATH.
        client_key: The private key's file.
        state: The state folder as the host sees it; the guest has it at /run/gpu-lab.
    """

    vmid = VMID
    hostname = HOSTNAME
    guest_port = 22
    node_address = ADDRESS
    node_bin = NODE_BIN
    state = STATE

    def __init__(self, bench: bool = False) -> None:
        """Prepares a lab that is not started yet.

        Args:
            bench: Whether its guests get SGLang's benchmark and the server that it can measure.
        """
        super().__init__()
        self._bench = bench
        self._site: Path | None = None
        self.machine_id = uuid.uuid4().hex
        self.node_port = 0
        self._lock: int | None = None
        self._root = Path()
        self._keys: dict[str, Key] = {}

    def __enter__(self) -> Self:
        """Starts the lab."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stops the lab."""
        self.stop()

    def start(self, wait: float = 600) -> None:
        """Boots the guest and starts the node; what a killed run left is removed first.

        Args:
            wait: Seconds to wait for another process that uses the lab.

        Raises:
            LabError: Not root, tools missing (see install.sh), or the guest does not boot.
        """
        _check_tools()
        self._lock = record.acquire_lock(wait)
        try:
            tear_down()
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Removes everything that was started; the cached root filesystem stays."""
        if self._lock is None:
            return
        try:
            tear_down()
        finally:
            os.close(self._lock)
            self._lock = None

    def _start(self) -> None:
        RUN.mkdir(mode=0o755)
        self._root = cached_rootfs()
        self._site = bench_site() if self._bench else None
        self._keys = {name: make_key(name) for name in ("guest", "node", "client")}
        gpu_state.clear_state()
        make_nodes()
        self.guest = self._boot(VMID, HOSTNAME, self.machine_id)
        self.node_port = start_node(self._keys["node"], self._keys["client"])
        self.set_lock(None)
        self.remember_settings()

    def _boot(self, vmid: int, hostname: str, machine_id: str) -> Container:
        identity = Identity(hostname, machine_id, self._keys["guest"], self._keys["client"])
        container = Container(vmid, identity, self._site)
        container.start(self._root)
        return container

    @property
    def guest_address(self) -> str:
        """The guest's address."""
        return self.guest.address

    @property
    def guest_host_key(self) -> str:
        """The guest's SSH host key, as "ssh-ed25519 AAAA..."."""
        return self._keys["guest"].public

    @property
    def node_host_key(self) -> str:
        """The node's SSH host key, as "ssh-ed25519 AAAA..."."""
        return self._keys["node"].public

    @property
    def client_key(self) -> Path:
        """The private key that may log in as root on both."""
        return self._keys["client"].path

    def add_guest(self, vmid: int = 130, hostname: str = "other-guest") -> Container:
        """Boots another guest on the same GPUs; it runs until the lab stops."""
        container = self._boot(vmid, hostname, uuid.uuid4().hex)
        write_container(vmid, hostname, container.address, None)
        return container

    def set_lock(self, lock: str | None) -> None:
        """Sets or clears the guest's lock, for instance "backup", in its configuration."""
        write_container(VMID, HOSTNAME, self.guest.address, lock)

    def attach(self, script: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        """Runs a shell script in the guest, independent of SSH and of the code under test."""
        return self.guest.attach(script, timeout)

    def cut(self) -> AbstractContextManager[None]:
        """Cuts the wire to the guest and the node while in it: packets vanish; see wire.py."""
        return wire.cut(self.guest, self.node_port)

    def smi(self, name: str, content: str | None) -> None:
        """Sets a state file of the nvidia-smi stand-in, or removes it (None).

        Args:
            name: As listed in guest/gpu_charges.py; "mem/PID" is the first guest's.
            content: Its text.
        """
        gpu_state.set_state(name.replace("mem/", f"mem-{VMID}/"), content)

    def smi_calls(self) -> list[gpu_state.Call]:
        """Returns all calls of the stand-in since the last reset, the oldest first."""
        return gpu_state.calls()

    def reset(self) -> None:
        """Brings the guest back to idle: innocents and sshd running, nothing else, no traces.

        Raises:
            LabError: Something could not be brought back.
        """
        wire.heal()
        self.set_lock(None)
        self.restore_guest(HOSTNAME)
        gpu_state.clear_state()


def tear_down() -> None:
    """Ends all that the record names, whoever started it. The caller holds the lock.

    Raises:
        LabError: Something did not end, or is still mounted; its files are then left alone.
    """
    if not RUN.exists():
        return
    freezer.thaw()
    wire.heal()
    stop_node()
    stop_containers()
    remove_nodes()
    mounted = [line for line in Path("/proc/mounts").read_text().splitlines() if str(RUN) in line]
    if mounted:
        raise LabError(f"still mounted: {mounted}")
    shutil.rmtree(RUN)


def _check_tools() -> None:
    if os.geteuid() != 0:
        raise LabError("the lab needs root: it boots a container")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise LabError(f"missing {', '.join(missing)}: run tests/lab/install.sh")
