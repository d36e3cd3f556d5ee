"""SSH keys, made anew for each run of the lab."""

from dataclasses import dataclass
from pathlib import Path

from lab.paths import KEYS
from lab.shell import run


@dataclass(frozen=True)
class Key:
    """A key pair.

    Attributes:
        path: The private key's file.
        public: The public key as "ssh-ed25519 AAAA...", without a comment.
    """

    path: Path
    public: str


def make_key(name: str) -> Key:
    """Makes an Ed25519 key pair without a passphrase."""
    path = KEYS / name
    KEYS.mkdir(parents=True, exist_ok=True, mode=0o700)
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(path)])
    words = path.with_name(name + ".pub").read_text().split()
    return Key(path, " ".join(words[:2]))
