"""A server that runs: its arguments, its answers and its speed, asked on the host itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus

from gpu_reclaim import benching, sglang
from gpu_reclaim.benching import Load, Tool
from gpu_reclaim.commands import Script, printable
from gpu_reclaim.errors import BadInput
from gpu_reclaim.serving import Server, no_interpreter
from gpu_reclaim.session import Session
from gpu_reclaim.sglang import Answer, Ask
from gpu_reclaim.tuning import Measurement

log = logging.getLogger(__name__)

INFO = ("/server_info", "/get_server_info")
"""The second is the only one in sglang 0.5.5, and deprecated in 0.5.23."""

INFO_TRIES = 2
"""A server that serves and does not answer is asked once more."""

INFO_S = 30
"""Longest wait for /server_info, in seconds: it asks the schedulers."""

ANSWER_TOKENS = 48
"""Length of a greedy answer: long enough that a broken cache or a wrong kernel shows, short enough
that sixteen take seconds."""

Answers = list[list[str]]
"""Greedy answers, by group."""

MOST_TOGETHER = 256
"""At most so many greedy answers are asked for at the same time: each is a thread on the host."""

TOKENS_PER_WORD = 1.4
"""Of `PROMPTS`, roughly: prose has 1.3 tokens a word, code and numbers more."""

ANSWER_S = 120
"""Longest wait for one greedy answer, in seconds; who is healthy and slower than that hangs."""

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "In Python, a list of the squares of the first five numbers is written as",
    "Once upon a time, in a village at the foot of a mountain,",
    "The three laws of motion say that",
    "To make bread at home you first need to",
    "SELECT name, COUNT(*) FROM orders",
    "1, 1, 2, 3, 5, 8, 13,",
    "def fibonacci(n):",
    "Dear Sir or Madam, I am writing to complain about",
    "The difference between a process and a thread is that",
    "Translate into German: The weather is fine today.",
    "A short summary of the French Revolution:",
    "Q: If a train leaves at 9:15 and arrives at 11:40, how long does it travel?\nA:",
    '{"name": "Ada", "age": 36, "languages": [',
    "The most important rule when working with electricity is",
)
"""Greedy answers to these are compared: prose, code, numbers, other languages, JSON."""


def server_info(session: Session, server: Server) -> dict[str, object]:
    """The server's resolved arguments and state, as /server_info has them; empty where none."""
    for path in INFO * INFO_TRIES:
        answer = _ask(session, server, "ask for its arguments", [Ask(path, timeout_s=INFO_S)])[0]
        # An error may be an object too: FastAPI's `{"detail": "Not Found"}`.
        if answer.code == sglang.OK and answer.json():
            return answer.json()
    return {}


def greedy_answers(
    session: Session, server: Server, levels: Sequence[int], long_tokens: int = 0
) -> Answers | str:
    """Answers to `PROMPTS`; or, as one sentence, why there are none.

    A kernel works at another size at each concurrency and in a prefill, and may be wrong at one
    alone. So there is a group of answers that were asked for one at a time, one for each
    concurrency, and a long prompt's.

    Args:
        session: The host.
        server: What is asked.
        levels: Requests in flight.
        long_tokens: About so many tokens the long prompt has; 0: there is none.
    """
    asks = [_completion(text) for text in PROMPTS]
    # The first one alone: whether it answers at all is known sooner.
    first = _texts(_ask(session, server, "ask for a completion", asks[:1]))
    if isinstance(first, str):
        return first
    rest = _texts(_ask(session, server, "ask for greedy answers", asks[1:]))
    groups = [rest if isinstance(rest, str) else [*first, *rest]]
    for level in levels:
        if level > 1:
            many = [asks[i % len(asks)] for i in range(min(level, MOST_TOGETHER))]
            name = f"ask for greedy answers at {level}"
            groups.append(_texts(_ask(session, server, name, many, together=True)))
    if long_tokens:
        groups.append(_long_answer(session, server, long_tokens))
    wrong = next((group for group in groups if isinstance(group, str)), None)
    return wrong or [group for group in groups if not isinstance(group, str)]


def _completion(text: str) -> Ask:
    sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS}
    return Ask("/generate", {"text": text, "sampling_params": sampling}, ANSWER_S)


