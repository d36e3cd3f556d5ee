"""SGLang's HTTP server: questions, asked on the host itself by its own interpreter, and answers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from gpu_reclaim.commands import Section

ANSWER_S = 25
"""Longest wait for /health, in seconds: it generates a token, for which SGLang itself allows 20 s
(SGLANG_HEALTH_CHECK_TIMEOUT)."""

_ASK = """
import concurrent.futures, http.client, json, sys, time, urllib.error, urllib.request
asked = json.loads(ASKED)
send = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
def told(number, one):
    head = {"Content-Type": "application/json"}
    if asked["key"]:
        head["Authorization"] = "Bearer " + asked["key"]
    body = None if one["body"] is None else json.dumps(one["body"]).encode()
    began = time.monotonic()
    try:
        request = urllib.request.Request(asked["url"] + one["path"], body, head)
        with send(request, timeout=one["timeout_s"]) as answer:
            code, text = answer.status, answer.read(MOST).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        code, text = error.code, error.read(MOST).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException, ValueError) as error:
        code, text = 0, str(error) or type(error).__name__
    took = time.monotonic() - began
    return "answer %d %d %.3f %s" % (number, code, took, json.dumps(text))
asks = list(enumerate(asked["asks"]))
with concurrent.futures.ThreadPoolExecutor(len(asks) if asked["together"] else 1) as pool:
    for line in pool.map(lambda ask: told(*ask), asks):
        print(line, flush=True)
"""

OK = 200
"""HTTP's word for success (RFC 9110)."""

MOST_BYTES = 4_000_000
"""So much of an answer is read; /server_info is some 10 kB."""


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        path: For example `/health`.
        body: Sent as JSON with POST; None: GET.
        timeout_s: Longest silence, in seconds.
    """

    path: str
    body: dict[str, Any] | None = None
    timeout_s: float = ANSWER_S


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        code: HTTP status; 200 when it serves, 503 while it loads, 0 when nobody answers.
        text: The body, or what the operating system said where nobody answers.
        seconds: How long it took.
    """

    code: int
    text: str = ""
    seconds: float = 0

    def __str__(self) -> str:
        """For people."""
        why = " ".join(self.text.split())[:200]
        return f"HTTP {self.code}" if self.code else f"no answer ({why})"

    def json(self) -> dict[str, Any]:
        """The body as an object; empty where it is none."""
        try:
            value = json.loads(self.text)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


def ask(
    python: str,
    base_url: str,
    asks: Sequence[Ask],
    api_key: str = "",
    *,
    together: bool = False,
) -> str:
    """Shell text that sends requests to a server on the host.

    Args:
        python: The interpreter on the host to ask with; the server's own is surely there.
        base_url: For example `http://127.0.0.1:30000`, as seen from the host.
        asks: What to ask.
        api_key: Sent as a bearer token; it stands in no command line.
        together: All at the same time; else one after the other.
    """
    said = {
        "url": base_url.rstrip("/"),
        "key": api_key,
        "together": together,
        "asks": [asdict(x) for x in asks],
    }
    head = f"MOST = {MOST_BYTES}\nASKED = {json.dumps(json.dumps(said))}"
    return by_python(python, f"{head}{_ASK}")


def by_python(python: str, program: str, *arguments: str) -> str:
    """Shell text that runs a program by the server's interpreter; it travels on stdin.

    Args:
        python: The interpreter.
        program: Its text; it ends with a newline.
        arguments: For `sys.argv[1:]`.
    """
    return f"{shlex.join([python, '-', *arguments])} <<'@gr-python'\n{program}@gr-python\n"


def parse_answers(section: Section) -> list[Answer]:
    """The answers, in order; fewer than asks where the interpreter gave up."""
    found = []
    for line in section.lines("answer"):
        words = line.split(" ", 3)
        if len(words) == 4 and words[1].isdigit():  # noqa: PLR2004 - number, code, seconds, text
            with suppress(ValueError):
                found.append(Answer(int(words[1]), _text(words[3]), float(words[2])))
    return found


def _text(shown: str) -> str:
    try:
        return str(json.loads(shown))
    except ValueError:
        return ""


def ask_health(python: str, base_url: str) -> str:
    """Shell text that asks a server on the host whether it serves."""
    return ask(python, base_url, [Ask("/health", timeout_s=ANSWER_S)])


def parse_health(section: Section) -> Answer | None:
    """The answer; None where the interpreter gave none."""
    return next(iter(parse_answers(section)), None)
