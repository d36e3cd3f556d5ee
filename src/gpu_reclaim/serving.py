"""Waiting until a server that was put back serves again."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from gpu_reclaim import sglang
from gpu_reclaim.commands import Result, Script
from gpu_reclaim.errors import BadAnswer, TransportError
from gpu_reclaim.session import Session
from gpu_reclaim.sglang import Answer

log = logging.getLogger(__name__)

POLL_S = (1.0, 10.0)
"""First and longest pause between two questions, in seconds: loading takes seconds or many
minutes."""

SAY_S = 60
"""How often the log says that we still wait, in seconds."""


@dataclass(frozen=True)
class Server:
    """A server on the host.

    Attributes:
        unit: Its systemd unit.
        base_url: As seen from the host.
        python: Its interpreter on the host.
        ready_s: Longest time until it serves after its start, in seconds.
        model_path: The model's folder there, for its tokenizer; empty: as the server says.
        dataset_name: What kind of file the benchmark's prompts are in.
        dataset_path: That file, on the host.
        api_key: Its own, where it wants one.
        sglang_source: A checkout of SGLang there, with the tuning scripts.
    """

    unit: str
    base_url: str
    python: str
    ready_s: float
    model_path: str = ""
    dataset_name: str = "sharegpt"
    dataset_path: str = ""
    api_key: str = field(default="", repr=False)
    sglang_source: str = ""


def wait_healthy(session: Session, server: Server) -> tuple[bool, str]:
    """Ask until the server answers 200, or its time is over.

    Returns:
        Whether it serves, and one sentence on that.

    Raises:
        BadAnswer: Its interpreter cannot be run on the host.
    """
    began = session.clock()
    said, pause = began, POLL_S[0]
    while True:
        answer = _ask(session, server)
        took = session.clock() - began
        if answer == "HTTP 200":
            return True, f"{server.unit} serves again after {took:.0f} s"
        if took + pause > server.ready_s:
            return False, f"{server.unit} did not serve within {took:.0f} s: {answer}"
        if session.clock() - said > SAY_S:
            log.info("%s: %s does not serve yet: %s", session.host, server.unit, answer)
            said = session.clock()
        session.sleep(pause)
        pause = min(pause * 1.5, POLL_S[1])


def _ask(session: Session, server: Server) -> str:
    try:
        return str(ask_health(session, server))
    except TransportError as error:
        return error.message


def ask_health(session: Session, server: Server) -> Answer:
    """Ask a server once whether it serves.

    Raises:
        BadAnswer: Its interpreter cannot be run on the host.
        TransportError: As `Transport.run`.
    """
    text = sglang.ask_health(server.python, server.base_url)
    script = Script("ask for health", {"health": text}, timeout_s=sglang.ANSWER_S + 10)
    result = session.links.run(script)
    health = sglang.parse_health(result.section("health"))
    if health is None:
        raise no_interpreter(session, server, result)
    return health


def no_interpreter(session: Session, server: Server, result: Result) -> BadAnswer:
    """What is said where the server's interpreter gave no answer at all."""
    return BadAnswer(
        f"{session.host}: {server.python} cannot be run there",
        remedy="correct python in the LlmServer block",
        result=result,
    )
