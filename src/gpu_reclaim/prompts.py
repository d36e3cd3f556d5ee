"""What a benchmark needs on the host: the file with its prompts, and the model's tokenizer."""

from __future__ import annotations

import shlex

from gpu_reclaim.benching import HELP_S, OFFLINE
from gpu_reclaim.commands import Script, Section, printable
from gpu_reclaim.errors import BadInput
from gpu_reclaim.serving import Server, no_interpreter
from gpu_reclaim.session import Session
from gpu_reclaim.sglang import by_python

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
    texts = [[turn.get("content", turn.get("value")) for turn in head] for head in heads]
    if not all(isinstance(text, str) for pair in texts for text in pair):
        raise TypeError
    # Prompts and answers of fewer than two tokens are passed over; two words have two at least.
    long = [all(len(text.split()) > 1 or len(text) > 15 for text in pair) for pair in texts]
    print("prompts", sum(long))
except (AttributeError, LookupError, TypeError):
    print("why it is no list of conversations")
except Exception as error:
    print("why", (str(error) or type(error).__name__).split(chr(10))[0])
"""

_LOAD = """
import sys
try:
    from transformers import AutoTokenizer
    # As the benchmark does it.
    AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
    print("tokenizer loads")
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
    body += by_python(server.python, _COUNT, server.dataset_path)
    section = _said(session, server, Script("look at the prompts", {"prompts": body}))
    count, why = section.value("prompts"), section.value("why")
    if not count.isdigit():
        raise BadInput(
            f"{session.host}: {server.dataset_path} cannot be read as {server.dataset_name}: "
            f"{printable(why)}",
            remedy="correct dataset_path in the LlmServer block",
        )
    if int(count) < needed:
        raise BadInput(
            f"{session.host}: {server.dataset_path} has {count} conversations of more than a word, "
            f"and the highest concurrency needs {needed} requests",
            remedy="take fewer requests per stream, lower concurrencies, or a longer file",
        )
    return " ".join(section.value("sum").split()[:2])


def look_at_tokenizer(session: Session, server: Server, model: str) -> None:
    """Look whether the benchmark finds the tokenizer: as root, offline, without the unit's HOME.

    Raises:
        BadInput: It will not.
        BadAnswer: The server's interpreter cannot be run on the host.
        TransportError: As `Transport.run`.
    """
    body = f"{OFFLINE}\ntimeout -k 5 {HELP_S} {by_python(server.python, _LOAD, model)}"
    script = Script("load the tokenizer", {"tokenizer": body}, timeout_s=HELP_S + 30)
    why = _said(session, server, script).value("why")
    if why:
        raise BadInput(
            f"{session.host}: the benchmark cannot load the tokenizer of {model}: "
            f"{printable(why, limit=300)}",
            remedy="set model_path in the LlmServer block to a folder on the host with the "
            "model's tokenizer, which root can read",
        )


def _said(session: Session, server: Server, script: Script) -> Section:
    """What a program said, under its section's own name; or `why` not."""
    result = session.links.run(script)
    (name,) = script.sections
    section = result.section(name)
    if not section.value(name) and not section.value("why"):
        raise no_interpreter(session, server, result)
    return section
