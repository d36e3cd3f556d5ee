"""The Proxmox VE API over HTTPS, by token: where a guest is, what it is, and its guest agent.

Field names and limits are those of the published schema (Proxmox VE 9.1). Reads are repeated when
the link fails, writes never. For one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import requests
from proxmoxer.core import ProxmoxResource, ResourceException

from gpu_reclaim import errors
from gpu_reclaim.transport import proxmox_answers as answers
from gpu_reclaim.transport.proxmox_answers import (
    ExecStatus,
    GuestConfig,
    GuestPlace,
    GuestStatus,
)
from gpu_reclaim.transport.proxmox_options import ProxmoxApiOptions, open_session

__all__ = [
    "INPUT_LIMIT",
    "RETRY_WAITS_S",
    "VMIDS",
    "ExecStatus",
    "GuestConfig",
    "GuestPlace",
    "GuestStatus",
    "ProxmoxApi",
    "ProxmoxApiOptions",
]

RETRY_WAITS_S = (0.2, 1.0)
"""Pauses before the second and third attempt of a read: a proxy's restart, not an outage."""

INPUT_LIMIT = 65536
"""Characters of `input-data` (schema of agent/exec)."""

VMIDS = range(100, 1_000_000_000)
"""What the schema allows (`pve-vmid`)."""

_AUDIT = "VM.Audit"
_AGENT = "VM.GuestAgent.Unrestricted (before Proxmox VE 9: VM.Monitor)"

logger = logging.getLogger(__name__)


