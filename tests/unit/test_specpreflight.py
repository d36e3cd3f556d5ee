"""All that can refuse a tuning refuses it before the server is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gpu_reclaim.errors import BadAnswer, BadInput, LinkLost
from gpu_reclaim.finding import START_S
from gpu_reclaim.logbook import key_of
from gpu_reclaim.plans import SpecDecodePlan, SpecSetting
from gpu_reclaim.preflight import load_of
from gpu_reclaim.specpreflight import SpecPreflight, spec_preflight
from gpu_reclaim.transport.scripted import Answer
from unit.scenery import Unit, scene
from unit.tuned import (
    FLAGS,
    INFO,
    KEY,
    LOADS,
    PLAN,
    SERVER,
    TOOL,
    UNIT,
    TunedHost,
    answered,
    health,
    setting,
    shown,
    tuned,
)

Told = Mapping[str, Answer | list[Answer]]


def found(
    told: Told | None = None, plan: SpecDecodePlan = PLAN, server: Any = SERVER
) -> SpecPreflight:
    return spec_preflight(tuned(told).session, server, plan)


def info(**more: object) -> Told:
    """The server says something else of itself; `...` leaves it out."""
    values = {name: value for name, value in {**INFO, **more}.items() if value is not ...}
    return {"ask for its arguments": answered((200, values))}


def flags(*more: str) -> Told:
    return {"read its command line": shown([*FLAGS, *more])}


def test_all_that_is_found() -> None:
    made = tuned(info(startup_time=71.5))
    seen = spec_preflight(made.session, SERVER, PLAN)

    assert list(seen.settings) == [seen.current, "off", "NEXTN 1/1/2", "NEXTN 2/1/3", "NEXTN 4/1/5"]
    assert (seen.current, seen.refused) == ("NEXTN 3/1/4", {})
    assert (seen.found.tool, seen.found.model, seen.running, seen.found.start_s) == (
        TOOL,
        "/models/glm",
        64,
        71.5,
    )
    assert seen.command.flags == FLAGS
    assert seen.place == f"/var/lib/gpu-reclaim-tuning/{UNIT}/{key_of(seen.parts)}"
    assert made.writes == []


def test_nothing_is_written() -> None:
    made = tuned()
    spec_preflight(made.session, SERVER, PLAN)

    assert [script.name for script in made.direct.asked if script.writes] == []


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (
            {"ask for health": health(LOADS)},
            f"{UNIT} does not serve at http://127.0.0.1:30000: HTTP",
        ),
        (
            {"ask for health": health((0, "refused"))},
            r"does not serve at .*: no answer \(refused\)",
        ),
        (
            {"ask for its arguments": answered((401, {"error": "no"}))},
            "does not answer /server_info",
        ),
        ({"ask for its arguments": answered((0, "x"))}, "does not answer /server_info"),
        ({"read its command line": shown(reload="yes")}, "files were changed since"),
        (info(speculative_num_steps=5), "does not run as its flags say"),
        (info(model_path=...), "does not say where its model is"),
        (info(model_path=["x"]), "does not say where its model is"),
        ({"look at the prompts": {"prompts": "prompts 127"}}, "127 conversations of .* needs 128"),
        ({"look at the prompts": {"prompts": "why no"}}, "cannot be read as sharegpt: no"),
        (
            {"load the tokenizer": {"tokenizer": "why not there"}},
            "cannot load the tokenizer of /models/glm: not there",
        ),
        ({"look for the benchmark": {"tool": "said no"}}, "cannot run sglang's benchmark: no"),
        ({"look for the benchmark": {"tool": "module a"}}, "a there does not know --backend"),
    ],
)
def test_what_is_refused(told: Told, words: str) -> None:
    made = tuned(told)
    with pytest.raises(BadInput, match=words) as caught:
        spec_preflight(made.session, SERVER, PLAN)

    assert caught.value.remedy
    assert KEY not in f"{caught.value}"
    assert made.writes == []


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ({"ask for health": {"health": ""}}, BadAnswer),
        ({"read its command line": {"unit": ""}}, BadAnswer),
        ({"look for the benchmark": LinkLost("gone")}, LinkLost),
    ],
)
def test_what_is_nobodys_fault(told: Told, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        found(told)


def test_a_unit_of_another_host() -> None:
    made = tuned()
    with pytest.raises(BadInput, match=r"other\.service is none of its units \(sglang\.service\)"):
        spec_preflight(made.session, replace(SERVER, unit="other.service"), PLAN)

    assert made.asked == ["read the GPUs"]


@pytest.mark.parametrize(
    ("path", "more", "model"),
    [
        ("/own", {"tokenizer_path": "/t"}, "/own"),
        ("", {"tokenizer_path": "/t"}, "/t"),
        ("", {"tokenizer_path": None}, "/models/glm"),
    ],
)
def test_whose_tokenizer(path: str, more: dict[str, object], model: str) -> None:
    assert found(info(**more), server=replace(SERVER, model_path=path)).found.model == model


@pytest.mark.parametrize(
    ("asked", "runs", "running"),
    [(0, 48, 48), (96, 48, 96), (96, None, 96)],
)
def test_running_requests(asked: int, runs: object, running: int) -> None:
    plan = PLAN.model_copy(update={"max_running_requests": asked})
    seen = found(info(max_running_requests=runs), plan)

    assert seen.running == running
    assert all(
        x[-2:] == ["--max-running-requests", f"{running}"] for x in seen.trial_flags.values()
    )


@pytest.mark.parametrize(
    ("told", "plan"),
    [
        ({}, PLAN.model_copy(update={"settings": [setting(7)]})),
        (
            {
                "read its command line": shown(
                    [*FLAGS[:6], "--speculative-num-steps", "2", "--speculative-eagle-topk", "1"]
                ),
                **info(speculative_num_steps=2, speculative_num_draft_tokens=3),
            },
            PLAN,
        ),
    ],
)
def test_other_settings_begin_a_logbook_of_their_own(told: Told, plan: SpecDecodePlan) -> None:
    """A round's visits are compared with each other: they must have been made together."""
    assert found(told, plan).parts["settings"] != found().parts["settings"]


