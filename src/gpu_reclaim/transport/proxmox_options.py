"""How to reach the Proxmox VE API, and opening a session with it.

Of proxmoxer only the HTTPS backend is used (its SSH backends take any host key), and that is loaded
on first use: without `requests` it ends the process.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import warnings
from dataclasses import dataclass, field

import requests
from proxmoxer.core import ProxmoxResource

from gpu_reclaim import errors

_TOKEN_ID = re.compile(r"([^\s:/]+@[A-Za-z][A-Za-z0-9.\-_]+)!([A-Za-z][A-Za-z0-9.\-_]+)")  # schema
_ADDRESS = re.compile(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\]?")


@dataclass(frozen=True, kw_only=True)
class ProxmoxApiOptions:
    """How to reach the API.

    Attributes:
        address: Name or IP address of any node of the cluster, as its certificate has it.
        port: TCP port.
        token_id: `user@realm!name`.
        token_secret: The token's UUID. Never shown.
        ca_path: File with the CA that signed the certificate; a cluster's own is
            /etc/pve/pve-root-ca.pem on each node. Empty: the system's CAs.
        verify: False: the certificate is not checked, and each connection logs a warning.
        timeout_s: For connecting, and for each wait for an answer, in seconds.

    Raises:
        BadInput: A value cannot be right.
    """

    address: str
    port: int = 8006
    token_id: str
    token_secret: str = field(repr=False)
    ca_path: str | None = None
    verify: bool = True
    timeout_s: float = 30

    def __post_init__(self) -> None:
        checks = (
            (_ADDRESS.fullmatch(self.address), "address must be a bare host name or IP address"),
            (0 < self.port < 2**16, "port must be 1 to 65535"),
            (_TOKEN_ID.fullmatch(self.token_id), "token_id must look like user@realm!name"),
            (re.fullmatch(r"[!-~]+", self.token_secret), "token_secret must be the token's UUID"),
            (self.timeout_s > 0, "timeout_s must be above 0"),
        )
        for good, words in checks:
            if not good:
                raise errors.BadInput(f"Proxmox API: {words}")


def open_session(options: ProxmoxApiOptions) -> tuple[requests.Session, ProxmoxResource]:
    """A session with the token in its headers, and the API's root on it; nothing is sent yet."""
    with warnings.catch_warnings():  # loading it turns off urllib3's warnings for the whole process
        https = importlib.import_module("proxmoxer.backends.https")
    # At INFO it logs what is posted (whole scripts), at DEBUG all answers. A filter, not a level:
    # a level is easily set back by an application that wants to see more of everything.
    logging.getLogger("proxmoxer.core").addFilter(_is_warning)
    user, name = options.token_id.rsplit("!", 1)
    backend = https.Backend(
        options.address,
        port=options.port,
        user=user,
        token_name=name,
        token_value=options.token_secret,
        verify_ssl=options.verify and (options.ca_path or True),
        timeout=options.timeout_s,
    )
    session: requests.Session = backend.get_session()
    session.max_redirects = 0  # the API never redirects, a login portal does
    url = backend.get_base_url()
    return session, ProxmoxResource(base_url=url, session=session, serializer=_Answers())


def _is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


class _Answers:
    """Reads answers in place of proxmoxer's reader, to which a page that is no JSON is data."""

    def loads(self, response: requests.Response) -> object:
        """The `data` of an answer; None when it is no answer of the API."""
        body = _json(response)
        return body.get("data") if isinstance(body, dict) else None

    def loads_errors(self, response: requests.Response) -> object:
        """What was wrong with which parameter, if anything."""
        body = _json(response)
        return body.get("errors") if isinstance(body, dict) else None


def _json(response: requests.Response) -> object:
    try:
        return json.loads(response.content)
    except ValueError:
        return None
