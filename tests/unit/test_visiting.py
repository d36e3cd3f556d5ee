"""One visit: whatever the server does is an observation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gpu_reclaim.errors import BadAnswer, CommandFailed, HoldLost, LinkLost
from gpu_reclaim.finding import changed
from gpu_reclaim.transport.scripted import Answer
from gpu_reclaim.trial import Failure
from gpu_reclaim.tuning import Visit
from gpu_reclaim.visiting import start, visit
from unit.scenery import Scene
from unit.tuned import (
    INFO,
    KEY,
    LOADS,
    PLAN,
    UNIT,
    answered,
    before,
    benched,
    found_server,
    looked,
    texts,
    tuned,
)

PRESENT, OFF, TWO = before().settings
START, ARGUMENTS = f"start {UNIT} on trial", "ask for its arguments"
AS_TWO = {**INFO, "speculative_num_steps": 2, "speculative_num_draft_tokens": 3}
LEVELS = ["measure at 1", "measure at 16"]
ANSWERS = [
    ["text 0", *(f"text {number}" for number in range(15))],
    [f"text {number}" for number in range(16)],
]
ASK = ["ask for a completion", "ask for greedy answers", "ask for greedy answers at 16"]

Told = Mapping[str, Answer | list[Answer]]


def visited(
    told: Told | None = None, arm: str = PRESENT, reference: list[list[str]] | None = None
) -> tuple[Scene, Visit, list[list[str]]]:
    made = tuned(told)
    seen, answers = visit(made.session, before(), PLAN, (arm, 2), reference or [])
    return made, seen, answers


def test_a_good_visit_has_all_levels() -> None:
    made, seen, answers = visited({"look at the trial": [looked(serves=LOADS), looked()]})

    assert (seen.arm, seen.round, seen.failure) == (PRESENT, 2, "")
    assert [row.level for row in seen.levels] == PLAN.levels
    assert [row.requests for row in seen.levels] == [16, 128]
    assert (seen.ready_s, seen.token_capacity, seen.differing_pct) == (2, 412_000, 0)
    assert answers == ANSWERS
    assert made.asked == [
        *(START, "look at the trial", "look at the trial", ARGUMENTS),
        # Twice, for there is nothing to compare with yet.
        *(*ASK, *ASK, *LEVELS, ARGUMENTS),
    ]


def test_it_is_started_once_and_never_again() -> None:
    made, _, _ = visited()

    assert made.writes == [START]
    text = made.direct.asked[0].sections["hold"]
    assert "--speculative-num-steps 3" in text
    assert "Restart=no\n" in text


def test_answers_are_compared_with_those_of_the_present_setting() -> None:
    assert visited(reference=ANSWERS)[1].differing_pct == 0
    others = [ANSWERS[0], ["x", "y", *ANSWERS[1][2:]]]
    made, seen, _ = visited(reference=others)
    assert seen.differing_pct == 12.5
    assert [name for name in made.asked if name in ASK] == ASK


def test_the_present_setting_differs_from_itself() -> None:
    """Asked for twice, for what is more than that is another setting's own."""
    _, seen, answers = visited({ASK[2]: [texts(count=16), texts({"text": "x"}, count=16)]})
    assert seen.differing_pct == 6.25
    assert answers == ANSWERS


def test_each_record_has_its_own_name() -> None:
    made, _, _ = visited({ARGUMENTS: answered((200, AS_TWO))}, TWO)
    bodies = [x.sections["bench"] for x in made.direct.asked if x.name in LEVELS]

    names = [f"NEXTN-2.1.3-round-2-at-{level}" for level in PLAN.levels]
    assert [f"file={name};" in body for name, body in zip(names, bodies, strict=True)] == [True] * 2


@pytest.mark.parametrize(
    ("told", "why", "rest"),
    [
        (
            {"look at the trial": looked({"ActiveState": "failed", "ExecMainStatus": "1"})},
            "it ended at start: exit status 1",
            [],
        ),
        ({"look at the trial": looked(serves=LOADS)}, "it did not serve within 602 s", []),
        ({ARGUMENTS: answered((200, AS_TWO))}, "it runs with other arguments: ", []),
        ({ARGUMENTS: answered((0, "refused"))}, "it runs with other arguments: ", []),
        ({"ask for a completion": answered((500, "x"))}, "a request for 48 tokens got HTTP", []),
        (
            {"ask for greedy answers": texts({"text": 1})},
            "a request for 48 tokens got HTTP 200",
            [],
        ),
        ({LEVELS[0]: benched(code=1)}, "the benchmark at 1 failed (exit status 1)", ANSWERS),
        ({LEVELS[1]: benched(code=124)}, "the benchmark at 16 did not end within", ANSWERS),
        ({LEVELS[1]: benched()}, "16 of 128 requests were answered at 16", ANSWERS),
    ],
)
def test_each_failure_is_a_visit(told: Told, why: str, rest: list[list[str]]) -> None:
    made, seen, answers = visited(told)

    assert seen.failure.startswith(why)
    assert (seen.levels, seen.differing_pct, seen.round) == ([], None, 2)
    assert answers == rest
    assert (seen.detail == "") == why.startswith("it runs")
    assert made.writes == [START]


