"""SGLang's HTTP server: the question whether it serves, and its answer."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from gpu_reclaim.commands import Section

ANSWER_S = 25
"""Longest wait for /health, in seconds: it generates a token, for which SGLang itself allows 20 s
(SGLANG_HEALTH_CHECK_TIMEOUT)."""

_ASK = """
import http.client, sys, urllib.error, urllib.request
ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
try:
    print("health", ask(sys.argv[1], timeout=float(sys.argv[2])).status)
except urllib.error.HTTPError as error:
    print("health", error.code)
except (OSError, http.client.HTTPException) as error:
    print("health 0", " ".join(str(error).split()))
"""


@dataclass(frozen=True)
class Health:
    """What /health answered.

    Attributes:
        code: HTTP status; 200 when it serves, 503 while it loads, 0 when nobody answers.
        why: What the operating system said, where nobody answers.
    """

    code: int
    why: str = ""

    def __str__(self) -> str:
        """For people."""
        return f"HTTP {self.code}" if self.code else f"no answer ({self.why})"


def ask_health(python: str, base_url: str) -> str:
    """Shell text that asks a server on the host whether it serves.

    Args:
        python: The interpreter on the host to ask with; the server's own is surely there.
        base_url: For example `http://127.0.0.1:30000`, as seen from the host.
    """
    url = shlex.quote(f"{base_url.rstrip('/')}/health")
    return f"{shlex.quote(python)} - {url} {ANSWER_S} <<'@gr-python'\n{_ASK}@gr-python\n"


def parse_health(section: Section) -> Health | None:
    """The answer; None where the interpreter gave none."""
    code, _, why = section.value("health").partition(" ")
    return Health(int(code), why) if code.isdigit() else None
