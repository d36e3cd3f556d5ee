"""Private keys, in any of the usual formats."""

from __future__ import annotations

import io

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

Opened = Ed25519PrivateKey | EllipticCurvePrivateKey | RSAPrivateKey


class KeyTroubleError(ValueError):
    """Why a private key cannot be used, and the cure; holds nothing of the key."""

    def __init__(self, trouble: str, cure: str) -> None:
        super().__init__(trouble)
        self.trouble = trouble
        self.cure = cure


def open_key(text: str, passphrase: str | None) -> paramiko.PKey:
    """Open a private key; a passphrase for a key that needs none does not matter.

    paramiko itself reads no PKCS#8, and a wrong passphrase looks to it like a damaged key (5.1.0);
    so the key is opened by `cryptography`, which paramiko stands on.

    Raises:
        KeyTroubleError: It is no private key, or encrypted and the passphrase is wrong or missing.
    """
    data = text.encode()
    try:
        opened = _open(data, passphrase.encode() if passphrase else None)
        plain = opened.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode()
        return _class_of(opened).from_private_key(io.StringIO(plain))
    except KeyTroubleError:
        raise
    except (TypeError, ValueError, UnsupportedAlgorithm, paramiko.SSHException) as error:
        wrong = ", or the passphrase is wrong" if passphrase else ""
        raise KeyTroubleError(
            f"is no private key that can be used{wrong}",
            "give the whole text of an Ed25519, ECDSA or RSA private key, with its BEGIN and END "
            "lines",
        ) from error


def _open(data: bytes, secret: bytes | None) -> Opened:
    try:
        return _load(data, None)
    except TypeError as error:  # what cryptography raises when the key is encrypted
        if secret is None:
            raise KeyTroubleError(
                "is encrypted", "give its passphrase, or use a key without one"
            ) from error
        return _load(data, secret)


def _load(data: bytes, secret: bytes | None) -> Opened:
    load = (
        serialization.load_ssh_private_key
        if b"BEGIN OPENSSH" in data
        else serialization.load_pem_private_key
    )
    key = load(data, secret)
    if not isinstance(key, Opened):
        raise ValueError(f"a {type(key).__name__} is of no use for a login")
    return key


def _class_of(opened: Opened) -> type[paramiko.PKey]:
    if isinstance(opened, Ed25519PrivateKey):
        return paramiko.Ed25519Key
    return paramiko.RSAKey if isinstance(opened, RSAPrivateKey) else paramiko.ECDSAKey
