"""The only I/O: how a script reaches a machine.

A transport runs scripts on one machine. It is used by one thread, opens at most one connection,
on first use, and opens it again if it was lost.
"""

from __future__ import annotations

from typing import Protocol

from gpu_reclaim.commands import Result, Script


class Transport(Protocol):
    """Runs scripts on one machine."""

    @property
    def name(self) -> str:
        """For people: how and where, for example `ssh root@10.0.0.9`."""

    def run(self, script: Script) -> Result:
        """Run a script and find its sections.

        Raises:
            Unreachable: No session could be opened; nothing was run.
            OutcomeUnknown: The link broke, time ran out or the answer is cut; it may have run.
            IdentityMismatch: Another machine answered; no section was run.
        """

    def close(self) -> None:
        """End the connection, if one is open. Never raises."""