class ProxmoxApi:
    """A cluster's API, asked through one of its nodes.

    Besides what each method names, all raise:
        Unreachable: No answer, an untrusted certificate, or a node behind this one is away.
        AccessRefused: The token is not accepted, or lacks a privilege.
        CommandFailed: Proxmox said no for another reason.
        BadAnswer: What came back is not what the schema promises.
    """

    def __init__(
        self, options: ProxmoxApiOptions, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._options = options
        self._sleep = sleep
        self._session: requests.Session | None = None
        self._root: ProxmoxResource | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"Proxmox API {self._options.address}:{self._options.port}"

    def locate(self, vmid: int) -> GuestPlace:
        """Find a guest in the cluster.

        Raises:
            BadInput: Not a vmid.
            IdentityMismatch: No such guest is shown to this token.
        """
        if vmid not in VMIDS:
            raise errors.BadInput(f"{vmid} is no vmid ({VMIDS.start} to {VMIDS.stop - 1})")
        ask = answers.Ask(self.name, "cluster/resources", _AUDIT)
        rows = self._read(ask, type="vm")
        if not isinstance(rows, list):
            raise answers.odd(ask, "not a list")
        found = [row for row in rows if isinstance(row, dict) and str(row.get("vmid")) == str(vmid)]
        if not found:
            raise errors.IdentityMismatch(
                f"{self.name}: no guest {vmid} is shown to {self._options.token_id}",
                remedy=f"check the vmid; guests on which the token lacks {_AUDIT} are left out",
            )
        if len(found) > 1:
            raise answers.odd(ask, f"guest {vmid} is listed twice")
        return answers.place_of(ask, vmid, found[0])

    def status(self, place: GuestPlace) -> GuestStatus:
        """What a guest does now, as its node says.

        Raises:
            IdentityMismatch: It is not on that node (any more).
        """
        ask = self._ask(place, "status/current")
        row = answers.mapping_of(ask, self._read(ask))
        return GuestStatus(
            answers.text_of(ask, row, "status", need=True),
            answers.text_of(ask, row, "lock"),
            answers.text_of(ask, row, "qmpstatus"),
        )

    def config(self, place: GuestPlace) -> GuestConfig:
        """A guest's configuration.

        Raises:
            IdentityMismatch: It is not on that node (any more).
        """
        ask = self._ask(place, "config")
        row = answers.mapping_of(ask, self._read(ask))
        name = answers.text_of(ask, row, "hostname" if place.kind == "lxc" else "name")
        return GuestConfig(
            name, answers.text_of(ask, row, "lock"), answers.text_of(ask, row, "digest", need=True)
        )

    def agent_exec(self, node: str, vmid: int, argv: Sequence[str], input_data: str) -> int:
        """Start a command in a VM; never repeated.

        Args:
            node: The VM's node.
            vmid: The VM.
            argv: The command.
            input_data: Its standard input: ASCII (Proxmox hands anything else on damaged).

        Returns:
            The process id by which `agent_exec_status` knows it.

        Raises:
            BadInput: The input is too long or not ASCII.
            GuestStopped: The VM is not running.
            LinkLost: It may have been started.
        """
        if len(input_data) > INPUT_LIMIT or not input_data.isascii():
            raise errors.BadInput(
                f"{self.name}: the script has {len(input_data)} characters; the guest agent takes "
                f"{INPUT_LIMIT} at most, all ASCII",
                remedy="reach the guest by SSH instead",
            )
        ask = answers.Ask(self.name, f"nodes/{node}/qemu/{vmid}/agent/exec", _AGENT, writes=True)
        answer = self._send(ask, {"command": list(argv), "input-data": input_data})
        pid = answer.get("pid") if isinstance(answer, dict) else None
        if not isinstance(pid, int):
            raise errors.Incomplete(f"{ask}: no pid in the answer, so the command may have started")
        return pid

    def agent_exec_status(self, node: str, vmid: int, pid: int) -> ExecStatus:
        """How a command started by `agent_exec` stands. Once ended, the agent tells it ONCE."""
        ask = answers.Ask(self.name, f"nodes/{node}/qemu/{vmid}/agent/exec-status", _AGENT)
        row = answers.mapping_of(ask, self._read(ask, pid=pid))
        return ExecStatus(
            answers.truth_of(ask, row, "exited", need=True),
            answers.number_of(ask, row, "exitcode"),
            answers.number_of(ask, row, "signal"),
            answers.guest_text(answers.text_of(ask, row, "out-data")),
            answers.guest_text(answers.text_of(ask, row, "err-data")),
            answers.truth_of(ask, row, "out-truncated")
            or answers.truth_of(ask, row, "err-truncated"),
        )

    def close(self) -> None:
        """End the connection, if one is open. Never raises."""
        session, self._session, self._root = self._session, None, None
        if session is not None:
            session.close()

    def _ask(self, place: GuestPlace, what: str) -> answers.Ask:
        return answers.Ask(
            self.name, f"nodes/{place.node}/{place.kind}/{place.vmid}/{what}", _AUDIT
        )

    def _read(self, ask: answers.Ask, **params: object) -> object:
        for wait_s in RETRY_WAITS_S:
            try:
                return self._send(ask, params)
            except errors.Unreachable as error:
                if not answers.passing(error.__cause__):
                    raise
                logger.info("%s; asking again in %g s", error.message, wait_s)
            self._sleep(wait_s)
        return self._send(ask, params)

    def _send(self, ask: answers.Ask, data: Mapping[str, object]) -> object:
        resource = self._connect()(ask.path)
        try:
            answer: object = resource.post(**data) if ask.writes else resource.get(**data)
        except ResourceException as error:
            raise answers.refused(ask, error, self._options.token_id) from error
        except requests.RequestException as error:
            raise answers.link_failed(ask, error) from error
        if answer is None and not ask.writes:
            raise answers.odd(
                ask, "not an answer of the Proxmox API (a login page? another service?)"
            )
        return answer

    def _connect(self) -> ProxmoxResource:
        if self._root is None:
            options = self._options
            if options.verify and options.ca_path and not Path(options.ca_path).is_file():
                raise errors.BadInput(f"{self.name}: no file {options.ca_path} (ca_path)")
            if not options.verify:
                logger.warning(
                    "%s: the certificate is not checked (verify=False): "
                    "whoever sits in between can take the token",
                    self.name,
                )
            self._session, self._root = open_session(options)
        return self._root