def test_nothing_is_measured_after_a_failure() -> None:
    made, _, _ = visited({LEVELS[0]: benched(code=1)})

    assert LEVELS[1] not in made.asked


def test_how_long_it_took_to_serve_is_known_of_a_failure_too() -> None:
    loading = [looked(serves=LOADS), looked()]

    told: Told = {"look at the trial": loading, LEVELS[0]: benched(code=1)}
    assert visited(told)[1].ready_s == 2
    told = {"look at the trial": loading, "ask for a completion": answered((0, "x"))}
    assert visited(told)[1].ready_s == 2


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ({START: {"hold": "status lost"}}, HoldLost),
        ({START: {"hold": "status unset"}}, CommandFailed),
        ({START: {"hold": ""}}, BadAnswer),
        ({LEVELS[1]: LinkLost("gone")}, LinkLost),
    ],
)
def test_what_is_not_the_servers_doing_is_no_visit(told: Told, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        visited(told)


@pytest.mark.parametrize(
    ("states", "capacity"),
    [
        ([{"memory_usage": {"token_capacity": 7}}], 7),
        ([{"memory_usage": {"token_capacity": "7"}}], None),
        ([{"memory_usage": None}], None),
        ([{}], None),
        ([], None),
        (None, None),
        ({"memory_usage": {}}, None),
        (3, None),
    ],
)
def test_the_caches_size(states: object, capacity: int | None) -> None:
    _, seen, _ = visited({ARGUMENTS: answered((200, {**INFO, "internal_states": states}))})

    assert (seen.failure, seen.token_capacity) == ("", capacity)


@pytest.mark.parametrize(
    ("arm", "info"),
    [
        (PRESENT, INFO),
        (TWO, AS_TWO),
        (OFF, {"speculative_algorithm": None, "max_running_requests": 64}),
    ],
)
def test_a_setting_is_proven(arm: str, info: dict[str, Any]) -> None:
    found = [
        start(tuned({ARGUMENTS: answered((200, one))}).session, before(), arm)
        for one in (
            info,
            {**info, "max_running_requests": 48},
            {**AS_TWO, "speculative_num_steps": 9},
        )
    ]

    assert found[0] == 0
    assert [type(one) for one in found[1:]] == [Failure, Failure]
    assert isinstance(found[1], Failure)
    assert found[1].why == (
        "it runs with other arguments: max_running_requests should be 64, and is 48"
    )


# What serves afterwards.


def differences(**more: object) -> list[str]:
    now = {name: value for name, value in {**INFO, **more}.items() if value is not ...}
    return changed(tuned({ARGUMENTS: answered((200, now))}).session, found_server())


def test_all_as_before() -> None:
    assert differences(internal_states=[], startup_time=3, last_gen_throughput=1.5) == []


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"version": "0.5.10"}, "version was '0.5.9' and is '0.5.10'"),
        ({"tp_size": 2}, "tp_size was 4 and is 2"),
        ({"speculative_num_steps": 2}, "speculative_num_steps was 3 and is 2"),
        ({"max_running_requests": ...}, "max_running_requests was 64 and is None"),
        ({"launch_command": "x"}, "its command line is another"),
        ({"launch_command": ...}, "its command line is another"),
    ],
)
def test_what_is_another_than_before(more: dict[str, object], sentence: str) -> None:
    assert differences(**more) == [sentence]


def test_a_command_line_with_a_key_is_not_shown() -> None:
    found = differences(launch_command=f"python --api-key {KEY} --x", tp_size=1)

    assert len(found) == 2
    assert KEY not in "".join(found)


def test_a_server_that_does_not_answer() -> None:
    made = tuned({ARGUMENTS: answered((0, "refused"))})

    assert changed(made.session, found_server()) == ["it does not answer /server_info"]
