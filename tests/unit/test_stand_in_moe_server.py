"""The lab's stand-in server and the files of MoE kernel parameters that it finds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_reclaim.moeconfigs import GRID
from gpu_reclaim.moelog import lookups
from lab.guest import sglang_moe
from unit.stand_in import MOE_FILE, Server, make_home, write_moe_table

BEST = {str(tokens): sglang_moe.best(tokens) for tokens in GRID}
SLOW = sglang_moe.heuristic(4096)
STEADY = {"noise_pct": 0, "tokens_per_s": 4000, "moe_gain_pct": 50}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("home"))


@pytest.fixture
def server(home: Path, tmp_path: Path) -> Iterator[Server]:
    server = Server(home, tmp_path)
    server.tell("speed", STEADY)
    yield server
    server.end()


def started(server: Server, flags: str = "", **environment: str) -> list[str]:
    """Starts it, and returns its lines up to where it serves."""
    server.start(flags, **environment)
    assert server.main.stdout is not None
    lines = []
    for line in server.main.stdout:
        lines.append(line.rstrip())
        if "fired up" in line:
            break
    return lines


def test_every_rank_says_what_it_found(server: Server) -> None:
    lines = started(server)
    found = lookups(lines)
    assert {each.rank for each in found} == {"TP0", "TP1", "TP2", "TP3"}
    assert {(each.found, str(each.name)) for each in found} == {
        ("none", MOE_FILE),
        ("none", MOE_FILE.replace(".json", "_down.json")),
    }
    assert {each.triton for each in found} == {"3.6.0"}
    info = server.info()
    shown = ("moe_runner_backend", "chunked_prefill_size", "ep_size", "quantization")
    assert [info[name] for name in shown] == ["triton", 8192, 1, None]


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--tp 1", "E=256,N=1024,"),
        ("--tp 2", "E=256,N=512,"),
        ("--ep-size 2", "E=128,N=512,"),
        ("--quantization fp8", "dtype=fp8_w8a8"),
        ("--moe-runner-backend auto --disable-shared-experts-fusion", "E=256,N=256,"),
    ],
)
def test_what_it_looks_for_depends_on_its_flags(server: Server, flags: str, name: str) -> None:
    lines = [line for line in started(server, flags) if "MoE kernel config" in line]
    assert lines
    assert all(name in line for line in lines)
    assert all((" TP0] " in line) == (flags != "--tp 1") for line in lines[:2])


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        ("--moe-runner-backend flashinfer_cutlass", 0),
        ("--enable-deterministic-inference", 8),
    ],
)
def test_files_do_not_matter_to_others(
    server: Server, tmp_path: Path, flags: str, lines: int
) -> None:
    write_moe_table(tmp_path, BEST)
    said = started(server, flags, SGLANG_MOE_CONFIG_DIR=str(tmp_path))
    about = [line for line in said if "MoE kernel config" in line]
    assert len(about) == lines
    assert all("Deterministic inference is enabled" in line for line in about)
    server.tell("speed", STEADY | {"moe_garbage": True})
    plain = server.generate("hello")["text"]
    server.tell("speed", STEADY)
    assert server.generate("hello")["text"] == plain


def test_a_table_is_used_and_said(server: Server, tmp_path: Path) -> None:
    path = write_moe_table(tmp_path, BEST)
    found = lookups(started(server, SGLANG_MOE_CONFIG_DIR=str(tmp_path)))
    assert [(each.used, each.rank) for each in found if each.found == "own"] == [
        (str(path), f"TP{rank}") for rank in range(4)
    ]


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({MOE_FILE: {"triton_version": "3.6.0", **BEST}}, "ValueError: invalid literal for int()"),
        (
            {MOE_FILE: BEST, MOE_FILE.replace(".json", "_down.json"): {"1": BEST["4096"]}},
            "AssertionError",
        ),
    ],
)
def test_a_wrong_table_ends_it_at_start(
    server: Server, tmp_path: Path, tables: dict[str, Any], said: str
) -> None:
    for name, table in tables.items():
        write_moe_table(tmp_path, table, name)
    server.start(SGLANG_MOE_CONFIG_DIR=str(tmp_path))
    output, _ = server.main.communicate(timeout=20)
    assert server.main.returncode == 1
    assert said in output
    assert not server.workers()


def rate(server: Server) -> float:
    """Tokens a second of one request, as the server itself keeps it."""
    server.generate("hello", 4)
    return float(server.info()["internal_states"][0]["last_gen_throughput"])


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [("", 1), ("--speculative-algorithm NEXTN --speculative-num-steps 2", 3)],
)
def test_a_row_makes_it_as_quick_as_it_is_good(
    server: Server, tmp_path: Path, flags: str, tokens: int
) -> None:
    """Beside its row, it finds others for more and fewer tokens: those are not used."""
    row = sglang_moe.best(tokens) | {"num_stages": 2}
    table = {"0": SLOW, str(tokens): row, str(tokens + 2): SLOW}
    write_moe_table(tmp_path, table)
    started(server, flags, SGLANG_MOE_CONFIG_DIR=str(tmp_path))
    gained = rate(server)
    server.tell("speed", STEADY | {"moe_gain_pct": 0})
    assert 0 < sglang_moe.quality(row, tokens) < 1
    factor = 1 + 0.5 * sglang_moe.quality(row, tokens)
    assert gained / rate(server) == pytest.approx(factor)


def test_without_a_table_nothing_is_gained_or_spoilt(server: Server) -> None:
    started(server)
    plain, text = rate(server), server.generate("hello")["text"]
    server.tell("speed", STEADY | {"moe_gain_pct": 0, "moe_garbage": True})
    assert rate(server) == plain
    assert server.generate("hello")["text"] == text


def test_tuned_rows_can_spoil_the_text_at_the_same_speed(server: Server, tmp_path: Path) -> None:
    write_moe_table(tmp_path, BEST)
    started(server, SGLANG_MOE_CONFIG_DIR=str(tmp_path))
    speed, text = rate(server), server.generate("hello")["text"]
    server.tell("speed", STEADY | {"moe_garbage": True})
    assert server.generate("hello")["text"] != text
    assert rate(server) == speed


def test_a_model_without_experts_looks_nothing_up(server: Server, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    lines = started(server, f"--model-path {tmp_path}")
    assert not [line for line in lines if "MoE kernel config" in line]
