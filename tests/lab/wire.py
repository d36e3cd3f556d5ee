"""Cutting the wire: packets to and from the first guest and the node vanish without a word.

They are dropped where they arrive, so whoever sends them sees nothing (a drop on the way out tells
the sender): in the guest's network namespace what this machine sends there, on this machine what
the guest sends, and what goes to and from the node's SSH server.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab import record
from lab.container import Container
from lab.errors import LabError
from lab.node import ADDRESS

NFT = "/usr/sbin/nft"
HERE = "/proc/self/ns/net"
_TABLE = "inet gpu_reclaim_lab"
_DROP = """\
table {table} {{
    chain arriving {{
        type filter hook input priority raw; policy accept;
        {rules}
    }}
}}
"""
# Adding first makes deleting right whether the table is there or not.
_DELETE = f"add table {_TABLE}\ndelete table {_TABLE}\n"


@contextmanager
def cut(guest: Container, node_port: int) -> Iterator[None]:
    """Drops everything between this machine and a guest, and the node's SSH, until it exits.

    Connections hang, and new ones time out; then they go on, as TCP has it. `Lab.cut` calls this.
    """
    drop(guest, node_port)
    try:
        yield
    finally:
        heal()


def drop(guest: Container, node_port: int) -> None:
    """Cuts; it stays so until `heal`, which `Lab.reset` and the next lab call too.

    Raises:
        LabError: The rules were refused; then nothing is cut.
    """
    here = [
        f'iifname "{guest.veth}" drop',
        f'iifname "lo" ip daddr {ADDRESS} tcp dport {node_port} drop',
        f'iifname "lo" ip saddr {ADDRESS} tcp sport {node_port} drop',
    ]
    there = str(guest.network)
    for place in (there, HERE):
        record.started("cuts", place)
    try:
        _apply(there, _DROP.format(table=_TABLE, rules='iifname "eth0" drop'))
        _apply(HERE, _DROP.format(table=_TABLE, rules="\n        ".join(here)))
    except BaseException:
        heal()
        raise


def heal() -> None:
    """Undoes every cut on record, whoever made it; a guest that is gone took its own along."""
    if "cuts" not in record.recorded():
        return
    with record.ending("cuts") as places:
        for place in places:
            if Path(place).exists():
                _apply(place, _DELETE)


def _apply(place: str, rules: str) -> None:
    """Gives nft its rules in a network namespace; all of them take effect at once, or none."""
    argv = ["nsenter", f"--net={place}", NFT, "-f", "-"]
    done = subprocess.run(
        argv, check=False, input=rules, capture_output=True, text=True, timeout=30
    )
    if done.returncode != 0:
        raise LabError(f"{' '.join(argv)}: exit code {done.returncode}\n{done.stderr}{rules}")
