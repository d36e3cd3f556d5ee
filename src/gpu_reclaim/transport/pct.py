"""An LXC container through its Proxmox node."""

from __future__ import annotations

from dataclasses import replace

from gpu_reclaim.commands import (
    ANY_MACHINE,
    REMOTE_SLACK_S,
    Framed,
    Guard,
    Result,
    Script,
    frame,
    unframe,
)
from gpu_reclaim.containers import not_running, pct_exec, refusal
from gpu_reclaim.errors import GuestStopped, TimedOut
from gpu_reclaim.transport import Transport


class PctTransport:
    """Runs scripts in a container by `pct exec`, over a transport to its node.

    Vmid, state, lock, name in the node's configuration, and hostname and machine-id in the guest
    are read in the same call that acts.
    """

    def __init__(self, node: Transport, vmid: int, *, guard: Guard = ANY_MACHINE) -> None:
        self._node = node
        self._vmid = vmid
        self._guard = guard

    @property
    def name(self) -> str:
        """How and where."""
        return f"container {self._vmid} through {self._node.name}"

    def run(self, script: Script) -> Result:
        """Run a script in the container; see `Transport.run`.

        Raises:
            GuestLocked: Proxmox holds a lock on it.
            GuestStopped: It does not run.
            IdentityMismatch: It is another one; nothing was touched.
            CommandFailed: pct is missing or refuses.
        """
        framed = frame(script, self._guard)
        outer = Script(
            script.name,
            {"pct": pct_exec(self._vmid, self._guard.hostname, framed)},
            timeout_s=script.timeout_s + 2 * REMOTE_SLACK_S,
            writes=script.writes,
        )
        try:
            result = self._node.run(outer)
        except TimedOut as late:
            raise self._hung(late, framed) from late
        section = result.section("pct")
        error = refusal(self._node.name, self._vmid, self._guard.hostname, section)
        if error is None and not_running(result.stderr):
            error = GuestStopped(f"{self._node.name}: container {self._vmid} stopped meanwhile")
        if error is not None:
            error.result = result
            raise error
        raw = replace(
            result, script=script, where=self.name, stdout=section.text, exit_code=section.code
        )
        return unframe(framed, raw)

    def _hung(self, error: TimedOut, framed: Framed) -> TimedOut:
        """What it means that there was no end in time, where entering the container hung."""
        said = error.result.stdout if error.result else ""
        if "pct status: running\n" not in said or f"{framed.mark} begin" in said:
            return error
        return TimedOut(
            f"{self.name}: {framed.script.name} did not begin within "
            f"{framed.script.timeout_s:g} s: entering the container hangs",
            remedy=f"see on the node whether it is frozen (`lxc-info -n {self._vmid} -s`): "
            f"`pct resume {self._vmid}` lets it go on; else see its memory and the node's load",
            result=error.result,
        )

    def close(self) -> None:
        """Close the connection to the node."""
        self._node.close()
