"""Into a virtual machine by its QEMU guest agent, through the Proxmox API.

The agent runs the same shell, with the same script on standard input, as SSH would; it runs as
root. It keeps at most 16 MiB of each stream, and tells the end of a command once only
(qga/commands.c: `guest-exec-status` forgets what it has told).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain, repeat

from gpu_reclaim import causes
from gpu_reclaim.commands import (
    ANY_MACHINE,
    REMOTE_SLACK_S,
    Guard,
    Result,
    Script,
    argv,
    frame,
    unframe,
)
from gpu_reclaim.errors import (
    AccessRefused,
    GpuReclaimError,
    GuestLocked,
    GuestStopped,
    IdentityMismatch,
    Incomplete,
    LinkLost,
    TimedOut,
    Unreachable,
)
from gpu_reclaim.transport.proxmox_api import ExecStatus, GuestPlace, ProxmoxApi

FIRST_POLLS_S = (0.05, 0.1, 0.2)
"""Pauses before the first looks: most scripts end within a tenth of a second."""

POLL_S = 0.5
"""Pause before each later look, in seconds."""

SIGNAL_BASE = 128
"""A shell's exit status for a command ended by signal n is 128 + n (POSIX: above 128)."""


class GuestAgentTransport:
    """Runs scripts in one virtual machine.

    Right before each script it reads where the VM is, whether it runs, its lock and its name.

    Args:
        api: The cluster.
        vmid: The VM.
        guard: Who the machine must be, checked inside it by the script itself.
        expected_name: The VM's name in Proxmox. Empty: any.
        sleep: For tests.
        clock: For tests; seconds that only grow.
    """

    def __init__(
        self,
        api: ProxmoxApi,
        vmid: int,
        *,
        guard: Guard = ANY_MACHINE,
        expected_name: str = "",
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._vmid = vmid
        self._guard = guard
        self._expected_name = expected_name
        self._sleep = sleep
        self._clock = clock

    @property
    def name(self) -> str:
        """How and where."""
        return f"guest agent of VM {self._vmid} by {self._api.name}"

    def run(self, script: Script) -> Result:
        """Run a script in the VM; see `Transport.run`.

        Raises:
            BadInput: The script is too long for the agent, or not ASCII.
            GuestLocked: Proxmox holds a lock on the VM.
            GuestStopped: It does not run.
            BadAnswer: Proxmox answered oddly before anything was run.
            CommandFailed: The agent does not run commands.
        """
        framed = frame(script, self._guard)
        place = self.check()
        started = self._clock()
        pid = self._api.agent_exec(place.node, self._vmid, argv(script), framed.text)
        done = self._wait(place.node, pid, script)
        code = done.exit_code if done.signal is None else SIGNAL_BASE + done.signal
        raw = Result(
            script, self.name, done.stdout, done.stderr, code, seconds=self._clock() - started
        )
        if done.truncated:
            raise Incomplete(
                f"{self.name}: {script.name} printed more than the agent keeps, "
                "so its end is unknown",
                remedy="look at the VM; the next attempt looks before it acts",
                result=raw,
            )
        return unframe(framed, raw)

    def close(self) -> None:
        """End the connection to the API, if one is open. Never raises."""
        self._api.close()

    def check(self) -> GuestPlace:
        """Where the VM is, once it is sure that it is the right one and may be touched.

        Raises:
            GuestRefused: It is another one, locked or stopped.
            TransportError: As `Transport.run`.
        """
        place = self._api.locate(self._vmid)
        if place.kind != "qemu":
            raise IdentityMismatch(
                f"{self.name}: guest {self._vmid} is a container, which has no guest agent",
                remedy='set kind="lxc" and node_ssh in the ProxmoxGuest block',
            )
        status, config = self._api.status(place), self._api.config(place)
        if self._expected_name and config.name != self._expected_name:
            raise IdentityMismatch(
                f"{self.name}: VM {self._vmid} is called {config.name!r}, "
                f"expected {self._expected_name!r}; nothing was touched",
                remedy="check the vmid, or correct the hostname in the ProxmoxGuest block",
            )
        lock = config.lock or status.lock or place.lock
        if lock:
            raise GuestLocked(
                f"{self.name}: Proxmox holds the lock {lock!r} on VM {self._vmid}",
                remedy=causes.LOCKED.advice(lock=lock, command=f"qm config {self._vmid}"),
            )
        state = status.status if status.status != "running" else status.qmp_status or "running"
        if state != "running":
            raise GuestStopped(
                f"{self.name}: VM {self._vmid} is {state}",
                remedy=causes.STOPPED.advice(
                    command=f"qm {'resume' if state == 'paused' else 'start'} {self._vmid}"
                ),
            )
        return place

    def _wait(self, node: str, pid: int, script: Script) -> ExecStatus:
        """Look until the command has ended.

        The last look may take the API's `timeout_s` longer than the deadline.
        """
        deadline = self._clock() + script.timeout_s + REMOTE_SLACK_S
        for pause_s in chain(FIRST_POLLS_S, repeat(POLL_S)):
            silence: Unreachable | None = None
            try:
                status = self._look(node, pid, script)
            except Unreachable as error:
                silence = error
            else:
                if status.exited:
                    return status
            if self._clock() >= deadline:
                raise self._late(script, silence) from silence
            self._sleep(pause_s)
        raise AssertionError("repeat() has no end")

    def _look(self, node: str, pid: int, script: Script) -> ExecStatus:
        """One look.

        Raises:
            Unreachable: The next look may succeed.
            LinkLost: No look will.
        """
        try:
            return self._api.agent_exec_status(node, self._vmid, pid)
        except GpuReclaimError as error:
            if isinstance(error, Unreachable) and not isinstance(error, AccessRefused):
                raise
            raise LinkLost(
                f"{self.name}: {script.name} was started (pid {pid}), "
                f"but its end cannot be learnt: {error.message}",
                remedy=error.remedy or "look at the VM; the next attempt looks before it acts",
            ) from error

    def _late(self, script: Script, silence: Unreachable | None) -> LinkLost | TimedOut:
        if silence is not None:
            return LinkLost(
                f"{self.name}: {script.name} was started, then: {silence.message}",
                remedy=silence.remedy,
            )
        return TimedOut(
            f"{self.name}: {script.name} did not end within {script.timeout_s:g} s",
            remedy="see what it waits for in the VM: `ps -eo pid,stat,wchan,args`",
        )
