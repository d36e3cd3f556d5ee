"""A held unit started with other flags: begun, waited for, closed, kept."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_reclaim import hold, sglang, trying
from gpu_reclaim.commands import Script, printable
from gpu_reclaim.errors import CommandFailed, TransportError
from gpu_reclaim.serving import SAY_S, Server
from gpu_reclaim.session import Session

log = logging.getLogger(__name__)

POLL_S = 2.0
"""Pause between two looks at a server that loads, in seconds."""

BEGIN_S = 5.0
"""So long after it was told to start a unit may still be shown as inactive, in seconds: systemd
has queued the start, and is not waited for."""

JOURNAL_LINES = 40
"""Last lines of a failed server that are read."""

LONGEST_LINE = 400
"""So many characters of each are kept."""

OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|[Nn]ot enough memory|"
    r"out of GPU memory|cudaErrorMemoryAllocation"
)
"""What torch, CUDA and SGLang ("Not enough memory. Please try to increase --mem-fraction-static")
say."""

SILENT = "its interpreter gave no answer"
"""What is said where not even an error came back."""

_SECRET = re.compile(
    r"(Bearer |[A-Z_]*(?:TOKEN|KEY|SECRET|PASSWORD)=|(?:api_key|password)['\"]?[=:] ?|"
    r"--[a-z-]*(?:api-key|password)['\"]?[=, ]+|--api[=, ]+)"
    r"('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^,\s)]+)"
)
"""SGLang prints all its arguments at start, and systemd a whole command line when it fails."""

_ERROR = re.compile(r"^\s*([A-Za-z_.]*(Error|Exception|AssertionError)\b.*)$")


@dataclass(frozen=True)
class Failure:
    """A server that could not be measured.

    Attributes:
        why: For people, for example `out of memory at start`.
        detail: Its last words; no secret of ours is in it.
    """

    why: str
    detail: str = ""


def begin(session: Session, unit: str, text: str) -> None:
    """Start a held unit with a drop-in of ours; its readiness is another question.

    Raises:
        CommandFailed: It could not be started.
        HoldLost: The hold is no longer ours.
        TransportError: As `Transport.run`.
    """
    session.on_trial.add(unit)
    body = trying.begin(hold.claim(session), unit, text, places=session.places)
    act(session, f"start {unit} on trial", body)


def close(session: Session) -> None:
    """From now on no unit on trial can be started again; what runs goes on.

    Raises:
        CommandFailed: The hold could not be set again.
        HoldLost: The hold is no longer ours.
        TransportError: As `Transport.run`.
    """
    body = trying.close(hold.claim(session), places=session.places)
    act(session, "close the trial", body)


def keep(session: Session, unit: str, text: str, *, file: str, lasting: bool) -> None:
    """Make what is on trial the unit's own setting; it goes on running.

    Args:
        session: The host.
        unit: The unit on trial.
        text: The drop-in.
        file: Its name.
        lasting: It shall outlive a reboot.

    Raises:
        CommandFailed: The file could not be written.
        HoldLost: The hold is no longer ours.
        TransportError: As `Transport.run`.
    """
    claim = hold.claim(session)
    body = trying.keep(claim, unit, text, file=file, lasting=lasting, places=session.places)
    # It stays in `on_trial`: to the keeper its server is no more of an intruder than before.
    act(session, f"keep the setting of {unit}", body)


def is_kept(session: Session, unit: str, text: str, *, file: str, lasting: bool) -> bool:
    """Look whether `keep` was done already, by an attempt whose answer was lost.

    Raises:
        TransportError: As `Transport.run`.
    """
    look = trying.kept(unit, text, file=file, lasting=lasting, places=session.places)
    script = Script("look whether it is kept", {"kept": look})
    return session.links.run(script).section("kept").value("kept") == "yes"


def act(session: Session, name: str, body: str) -> None:
    """Run a script of the hold that begins, ends or changes something that runs on the host.

    Raises:
        CommandFailed: It could not be done.
        HoldLost: The hold is no longer ours.
        TransportError: As `Transport.run`.
    """
    result, answer = hold.ask(session, name, body, hold.SCRIPT_S)
    if answer.status in ("unset", "running"):
        raise CommandFailed(
            f"{session.host}: {name}: {answer.why or 'a file could not be written'}",
            remedy="see `systemctl status` and the disk's space there; what was stopped is put "
            "back as it was",
            result=result,
        )
    hold.need(session, answer, result)


def wait_ready(session: Session, server: Server) -> float | Failure:
    """Wait until a unit that was just started serves, has ended, or its time is over.

    Returns:
        Seconds until it served; or why it does not.

    Raises:
        TransportError: The host cannot be reached for as long as the server may take.
    """
    began = said = session.clock()
    while True:
        took = session.clock() - began
        try:
            state, health = _look(session, server)
        except TransportError:
            if took > server.ready_s:
                raise
            session.links.close()
            session.sleep(POLL_S)
            continue
        ended = ("failed",) if took < BEGIN_S else ("failed", "inactive", "deactivating")
        if state.get("ActiveState") in ended:
            return _died(session, server, state)
        if health is not None and health.code == sglang.OK and state.get("ActiveState") == "active":
            return took
        if took > server.ready_s:
            words = last_words(session, server)
            return Failure(f"it did not serve within {took:.0f} s: {health or SILENT}", words)
        if session.clock() - said > SAY_S:
            log.info("%s: %s does not serve yet: %s", session.host, server.unit, health or SILENT)
            said = session.clock()
        session.sleep(POLL_S)


def _look(session: Session, server: Server) -> tuple[dict[str, str], sglang.Answer | None]:
    script = Script(
        "look at the trial",
        {
            "state": trying.look(server.unit, places=session.places),
            "health": sglang.ask_health(server.python, server.base_url),
        },
        timeout_s=sglang.ANSWER_S + 15,
    )
    result = session.links.run(script)
    return (
        trying.parse_state(result.section("state")),
        sglang.parse_health(result.section("health")),
    )


def _died(session: Session, server: Server, state: dict[str, str]) -> Failure:
    words = last_words(session, server)
    if OUT_OF_MEMORY.search(words) or state.get("Result") == "oom-kill":
        return Failure("out of memory at start", words)
    errors = [found[1] for line in words.split("\n") if (found := _ERROR.match(line))]
    status = f"exit status {state.get('ExecMainStatus', '?')}"
    return Failure(f"it ended at start: {errors[-1] if errors else status}", words)


def last_words(session: Session, server: Server) -> str:
    """The last lines of the unit's journal, for people; its keys are blotted out.

    Raises:
        TransportError: As `Transport.run`.
    """
    text = trying.journal(server.unit, JOURNAL_LINES, places=session.places)
    # What it printed may hold keys: shown only once they are blotted out.
    result = session.links.run(Script("read its journal", {"journal": text}, together=True))
    lines = result.section("journal").lines("journal")
    shown = without(lines, [server.api_key]).split("\n")
    # SGLang's line with all its arguments alone has some 8000 characters; errors come last.
    return "\n".join(printable(line, limit=LONGEST_LINE) for line in shown)


def without(lines: Sequence[str], secrets: Sequence[str]) -> str:
    """Lines as one text, without some words."""
    text = "\n".join(lines)
    for secret in secrets:
        text = text.replace(secret, "***") if secret else text
    return _SECRET.sub(r"\1***", text)
