"""What a running server is asked, and the sentences where it cannot be measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from gpu_reclaim.benching import NEEDED
from gpu_reclaim.errors import BadAnswer, BadInput, LinkLost
from gpu_reclaim.measuring import (
    PROMPTS,
    differing_pct,
    find_tool,
    greedy_answers,
    measure,
    server_info,
)
from gpu_reclaim.preflight import load_of
from gpu_reclaim.transport.scripted import Answer
from gpu_reclaim.tuning import Measurement
from unit.tuned import INFO, KEY, PLAN, SERVER, TOOL, answered, before, benched, texts, tuned

ARGUMENTS = "ask for its arguments"
FIRST, OTHERS = "ask for a completion", "ask for greedy answers"
AT_20, LONG = "ask for greedy answers at 20", "ask for a long prompt's answer"
SIXTEEN = ["text 0", *(f"text {x}" for x in range(15))]
NOT_FOUND = (404, {"detail": "Not Found"})
"""FastAPI's own body."""


@pytest.mark.parametrize(
    ("answers", "info"),
    [
        ([answered((200, INFO))], INFO),
        ([answered(NOT_FOUND), answered((200, INFO))], INFO),
        ([answered((404, "no")), answered((200, INFO))], INFO),
        ([answered((200, "[1]")), answered((200, INFO))], INFO),
        ([answered((0, "timed out")), answered((200, INFO))], INFO),
        ([answered((401, {"error": "Unauthorized"}))], {}),
        ([answered((200, {}))], {}),
    ],
)
def test_the_servers_arguments(answers: list[Answer], info: Mapping[str, object]) -> None:
    made = tuned({ARGUMENTS: answers})

    assert server_info(made.session, SERVER) == info


def test_the_older_name_is_asked_second_and_only_then() -> None:
    made = tuned({ARGUMENTS: [answered(NOT_FOUND), answered((200, INFO))]})
    server_info(made.session, SERVER)
    server_info(made.session, SERVER)

    paths = [
        next(x for x in ("/get_server_info", "/server_info") if x in script.sections["answers"])
        for script in made.direct.asked
    ]
    assert paths == ["/server_info", "/get_server_info", "/server_info"]


def test_greedy_answers_the_first_alone() -> None:
    made = tuned()

    assert greedy_answers(made.session, SERVER, [1]) == [SIXTEEN]
    assert made.asked == [FIRST, OTHERS]
    first, others = (script.sections["answers"] for script in made.direct.asked)
    assert [x for x in PROMPTS if json.dumps(json.dumps(x))[1:-1] in first] == [PROMPTS[0]]
    assert others.count('\\"temperature\\": 0,') == len(PROMPTS) - 1


def test_each_concurrency_has_answers_of_its_own_all_at_the_same_time() -> None:
    made = tuned({"ask for greedy answers at 4": texts(count=4), AT_20: texts(count=20)})

    found = greedy_answers(made.session, SERVER, [1, 4, 20])
    assert found == [SIXTEEN, *([f"text {x}" for x in range(many)] for many in (4, 20))]
    assert made.asked == [FIRST, OTHERS, "ask for greedy answers at 4", AT_20]
    one_by_one, together = (made.direct.asked[x].sections["answers"] for x in (1, 3))
    assert '\\"together\\": false' in one_by_one
    assert '\\"together\\": true' in together
    # There are sixteen prompts, so four of them come twice.
    assert together.count(json.dumps(json.dumps(PROMPTS[0]))[1:-1]) == 2


def test_a_failure_at_a_concurrency_is_one() -> None:
    bad = answered(*[(200, {"text": "x"})] * 3, (500, "x"))
    made = tuned({"ask for greedy answers at 4": bad})

    assert greedy_answers(made.session, SERVER, [4]) == "a request for 48 tokens got HTTP 500"


@pytest.mark.parametrize(
    ("answer", "text"),
    [((200, {"text": "long"}), "long"), ((400, "too long"), "HTTP 400")],
)
def test_a_prompt_as_long_as_a_prefill(answer: tuple[int, object], text: str) -> None:
    """A server that refuses its length does so with every setting."""
    made = tuned({LONG: answered(answer)})

    found = greedy_answers(made.session, SERVER, [1], 1400)
    assert found == [SIXTEEN, [text]]
    asked = made.direct.asked[-1].sections["answers"]
    assert 1000 < len(asked.split(" ")) < 1300


@pytest.mark.parametrize("answer", [(500, "x"), (0, "cut")])
def test_a_prefill_that_fails_is_a_failure(answer: tuple[int, object]) -> None:
    made = tuned({LONG: answered(answer)})

    words = greedy_answers(made.session, SERVER, [1], 1400)
    assert isinstance(words, str)
    assert words.startswith("a request for 48 tokens got ")


def test_an_empty_answer_is_one() -> None:
    made = tuned({OTHERS: texts({"text": ""})})

    assert greedy_answers(made.session, SERVER, [1])[0][1] == ""


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((500, {"error": {"message": "boom"}}), "HTTP 500"),
        ((500, {"text": "half"}), "HTTP 500"),
        ((0, "timed out"), "no answer (timed out)"),
        ((200, {"output_ids": [1]}), "HTTP 200"),
        ((200, {"text": None}), "HTTP 200"),
        ((200, "[]"), "HTTP 200"),
    ],
)
def test_why_there_are_no_greedy_answers(answer: tuple[int, object], why: str) -> None:
    sentence = f"a request for 48 tokens got {why}"
    made = tuned({FIRST: answered(answer)})
    assert greedy_answers(made.session, SERVER, [1]) == sentence
    assert made.asked == [FIRST]

    good = [(200, {"text": "x"})] * 14
    made = tuned({OTHERS: answered(*good, answer)})
    assert greedy_answers(made.session, SERVER, [1]) == sentence


