"""One LXC container set up as Proxmox would set it up."""

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from lab import record
from lab.bench_site import guest_mount, install_in_guest
from lab.devices import PATHS
from lab.errors import LabError
from lab.guest_files import AT_BOOT, Identity, write_guest_files
from lab.paths import GUEST_STATE, LXC, STATE
from lab.processes import Process, processes_in
from lab.shell import run
from lab.waiting import wait_until

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Container:
    """A container by its Proxmox number; the same root serves several of them.

    Attributes:
        vmid: Proxmox's number, also the container's name.
        identity: Host name, machine id and keys.
        address: The guest's address.
        gateway: The host's address on the same wire.
        veth: The host's end of the wire.
    """

    def __init__(self, vmid: int, identity: Identity, site: Path | None = None) -> None:
        """Names the container; nothing is started. With a bench_site it gets that too."""
        self._site = site
        self.vmid = vmid
        self.identity = identity
        self.address = f"10.{vmid}.0.2"
        self.gateway = f"10.{vmid}.0.1"
        self.veth = f"vethlab{vmid}"
        self._folder = LXC / str(vmid)
        self._init = 0

    def start(self, root: Path) -> None:
        """Boots the container over an untouched root and waits until its services run.

        Raises:
            LabError: It did not come up; the end of its log is in the message.
        """
        upper = self._folder / "delta"
        upper.mkdir(parents=True)
        write_guest_files(upper, self.identity)
        if self._site:
            install_in_guest(upper, self._site)
        (self._folder / "config").write_text(self._config(root))
        (STATE / f"mem-{self.vmid}").mkdir(parents=True, exist_ok=True)
        _record_groups()
        record.started("containers", str(self.vmid))
        self._boot()

    def restart(self) -> None:
        """Stops the container as a power cut would, and boots it anew over the same files.

        Raises:
            LabError: It did not come up.
        """
        run(["lxc-stop", *self._named(), "-k"])
        wait_until("its wire is gone", lambda: not Path(f"/sys/class/net/{self.veth}").exists())
        self._boot()

    def _boot(self) -> None:
        try:
            run(["lxc-start", *self._named(), "-d", "-o", str(self._folder / "log"), "-l", "INFO"])
            self._init = int(run(["lxc-info", *self._named(), "-p", "-H"]))
            run(["ip", "addr", "add", f"{self.gateway}/24", "dev", self.veth])
            run(["ip", "link", "set", self.veth, "up"])
            self._wait_booted(timeout=60)
        except (LabError, ValueError) as error:
            raise LabError(f"guest {self.vmid} did not start: {error}\n{self._log()}") from error

    def attach(self, script: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
        """Runs a shell script inside, as the guest's root, whatever else is broken there.

        Args:
            script: Lines for `sh -s`; travels on standard input.
            timeout: Seconds after which the script's shell is ended.

        Returns:
            Exit code and both streams.
        """
        environment = ["--clear-env", f"--set-var=PATH={PATH}"]
        return subprocess.run(
            ["lxc-attach", *self._named(), *environment, "--", "sh", "-s"],
            check=False,
            input=script,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def processes(self) -> Iterator[Process]:
        """Yields all processes inside."""
        return processes_in(str(Path(f"/proc/{self._init}/ns/pid").readlink()))

    def pids(self) -> list[int]:
        """Returns the processes that hold it up: LXC's monitor and the guest's first one."""
        groups = Path("/sys/fs/cgroup").glob(f"**/lxc.monitor/{self.vmid}/cgroup.procs")
        monitors = {int(line) for group in groups for line in group.read_text().split()}
        return [*monitors, self._init]

    @property
    def rootfs(self) -> Path:
        """The guest's root as seen from the host, mounts and all."""
        return Path(f"/proc/{self._init}/root")

    @property
    def network(self) -> Path:
        """The guest's network namespace."""
        return Path(f"/proc/{self._init}/ns/net")

    def _named(self) -> list[str]:
        return ["-P", str(LXC), "-n", str(self.vmid)]

    def _wait_booted(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        script = f"systemctl is-system-running; systemctl is-active {' '.join(AT_BOOT)}\n"
        while time.monotonic() < deadline:
            words = self.attach(script).stdout.split()
            if words[1:] == ["active"] * len(AT_BOOT) and words[0] in ("running", "degraded"):
                return
            time.sleep(0.1)
        raise LabError(f"its services are {words}")

    def _log(self) -> str:
        log = self._folder / "log"
        return log.read_text()[-2000:] if log.exists() else "no log"

    def _config(self, root: Path) -> str:
        lines = [
            "lxc.include = /usr/share/lxc/config/common.conf",
            f"lxc.rootfs.path = overlayfs:{root}:{self._folder}/delta",
            f"lxc.uts.name = {self.identity.hostname}",
            "lxc.apparmor.profile = unconfined",
            "lxc.mount.auto = proc:mixed sys:mixed cgroup:mixed",
            f"lxc.cgroup.dir.container = lxc/{self.vmid}",
            "lxc.cgroup.dir.container.inner = ns",
            f"lxc.cgroup.dir.monitor = lxc.monitor/{self.vmid}",
            "lxc.net.0.type = veth",
            f"lxc.net.0.veth.pair = {self.veth}",
            "lxc.net.0.name = eth0",
            "lxc.net.0.flags = up",
            f"lxc.net.0.ipv4.address = {self.address}/24",
            f"lxc.net.0.ipv4.gateway = {self.gateway}",
        ]
        return "".join(line + "\n" for line in [*lines, *self._mounts()])

    def _mounts(self) -> list[str]:
        """Returns the mounts: the nodes, and the lab's state with the host's process table.

        Where /run is a mount already, the guest's systemd leaves it alone.
        """
        state = GUEST_STATE.lstrip("/")
        entries = [f"{path} dev/{path.name} none bind,create=file" for path in PATHS]
        entries += [
            "tmpfs run tmpfs rw,nosuid,nodev,mode=755,create=dir",
            f"{STATE} {state} none bind,create=dir",
            f"{STATE}/mem-{self.vmid} {state}/mem none bind,create=dir",
            f"/proc {state}/proc none bind,create=dir",
        ]
        if self._site:
            entries.append(guest_mount(self._site))
        return [f"lxc.mount.entry = {entry} 0 0" for entry in entries]


def stop_containers() -> None:
    """Ends the recorded containers and removes their files.

    Raises:
        LabError: One of them did not end.
    """
    with record.ending("containers") as names:
        for name in names:
            _stop(name)
    with record.ending("groups") as folders:
        for folder in map(Path, folders):
            wait_until(f"{folder} can be removed", partial(_remove_group, folder))


def _remove_group(folder: Path) -> bool:
    """Removes a control group with those inside; where a monitor is still on its way out: False.

    A guest or a monitor that was killed leaves its own group behind.
    """
    try:
        for path, _, _ in os.walk(folder, topdown=False):
            Path(path).rmdir()
    except FileNotFoundError:
        return not folder.exists()
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def _record_groups() -> None:
    """Notes the parents that LXC is about to make in each control group tree, and never removes."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        for name in ("lxc", "lxc.monitor", "lxc.pivot"):
            folder = Path(place) / name
            if kind in ("cgroup", "cgroup2") and not folder.exists():
                record.started("groups", str(folder))


def _stop(name: str) -> None:
    known = (LXC / name / "config").exists()
    if known and "RUNNING" in run(["lxc-info", "-P", str(LXC), "-n", name, "-s"], check=False):
        run(["lxc-stop", "-P", str(LXC), "-n", name, "-k"])
    veth = Path(f"/sys/class/net/vethlab{name}")
    if veth.exists():
        run(["ip", "link", "delete", veth.name], check=False)
    shutil.rmtree(LXC / name, ignore_errors=True)