EFFECTIVE = "effective_max_running_requests_per_dp"


@pytest.mark.parametrize(
    ("ranks", "running"),
    [
        ({"dp_size": 4, "enable_dp_attention": True}, 256),
        ({"dp_size": 4, "enable_dp_attention": False}, 64),
        ({"dp_size": None, "enable_dp_attention": True}, 64),
    ],
)
def test_running_requests_of_all_ranks(ranks: dict[str, object], running: int) -> None:
    """SGLang divides the flag among the ranks of DP attention, and tells each rank's share."""
    states = [{EFFECTIVE: 64} for _ in range(4)]
    told = info(max_running_requests=None, internal_states=states, **ranks)
    assert found(told).running == running


@pytest.mark.parametrize("runs", [None, True, 0, "48"])
def test_running_requests_nobody_gave(runs: object) -> None:
    """The server's own choice is kept; a guess would cap it for good."""
    seen = found(info(max_running_requests=runs, internal_states=[{EFFECTIVE: 2048}]))
    assert seen.running == 2048

    unknown: tuple[object, ...] = ([], [{}], [{EFFECTIVE: None}], None, [3])
    for states in unknown:
        with pytest.raises(BadInput, match="does not say how many requests"):
            found(info(max_running_requests=runs, internal_states=states))


@pytest.mark.parametrize("name", ["zz-sglang.conf", "zzz.conf", "zzzz-gpu-reclaim-trial.conf"])
def test_a_drop_in_that_would_come_after_ours(name: str) -> None:
    with pytest.raises(BadInput, match=f"is in {name}, which systemd reads after"):
        found(
            {"read its command line": shown(FLAGS, drop_in=f"/etc/systemd/system/{UNIT}.d/{name}")}
        )


def test_an_earlier_winner_would_hide_one_until_a_reboot() -> None:
    there = f"/etc/systemd/system/{UNIT}.d/zz-gpu-reclaim.conf"
    told = {"read its command line": shown(FLAGS, drop_in=there)}
    with pytest.raises(BadInput, match="would hide a winner's file in /run"):
        found(told, PLAN.model_copy(update={"persist": False}))
    assert found(told).command.file == there


def test_where_etc_cannot_be_written_to_nothing_is_measured_in_vain() -> None:
    told = {"read its command line": shown(FLAGS, fixed=True)}
    with pytest.raises(BadInput, match="/etc/systemd/system cannot be written to"):
        found(told)
    for change in ({"persist": False}, {"apply": "never"}, {"mode": "plan"}):
        assert found(told, PLAN.model_copy(update=change)).current


