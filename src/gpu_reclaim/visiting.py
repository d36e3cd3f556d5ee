"""One visit: a server started with one setting, proven, asked and measured."""

from __future__ import annotations

import logging

from gpu_reclaim import measuring, trial
from gpu_reclaim.finding import long_tokens
from gpu_reclaim.measuring import Answers, differing_pct, greedy_answers
from gpu_reclaim.plans import TrialPlan
from gpu_reclaim.preflight import Preflight, load_of
from gpu_reclaim.session import Session
from gpu_reclaim.trial import Failure
from gpu_reclaim.tuning import Measurement, Visit

log = logging.getLogger(__name__)

ON_TRIAL = """Restart=no
[Unit]
FailureAction=none
SuccessAction=none
StartLimitAction=none
"""
"""A server that ends while it is on trial stays ended, and nothing is done to the machine for it:
that is an observation."""


LONGEST_NAME = 150
"""So many characters of a setting's name are in the names of its records; a file's has 255."""


def start(session: Session, before: Preflight, arm: str) -> float | Failure:
    """Start a server whose GPUs are free with one setting, until it serves and is proven.

    Returns:
        Seconds until it served; or why it does not, or not so.

    Raises:
        CommandFailed: It could not be started.
        HoldLost: The host is not ours any more.
        TransportError: As `Transport.run`.
    """
    server = before.server
    log.info("%s: %s starts with %s", session.host, server.unit, arm)
    trial.begin(session, server.unit, f"{before.drop_in(arm)}{ON_TRIAL}")
    ready = trial.wait_ready(session, server)
    if isinstance(ready, Failure):
        return ready
    wrong = before.wrong_on_trial(session, arm)
    return Failure(f"it runs with other arguments: {'; '.join(wrong)}") if wrong else ready


def visit(
    session: Session,
    before: Preflight,
    plan: TrialPlan,
    turn: tuple[str, int],
    reference: Answers,
) -> tuple[Visit, Answers]:
    """Start, prove, ask and measure; whatever the server does is an observation.

    Args:
        session: The host; the GPUs are free and held.
        before: From `preflight`.
        plan: How it is measured.
        turn: The setting's name, and the round.
        reference: Greedy answers to compare with; none yet: its own, asked for twice.

    Returns:
        The visit, and the server's own greedy answers.

    Raises:
        CommandFailed: It could not be started.
        HoldLost: The host is not ours any more.
        TransportError: As `Transport.run`.
    """
    arm, number = turn
    ready = start(session, before, arm)
    if isinstance(ready, Failure):
        return _failed(turn, ready), []
    long = long_tokens(before.found.info)
    answers = greedy_answers(session, before.server, plan.levels, long)
    if isinstance(answers, str):
        return _failed(turn, _failure(session, before, answers), ready), []
    again = answers if reference else greedy_answers(session, before.server, plan.levels, long)
    if isinstance(again, str):
        return _failed(turn, _failure(session, before, again), ready), answers
    # Without others to compare with: how much it differs from itself.
    differing = differing_pct(again, reference or answers)
    levels: list[Measurement] = []
    for level in plan.levels:
        # A candidate may be named by a long path, and the end of it tells it from others.
        short = arm.replace(" ", "-").replace("/", ".")[-LONGEST_NAME:]
        name = f"{short}-round-{number}-at-{level}"
        load = load_of(before, plan, level, name)
        found = measuring.measure(session, before.server, before.found.tool, load)
        if isinstance(found, str):
            return _failed(turn, _failure(session, before, found), ready), answers
        levels.append(found)
    done = Visit(
        arm=arm,
        round=number,
        ready_s=ready,
        levels=levels,
        differing_pct=differing,
        token_capacity=_capacity(session, before),
    )
    return done, answers


def _failure(session: Session, before: Preflight, why: str) -> Failure:
    # What a benchmark says when it fails may be a request, key and all.
    blotted = trial.without([why], [before.server.api_key])
    return Failure(blotted, trial.last_words(session, before.server))


def _failed(turn: tuple[str, int], failure: Failure, ready_s: float = 0) -> Visit:
    arm, number = turn
    log.warning("%s: %s", arm, failure.why)
    return Visit(arm=arm, round=number, failure=failure.why, detail=failure.detail, ready_s=ready_s)


def _capacity(session: Session, before: Preflight) -> int | None:
    states = measuring.server_info(session, before.server).get("internal_states")
    try:
        value = states[0]["memory_usage"]["token_capacity"]  # type: ignore[index]
    except (LookupError, TypeError):
        return None
    return value if isinstance(value, int) else None
