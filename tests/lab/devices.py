"""Stand-in GPU device nodes on the host, bind-mounted into every guest."""

import os
import stat
from pathlib import Path

from lab import record
from lab.errors import LabError

GPUS = 4
NAMES = (*(f"nvidia{index}" for index in range(GPUS)), "nvidiactl", "nvidia-uvm")
PATHS = tuple(Path("/dev") / name for name in NAMES)

# A node without a driver cannot be opened. This one, the kernel's zero device, can also be
# read, written and mapped, and every guest may use it.
_RDEV = os.makedev(1, 5)


def make_nodes() -> None:
    """Makes the nodes in the host's /dev, so that the host's own tools see guests' holders.

    Raises:
        LabError: There are other nodes of these names, for instance those of real GPUs.
    """
    for path in PATHS:
        if path.exists() and not _is_ours(path):
            raise LabError(f"{path} is there already: this machine seems to have real GPUs")
        if not path.exists():
            record.started("devices", str(path))
            os.mknod(path, stat.S_IFCHR | 0o666, _RDEV)
            path.chmod(0o666)


def remove_nodes() -> None:
    """Removes the recorded nodes."""
    with record.ending("devices") as paths:
        for path in map(Path, paths):
            if path.exists() and _is_ours(path):
                path.unlink()


def _is_ours(path: Path) -> bool:
    status = path.stat()
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == _RDEV
