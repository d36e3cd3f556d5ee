"""What a tuning has measured, kept in real files by a real shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_reclaim import logbook
from gpu_reclaim.errors import BadAnswer
from gpu_reclaim.session import Session
from gpu_reclaim.transport.local import LocalTransport
from unit.scenery import scene
from unit.tuned import TunedHost, on_this_machine, visit

HARD = "it's $(x) \\n\r\n\t\u2028\u2603 \U0001f600 \x00 \x1b[0m \ud83d @gr-python"
"""What text may hold; the last but one is half of a pair."""


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return on_this_machine(tmp_path)


@pytest.fixture
def place(session: Session) -> str:
    return logbook.folder(session, "it's $x.service", "0123456789ab")


def visits_file(place: str) -> Path:
    return Path(place) / "visits.jsonl"


def test_nothing_is_on_record_at_first(tools: str, session: Session, place: str) -> None:
    assert logbook.read(session, place) == ([], [])
    assert not Path(place).exists()


def test_what_is_written_is_read_again(tools: str, session: Session, place: str) -> None:
    failed = visit("off", 1, failure="out of memory").model_copy(update={"detail": HARD[:-14]})
    visits = [visit("present", 1, differing=None), failed, visit("NEXTN 2/1/3", 2, 99.5, 1e6)]
    for one in visits:
        logbook.add(session, place, one)

    assert logbook.read(session, place) == (visits, [])


def test_answers_of_any_text(tools: str, session: Session, place: str) -> None:
    logbook.add(session, place, visit("off", 1))
    logbook.add_answers(session, place, [["before"]])
    logbook.add_answers(session, place, [["", HARD], ["x" * 10_000]])

    assert logbook.read(session, place)[1] == [["", HARD], ["x" * 10_000]]


def test_a_cut_line_counts_as_not_there_and_the_next_is_whole(
    tools: str, session: Session, place: str
) -> None:
    one, two, three = (visit("off", turn) for turn in (1, 2, 3))
    for each in (one, two):
        logbook.add(session, place, each)
    file = visits_file(place)
    file.write_bytes(file.read_bytes()[:-30])
    assert logbook.read(session, place) == ([one], [])

    logbook.add(session, place, three)
    assert logbook.read(session, place) == ([one, three], [])


@pytest.mark.parametrize("line", ["[1]", "{}", '{"arm": "x"}', "null", "\xff"])
def test_what_is_no_visit_is_none(line: str, session: Session, place: str) -> None:
    logbook.add(session, place, visit("off", 1))
    with visits_file(place).open("a", encoding="latin-1") as file:
        file.write(line)

    assert logbook.read(session, place) == ([visit("off", 1)], [])


@pytest.mark.parametrize(
    "text", ['[["cut', "{}", '"x"', "[[1, 2]]", '[["a", null]]', '["a"]', '[["a"], "b"]', ""]
)
def test_what_are_no_answers_are_none(text: str, session: Session, place: str) -> None:
    Path(place).mkdir(parents=True)
    (Path(place) / "answers.json").write_text(text)

    assert logbook.read(session, place) == ([], [])


def test_people_are_told_what_was_measured(session: Session, place: str) -> None:
    logbook.about(session, place, {"unit": "x", "levels": {"1": 16}})

    text = (Path(place) / "about.json").read_text()
    assert text == '{\n "levels": {\n  "1": 16\n },\n "unit": "x"\n}'


def test_it_is_for_root_alone(session: Session, place: str) -> None:
    logbook.about(session, place, {})
    logbook.add_answers(session, place, [["x"]])
    logbook.add(session, place, visit("off", 1))

    folder = Path(place)
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o600"}
    above = (folder, folder.parent, folder.parent.parent)
    assert {oct(path.stat().st_mode & 0o777) for path in above} == {"0o700"}
    assert folder.parent.parent.name == "gpu-reclaim-tuning"


def test_a_folder_that_cannot_be_entered(
    session: Session, place: str, nobody: LocalTransport, tmp_path: Path
) -> None:
    logbook.add(session, place, visit("off", 1))
    stranger = on_this_machine(tmp_path, nobody)

    assert logbook.read(stranger, place) == ([], [])
    with pytest.raises(BadAnswer, match=r"visits\.jsonl could not be written") as caught:
        logbook.add(stranger, place, visit("off", 2))
    assert "disk is full" in caught.value.remedy
    assert logbook.read(session, place) == ([visit("off", 1)], [])


def test_a_full_disk_is_told(session: Session, place: str) -> None:
    Path(place).mkdir(parents=True)
    visits_file(place).symlink_to("/dev/full")

    with pytest.raises(BadAnswer, match="could not be written"):
        logbook.add(session, place, visit("off", 1))


def test_reading_changes_nothing_and_writing_is_never_repeated_blindly() -> None:
    told = {"read the logbook": {"book": ""}, "write visits.jsonl": {"book": "written yes"}}
    made = scene(TunedHost(told={**told}))
    logbook.read(made.session, "/x")
    logbook.add(made.session, "/x", visit("off", 1))

    assert made.writes == ["write visits.jsonl"]


PARTS: dict[str, object] = {"unit": "a", "gpus": ["L40S x"], "levels": {"1": 16, "4": 32}}


def test_a_key_is_stable() -> None:
    key = logbook.key_of(PARTS)

    assert logbook.key_of(dict(reversed(PARTS.items()))) == key == "00d2de1ae19c"
    assert len(key) == logbook.KEY_LENGTH


@pytest.mark.parametrize(
    "changed",
    [{"unit": "b"}, {"gpus": []}, {"levels": {"1": 16, "4": 33}}, {"unit": "\u2603"}, {"new": 1}],
)
def test_a_key_is_another_with_each_part(changed: dict[str, object]) -> None:
    assert logbook.key_of(PARTS | changed) != logbook.key_of(PARTS)
