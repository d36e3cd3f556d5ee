"""Units that a test adds to the guest; `reset` takes them away."""

from __future__ import annotations

from collections.abc import Sequence

from lab.lab import Lab

FOLDER = "etc/systemd/system"


def add(lab: Lab, name: str, **sections: Sequence[str]) -> None:
    """Write a unit file in /etc and have systemd read it.

    Args:
        lab: The lab.
        name: The unit's full name.
        **sections: Section to its lines.
    """
    text = "".join("\n".join([f"[{head}]", *lines, ""]) for head, lines in sections.items())
    (lab.guest.rootfs / FOLDER / name).write_text(text)
    lab.do("systemctl daemon-reload")


def alias(lab: Lab, name: str, target: str) -> None:
    """Give a unit in /etc a second name."""
    (lab.guest.rootfs / FOLDER / name).symlink_to(target)
    lab.do("systemctl daemon-reload")


def drop_in(lab: Lab, unit: str, text: str) -> None:
    """Change a unit until the guest's next `reset`."""
    folder = lab.guest.rootfs / FOLDER / f"{unit}.d"
    folder.mkdir()
    (folder / "test.conf").write_text(text)
    lab.do("systemctl daemon-reload")
