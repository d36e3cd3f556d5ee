"""Every error this package raises, as one tree.

    GpuReclaimError
    ├── BadInput (ValueError)      what was asked makes no sense; nothing was touched
    │   ├── UnknownHost            no block document of that name
    │   └── UnknownUnit            systemd does not know the unit
    ├── TransportError             between here and there
    │   ├── Unreachable            no session could be opened: nothing was run
    │   │   ├── HostKeyRefused     unknown or changed host key
    │   │   └── AccessRefused      the login or sudo was refused
    │   └── OutcomeUnknown         it may have run, wholly or in part: look before acting again
    │       ├── LinkLost
    │       ├── TimedOut
    │       └── Incomplete         the end marker is missing
    ├── GuestRefused               the guest is not the one expected, or not fit to be touched
    │   ├── IdentityMismatch
    │   ├── GuestLocked
    │   └── GuestStopped
    ├── HoldRefused                the hold on the host cannot be had
    │   ├── HeldByOther            another run holds it; nothing was touched
    │   ├── HoldLost               ours ran out, or was ended by somebody else
    │   ├── Intruded               somebody else used the GPUs meanwhile
    │   └── HoldBroken             it cannot be set, or a held unit could be started
    ├── BadAnswer                  a tool answers what we do not understand: unknown, not zero
    ├── CommandFailed              a tool said no
    │   └── CameBack               what was stopped runs again
    ├── NotRestored                not all that was stopped came back; carries the report
    ├── NotInForce                 a server serves, and not with the setting it should have
    └── GpusNotReclaimed           the verdict is not a good one; carries the report

Each says what happened, on which host, and what to do; `result` is what caused it, if one did.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_reclaim.commands import Result
    from gpu_reclaim.models import ReclaimReport, RestoreReport

TAIL_LINES = 10
"""Lines of a tool's own words shown in a message: enough for the cause, short enough for a UI."""


class GpuReclaimError(Exception):
    """Base of all errors.

    Attributes:
        message: What happened and where, one or two sentences.
        remedy: What a person should do now; may be empty.
        result: The command's result that caused it, if one did.
    """

    def __init__(self, message: str, *, remedy: str = "", result: Result | None = None) -> None:
        self.message = message
        self.remedy = remedy
        self.result = result
        super().__init__(message)

    def __str__(self) -> str:
        """Message, remedy and the last lines the tool wrote."""
        parts = [self.message]
        if self.remedy:
            parts.append(f"What to do: {self.remedy}")
        if self.result is not None and self.result.words(TAIL_LINES):
            parts.append(f"It said:\n{self.result.words(TAIL_LINES)}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        """Keep keyword arguments through pickling (Prefect pickles exceptions of failed runs)."""
        # What a host printed may hold other people's command lines: it stays in this process.
        return _rebuild, (type(self), self.args, {**self.__dict__, "result": None})


def _rebuild(
    kind: type[GpuReclaimError], args: tuple[object, ...], state: dict[str, object]
) -> GpuReclaimError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class BadInput(GpuReclaimError, ValueError):
    """What was asked makes no sense; nothing was touched."""


class UnknownHost(BadInput):
    """No block document of that name."""


class UnknownUnit(BadInput):
    """systemd on the host does not know the unit."""


class TransportError(GpuReclaimError):
    """Between here and there."""


class Unreachable(TransportError):
    """No session could be opened: nothing was run."""


class HostKeyRefused(Unreachable):
    """The host key is unknown, changed or revoked. Never passed over for another way in."""


class AccessRefused(Unreachable):
    """The login, or sudo on the far side, was refused."""


class OutcomeUnknown(TransportError):
    """The script may have run, wholly or in part: look before acting again."""


class LinkLost(OutcomeUnknown):
    """The connection ended before the script did."""


class TimedOut(OutcomeUnknown):
    """The script did not end in time; a `TimeoutError` would read as Prefect's task timeout."""


class Incomplete(OutcomeUnknown):
    """The end marker is missing from what came back."""


class GuestRefused(GpuReclaimError):
    """The guest is not the one expected, or not fit to be touched; nothing was touched."""


class IdentityMismatch(GuestRefused):
    """Another machine answers than the one described."""


class GuestLocked(GuestRefused):
    """Proxmox holds a lock on the guest (backup, migration, snapshot and so on)."""


class GuestStopped(GuestRefused):
    """The guest is not running."""


class HoldRefused(GpuReclaimError):
    """The hold on the host cannot be had."""


class HeldByOther(HoldRefused):
    """Another run holds the host; nothing was touched."""


class HoldLost(HoldRefused):
    """Our hold ran out, or somebody ended it."""


class Intruded(HoldRefused):
    """Somebody else used the GPUs while they were held."""


class HoldBroken(HoldRefused):
    """The hold cannot be set, or a held unit could be started all the same."""


class BadAnswer(GpuReclaimError):
    """A tool answered in a way we do not understand: unknown, never zero."""


class CommandFailed(GpuReclaimError):
    """A tool said no."""


class CameBack(CommandFailed):
    """A unit was stopped, and runs again."""


class NotInForce(GpuReclaimError):
    """A server serves, and not with the setting that it should have."""


class NotRestored(GpuReclaimError):
    """Not all that was stopped came back.

    Attributes:
        report: The whole `RestoreReport`.
    """

    def __init__(self, report: RestoreReport) -> None:
        self.report = report
        super().__init__(f"{report.host}: {report.summary}", remedy=report.remedy)


class GpusNotReclaimed(GpuReclaimError):
    """The verdict is not a good one; whoever needs the GPUs must not start.

    Attributes:
        report: The whole `ReclaimReport`.
    """

    def __init__(self, report: ReclaimReport) -> None:
        self.report = report
        super().__init__(f"{report.host}: {report.verdict}: {report.summary}", remedy=report.remedy)