def _texts(found: Sequence[Answer]) -> list[str] | str:
    texts = [_text(answer) for answer in found]
    bad = next((x for x, text in zip(found, texts, strict=True) if text is None), None)
    if bad is not None:
        return f"a request for {ANSWER_TOKENS} tokens got {bad}"
    return [text or "" for text in texts]


def _long_answer(session: Session, server: Server, tokens: int) -> list[str] | str:
    """The answer to a prompt of so many tokens; a server that refuses its length always does."""
    words = " ".join(PROMPTS).split()
    many = int(tokens / TOKENS_PER_WORD)
    text = " ".join(words[i % len(words)] for i in range(many))
    found = _ask(session, server, "ask for a long prompt's answer", [_completion(text)])
    refused = HTTPStatus.BAD_REQUEST <= found[0].code < HTTPStatus.INTERNAL_SERVER_ERROR
    return [f"HTTP {found[0].code}"] if refused else _texts(found)


def _text(answer: Answer) -> str | None:
    text = answer.json().get("text")
    return text if answer.code == sglang.OK and isinstance(text, str) else None


def differing_pct(answers: Answers, reference: Answers) -> float:
    """How many answers are not those of the reference, in percent, in the group that has most.

    A group of a single answer cannot say how many, so it counts with the group before it.
    """
    groups = list(zip(answers, reference, strict=True))
    while len(groups) > 1 and len(groups[-1][0]) == 1:
        (one, other), (before, others) = groups.pop(), groups.pop()
        groups.append((before + one, others + other))
    return max(_differing(one, other) for one, other in groups)


def _differing(answers: Sequence[str], reference: Sequence[str]) -> float:
    pairs = list(zip(answers, reference, strict=True))
    return 100 * sum(one != other for one, other in pairs) / len(pairs)


def find_tool(session: Session, server: Server) -> Tool:
    """The host's benchmark client.

    Raises:
        BadInput: There is none, or it lacks flags.
        TransportError: As `Transport.run`.
    """
    script = Script(
        "look for the benchmark",
        {"tool": benching.find_tool(server.python)},
        timeout_s=benching.HELP_S * len(benching.MODULES) + 10,
    )
    section = session.links.run(script).section("tool")
    tool = benching.parse_tool(section)
    if tool is None:
        said = printable("; ".join(section.lines("said")))
        raise BadInput(
            f"{session.host}: {server.python} cannot run sglang's benchmark: {said}",
            remedy="correct python in the LlmServer block, or install what is missing there",
        )
    if tool.missing:
        raise BadInput(
            f"{session.host}: {tool.module} there does not know {', '.join(tool.missing)}",
            remedy="use sglang 0.5.5 or newer",
        )
    return tool


def measure(session: Session, server: Server, tool: Tool, load: Load) -> Measurement | str:
    """Measure one concurrency; or, as one sentence, why it could not be.

    Args:
        session: The host.
        server: What is measured.
        tool: From `find_tool`.
        load: What is sent.

    Raises:
        TransportError: As `Transport.run`.
    """
    body = benching.run(server.python, tool, load)
    script = Script(
        f"measure at {load.level}", {"bench": body}, timeout_s=load.timeout_s + 30, together=True
    )
    ran = benching.parse_run(session.links.run(script).section("bench"))
    if ran.code in (124, 137):
        return f"the benchmark at {load.level} did not end within {load.timeout_s:.0f} s"
    found = benching.measurement(ran, load)
    if ran.code != 0 or found is None:
        last = printable(_last(ran.said), limit=300)
        return f"the benchmark at {load.level} failed (exit status {ran.code}): {last}"
    if found.completed != load.requests:
        return f"{found.completed} of {load.requests} requests were answered at {load.level}"
    log.info("%s: %d in flight: %.1f tok/s", session.host, load.level, found.output_tok_s)
    return found


def _last(text: str) -> str:
    return next((line for line in reversed(text.split("\n")) if line.strip()), "it said nothing")


def _ask(
    session: Session, server: Server, name: str, asks: Sequence[Ask], *, together: bool = False
) -> list[Answer]:
    text = sglang.ask(server.python, server.base_url, asks, server.api_key, together=together)
    times = [one.timeout_s for one in asks]
    limit = (max(times) if together else sum(times)) + 10
    # What a server says of itself holds its keys, so it is never shown.
    result = session.links.run(Script(name, {"answers": text}, timeout_s=limit, together=True))
    found = sglang.parse_answers(result.section("answers"))
    if len(found) != len(asks):
        raise no_interpreter(session, server, result)
    return found
