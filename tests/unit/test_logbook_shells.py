"""What a tuning keeps on the host: the real scripts in a real shell."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gpu_reclaim import logbook, trial
from gpu_reclaim.errors import BadAnswer
from gpu_reclaim.lease import Places
from gpu_reclaim.session import Session
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.local import LocalTransport
from unit.shells import SHELLS, tool_path
from unit.tunings import visit

ONE = visit("NEXTN 2/1/3", 1, detail="it's\n'said' \\n $HOME `x`", ready_s=71.2)
TWO = visit("off", 1, levels=[], failure="out of memory at start")


@pytest.fixture(params=SHELLS)
def session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Session:
    (tmp_path / "tools").mkdir()
    monkeypatch.setenv("PATH", tool_path(tmp_path / "tools", request.param))
    links = Links(direct=LocalTransport())
    return Session("box", links, places=Places(lib=str(tmp_path / "var lib")))


@pytest.fixture
def place(session: Session) -> str:
    return logbook.folder(session, "sglang.service", logbook.key_of({"version": "0.5.23"}))


def test_what_is_written_is_read_again(session: Session, place: str) -> None:
    assert logbook.read(session, place) == ([], [])
    logbook.about(session, place, {"version": "0.5.23"})
    logbook.add_answers(session, place, [["it's one"], ["two\nlines"]])
    logbook.add(session, place, ONE)
    logbook.add(session, place, TWO)

    assert logbook.read(session, place) == ([ONE, TWO], [["it's one"], ["two\nlines"]])
    assert stat.S_IMODE(Path(place).stat().st_mode) == 0o700
    assert stat.S_IMODE((Path(place) / "visits.jsonl").stat().st_mode) == 0o600


def test_a_line_that_was_cut_counts_as_not_there(session: Session, place: str) -> None:
    logbook.add(session, place, ONE)
    book = Path(place) / "visits.jsonl"
    book.write_text(book.read_text() + TWO.model_dump_json()[:40])
    logbook.add(session, place, TWO)

    assert logbook.read(session, place) == ([ONE, TWO], [])


@pytest.mark.parametrize("text", ['["one"', '{"a": 1}', "[1]", ""])
def test_answers_that_are_none_are_not_compared_with(
    session: Session, place: str, text: str
) -> None:
    logbook.add(session, place, ONE)
    (Path(place) / "answers.json").write_text(text)
    assert logbook.read(session, place) == ([ONE], [])


def test_what_is_set_aside_does_not_count_any_more(session: Session, place: str) -> None:
    logbook.set_aside(session, place)
    logbook.add_answers(session, place, [["one"]])
    logbook.add(session, place, ONE)
    logbook.set_aside(session, place)
    # An answer that was lost makes it come twice.
    logbook.set_aside(session, place)

    assert logbook.read(session, place) == ([], [])
    assert len(list(Path(place).glob("visits-*.jsonl"))) == 1
    logbook.add(session, place, TWO)
    assert logbook.read(session, place) == ([TWO], [])


def test_what_cannot_be_written_is_said(session: Session, place: str) -> None:
    Path(place).parent.mkdir(parents=True)
    Path(place).write_text("no folder")
    with pytest.raises(BadAnswer, match=r"visits\.jsonl could not be written"):
        logbook.add(session, place, ONE)


@pytest.mark.parametrize(
    "line",
    [
        "server_args=ServerArgs(model_path='/m', api_key='s3cr3t', admin_api_key=\"s3cr3t\")",
        "ssl_keyfile_password='s3cr3t', tp_size=4",
        "launch_server --api-key s3cr3t --tp 4",
        "launch_server --admin-api-key=s3cr3t --tp 4",
        "launch_server --ssl-keyfile-password s3cr3t",
        "argv: ['--api-key', 's3cr3t', '--tp', '4']",
        "{'tp_size': 4, 'api_key': 's3cr3t'}",
        "Bearer s3cr3t was refused",
    ],
)
def test_last_words_have_no_secret(line: str) -> None:
    secrets = ["s3cr3t"] if "Bearer" in line else [""]
    said = trial.without([line, "the end"], secrets)
    assert "s3cr3t" not in said
    assert "***" in said
    assert said.endswith("\nthe end")
