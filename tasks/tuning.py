"""Tasks of a tuning: look first, start a setting and measure it, close, keep, look again."""

from __future__ import annotations

import logging

from gpu_reclaim import hold, logbook, trial, visiting
from gpu_reclaim.errors import BadInput, NotInForce
from gpu_reclaim.finding import read_unit
from gpu_reclaim.plans import SpecDecodePlan, TrialPlan
from gpu_reclaim.preflight import Preflight
from gpu_reclaim.serving import wait_healthy
from gpu_reclaim.specpreflight import SpecPreflight, spec_preflight
from gpu_reclaim.tasks.host import load_server, open_host, ops_task
from gpu_reclaim.trial import Failure
from gpu_reclaim.tuning import Visit

log = logging.getLogger(__name__)


@ops_task("look_before_tuning")
def look_before_tuning(host: str, server: str, plan: SpecDecodePlan) -> SpecPreflight:
    """Look at everything that can speak against a tuning; touch nothing.

    Args:
        host: Name of the GpuHost block.
        server: Name of the LlmServer block.
        plan: What is to be tried.

    Raises:
        BadInput: Something speaks against it.
        TransportError: The host could not be reached.
    """
    with open_host(host) as session:
        return spec_preflight(session, load_server(server), plan)


@ops_task("read_logbook")
def read_logbook(host: str, before: Preflight) -> tuple[list[Visit], list[list[str]]]:
    """What an earlier run has measured of the very same server, and its greedy answers.

    Args:
        host: Name of the GpuHost block.
        before: From `look_before_tuning`.

    Raises:
        TransportError: The host could not be reached.
    """
    with open_host(host) as session:
        return logbook.read(session, before.place)


@ops_task("check_unedited")
def check_unedited(host: str, before: Preflight) -> None:
    """Look whether the unit is still as it was looked at: another run may have been waited for.

    Args:
        host: Name of the GpuHost block; it is held.
        before: What was looked at.

    Raises:
        BadInput: It is not; nothing was tried.
        TransportError: The host could not be reached.
    """
    unit = before.server.unit
    with open_host(host) as session:
        if read_unit(session, unit).print != before.files:
            raise BadInput(
                f"{host}: {unit} was changed since it was looked at, perhaps by another tuning",
                remedy="run it again, so that it goes by the unit as it is now",
            )


@ops_task("set_aside_logbook")
def set_aside_logbook(host: str, before: Preflight) -> None:
    """What earlier runs have measured does not count any more, in later runs neither.

    Args:
        host: Name of the GpuHost block; it is held.
        before: From `look_before_tuning`.

    Raises:
        BadAnswer: The record could not be moved.
        TransportError: The host could not be reached.
    """
    with open_host(host) as session:
        logbook.set_aside(session, before.place)


@ops_task("measure_setting")
def measure_setting(
    host: str,
    before: Preflight,
    plan: TrialPlan,
    turn: tuple[str, int],
    reference: list[list[str]],
) -> tuple[Visit, list[list[str]]]:
    """Start the server with one setting, prove it, measure it, and put that on record.

    Whatever the server does is an observation. It runs on afterwards.

    Args:
        host: Name of the GpuHost block; its GPUs are free and held.
        before: From `look_before_tuning`.
        plan: How it is measured.
        turn: The setting's name and the round.
        reference: The present setting's greedy answers, if there are any yet.

    Returns:
        The visit, and the greedy answers to compare with from now on.

    Raises:
        HoldLost: The host is not ours any more.
        TransportError: The host could not be reached.
    """
    with open_host(host) as session:
        seen, answers = visiting.visit(session, before, plan, turn, reference)
        # Whoever ended the hold meanwhile ended the benchmark too: that says nothing of a setting.
        hold.renew(session, session.lease_s)
        if not reference and answers and turn[0] == before.current:
            logbook.about(session, before.place, before.parts)
            logbook.add_answers(session, before.place, answers)
            reference = answers
        logbook.add(session, before.place, seen)
        return seen, reference


@ops_task("close_trial")
def close_trial(host: str) -> None:
    """What is on trial cannot be started again; what runs goes on, for a reclaim to end.

    Args:
        host: Name of the GpuHost block.

    Raises:
        HoldLost: The host is not ours any more.
        TransportError: The host could not be reached.
    """
    with open_host(host) as session:
        trial.close(session)


@ops_task("apply_setting")
def apply_setting(host: str, before: Preflight, arm: str, *, lasting: bool) -> str:
    """Start the server with the winner, prove it, and keep it.

    Args:
        host: Name of the GpuHost block; its GPUs are free and held.
        before: From `look_before_tuning`.
        arm: The winner.
        lasting: It shall outlive a reboot.

    Returns:
        Empty; or why it is not kept. Then it is still on trial.

    Raises:
        HoldLost: The host is not ours any more.
        TransportError: The host could not be reached.
    """
    unit, text = before.server.unit, before.drop_in(arm)
    with open_host(host) as session:
        file = before.winner_file
        if trial.is_kept(session, unit, text, file=file, lasting=lasting):
            return ""
        ready = visiting.start(session, before, arm)
        if isinstance(ready, Failure):
            return ready.why
        trial.keep(session, unit, text, file=file, lasting=lasting)
        log.info("%s: %s is in force, and stays", host, arm)
        return ""


@ops_task("prove_in_force")
def prove_in_force(host: str, before: Preflight, arm: str) -> str:
    """Look at the server that serves now, after all is put back.

    Args:
        host: Name of the GpuHost block.
        before: From `look_before_tuning`.
        arm: The setting that should be in force.

    Returns:
        One sentence that says what was seen.

    Raises:
        NotInForce: It serves with something else.
        TransportError: The host could not be reached.
    """
    with open_host(host) as session:
        serves, said = wait_healthy(session, before.server)
        if not serves:
            raise NotInForce(f"{host}: {said}", remedy=_advice(before))
        wrong = before.wrong_now(session, arm)
    if wrong:
        raise NotInForce(
            f"{host}: {before.server.unit} does not run with {arm}: {'; '.join(wrong)}",
            remedy=_advice(before),
        )
    same = "all as before" if arm == before.current else f"with {arm}"
    return f"{before.proof} says so: {before.server.unit} serves {same}"


def _advice(before: Preflight) -> str:
    unit = before.server.unit
    return f"see `systemctl cat {unit}` and `journalctl -u {unit}` on the host"
