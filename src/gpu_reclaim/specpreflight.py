"""Speculative decoding: what speaks against a tuning, and which settings are tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpu_reclaim import logbook, measuring
from gpu_reclaim.errors import BadInput
from gpu_reclaim.execstart import locate
from gpu_reclaim.finding import changed, check_place, find, read_unit, running_requests
from gpu_reclaim.lease import TUNED_FILE
from gpu_reclaim.plans import SpecDecodePlan, SpecSetting
from gpu_reclaim.preflight import Preflight
from gpu_reclaim.servercommand import ServerCommand, drop_in, hides_secrets
from gpu_reclaim.serverunit import Unit
from gpu_reclaim.serving import Server
from gpu_reclaim.session import Session
from gpu_reclaim.spectrials import trials
from gpu_reclaim.speculation import read_flags, same_server, with_setting


@dataclass(frozen=True)
class SpecPreflight(Preflight):
    """A server before its speculative decoding is tuned.

    Attributes:
        command: Its command line.
        settings: The trials by name.
        running: --max-running-requests of every trial.
    """

    winner_file = TUNED_FILE
    proof = "/server_info"

    command: ServerCommand = field(repr=False)
    settings: Mapping[str, SpecSetting]
    running: int

    def flags(self, arm: str) -> list[str]:
        """The server's flags with that setting."""
        return self._with(self.command.flags, arm)

    @property
    def trial_flags(self) -> dict[str, list[str]]:
        """The flags that are different from trial to trial, by setting."""
        return {arm: self._with([], arm) for arm in self.settings}

    def _with(self, words: Sequence[str], arm: str) -> list[str]:
        return with_setting(
            words,
            self.settings[arm],
            current_algorithm=read_flags(self.command.flags).algorithm,
            max_running_requests=self.running,
        )

    def drop_in(self, arm: str) -> str:
        """Text of the drop-in that gives the unit that setting."""
        return drop_in(self.command, self.flags(arm))

    def wrong_on_trial(self, session: Session, arm: str) -> list[str]:
        """Which of its resolved arguments are not those of the setting."""
        info = measuring.server_info(session, self.server)
        return same_server(self.settings[arm], info, max_running_requests=self.running)

    def wrong_now(self, session: Session, arm: str) -> list[str]:
        """The same for a winner; the present setting's server must be as it was in all."""
        if arm == self.current:
            return changed(session, self.found)
        return self.wrong_on_trial(session, arm)


def spec_preflight(session: Session, server: Server, plan: SpecDecodePlan) -> SpecPreflight:
    """Look at everything; touch nothing.

    Raises:
        BadInput: Something speaks against tuning; the message says what.
        BadAnswer: The server's interpreter cannot be run, or systemd does not show the unit.
        TransportError: As `Transport.run`.
    """
    found = find(session, server, plan)
    unit = read_unit(session, found.server.unit)
    command = _command(session, unit, plan)
    chosen, refused = trials(plan, read_flags(command.flags), command.flags, found.info)
    running = plan.max_running_requests or running_requests(session, found.info)
    parts = dict(found.parts) | {
        "flags": logbook.key_of(
            {
                "flags": with_setting(
                    command.flags,
                    # Not off: that would leave out the draft model too.
                    SpecSetting(algorithm="NEXTN"),
                    current_algorithm="",
                    max_running_requests=running,
                )
            }
        ),
        "running": running,
        # Visits are compared with those of the present setting in the same round.
        "settings": [str(one) for one in chosen],
    }
    return SpecPreflight(
        found=found,
        arms=tuple(str(one) for one in chosen),
        refused=refused,
        parts=parts,
        place=logbook.folder(session, found.server.unit, logbook.key_of(parts)),
        files=unit.print,
        command=command,
        settings={str(one): one for one in chosen},
        running=running,
    )


def _command(session: Session, unit: Unit, plan: SpecDecodePlan) -> ServerCommand:
    """The server's command line.

    Raises:
        BadInput: A drop-in of ours would not be what systemd goes by, or would tell a secret.
    """
    command = locate(unit)
    name = command.file.rpartition("/")[2]
    if name.endswith(".conf") and name > TUNED_FILE:
        raise BadInput(
            f"{session.host}: ExecStart= of {unit.name} is in {name}, which systemd reads after "
            f"{TUNED_FILE}",
            remedy="rename that drop-in, for example to override.conf",
        )
    applies = plan.mode == "tune" and plan.apply == "if_better"
    if applies:
        check_place(session, unit, TUNED_FILE, lasting=plan.persist)
    if applies and command.from_process and hides_secrets(command.flags):
        raise BadInput(
            f"{session.host}: a secret of {unit.name} is in its environment, and a winner's file "
            "would have it in clear",
            remedy="use apply = never, and edit the environment file yourself",
        )
    return command