def test_fewer_answers_than_questions() -> None:
    with pytest.raises(BadAnswer, match="cannot be run there"):
        greedy_answers(tuned({OTHERS: texts(count=14)}).session, SERVER, [1])


def test_a_lost_link_is_no_answer_of_the_server() -> None:
    with pytest.raises(LinkLost):
        greedy_answers(tuned({OTHERS: LinkLost("gone")}).session, SERVER, [1])


@pytest.mark.parametrize(
    ("answers", "percent"), [("abcd", 0), ("abcx", 25), ("bacd", 50), ("wxyz", 100)]
)
def test_how_many_answers_differ(answers: str, percent: float) -> None:
    assert differing_pct([[*answers]], [[*"abcd"]]) == percent


@pytest.mark.parametrize(
    ("groups", "percent"),
    [
        (("abcd", "ef"), 0),
        (("abcx", "ef"), 25),
        # Wrong at one concurrency alone.
        (("abcd", "xy"), 100),
        # A single answer says no share of its own.
        (("abcd", "ef", "x"), 100 / 3),
    ],
)
def test_the_concurrency_where_most_differ_counts(groups: tuple[str, ...], percent: float) -> None:
    reference = [[*text] for text in ("abcd", "ef", "g")[: len(groups)]]
    assert differing_pct([[*text] for text in groups], reference) == percent


def test_answers_to_other_questions_are_not_compared() -> None:
    for one, other in (([["a"]], [["a", "b"]]), ([["a"]], [["a"], ["b"]])):
        with pytest.raises(ValueError, match="longer"):
            differing_pct(one, other)


# The benchmark.

TOOLS = "look for the benchmark"


def test_the_benchmark_client() -> None:
    assert find_tool(tuned().session, SERVER) == TOOL


def test_no_benchmark_client() -> None:
    made = tuned({TOOLS: {"tool": "said a: No module named a\nsaid b: x\x1b[0m"}})
    with pytest.raises(BadInput) as caught:
        find_tool(made.session, SERVER)

    assert caught.value.message == (
        "llm: /opt/sglang/bin/python cannot run sglang's benchmark: "
        "a: No module named a; b: x\\x1b[0m"
    )
    assert "python in the LlmServer block" in caught.value.remedy


def test_a_client_without_needed_flags() -> None:
    flags = "\n".join(f"help {x}" for x in NEEDED if x not in ("--seed", "--tokenizer"))
    made = tuned({TOOLS: {"tool": f"module old.client\n{flags}"}})
    with pytest.raises(BadInput, match=r"old\.client there does not know --seed, --tokenizer"):
        find_tool(made.session, SERVER)


def measured(answer: Answer, timeout_s: float = 90) -> Measurement | str:
    load = load_of(before(), PLAN.model_copy(update={"measure_timeout_s": timeout_s}), 1, "x")
    return measure(tuned({"measure at 1": answer}).session, SERVER, TOOL, load)


def test_a_measurement() -> None:
    found = measured(benched())

    assert isinstance(found, Measurement)
    assert (found.level, found.completed, found.output_tok_s) == (1, 16, 121.5)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (benched(code=124), "the benchmark at 1 did not end within 90 s"),
        (benched(code=137), "the benchmark at 1 did not end within 90 s"),
        (
            benched(code=1, said="a\nb\x07\n\n"),
            "the benchmark at 1 failed (exit status 1): b\\x07",
        ),
        (
            benched({"duration": None}, said="x"),
            "the benchmark at 1 failed (exit status 0): x",
        ),
        ({"bench": ""}, "the benchmark at 1 failed (exit status -1): it said nothing"),
        (benched({"completed": 15}), "15 of 16 requests were answered at 1"),
        (benched({"completed": 17}), "17 of 16 requests were answered at 1"),
    ],
)
def test_why_there_is_no_measurement(answer: Answer, sentence: str) -> None:
    assert measured(answer) == sentence


def test_a_long_last_line_is_cut() -> None:
    said = measured(benched(code=1, said="x" * 5000))

    assert isinstance(said, str)
    assert len(said) < 400


def test_the_far_side_waits_longer_than_the_client_may_take() -> None:
    made = tuned()
    load = load_of(before(), PLAN, 16, "x")
    measure(made.session, SERVER, TOOL, load)

    script = made.direct.asked[0]
    assert script.name == "measure at 16"
    assert script.timeout_s > load.timeout_s + 5
    assert f"OPENAI_API_KEY={KEY}" in script.sections["bench"]


def test_a_server_without_a_key_is_asked_without() -> None:
    made = tuned()
    server_info(made.session, replace(SERVER, api_key=""))
    server_info(made.session, SERVER)

    without, with_it = (script.sections["answers"] for script in made.direct.asked)
    assert KEY not in without
    assert KEY in with_it
