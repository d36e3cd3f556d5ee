"""The file on the host with the prompts that a benchmark sends."""

from __future__ import annotations

import shlex

from gpu_reclaim.commands import Script, printable
from gpu_reclaim.errors import BadInput
from gpu_reclaim.serving import Server, no_interpreter
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
    heads = [talk[:2] for talk in talks if len(talk) >= 2]
    texts = [turn.get("content", turn.get("value")) for head in heads for turn in head]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError
    print("prompts", len(heads))
except (AttributeError, LookupError, TypeError):
    print("why it is no list of conversations")
except Exception as error:
    print("why", (str(error) or type(error).__name__).split(chr(10))[0])
"""


def look_at_prompts(session: Session, server: Server, needed: int) -> str:
    """Look whether there are prompts enough to measure with.

    Returns:
        The file's checksum and size.

    Raises:
        BadInput: There are not.
        BadAnswer: The server's interpreter cannot be run on the host.
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
    result = session.links.run(Script("look at the prompts", {"prompts": body}))
    section = result.section("prompts")
    count, why = section.value("prompts"), section.value("why")
    if not count and not why:
        raise no_interpreter(session, server, result)
    if not count.isdigit():
        raise BadInput(
            f"{session.host}: {server.dataset_path} cannot be read as {server.dataset_name}: "
            f"{printable(why)}",
            remedy="correct dataset_path in the LlmServer block",
        )
    if int(count) < needed:
        raise BadInput(
            f"{session.host}: {server.dataset_path} has {count} conversations, and the highest "
            f"concurrency needs {needed} requests",
            remedy="take fewer requests per stream, lower concurrencies, or a longer file",
        )
    return " ".join(section.value("sum").split()[:2])
