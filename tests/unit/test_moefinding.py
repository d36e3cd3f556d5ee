"""All that can refuse a tuning of MoE kernels refuses it before the server is touched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gpu_reclaim.commands import Section
from gpu_reclaim.errors import BadAnswer, BadInput, LinkLost
from gpu_reclaim.lease import MOE_FILE
from gpu_reclaim.moeconfigs import GRID, chosen
from gpu_reclaim.moefinding import moe_preflight
from gpu_reclaim.moelog import Lookup
from gpu_reclaim.moelooks import Device
from gpu_reclaim.moescript import NEEDED
from gpu_reclaim.moespace import SPACE, Shape, fitting
from gpu_reclaim.plans import MoeTunePlan
from gpu_reclaim.transport.scripted import Answer
from unit.moe_host import (
    BLOCKS,
    GOOD,
    GPU,
    NAME,
    PACKAGE,
    PLAN,
    ROW,
    SEARCH,
    SERVED,
    defaults,
    environment,
    file_of,
    gpus_answer,
    info,
    logged,
    moe_found,
    moe_scene,
    other_file,
    path_of,
    script_answer,
    shape_answer,
    with_file,
    without_file,
)
from unit.tuned import FLAGS, KEY, LOADS, UNIT, health, shown

Told = Mapping[str, Answer | list[Answer]]
LOG, SCRIPT, SHAPE_OF = "read its log", "look for the tuning script", "ask for the model's shape"
CARDS, ENV, ROWS = (
    "read what GPUs can do",
    "read a part of its environment",
    "ask for its default rows",
)
UNIT_OF, SEEN = "read its command line", "look what it sees"


def plan(**changes: Any) -> MoeTunePlan:
    return MoeTunePlan(**(PLAN.model_dump() | changes))


def test_all_that_is_found() -> None:
    made = moe_scene()
    seen = moe_preflight(made.session, SERVED, PLAN, [])

    assert made.writes == []
    assert (seen.name, seen.triton, seen.base) == (NAME, "3.6.0", PACKAGE)
    assert seen.lookups == tuple(
        Lookup("none", path_of(), "", NAME, f"TP{rank}") for rank in range(4)
    )
    assert seen.shape == Shape(256, 256, 4096, 8, None, "bfloat16", "Qwen3MoeForCausalLM")
    assert [x.index for x in seen.devices] == [0, 1, 2, 3]
    assert seen.devices[0] == Device(0, NAME.device, (12, 0))
    assert (seen.before, seen.candidates, seen.refused) == (defaults(), {}, {})
    assert (seen.model, seen.found.server.unit) == ("/models/glm", UNIT)
    assert seen.place.startswith(f"/var/lib/gpu-reclaim-tuning/{UNIT}/moe-")
    assert seen.overlays == f"/var/lib/gpu-reclaim-moe/{UNIT}"
    assert seen.facts.script == "/src/sglang/benchmark/kernels/fused_moe_triton/" + (
        "tuning_fused_moe_triton.py"
    )


def test_the_shape_is_asked_as_the_server_runs() -> None:
    told = {
        **info(tp_size=8, ep_size=2, disable_shared_experts_fusion=True),
        ENV: environment("HF_HOME=/it's here", "SGLANG_MOE_CONFIG_DIR=/o", of_unit="1"),
    }
    made = moe_scene(told)
    moe_preflight(made.session, SERVED, PLAN, [])
    body = next(x for x in made.direct.asked if x.name == SHAPE_OF).sections["shape"]

    for words in ('\\"tp_size\\": 8', '\\"ep_size\\": 2', 'fusion\\": true', "HF_HOME="):
        assert words in body
    assert "SGLANG_MOE_CONFIG_DIR" not in body


REFUSED: dict[str, tuple[Told, str]] = {
    "does not serve": ({"ask for health": health(LOADS)}, f"{UNIT} does not serve at"),
    "other runner": (
        info(moe_runner_backend="flashinfer_cutlass"),
        "runs its experts by flashinfer_cutlass, which reads no Triton configs",
    ),
    "deterministic": (
        info(enable_deterministic_inference=True),
        "runs with deterministic inference, which reads no configs",
    ),
    **{
        f"too quiet: {level}": (
            info(log_level=level),
            f"runs with --log-level {level}, so it does not say which configs it uses",
        )
        for level in ("warning", "error", "critical")
    },
    "one of several hosts": (info(nnodes=2), "is a part of a server on several hosts"),
    "somebody else's folder": (
        {LOG: logged(without_file(base="/o"))},
        f"looks for configs in /o, which is neither its package's folder \\({PACKAGE}\\) nor one",
    ),
    "a container": (
        {SEEN: {"seen": f"other {PACKAGE}/configs\nother /var/lib"}},
        f"{UNIT} does not see {PACKAGE}/configs and /var/lib as the host does",
    ),
    "another root": ({SEEN: {"seen": "other /var/lib"}}, "does not see /var/lib as the host does"),
    "no flag for channels": (
        {
            LOG: logged(without_file(replace(NAME, dtype="fp8_w8a8", per_channel=True))),
            SCRIPT: script_answer(without=["--per-channel-quant"]),
        },
        "does not know --per-channel-quant",
    ),
    "no flag for shared experts": (
        {
            **info(disable_shared_experts_fusion=True),
            SCRIPT: script_answer(without=["--disable-shared-experts-fusion"]),
        },
        "does not know --disable-shared-experts-fusion",
    ),
    "no line": (
        {LOG: logged("Decode batch")},
        r"has no line on MoE kernel configs, .* \(moe_runner_backend is auto\)",
    ),
    "no line and no word of the runner": (
        {LOG: logged(), **info(moe_runner_backend=...)},
        "moe_runner_backend is unknown",
    ),
    "only the down product": (
        {LOG: logged(without_file(replace(NAME, down=True)))},
        "has no line on MoE kernel configs",
    ),
    "no script": (
        {SCRIPT: script_answer(script="")},
        "/src/sglang has no tuning script for the fused MoE kernel",
    ),
    "skew": (
        {SCRIPT: script_answer(version="v0.5.13")},
        "the checkout is of SGLang 0.5.13, and the package that serves is 0.5.9",
    ),
    "a missing module": (
        {SCRIPT: script_answer(code="1", said="ModuleNotFoundError: No module named 'x'")},
        "does not run by the server's interpreter: ModuleNotFoundError: No module named 'x'",
    ),
    "missing flags": (
        {SCRIPT: script_answer(without=["--tune", "--batch-size"])},
        "the tuning script lacks --batch-size, --tune: its --help does not name them",
    ),
    "a script that cannot be run": (
        {SCRIPT: script_answer(without=NEEDED, code="127", said="python: not found")},
        r"lacks --model.*: python: not found",
    ),
    "upgraded since its start": (
        {SCRIPT: script_answer(sglang="0.5.10", version="v0.5.10")},
        "the server runs SGLang 0.5.9, and its interpreter has 0.5.10 now",
    ),
    "no shape": (
        {SHAPE_OF: {"shape": "said AttributeError: num_local_experts"}},
        "the tuning script cannot make out the model: .*AttributeError: num_local_experts",
    ),
    "other experts": (
        {SHAPE_OF: shape_answer(experts=257)},
        f"the server asks for {NAME}; the script would make a file for E=257,N=256, block shape "
        "None, which it would never read",
    ),
    "another shard": ({SHAPE_OF: shape_answer(shard=512)}, "a file for E=256,N=512"),
    "other blocks": (
        {SHAPE_OF: shape_answer(block_shape=[128, 128])},
        r"a file for E=256,N=256, block shape \(128, 128\)",
    ),
    "two number formats": (
        {LOG: logged(without_file(), without_file(replace(NAME, dtype="fp8_w8a8"), 1))},
        "the server asks for several files of that shape: E=256,N=256,.*, E=256,N=256,",
    ),
    "two folders": (
        {LOG: logged(without_file(), without_file(rank=1, base="/other"))},
        "the server asks for several files of that shape",
    ),
    "another Triton": (
        {SCRIPT: script_answer(triton="3.7.0")},
        "the server runs with Triton 3.6.0, and its interpreter has 3.7.0 now",
    ),
    "another GPU": (
        {CARDS: gpus_answer("NVIDIA H200", "NVIDIA L40S")},
        f"asks for a file for {NAME.device}, and the GPUs are NVIDIA_H200, NVIDIA_L40S",
    ),
    "no GPU": ({CARDS: gpus_answer()}, "and the GPUs are none"),
    "set elsewhere": (
        {ENV: environment("SGLANG_MOE_CONFIG_DIR=/o")},
        f"SGLANG_MOE_CONFIG_DIR of {UNIT} is set outside of its unit",
    ),
    "the file in use is gone": (
        {LOG: logged(with_file())},
        f"{path_of()}, which the server uses, cannot be read now",
    ),
    "no default rows": (
        {ROWS: {"rows": "said ModuleNotFoundError: there is no x"}},
        "what the server uses without a file cannot be asked: .*there is no x",
    ),
    "read-only": ({UNIT_OF: shown(fixed=True)}, "/etc/systemd/system cannot be written to"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    told, words = REFUSED[name]
    made = moe_scene(told)
    with pytest.raises(BadInput, match=words.replace("[", r"\[")) as caught:
        moe_preflight(made.session, SERVED, PLAN, [])

    assert caught.value.remedy
    assert KEY not in f"{caught.value}"
    assert made.writes == []


def test_no_checkout_is_named() -> None:
    made = moe_scene()
    with pytest.raises(BadInput, match="no checkout with SGLang's tuning script is named"):
        moe_preflight(made.session, replace(SERVED, sglang_source=""), PLAN, [])

    assert (made.writes, SCRIPT in made.asked) == ([], False)


@pytest.mark.parametrize("change", [{"persist": False}, {"apply": "never"}, {"mode": "plan"}])
def test_where_etc_cannot_be_written_to(change: dict[str, Any]) -> None:
    assert moe_found({UNIT_OF: shown(fixed=True)}, plan(**change)).name == NAME


def test_an_earlier_winner_would_hide_one_until_a_reboot() -> None:
    there = f"/etc/systemd/system/{UNIT}.d/{MOE_FILE}"
    told = {UNIT_OF: shown(FLAGS, drop_in=there)}
    with pytest.raises(BadInput, match="would hide a winner's file in /run"):
        moe_found(told, plan(persist=False))
    assert moe_found(told).name == NAME


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ({"ask for health": {"health": ""}}, BadAnswer),
        ({UNIT_OF: {"unit": ""}}, BadAnswer),
        ({LOG: LinkLost("gone")}, LinkLost),
    ],
)
def test_what_is_nobodys_fault(told: Told, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        moe_found(told)


FINE: dict[str, Told] = {
    "versions unknown": {SCRIPT: script_answer(sglang="", triton="", version="", exact="")},
    "a draft model of another shape": {
        LOG: logged(without_file(), without_file(replace(NAME, experts=64)))
    },
    "its down product too": {LOG: logged(without_file(), without_file(replace(NAME, down=True)))},
    "a runner by name": info(moe_runner_backend="triton"),
    "no runner is told": info(moe_runner_backend=...),
    "a folder of the unit's": {
        ENV: environment("SGLANG_MOE_CONFIG_DIR=/o", of_unit="1"),
        LOG: logged(without_file(base="/o")),
    },
    "a folder of the unit's, with a slash": {
        ENV: environment("SGLANG_MOE_CONFIG_DIR=/o/", of_unit="1"),
        LOG: logged(without_file(base="/o")),
    },
    "a package without a folder of configs": {
        SCRIPT: script_answer(SEARCH, configs=""),
        LOG: logged(without_file(base="/o")),
    },
    "it talks": info(log_level="info"),
    "on one host": info(nnodes=1),
    "blocks with a zero are none in a name": {SHAPE_OF: shape_answer(block_shape=[0, 128])},
    "GPUs of two kinds": {CARDS: gpus_answer("NVIDIA L40S", GPU)},
}


@pytest.mark.parametrize("name", FINE)
def test_what_speaks_against_nothing(name: str) -> None:
    seen = moe_found(FINE[name])

    assert {x.name for x in seen.lookups} == {NAME}
    assert {x.name for x in seen.devices} == {NAME.device}


def asked(body: str, word: str) -> int:
    """A number or a truth value that is asked for by that name."""
    found = re.findall(rf'\\"{word}\\": (\w+)', body)
    return {"true": 1, "false": 0}.get(found[0], -1)


BOTH = [0, 1]


@pytest.mark.parametrize(
    ("said", "answers", "fusions", "no_fusion"),
    [
        (False, [shape_answer()], [0], False),
        # The server may leave the fusion out by itself.
        (False, [shape_answer(experts=257), shape_answer()], BOTH, True),
        (False, [{"shape": "said KeyError: x"}, shape_answer()], BOTH, True),
        (True, [shape_answer()], [1], True),
    ],
)
def test_a_shared_expert_is_one_more_where_it_is_fused(
    said: bool, answers: list[Answer], fusions: list[int], no_fusion: bool
) -> None:
    made = moe_scene({**info(disable_shared_experts_fusion=said), SHAPE_OF: answers})
    seen = moe_preflight(made.session, SERVED, PLAN, [])

    bodies = [x.sections["shape"] for x in made.direct.asked if x.name == SHAPE_OF]
    assert [asked(x, "disable_shared_experts_fusion") for x in bodies] == fusions
    assert (seen.shape.experts, seen.no_fusion) == (256, no_fusion)
    words = seen.script(4, tune=True)
    assert ("--disable-shared-experts-fusion" in words) == no_fusion


@pytest.mark.parametrize(
    ("said", "answers", "words"),
    [
        (False, [shape_answer(experts=257), shape_answer(experts=258)], "a file for E=257"),
        (False, [shape_answer(experts=257), {"shape": "said no"}], "a file for E=257"),
        (False, [{"shape": "said no"}, shape_answer(experts=257)], "cannot make out the model"),
        (True, [shape_answer(experts=257), shape_answer()], "a file for E=257"),
    ],
)
def test_neither_with_nor_without_it(said: bool, answers: list[Answer], words: str) -> None:
    """What was found first is told: the flag is what the server was started with."""
    with pytest.raises(BadInput, match=words):
        moe_found({**info(disable_shared_experts_fusion=said), SHAPE_OF: answers})


@pytest.mark.parametrize(
    ("mode", "dtype", "refused"),
    [("kernels", "int8_w8a8", True), ("kernels", "fp8_w8a8", False), ("tune", "int8_w8a8", False)],
)
def test_kernels_that_the_script_times_without_configs(
    mode: str, dtype: str, refused: bool
) -> None:
    told = {LOG: logged(without_file(replace(NAME, dtype=dtype)))}
    if not refused:
        assert moe_found(told, plan(mode=mode)).name.dtype == dtype
        return
    with pytest.raises(BadInput, match="times int8_w8a8 kernels without their configs"):
        moe_found(told, plan(mode=mode))


def test_only_what_is_asked_of_the_script_must_be_known() -> None:
    quiet = ["--per-channel-quant", "--disable-shared-experts-fusion"]
    assert moe_found({SCRIPT: script_answer(without=quiet)}).name == NAME


def test_what_its_folders_are_is_asked_of_its_process() -> None:
    made = moe_scene()
    moe_preflight(made.session, SERVED, PLAN, [])
    body = next(x for x in made.direct.asked if x.name == SEEN).sections["seen"]

    assert f'root"{PACKAGE}/configs)' in body
    assert 'root"/var/lib)' in body


def test_only_the_gpus_of_the_policy_tune() -> None:
    assert [x.index for x in moe_found(gpus=[1, 3]).devices] == [1, 3]
    with pytest.raises(BadInput, match="and the GPUs are none"):
        moe_found(gpus=[7])


def test_the_file_in_use_is_what_is_better_than_the_default() -> None:
    made = moe_scene({LOG: logged(with_file())})
    made.host.files[path_of()] = file_of().encode()  # type: ignore[attr-defined]
    seen = moe_preflight(made.session, SERVED, PLAN, [])

    assert (seen.before, ROWS in made.asked) == (GOOD, False)
    assert [seen.row_before(m) for m in (2, 32, 33, 9999)] == [GOOD[x] for x in (1, 1, 64, 64)]


def test_the_file_of_another_triton_is_in_use() -> None:
    made = moe_scene({LOG: logged(other_file())})
    made.host.files[path_of(triton="3.4.0")] = file_of().encode()  # type: ignore[attr-defined]
    seen = moe_preflight(made.session, SERVED, PLAN, [])

    assert (seen.before, seen.triton, seen.base) == (GOOD, "3.6.0", PACKAGE)


def test_rows_in_use_that_no_kernel_takes_are_passed_over() -> None:
    """The server goes by the others; and SGLang ships one such row itself."""
    made = moe_scene({LOG: logged(with_file())})
    text = file_of({**GOOD, 8: {**ROW, "BLOCK_SIZE_M": 17}})
    made.host.files[path_of()] = text.encode()  # type: ignore[attr-defined]

    assert moe_preflight(made.session, SERVED, PLAN, []).before == GOOD


def test_a_file_in_use_that_no_kernel_takes_is_told() -> None:
    made = moe_scene({LOG: logged(with_file())})
    made.host.files[path_of()] = b"{}"  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match="has no rows"):
        moe_preflight(made.session, SERVED, PLAN, [])


@pytest.mark.parametrize(
    ("more", "change", "sizes"),
    [
        ({}, {}, (4, 64, 8192)),
        ({"speculative_num_draft_tokens": None}, {}, (1, 16, 8192)),
        ({"chunked_prefill_size": -1}, {}, (4, 64)),
        ({"max_running_requests": 8}, {}, (4, 32, 8192)),
        ({"max_running_requests": None, "internal_states": []}, {"levels": [64]}, (256, 8192)),
        ({}, {"batch_sizes": [64, 2, 64]}, (2, 64)),
        # The experts see the tokens of all ranks of DP attention together.
        ({"dp_size": 2, "enable_dp_attention": True}, {}, (4, 64, 16384)),
        # Each replica has requests of its own.
        ({"dp_size": 2}, {}, (4, 32, 8192)),
        ({"dp_size": 3, "enable_dp_attention": False}, {"levels": [2, 16]}, (4, 24, 8192)),
    ],
)
def test_sizes(more: dict[str, object], change: dict[str, Any], sizes: tuple[int, ...]) -> None:
    assert moe_found(info(**more), plan(**change)).sizes == sizes


def test_only_what_fits_is_searched() -> None:
    seen = moe_found()

    assert seen.rows == fitting("", (12, 0))
    assert (seen.tried, len(SPACE)) == (976, 1920)
    assert seen.space == "976 of 1920 rows: those that fit into the GPU's shared memory"
    assert seen.space_text.startswith('[{"BLOCK_SIZE_M": 16, ')


@pytest.mark.parametrize(
    ("told", "change", "space"),
    [
        ({SCRIPT: script_answer()}, {}, "search space: this script takes no other one"),
        ({}, {"full_space": True}, "all 1920 rows of SGLang's search space"),
        (
            {CARDS: {"gpus": f"gpu 0, {GPU}"}},
            {},
            "all 1920 rows of SGLang's search space",
        ),
    ],
)
def test_the_whole_space(told: Told, change: dict[str, Any], space: str) -> None:
    seen = moe_found(told, plan(**change))

    assert (list(seen.rows), seen.tried) == ([], 1920)
    assert seen.space.endswith(space)


def test_a_driver_that_does_not_know_capabilities() -> None:
    unknown = Section("gpu Field is not a valid field to query.", 2)
    told: Told = {CARDS: [{"gpus": unknown}, {"gpus": f"gpu 0, {GPU}"}]}

    assert moe_found(told).devices == (Device(0, NAME.device),)


BY_NAME: dict[str, tuple[str, str]] = {
    "good.json": (file_of(), ""),
    "words.json": ("no json", "is no JSON"),
    "vllm.json": ('{"triton_version": "3.6.0", "1": {}}', "the key 'triton_version'"),
    "row.json": (file_of({1: {**ROW, "BLOCK_SIZE_M": 17}}), "has BLOCK_SIZE_M = 17 at 1"),
    "short.json": ('{"1": {"BLOCK_SIZE_M": 16}}', "lacks BLOCK_SIZE_N at 1"),
    "none.json": ("{}", "has no rows"),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_candidate(name: str) -> None:
    text, why = BY_NAME[name]
    seen = moe_found(plan=plan(candidates=[f"/configs/{name}"]), files={name: text})

    assert list(seen.candidates) == ([] if why else [name])
    assert why in seen.refused.get(name, "")
    assert (name in seen.refused) == bool(why)


def test_a_candidate_that_is_not_there() -> None:
    seen = moe_found(plan=plan(candidates=["/configs/gone.json"]))

    assert seen.refused == {"gone.json": "/configs/gone.json cannot be read on the host"}


def test_a_candidate_whose_k_steps_over_a_quantized_block() -> None:
    told = {LOG: logged(without_file(BLOCKS)), SHAPE_OF: shape_answer(block_shape=[128, 128])}
    text = file_of({1: {**ROW, "BLOCK_SIZE_K": 256}})
    seen = moe_found(told, plan(candidates=["/configs/wide.json"]), files={"wide.json": text})

    assert "has BLOCK_SIZE_K = 256 at 1, and quantized blocks of 128" in seen.refused["wide.json"]


def test_each_candidate_has_a_name_of_its_own() -> None:
    files = {name: file_of() for name in ("a.json", "x/a.json", "present", "tuned")}
    files["y/a.json"] = "no"
    paths = [f"/configs/{name}" for name in files]
    seen = moe_found(plan=plan(candidates=paths), files=files)

    assert list(seen.candidates) == [
        *("a.json", "/configs/x/a.json", "/configs/present", "/configs/tuned"),
    ]
    assert list(seen.refused) == ["/configs/y/a.json"]


def test_so_has_each_that_is_refused() -> None:
    files = {"x/a.json": "no", "y/a.json": "no", "z/a.json": file_of()}
    seen = moe_found(plan=plan(candidates=[f"/configs/{name}" for name in files]), files=files)

    assert list(seen.refused) == ["a.json", "/configs/y/a.json"]
    assert list(seen.candidates) == ["/configs/z/a.json"]


def test_a_candidate_that_is_far_too_long() -> None:
    with pytest.raises(BadInput, match=r"/configs/long\.json is too long"):
        moe_found(
            plan=plan(candidates=["/configs/long.json"]), files={"long.json": " " * (1 << 19)}
        )


# What is gone on with.


KEYS: dict[str, tuple[Told, dict[str, Any]]] = {
    "its file": ({LOG: logged(without_file(replace(NAME, dtype="fp8_w8a8")))}, {}),
    "Triton": (
        {LOG: logged(without_file(triton="3.5.1")), SCRIPT: script_answer(SEARCH, triton="3.5.1")},
        {},
    ),
    "release": (
        {**info(version="0.5.10"), SCRIPT: script_answer(SEARCH, sglang="0.5.10", version="")},
        {},
    ),
    "hidden size": ({SHAPE_OF: shape_answer(hidden=2048)}, {}),
    "experts of a token": ({SHAPE_OF: shape_answer(topk=6)}, {}),
    "space": ({}, {"full_space": True}),
}
SAME: dict[str, tuple[Told, dict[str, Any]]] = {
    "sizes": ({}, {"batch_sizes": [1, 2, 3]}),
    "limits": ({}, {"size_timeout_minutes": 1, "window_minutes": 60}),
    "a folder in use meanwhile": (
        {
            LOG: logged(without_file(base="/o")),
            ENV: environment("SGLANG_MOE_CONFIG_DIR=/o", of_unit="1"),
        },
        {},
    ),
    "speculation": (info(speculative_num_draft_tokens=2), {}),
}


@pytest.mark.parametrize("name", KEYS)
def test_sizes_of_another_kernel_are_not_gone_on_with(name: str) -> None:
    told, change = KEYS[name]
    assert moe_found(told, plan(**change)).place != moe_found().place


@pytest.mark.parametrize("name", SAME)
def test_what_says_nothing_of_a_kernel_is_no_part_of_its_record(name: str) -> None:
    told, change = SAME[name]
    assert moe_found(told, plan(**change)).place == moe_found().place


def test_no_key_is_told() -> None:
    seen = moe_found({ENV: environment("HF_HOME=/h")})

    assert KEY not in repr(seen)
    assert "environment" not in repr(seen)


def test_a_row_of_the_default_for_each_usual_size() -> None:
    made = moe_scene()
    seen = moe_preflight(made.session, SERVED, PLAN, [])
    body = next(x for x in made.direct.asked if x.name == ROWS).sections["rows"]
    sizes = re.findall(r'\\"sizes\\": \[([0-9, ]+)\]', body)

    # SGLang's rule changes where there are more tokens than experts.
    assert [int(x) for x in sizes[0].split(", ")] == sorted({*GRID, 256, 257})
    assert tuple(seen.before) == GRID
    assert seen.row_before(100_000) == chosen(defaults(), 4096)
    assert "at M = 4 a layer reads" in seen.expectation
