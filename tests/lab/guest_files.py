"""What a guest's root filesystem gets on top of the cached one."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from lab.keys import Key
from lab.paths import RUN, SOURCE
from lab.shell import run

HOLDER = "/usr/local/bin/lab-holder"
_FILES = SOURCE / "guest"
_UNITS = ("sglang-qwen.service", "gpu-agent.service", "nvidia-persistenced.service")
INNOCENTS = ("gpu-agent.service", "nvidia-persistenced.service")
AT_BOOT = (*INNOCENTS, "ssh.service")
# Nothing logs in on a console here, and timers would add processes that tests do not expect.
_MASKED = (
    "console-getty.service",
    "getty.target",
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "fstrim.timer",
    "motd-news.timer",
    "systemd-tmpfiles-clean.timer",
)
_SSHD = """\
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UseDNS no
PrintMotd no
"""


@dataclass(frozen=True)
class Identity:
    """What makes a guest that guest.

    Attributes:
        hostname: Its name.
        machine_id: Text of /etc/machine-id.
        host_key: Its SSH server's key.
        client_key: The key that may log in as root.
    """

    hostname: str
    machine_id: str
    host_key: Key
    client_key: Key


def write_guest_files(upper: Path, identity: Identity) -> None:
    """Fills the overlay's upper layer before the guest boots.

    Args:
        upper: The layer's folder, empty.
        identity: Name, machine id and keys.
    """
    _write_identity(upper, identity)
    _install(upper, _FILES / "nvidia_smi.py", "opt/gpu-lab/nvidia_smi.py", 0o755)
    _install(upper, _FILES / "gpu_charges.py", "opt/gpu-lab/gpu_charges.py")
    _install(upper, _FILES / "launch_server.py", "opt/sglang/launch_server.py")
    _install(upper, _FILES / "sglang_workers.py", "opt/sglang/sglang_workers.py")
    _install(upper, _FILES / "gpu_agent.py", "opt/gpu-agent/gpu_agent.py")
    _link(upper, "usr/bin/nvidia-smi", "/opt/gpu-lab/nvidia_smi.py")
    holder = _compiled_holder()
    _install(upper, holder, HOLDER.lstrip("/"), 0o755)
    _install(upper, holder, "usr/bin/nvidia-persistenced", 0o755)
    for unit in _UNITS:
        _install(upper, _FILES / unit, f"etc/systemd/system/{unit}")
    for unit in INNOCENTS:
        wants = "etc/systemd/system/multi-user.target.wants"
        _link(upper, f"{wants}/{unit}", f"/etc/systemd/system/{unit}")
    for unit in _MASKED:
        _link(upper, f"etc/systemd/system/{unit}", "/dev/null")


def _write_identity(upper: Path, identity: Identity) -> None:
    _write(upper, "etc/hostname", identity.hostname + "\n")
    _write(upper, "etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {identity.hostname}\n")
    _write(upper, "etc/machine-id", identity.machine_id + "\n")
    _write(upper, "etc/ssh/sshd_config.d/lab.conf", _SSHD)
    _write(upper, "etc/ssh/ssh_host_ed25519_key", identity.host_key.path.read_text(), 0o600)
    _write(upper, "root/.ssh/authorized_keys", identity.client_key.public + "\n", 0o600)
    for folder in ("root", "root/.ssh"):
        (upper / folder).chmod(0o700)


def _compiled_holder() -> Path:
    """Compiles the holder once for a run; static, so that it starts anywhere."""
    binary = RUN / "holder"
    if not binary.exists():
        source = str(_FILES / "holder.c")
        run(["gcc", "-static", "-Os", "-Wall", "-Wextra", "-o", str(binary), source])
    return binary


def _install(upper: Path, source: Path, target: str, mode: int = 0o644) -> None:
    path = upper / target
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, path)
    path.chmod(mode)


def _write(upper: Path, target: str, text: str, mode: int = 0o644) -> None:
    path = upper / target
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def _link(upper: Path, name: str, target: str) -> None:
    path = upper / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
