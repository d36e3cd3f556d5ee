"""The file on the host with the prompts that a benchmark sends."""

from __future__ import annotations

import shlex

from gpu_reclaim.commands import Script, printable
from gpu_reclaim.errors import BadInput
from gpu_reclaim.serving import Server
from gpu_reclaim.session import Session

_COUNT = """
import json, sys
try:
    with open(sys.argv[1], encoding="utf-8") as file:
        text = file.read()
    try:
        rows = json.loads(text)
    except ValueError:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    talks = [row.get("conversations", row.get("conversation", [])) for row in rows]
    print("prompts", sum(len(talk) >= 2 for talk in talks))
except (OSError, ValueError, AttributeError, TypeError) as error:
    print("why", str(error).split(chr(10))[0])
"""


def look_at_prompts(session: Session, server: Server, needed: int) -> str:
    """Look whether there are prompts enough to measure with.

    Returns:
        The file's checksum and size.

    Raises:
        BadInput: There are not.
        TransportError: As `Transport.run`.
    """
    if not server.dataset_path:
        raise BadInput(
            f"{session.host}: no prompts to measure with are named",
            remedy="set dataset_path in the LlmServer block to a ShareGPT file on the host: random "
            "tokens would say nothing about drafts",
        )
    path = shlex.quote(server.dataset_path)
    body = f"cksum {path} | sed 's/^/sum /'\n"
    body += f"{shlex.quote(server.python)} - {path} <<'@gr-python'{_COUNT}@gr-python\n"
    section = session.links.run(Script("look at the prompts", {"prompts": body})).section("prompts")
    count = section.value("prompts")
    if not count.isdigit():
        raise BadInput(
            f"{session.host}: {server.dataset_path} cannot be read as {server.dataset_name}: "
            f"{printable(section.value('why'))}",
            remedy="correct dataset_path in the LlmServer block",
        )
    if int(count) < needed:
        raise BadInput(
            f"{session.host}: {server.dataset_path} has {count} conversations, and the highest "
            f"concurrency needs {needed} requests",
            remedy="take fewer requests per stream, lower concurrencies, or a longer file",
        )
    return " ".join(section.value("sum").split()[:2])
