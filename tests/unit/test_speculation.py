"""SGLang's speculative flags as values, and which settings are worth a restart."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import strategies as st

from gpu_reclaim.errors import BadInput
from gpu_reclaim.plans import SpecDecodePlan, SpecSetting
from gpu_reclaim.specflags import split_flags, value_of
from gpu_reclaim.spectrials import refusal, trials
from gpu_reclaim.speculation import normalised, read_flags, same_server, with_setting
from unit.strategies import always

OFF = SpecSetting(off=True)


def spec(
    steps: int = 0, topk: int = 0, draft: int = 0, algorithm: str = "NEXTN", **more: Any
) -> SpecSetting:
    return SpecSetting(
        algorithm=algorithm, num_steps=steps, eagle_topk=topk, num_draft_tokens=draft, **more
    )


NEXTN = "--speculative-algorithm NEXTN"
FULL = (
    f"{NEXTN} --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
)
OTHER = "--speculative-attention-mode decode"


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        ("", OFF),
        ("--model-path /m --tp 4", OFF),
        (NEXTN, spec()),
        ("--speculative-algorithm=nextn", spec()),
        (FULL, spec(3, 1, 4)),
        (FULL.replace("-steps 3", "-steps=3"), spec(3, 1, 4)),
        (f"{FULL} --speculative-num-steps 5", spec(5, 1, 4)),
        (f"{NEXTN} --speculative-adaptive --tp 4", spec(adaptive=True)),
        (f"{NEXTN} --speculative-eagle 2 --speculative-num-s=2", spec(2, 2)),
        ("--speculative-al EAGLE3 --speculative-num-d 8", spec(0, 0, 8, "EAGLE3")),
        ("--speculative-num-steps 3", OFF),
        (f"{NEXTN} --speculative-adaptive-config /x", spec()),
        (f"{NEXTN} --spec-trace-dir /x --json '--speculative-num-steps'", spec()),
    ],
)
def test_what_a_unit_asks_for(flags: str, setting: SpecSetting) -> None:
    assert read_flags(flags.split()) == setting


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--speculative-n 3", "may mean several"),
        ("--speculative 3", "may mean several"),
        ("--spec 3", "may mean several"),
        ("--speculative-num-steps", "has no value"),
        ("--speculative-num-steps --tp", "has no value"),
        (f"{NEXTN} --speculative-num-steps 3.5", "no number"),
        (f"{NEXTN} --speculative-num-steps -1", "no number"),
        (f"{NEXTN} --speculative-num-steps 999", "beyond what is tuned"),
    ],
)
def test_flags_that_cannot_be_understood(flags: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence) as caught:
        read_flags(flags.split())

    assert caught.value.remedy


def test_a_value_is_no_flag() -> None:
    assert (
        value_of(["--x", "y", "--speculative-token-map", "/a"], "--speculative-token-map") == "/a"
    )
    assert value_of(["--speculative-adaptive"], "--speculative-adaptive") == ""
    assert value_of(["--tp", "4"], "--speculative-token-map") is None
    assert value_of(["--speculative-token-map", "- a"], "--speculative-token-map") == "- a"


@pytest.mark.parametrize(
    ("setting", "filled"),
    [
        (OFF, OFF),
        (SpecSetting(off=True, algorithm="EAGLE", num_steps=3), OFF),
        (spec(3, algorithm=""), spec(3, 1, 4)),
        (spec(3, algorithm="eagle"), spec(3, 1, 4, "EAGLE")),
        (spec(3, 1, 9), spec(3, 1, 4)),
        (spec(3, 4), spec(3, 4, 13)),
        (spec(3, 4, 8), spec(3, 4, 8)),
        (spec(), spec()),
        (spec(0, 1), spec(0, 1)),
        (spec(3, 4, algorithm="STANDALONE"), spec(3, 4, 13, "STANDALONE")),
        (spec(0, 0, 8, "NGRAM"), spec(0, 0, 8, "NGRAM")),
        (spec(3, 0, 0, "NGRAM"), spec(3, 0, 0, "NGRAM")),
        (spec(3, adaptive=True), spec(3, 1, 4, adaptive=True)),
    ],
)
def test_what_sglang_fills_in(setting: SpecSetting, filled: SpecSetting) -> None:
    assert normalised(setting, spec(1)) == filled


NUMBERS = "--speculative-num-steps {} --speculative-eagle-topk {} --speculative-num-draft-tokens {}"


@pytest.mark.parametrize(
    ("flags", "setting", "changed"),
    [
        ("--tp 4", spec(2), f"--tp 4 {NEXTN} {NUMBERS.format(2, 1, 3)}"),
        (
            f"{FULL} --tp 4",
            spec(2, algorithm=""),
            f"--tp 4 --speculative-algorithm EAGLE {NUMBERS.format(2, 1, 3)}",
        ),
        (f"{FULL} --tp 4", OFF, "--tp 4"),
        (f"{FULL} --tp 4", spec(), f"--tp 4 {NEXTN}"),
        (f"--a {OTHER} {FULL}", spec(1), f"--a {OTHER} {NEXTN} {NUMBERS.format(1, 1, 2)}"),
        (f"--a {OTHER} --speculative-draft-model /d {FULL} --b", OFF, "--a --b"),
        ("--speculative-eagle 2 --speculative-num-s=3 --x", OFF, "--x"),
        (
            "--no-speculative-enable-w4a4-mxfp4-megamoe --x --speculative-use-rejection --y",
            OFF,
            "--x --y",
        ),
        ("--speculative-new-thing 3 --speculative-new-switch --x", OFF, "--x"),
        ("--speculative-new-thing 3 --x", spec(), f"--speculative-new-thing 3 --x {NEXTN}"),
        ("--speculative-adaptive --x", spec(), f"--x {NEXTN}"),
        ("--x", spec(adaptive=True), f"--x {NEXTN} --speculative-adaptive"),
        ("--max-running-requests 9 --max-running=8 --x", OFF, "--x"),
        ("--max-total-tokens 9", OFF, "--max-total-tokens 9"),
    ],
)
def test_flags_with_another_setting(flags: str, setting: SpecSetting, changed: str) -> None:
    words = with_setting(flags.split(), setting, current_algorithm="EAGLE", max_running_requests=64)

    assert words == [*changed.split(), "--max-running-requests", "64"]


def test_a_setting_without_an_algorithm_cannot_be_set() -> None:
    with pytest.raises(BadInput, match="no algorithm is known"):
        with_setting([], spec(2, algorithm=""), current_algorithm="", max_running_requests=1)


RESOLVED: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_adaptive": False,
    "max_running_requests": 64,
    "attention_backend": "fa3",
    "page_size": 1,
    "enable_dp_attention": False,
    "mamba_track_interval": 256,
}
NONE = {
    **RESOLVED,
    "speculative_algorithm": None,
    "speculative_num_steps": None,
    "speculative_eagle_topk": None,
    "speculative_num_draft_tokens": None,
}


@pytest.mark.parametrize(
    ("setting", "resolved", "sentence"),
    [
        (spec(3), {}, ""),
        (spec(0, 1), {}, "without steps"),
        (spec(0, 0, 4), {}, "without steps"),
        (spec(0, 1, adaptive=True), {}, ""),
        (spec(0, 1, 2, adaptive=True), {}, "without steps"),
        (spec(2, 2, 6), {}, "6 draft tokens are more than steps x top k [+] 1 = 5"),
        (spec(2, 2, 5), {}, ""),
        (spec(2, 2, 1), {}, "one draft token"),
        (spec(2, 2), {"attention_backend": "trtllm_mha"}, "trtllm_mha"),
        (spec(2, 2), {"decode_attention_backend": "trtllm_mha"}, "trtllm_mha"),
        (spec(2, 1), {"attention_backend": "trtllm_mha"}, ""),
        (spec(2, 2), {"page_size": 64, "attention_backend": "flashmla"}, "pages of 64 tokens"),
        (spec(2, 2), {"page_size": 64, "attention_backend": "flashinfer"}, ""),
        (spec(2, 1), {"page_size": 64, "attention_backend": "flashmla"}, ""),
        (spec(2, 2), {"speculative_use_rejection_sampling": True}, "rejection sampling"),
        (spec(2, 1), {"speculative_use_rejection_sampling": True}, ""),
        (spec(3, adaptive=True), {}, ""),
        (spec(2, adaptive=True), {}, "1, 3, 5 or 7 steps, not with 2"),
        (spec(3, 2, adaptive=True), {}, "top k 1 only"),
        (spec(3, adaptive=True), {"enable_dp_attention": True}, "attention DP"),
        (spec(3, adaptive=True), {"enable_multi_layer_eagle": True}, "multi-layer"),
        (spec(3, 0, 0, "NGRAM", adaptive=False), {}, "do not apply to NGRAM"),
        (spec(0, 0, 8, "NGRAM"), {}, ""),
        (spec(0, 0, 8, "NGRAM"), {"enable_dp_attention": True}, "attention DP"),
        (spec(0, 0, 0, "NGRAM", adaptive=True), {}, "not with NGRAM"),
        (spec(3, algorithm="EAGLE3"), {}, "EAGLE3 needs a draft model"),
        (spec(3, algorithm="STANDALONE"), {}, "STANDALONE needs a draft model"),
        (spec(3, algorithm="EAGLE"), {}, ""),
        (spec(63), {"mamba_track_interval": 32}, "64 draft tokens are more than mamba"),
        (spec(3), {"mamba_track_interval": 4}, ""),
        (OFF, {"enable_dp_attention": True}, ""),
    ],
)
def test_what_sglang_would_refuse(
    setting: SpecSetting, resolved: dict[str, Any], sentence: str
) -> None:
    why = refusal(setting, FULL.split(), {**RESOLVED, **resolved})

    assert bool(why) == bool(sentence)
    assert why == "" or re.search(sentence, why)


@pytest.mark.parametrize(
    ("flags", "setting", "sentence"),
    [
        ("", spec(3, algorithm=""), "must name one"),
        ("", spec(3, algorithm="EAGLE"), "EAGLE needs a draft model"),
        ("", spec(3), ""),
        ("--speculative-draft-model-path /d", spec(3, algorithm="EAGLE"), ""),
        (
            "--speculative-draft-model /d --speculative-algorithm EAGLE3",
            spec(3),
            "for EAGLE3, not for NEXTN",
        ),
        ("--speculative-draft-model /d --speculative-algorithm EAGLE", spec(3), ""),
        (
            "--speculative-adaptive-config /c --speculative-algorithm NEXTN",
            spec(2, adaptive=True),
            "",
        ),
    ],
)
def test_what_the_units_flags_forbid(flags: str, setting: SpecSetting, sentence: str) -> None:
    why = refusal(setting, flags.split(), RESOLVED)

    assert sentence in why
    assert bool(sentence) == bool(why)


def names(found: list[SpecSetting]) -> list[str]:
    return [str(setting) for setting in found]


def test_trials_of_the_usual_plan() -> None:
    found, refused = trials(SpecDecodePlan(), spec(3, 1, 4), FULL.split(), RESOLVED)

    assert names(found) == ["NEXTN 3/1/4", "off", "NEXTN 1/1/2", "NEXTN 2/1/3", "NEXTN 4/1/5"]
    assert refused == {}


def test_the_servers_own_choice_is_the_same_as_its_numbers() -> None:
    found, _ = trials(SpecDecodePlan(), spec(), NEXTN.split(), RESOLVED)

    assert names(found) == ["NEXTN 0/0/0", "off", "NEXTN 1/1/2", "NEXTN 2/1/3", "NEXTN 4/1/5"]


def test_settings_that_start_the_same_server_are_tried_once() -> None:
    plan = SpecDecodePlan(
        settings=[
            spec(2, 1, 8),
            spec(2),
            spec(2, algorithm="EAGLE"),
            spec(2, algorithm=""),
            OFF,
            spec(2, 2, 4),
            spec(2, adaptive=True),
            spec(1, adaptive=True),
            spec(0, 1),
        ]
    )
    found, refused = trials(plan, spec(3, 1, 4), FULL.split(), RESOLVED)

    assert names(found) == [
        "NEXTN 3/1/4",
        "off",
        "NEXTN 2/1/3",
        "NEXTN 2/2/4",
        "NEXTN 1/1/2 adaptive",
    ]
    assert list(refused) == ["NEXTN 0/1/0", "NEXTN 2/1/3 adaptive"]


def test_a_server_without_speculation_is_tried_as_it_is_and_with_what_has_a_name() -> None:
    plan = SpecDecodePlan(settings=[spec(2, algorithm=""), spec(1), OFF])
    found, refused = trials(plan, OFF, [], NONE)

    assert names(found) == ["off", "NEXTN 1/1/2"]
    assert list(refused) == ["? 2/0/0"]
    assert "must name one" in refused["? 2/0/0"]


@pytest.mark.parametrize("resolved", [NONE, {}, {**RESOLVED, "speculative_num_steps": 5}])
def test_a_server_that_does_not_run_as_its_flags_say(resolved: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="does not run as its flags say") as caught:
        trials(SpecDecodePlan(), spec(3, 1, 4), FULL.split(), resolved)

    assert "--config" in caught.value.remedy


def test_the_present_setting_is_never_refused() -> None:
    current = spec(3, 1, 4, adaptive=False)
    odd = {**RESOLVED, "mamba_track_interval": 2}
    found, refused = trials(SpecDecodePlan(settings=[current]), current, FULL.split(), odd)

    assert (names(found), refused) == (["NEXTN 3/1/4", "off"], {})


def test_flags_in_a_file_of_their_own_are_noticed() -> None:
    with pytest.raises(BadInput, match="speculative_algorithm should be none, and is 'EAGLE'"):
        trials(SpecDecodePlan(), OFF, ["--config", "/x"], RESOLVED)


@pytest.mark.parametrize(
    ("setting", "resolved", "differing"),
    [
        (spec(3, 1, 4), {}, []),
        (spec(3), {}, []),
        (spec(), {}, []),
        (spec(3, algorithm="EAGLE"), {}, []),
        (spec(3), {"speculative_algorithm": "FROZEN_KV_MTP"}, []),
        (spec(3), {"speculative_algorithm": "EAGLE3"}, ["speculative_algorithm"]),
        (spec(3, algorithm="EAGLE3"), {}, ["speculative_algorithm"]),
        (spec(2), {}, ["speculative_num_steps", "speculative_num_draft_tokens"]),
        (spec(3, 2, 4), {}, ["speculative_eagle_topk"]),
        (
            spec(1),
            {"speculative_num_steps": True, "speculative_num_draft_tokens": 2},
            ["speculative_num_steps"],
        ),
        (spec(3, adaptive=True), {}, ["speculative_adaptive"]),
        (spec(3, adaptive=True), {"speculative_adaptive": True, "speculative_num_steps": 1}, []),
        (spec(3), {"speculative_adaptive": True}, ["speculative_adaptive"]),
        (spec(3), {"max_running_requests": 48}, ["max_running_requests"]),
        (OFF, {}, ["speculative_algorithm"]),
        (OFF, {"speculative_algorithm": None}, []),
    ],
)
def test_what_runs_is_compared_with_what_was_asked_for(
    setting: SpecSetting, resolved: dict[str, Any], differing: list[str]
) -> None:
    found = same_server(setting, {**RESOLVED, **resolved}, max_running_requests=64)

    assert [sentence.split()[0] for sentence in found] == differing


@pytest.mark.parametrize("setting", [OFF, spec(), spec(3)])
def test_an_answer_without_arguments_proves_nothing(setting: SpecSetting) -> None:
    found = same_server(setting, {}, max_running_requests=64)

    assert all("does not say" in sentence for sentence in found)
    assert len(found) >= 2


# Any flags.

WORD = st.sampled_from(
    [
        *(
            "--speculative-num-steps",
            "--speculative-num-steps=3",
            "3",
            "--tp",
            "-1",
            "a b",
            "--s p",
        ),
        *("--speculative-eagle", "--speculative-adaptive", "--speculative-x", "NEXTN", "", "-"),
        *("--speculative-algorithm", "--max-running-requests", "--no-speculative-x", "--"),
        "--speculative-draft-model-path",
    ]
)
WORDS = st.lists(st.one_of(WORD, st.text(max_size=5)), max_size=8)
SETTINGS = st.builds(
    spec,
    st.integers(0, 8),
    st.integers(0, 4),
    st.integers(0, 16),
    st.sampled_from(["", "NEXTN", "EAGLE", "EAGLE3", "STANDALONE", "NGRAM"]),
    adaptive=st.booleans(),
)


@always(words=WORDS, setting=st.one_of(st.just(OFF), SETTINGS))
def test_what_is_set_is_read_again(words: list[str], setting: SpecSetting) -> None:
    try:
        parts = list(split_flags(words))
        changed = with_setting(words, setting, current_algorithm="NEXTN", max_running_requests=7)
    except BadInput:
        return
    asked = normalised(setting, spec())

    assert [word for part in parts for word in part.words] == words
    assert read_flags(changed) == asked
    assert value_of(changed, "--max-running-requests") == "7"
    assert changed == with_setting(
        changed, setting, current_algorithm="NEXTN", max_running_requests=7
    )
    assert normalised(asked, spec()) == asked
    if setting.off:
        assert not any(word.startswith("--speculative") for word in changed)


@always(
    settings=st.lists(st.one_of(st.just(OFF), SETTINGS), max_size=6),
    flags=st.sampled_from(["", NEXTN, FULL]),
)
def test_no_trial_is_refused_or_double(settings: list[SpecSetting], flags: str) -> None:
    current = read_flags(flags.split())
    resolved = NONE if current.off else RESOLVED
    found, refused = trials(SpecDecodePlan(settings=settings), current, flags.split(), resolved)

    assert found[0] == normalised(current, current)
    assert names(found).count("off") == 1
    assert len(set(names(found))) == len(found)
    assert not set(names(found)) & set(refused)
    assert all(refused.values())
    assert not any(refusal(setting, flags.split(), resolved) for setting in found)
