"""MoE kernel configs as arms: no size gets worse, and each rank must say which file it uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_reclaim.moeconfigs import GRID, Row, Table, chosen
from gpu_reclaim.moefound import PRESENT, TUNED, MoeFound
from gpu_reclaim.moepreflight import (
    LOG_PAUSE_S,
    LOG_TRIES,
    MoePreflight,
    moe_trials,
    overlay_script,
    tuned_table,
)
from gpu_reclaim.overlays import drop_in
from gpu_reclaim.transport.scripted import Answer
from unit.moe_host import (
    GOOD,
    NAME,
    PACKAGE,
    PLAN,
    defaults,
    file_of,
    info,
    logged,
    moe_found,
    moe_scene,
    path_of,
    script_answer,
    size,
    with_file,
    without_file,
)
from unit.tuned import UNIT

LOG = "read its log"
FILES = {"a.json": file_of(), "b.json": file_of(defaults())}
TRIED = PLAN.model_copy(update={"candidates": [f"/configs/{x}" for x in FILES]})
OVERLAYS = f"/var/lib/gpu-reclaim-moe/{UNIT}"


def found(**more: Any) -> MoeFound:
    return replace(moe_found(plan=TRIED, files=FILES), **more)


MOE = found()
"""To be tuned for 4, 64 and 8192 tokens; `a.json` is another table, `b.json` what is in use."""


@pytest.fixture
def moe() -> MoeFound:
    return MOE


# No size gets worse.


def row(stages: int) -> Row:
    return {**GOOD[1], "num_stages": stages}


TABLES = st.dictionaries(st.integers(1, 10_000), st.integers(1, 9).map(row), min_size=1)


@given(TABLES, st.sets(st.integers(1, 10_000), min_size=1, max_size=5))
def test_a_size_that_was_not_tuned_is_served_as_before(before: Table, tuned: set[int]) -> None:
    moe = replace(MOE, before=before, sizes=tuple(tuned))
    made = tuned_table(moe, [size(m) for m in tuned])

    for tokens in {*GRID, *before} - tuned:
        assert chosen(made, tokens) == chosen(before, tokens)
    for tokens in tuned:
        assert chosen(made, tokens) == size(tokens).row


def test_only_sizes_that_were_found_are_of_the_table(moe: MoeFound) -> None:
    made = tuned_table(moe, [size(4), size(64, "out of memory"), size(2048)])

    assert made[4] == size(4).row
    # 2048 belongs to an earlier plan; 64 failed.
    assert (made[64], made[2048]) == (defaults()[64], defaults()[2048])
    assert set(made) == {*GRID}


@pytest.mark.parametrize("sizes", [[], [size(64, "no")], [size(2048)]])
def test_nothing_was_found(moe: MoeFound, sizes: list[Any]) -> None:
    assert tuned_table(moe, sizes) == {}
    assert TUNED not in moe_trials(moe, sizes).arms


# The arms.


def test_the_arms(moe: MoeFound) -> None:
    before = moe_trials(moe, [size(4), size(64)])

    # The other candidate is what is in use.
    assert before.arms == (PRESENT, TUNED, "a.json")
    assert before.current == PRESENT
    assert before.tables["a.json"] == GOOD
    assert set(before.folders) == {TUNED, "a.json"}
    assert all(path.startswith(f"{OVERLAYS}/") for path in before.folders.values())
    assert before.place.rpartition("/")[0] == moe.place.rpartition("/")[0]
    assert before.place != moe.place


def test_rows_that_are_those_in_use_are_no_arm(moe: MoeFound) -> None:
    same = size(4, row=dict(defaults()[4]))
    assert moe_trials(moe, [same]).arms == (PRESENT, "a.json")


def folder(moe: MoeFound, *sizes: int) -> str:
    return moe_trials(moe, [size(m) for m in sizes or (4,)]).folders[TUNED]


CHANGES: dict[str, dict[str, Any]] = {
    "base": {"base": "/other"},
    "Triton": {"triton": "3.7.0"},
    "name": {"name": replace(NAME, dtype="fp8_w8a8")},
    "release": {"facts": replace(MOE.facts, sglang="0.5.23")},
    "before": {"before": GOOD},
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_overlays_name_goes_by_all_that_is_in_it(moe: MoeFound, name: str) -> None:
    assert folder(replace(moe, **CHANGES[name])) != folder(moe)


def test_it_goes_by_nothing_else(moe: MoeFound) -> None:
    assert folder(moe) == folder(replace(moe, place="/x/y", refused={"c": "no"}))
    assert folder(moe, 4) != folder(moe, 4, 64)


PARTS: dict[str, MoeFound] = {
    "other arms": found(candidates={}),
    "in use": found(before=GOOD),
    "name": found(name=replace(NAME, dtype="fp8_w8a8")),
    "Triton": found(triton="3.7.0"),
    "command line": found(found=replace(MOE.found, info={**MOE.found.info, "launch_command": "x"})),
    "GPUs": found(found=replace(MOE.found, parts={**MOE.found.parts, "gpus": ["L40S"]})),
}


@pytest.mark.parametrize("name", PARTS)
def test_measurements_of_something_else_are_not_compared(moe: MoeFound, name: str) -> None:
    assert moe_trials(PARTS[name], [size(4)]).place != moe_trials(moe, [size(4)]).place


def test_no_key_is_told(moe: MoeFound) -> None:
    before = moe_trials(moe, [size(4)])

    assert "sk-secret" not in repr(before) + repr(before.parts) + before.drop_in(TUNED)
    assert "sk-secret" not in overlay_script(before, TUNED)


def test_drop_ins(moe: MoeFound) -> None:
    before = moe_trials(moe, [size(4)])
    path = before.folders[TUNED]

    assert before.drop_in(PRESENT) == "[Service]\n"
    assert before.drop_in(TUNED) == drop_in(UNIT, path)
    assert before.drop_in(TUNED).endswith(
        f'[Service]\nEnvironment="SGLANG_MOE_CONFIG_DIR={path}"\n'
    )
    assert f"remove this file and {path}" in before.drop_in(TUNED)
    assert before.trial_flags == {
        PRESENT: [],
        TUNED: [f"SGLANG_MOE_CONFIG_DIR={path}"],
        "a.json": [f"SGLANG_MOE_CONFIG_DIR={before.folders['a.json']}"],
    }
    file = f"/systemd/system/{UNIT}.d/zz-gpu-reclaim-moe.conf"
    assert before.tuned_file(lasting=True) == f"/etc{file}"
    assert before.tuned_file(lasting=False) == f"/run{file}"


def test_what_is_written_on_the_host(moe: MoeFound) -> None:
    before = moe_trials(moe, [size(4)])
    text = overlay_script(before, "a.json")

    assert f"TARGET={before.folders['a.json']} BASE={PACKAGE} TRITON=3_6_0" in text
    assert file_of() in text


# The proof.


def trial(moe: MoeFound, *said: Answer, arm: str = TUNED, **more: object) -> tuple[list[str], int]:
    """What is wrong with a server that says so of its configs, and how often it was waited for."""
    made = moe_scene({LOG: list(said), **info(**more)})
    wrong = trials(moe).wrong_on_trial(made.session, arm)
    return wrong, len(made.clock.sleeps)


def trials(moe: MoeFound) -> MoePreflight:
    return moe_trials(moe, [size(4)])


def base(moe: MoeFound, arm: str = TUNED) -> str:
    return trials(moe).folders[arm]


def ours(moe: MoeFound, *ranks: int, arm: str = TUNED) -> list[str]:
    return [with_file(rank=rank, base=base(moe, arm)) for rank in ranks]


def test_each_rank_uses_our_file(moe: MoeFound) -> None:
    draft = without_file(replace(NAME, experts=64), base=base(moe))
    down = without_file(replace(NAME, down=True), base=base(moe))

    assert trial(moe, logged(*ours(moe, 0, 1, 2, 3), draft, down)) == ([], 0)
    assert trial(moe, logged(*ours(moe, 3, 1, 0, 2, arm="a.json")), arm="a.json") == ([], 0)


def test_a_journal_that_lags_is_waited_for(moe: MoeFound) -> None:
    said = [logged(), logged(*ours(moe, 0, 2)), logged(*ours(moe, 0, 1, 2, 3))]

    assert trial(moe, *said) == ([], 2)
    assert LOG_PAUSE_S > 0


WRONG: dict[str, tuple[list[str], list[str]]] = {
    "nothing": ([], [f"rank TP{n} tells of no config file" for n in range(4)]),
    "one rank is missing": (["@0", "@1", "@3"], ["rank TP2 tells of no config file"]),
    "one rank has another": (
        ["@0", "@1", "@2", with_file(rank=3)],
        [f"rank TP3 tells of {path_of()}"],
    ),
    "one rank uses its default": (
        ["@0", without_file(rank=1), "@2", "@3"],
        [f"rank TP1 tells of no file, looking for {path_of()}"],
    ),
    "one has both": (
        ["@0", "@1", "@2", "@3", with_file(rank=3)],
        [f"rank TP3 tells of {path_of()} and @"],
    ),
    "a rank too many": (["@0", "@1", "@2", "@3", "@4"], ["rank TP4 tells of @"]),
    "without ranks": (
        [with_file().replace(" TP0", "")],
        [
            "its log tells of " + path_of(),
            *(f"rank TP{n} tells of no config file" for n in range(4)),
        ],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_rank_that_does_not(moe: MoeFound, name: str) -> None:
    said, words = WRONG[name]
    lines = [ours(moe, int(x[1:]))[0] if x.startswith("@") else x for x in said]
    mine = path_of(base=base(moe))
    wrong, waits = trial(moe, logged(*lines))

    assert sorted(wrong) == sorted(x.replace("@", mine) for x in words)
    assert waits == LOG_TRIES - 1


def test_the_present_arm_says_what_it_said_before(moe: MoeFound) -> None:
    before = [without_file(rank=rank) for rank in range(4)]

    assert trial(moe, logged(*before), arm=PRESENT) == ([], 0)
    wrong, _ = trial(moe, logged(*ours(moe, 0, 1, 2, 3)), arm=PRESENT)
    assert wrong == [f"rank TP{n} tells of {path_of(base=base(moe))}" for n in range(4)]


def test_a_server_that_is_another_besides(moe: MoeFound) -> None:
    wrong, _ = trial(moe, logged(*ours(moe, 0, 1, 2, 3)), tp_size=2)

    assert wrong == ["tp_size was 4 and is 2"]


def test_afterwards_it_is_proven_in_the_same_way(moe: MoeFound) -> None:
    made = moe_scene({LOG: logged(*ours(moe, 0, 1, 2))})

    assert trials(moe).wrong_now(made.session, TUNED) == ["rank TP3 tells of no config file"]
    assert made.writes == []


def test_a_script_without_a_release_is_one_too(moe: MoeFound) -> None:
    told = {"look for the tuning script": script_answer(sglang="")}
    assert moe_trials(moe_found(told), [size(4)]).arms == (PRESENT, TUNED)
