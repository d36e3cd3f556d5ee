"""What a tuning has measured so far, kept on the host itself: a later run goes on from there."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping

from gpu_reclaim.commands import Script
from gpu_reclaim.errors import BadAnswer
from gpu_reclaim.session import Session
from gpu_reclaim.tuning import TunedSize, Visit

FOLDER = "gpu-reclaim-tuning"
"""Below /var/lib; apart from the hold's own folder, which is gone with the hold."""

FRESH_MINUTES = 24 * 60
"""So long after its last visit a tuning may be gone on with."""

KEY_LENGTH = 12
"""Hexadecimal digits of a folder's name."""


def folder(session: Session, unit: str, key: str) -> str:
    """Where a tuning keeps its things on the host."""
    return f"{session.places.lib}/{FOLDER}/{unit}/{key}"


def key_of(parts: Mapping[str, object]) -> str:
    """A name for what must be the same, so that measurements may be compared."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


def read(session: Session, place: str) -> tuple[list[Visit], list[list[str]]]:
    """What is on record: the visits, and the present setting's greedy answers.

    A line that was cut by a full disk or a lost connection counts as not there. So does what is
    older than a day: a host changes, and a setting that was taken back meanwhile must not come
    again by old figures.

    Raises:
        TransportError: As `Transport.run`.
    """
    body = (
        f"cd {shlex.quote(place)} || exit 0\n"
        f'[ -n "$(find . -name visits.jsonl -mmin -{FRESH_MINUTES})" ] || exit 0\n'
        "[ ! -e visits.jsonl ] || { sed 's/^/visit /' visits.jsonl; echo; }\n"
        "[ ! -e answers.json ] || sed 's/^/answers /' answers.json"
    )
    section = session.links.run(Script("read the logbook", {"book": body})).section("book")
    visits = [found for line in section.lines("visit") if (found := _visit(line))]
    return visits, _answers(section.value("answers"))


def _visit(line: str) -> Visit | None:
    try:
        return Visit.model_validate_json(line)
    except ValueError:
        return None


def _answers(text: str) -> list[list[str]]:
    try:
        found = json.loads(text)
    except ValueError:
        return []
    groups = found if isinstance(found, list) else []
    texts = [one for group in groups if isinstance(group, list) for one in group]
    good = all(isinstance(group, list) for group in groups)
    return groups if good and all(isinstance(one, str) for one in texts) else []


def about(session: Session, place: str, parts: Mapping[str, object]) -> None:
    """Make the folder, and tell people there what was measured."""
    _write(session, place, "about.json", json.dumps(parts, indent=1, sort_keys=True))


def add_answers(session: Session, place: str, answers: list[list[str]]) -> None:
    """Keep the greedy answers that others are compared with."""
    _write(session, place, "answers.json", json.dumps(answers))


def add(session: Session, place: str, visit: Visit) -> None:
    """Put a finished visit on record.

    Raises:
        BadAnswer: It could not be written.
        TransportError: As `Transport.run`.
    """
    # An empty line before it: what an earlier, cut one left is no part of this.
    _write(session, place, "visits.jsonl", f"\n{visit.model_dump_json()}\n", more=True)


def read_sizes(session: Session, place: str) -> list[TunedSize]:
    """The batch sizes that were tuned, or failed, the last word on each; however long ago.

    Raises:
        TransportError: As `Transport.run`.
    """
    body = (
        f"cd {shlex.quote(place)} || exit 0\n[ ! -e sizes.jsonl ] || sed 's/^/size /' sizes.jsonl"
    )
    section = session.links.run(Script("read what was tuned", {"book": body})).section("book")
    found: dict[int, TunedSize] = {}
    for line in section.lines("size"):
        try:
            size = TunedSize.model_validate_json(line)
        except ValueError:
            continue
        found[size.tokens] = size
    return [found[tokens] for tokens in sorted(found)]


def add_size(session: Session, place: str, size: TunedSize) -> None:
    """Put a batch size on record.

    Raises:
        BadAnswer: It could not be written.
        TransportError: As `Transport.run`.
    """
    _write(session, place, "sizes.jsonl", f"\n{size.model_dump_json()}\n", more=True)


def set_aside(session: Session, place: str) -> None:
    """Begin an empty record; the old one stays beside it, under the time of now.

    Raises:
        BadAnswer: It could not be moved.
        TransportError: As `Transport.run`.
    """
    body = (
        f"[ -e {shlex.quote(place)} ] || {{ echo written yes; exit 0; }}\n"
        f"cd {shlex.quote(place)} && rm -f answers.json && {{ [ ! -e visits.jsonl ] ||\n"
        '  mv visits.jsonl "visits-$(date +%Y%m%d-%H%M%S).jsonl"; } && echo written yes'
    )
    _change(session, "set the logbook aside", body, place)


def _write(session: Session, place: str, name: str, text: str, *, more: bool = False) -> None:
    sign = ">>" if more else ">"
    body = (
        f"umask 077; mkdir -p {shlex.quote(place)} && cd {shlex.quote(place)} &&\n"
        f"printf '%s' {shlex.quote(text)} {sign}{name} && echo written yes"
    )
    _change(session, f"write {name}", body, f"{place}/{name}")


def _change(session: Session, what: str, body: str, path: str) -> None:
    result = session.links.run(Script(what, {"book": body}, writes=True))
    if result.section("book").value("written") != "yes":
        raise BadAnswer(
            f"{session.host}: {path} could not be written",
            remedy="see whether the disk is full there",
            result=result,
        )