def test_the_units_own_name_is_used() -> None:
    host = TunedHost(units={UNIT: Unit(names="llm.service")})
    made = scene(host, units=["sglang"])
    assert (
        spec_preflight(made.session, replace(SERVER, unit="llm.service"), PLAN).server.unit == UNIT
    )


@pytest.mark.parametrize("took", [None, 0, -1, "71"])
def test_a_start_that_took_nobody_knows_how_long(took: object) -> None:
    assert found(info(startup_time=took)).found.start_s == START_S


def test_settings_that_are_refused_are_named() -> None:
    plan = PLAN.model_copy(update={"settings": [setting(1), SpecSetting(eagle_topk=4)]})
    seen = found(plan=plan)

    assert list(seen.settings) == ["NEXTN 3/1/4", "off", "NEXTN 1/1/2"]
    assert list(seen.refused) == ["NEXTN 0/4/0"]


# What is compared with what.


KEYS: dict[str, tuple[Told, SpecDecodePlan]] = {
    "version": (info(version="0.5.10"), PLAN),
    "model": (info(model_path="/models/other"), PLAN),
    "flags": (flags("--mem-fraction-static", "0.8"), PLAN),
    "draft model": (flags("--speculative-draft-model-path", "/models/draft"), PLAN),
    "running": (info(max_running_requests=48), PLAN),
    "by a configuration file": (info(attention_backend="triton"), PLAN),
    "by the environment": (info(kv_cache_dtype="fp8_e5m2"), PLAN),
    "by the server itself": (info(mem_fraction_static=0.8), PLAN),
    "data parallel": (info(enable_dp_attention=True), PLAN),
    "asked running": ({}, PLAN.model_copy(update={"max_running_requests": 32})),
    "prompts": ({"look at the prompts": {"prompts": "sum 9 456 /p\nprompts 999"}}, PLAN),
    "levels": ({}, PLAN.model_copy(update={"levels": [1, 8]})),
    "requests": ({}, PLAN.model_copy(update={"least_requests": 17})),
}


@pytest.mark.parametrize("name", KEYS)
def test_measurements_of_something_else_are_not_compared(name: str) -> None:
    told, plan = KEYS[name]

    assert found(told, plan).place != found().place


def test_measurements_on_other_gpus_are_not_compared() -> None:
    made = tuned()
    made.host.used = [0, 0]

    assert spec_preflight(made.session, SERVER, PLAN).place != found().place


@pytest.mark.parametrize(
    ("told", "plan"),
    [
        (info(startup_time=3, last_gen_throughput=9, random_seed=7, port=30001), PLAN),
        (info(attention_backend=["a", "list"]), PLAN),
        ({}, PLAN.model_copy(update={"rounds": 2, "min_gain_pct": 9, "apply": "never"})),
    ],
)
def test_what_decides_is_no_part_of_what_was_measured(told: Told, plan: SpecDecodePlan) -> None:
    """Nor is the present setting: a winner in place must not make what it won by unknown."""
    assert found(told, plan).place == found().place


def test_no_key_is_told() -> None:
    seen = found()

    assert KEY in seen.flags("off")
    assert KEY not in repr(seen) + repr(seen.parts) + repr(seen.trial_flags) + seen.place


def test_flags_of_a_trial() -> None:
    seen = found()
    running = ["--max-running-requests", "64"]

    assert seen.trial_flags["off"] == running
    assert seen.trial_flags["NEXTN 2/1/3"] == [
        *("--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2"),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3", *running),
    ]
    assert seen.flags("off") == ["--model-path", "/models/glm", "--api-key", KEY, *running]
    assert f"ExecStart={seen.command.head} --model-path /models/glm" in seen.drop_in("off")


def test_where_a_winners_file_is() -> None:
    name = f"systemd/system/{UNIT}.d/zz-gpu-reclaim.conf"

    assert found().tuned_file(lasting=True) == f"/etc/{name}"
    assert found().tuned_file(lasting=False) == f"/run/{name}"


def test_what_a_measurement_sends() -> None:
    load = load_of(found(), PLAN, 16, "x")

    assert (load.level, load.requests, load.name, load.model) == (16, 128, "x", "/models/glm")
    assert (load.folder, load.timeout_s, load.api_key) == (found().place, 1800, KEY)
