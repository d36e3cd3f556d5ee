"""The guest's root filesystem: built once with debootstrap, kept, and never changed afterwards."""

import hashlib
import os
import shutil
import time
from pathlib import Path

from lab.paths import CACHE
from lab.shell import run

SUITE = "bookworm"
PACKAGES = (
    "systemd",
    "systemd-sysv",
    "dbus",
    "openssh-server",
    "psmisc",
    "procps",
    "iproute2",
    "python3",
    "python3-setproctitle",
    "busybox",
)
KEPT_AT_MOST = 2


def cached_rootfs() -> Path:
    """Builds the root filesystem unless it is cached; about a minute the first time.

    The caller holds the lab's lock, so that two builds cannot meet.

    Returns:
        A folder to be used read-only, as the lower layer of an overlay.

    Raises:
        LabError: debootstrap failed; the end of its output is in the message.
    """
    root = CACHE / _key() / "root"
    if not root.exists():
        _build(root)
    os.utime(root.parent)
    _drop_old(keep=root.parent)
    return root


def _key() -> str:
    listed = "\n".join((SUITE, *sorted(PACKAGES)))
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


def _build(root: Path) -> None:
    """Builds beside the final place and renames at the end: a folder called root is complete."""
    partial = root.with_name("partial")
    _release_mounts(partial)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    include = "--include=" + ",".join(PACKAGES)
    run(["debootstrap", "--variant=minbase", include, SUITE, str(partial)], timeout=900)
    _trim(partial)
    partial.rename(root)


def _release_mounts(folder: Path) -> None:
    """Unmounts what a killed debootstrap left mounted, before its files are removed."""
    for line in reversed(Path("/proc/mounts").read_text().splitlines()):
        place = line.split()[1]
        if place.startswith(f"{folder}/"):
            run(["umount", place])


def _trim(root: Path) -> None:
    for folder in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc"):
        shutil.rmtree(root / folder, ignore_errors=True)
        (root / folder).mkdir(parents=True)
    # Byte code: the stand-in server is started often, and the overlay would compile each time.
    run(["chroot", str(root), "python3", "-m", "compileall", "-q", "/usr/lib/python3"], check=False)


def _drop_old(keep: Path) -> None:
    """Removes roots of former package lists, the oldest first."""
    others = [entry for entry in CACHE.iterdir() if entry.is_dir() and entry != keep]
    others.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
    for entry in others[KEPT_AT_MOST - 1 :]:
        if time.time() - entry.stat().st_mtime > 24 * 3600:
            shutil.rmtree(entry, ignore_errors=True)
