"""The lab's stand-in server that generates, driven by SGLang's own benchmark where that matters."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lab.waiting import wait_until
from unit.stand_in import NEXTN_2, Server, make_home

NAME = "NEXTN 2/1/3"
STEADY = {"noise_pct": 0}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("home"))


@pytest.fixture
def server(home: Path, tmp_path: Path) -> Iterator[Server]:
    server = Server(home, tmp_path)
    server.tell("speed", STEADY | {"tokens_per_s": 4000})
    yield server
    server.end()


@pytest.fixture
def running(server: Server) -> Server:
    server.start(f"{NEXTN_2} --max-running-requests 64")
    server.wait_health()
    return server


def test_it_holds_the_gpus_and_says_what_it_runs_with(running: Server) -> None:
    info = running.info()
    assert len(running.workers()) == 4
    assert (running.state / "server.ready").read_text() == f"{running.main.pid}\n"
    assert (running.state / "server.starts").read_text() == f"{NAME}\n"
    assert info["speculative_algorithm"] == "EAGLE"
    assert info["speculative_num_draft_tokens"] == 3
    assert info["internal_states"][0]["effective_max_running_requests_per_dp"] == 64
    assert "sglang.launch_server" in info["launch_command"]
    assert running.get("/get_server_info")[0] == running.get("/v1/models")[0] == 200
    assert json.loads(running.get("/model_info")[1])["is_generation"]
    (running.state / "server.sick").touch()
    assert running.health() == 503


def test_acceptance_is_what_it_generated_since_the_last_flush(running: Server) -> None:
    assert "avg_spec_accept_length" not in running.info()["internal_states"][0]
    running.generate("hello")
    accepted = running.info()["internal_states"][0]["avg_spec_accept_length"]
    assert accepted == pytest.approx(1 + 0.8 + 0.64)
    assert running.post("/flush_cache", {})[0] == 200
    assert "avg_spec_accept_length" not in running.info()["internal_states"][0]


def test_all_routes_give_the_same_text(running: Server) -> None:
    body = {"prompt": "Why is the sky blue?", "max_tokens": 12, "ignore_eos": True}
    native = running.generate("Why is the sky blue?", 12)
    completion = json.loads(running.post("/v1/completions", body)[1])
    status, events = running.post("/v1/completions", {**body, "stream": True})
    chunks = [json.loads(x[6:]) for x in events.split("\n\n") if x.startswith("data: {")]
    assert status == 200
    assert events.endswith("data: [DONE]\n\n")
    assert native["text"] == completion["choices"][0]["text"]
    assert native["text"] == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert native["meta_info"]["completion_tokens"] == 12 == len(native["text"].split())
    assert completion["usage"]["completion_tokens"] == 12
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    assert json.loads(running.post("/v1/chat/completions", chat)[1])["choices"][0]["message"]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("", "off"),
        ("--speculative-algorithm NEXTN", "NEXTN 3/1/4"),
        (f"{NEXTN_2} --speculative-num-draft-tokens 9", NAME),
    ],
)
def test_settings_become_what_sglang_makes_of_them(server: Server, flags: str, names: str) -> None:
    server.start(flags)
    server.wait_health()
    assert (server.state / "server.starts").read_text().split("\n")[-2] == names
    assert server.info()["max_running_requests"] == (48 if flags else None)


@pytest.mark.parametrize(
    "flags", ["--no-such-flag", "--speculative-alg NEXTN --speculative-eagle-topk 2"]
)
def test_wrong_flags_end_it(server: Server, flags: str) -> None:
    server.start(flags)
    assert server.main.wait(20) != 0


def test_api_key(server: Server) -> None:
    server.start("--api-key secret")
    server.wait_health()
    assert server.get("/server_info")[0] == 401
    assert server.get("/server_info", Authorization="Bearer secret")[0] == 200


@pytest.mark.parametrize(
    ("fault", "said"),
    [("dies at start", "warmup error"), ("out of memory", "torch.OutOfMemoryError: CUDA out of")],
)
def test_it_can_fail_to_start(server: Server, fault: str, said: str) -> None:
    server.tell("faults", {NAME: fault})
    server.start(NEXTN_2)
    output, _ = server.main.communicate(timeout=20)
    assert server.main.returncode == 1
    assert said in output
    assert not server.workers()


def test_it_can_start_late_or_never(server: Server) -> None:
    server.tell("faults", {NAME: "slow start 2", "off": "never ready"})
    began = time.monotonic()
    server.start(NEXTN_2)
    server.wait_health()
    assert time.monotonic() - began >= 2
    server.end()
    server.start()
    server.wait_health(503)
    time.sleep(0.5)
    assert server.health() == 503


def test_it_can_go_wrong_later(running: Server) -> None:
    truth = running.generate("hello")["text"]
    running.tell("faults", {NAME: ["garbage", "wrong flags"]})
    assert running.generate("hello")["text"] != truth
    assert running.info()["speculative_num_steps"] == 7
    running.tell("faults", {"*": "half fail"})
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 4}}
    assert sorted(running.post("/generate", body)[0] for _ in range(4)) == [200, 200, 500, 500]
    running.tell("faults", {NAME: "health hangs after 2 requests"})
    with pytest.raises(TimeoutError):
        running.get("/health", timeout=0.3)
    running.tell("faults", {NAME: "hangs"})
    assert running.health() == 200
    with pytest.raises(TimeoutError):
        running.post("/generate", body, timeout=0.3)


def test_sigterm_drains_and_ends_its_workers(running: Server) -> None:
    running.tell("speed", STEADY | {"tokens_per_s": 20})
    workers = running.workers()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(running.generate, "hello", 20)
        time.sleep(0.3)
        running.main.send_signal(signal.SIGTERM)
        assert len(answer.result()["text"].split()) == 20
    assert running.main.wait(20) == 0
    assert len(workers) == 4
    wait_until("its workers are gone", lambda: not running.workers())


def test_workers_outlive_a_killed_main_process(running: Server) -> None:
    running.main.kill()
    running.main.wait(20)
    assert len(running.workers()) == 4


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat"])
def test_the_real_benchmark_completes(running: Server, backend: str) -> None:
    record = running.bench(16, 32, "--backend", backend)
    assert record["rc"] == 0, record["output"]
    assert record["completed"] == 32
    assert record["accept_length"] == pytest.approx(2.44)
    assert record["server_info"]["version"] == "0.5.9"


def test_the_real_benchmark_does_not_mind_that_half_fail(running: Server) -> None:
    running.tell("faults", {NAME: "half fail"})
    record = running.bench(4, 8)
    assert (record["rc"], record["completed"]) == (0, 4), record["output"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("concurrency", "requests"), [(1, 16), (4, 32), (16, 64), (64, 128)])
def test_the_real_benchmark_sees_how_quick_a_setting_is(
    running: Server, concurrency: int, requests: int
) -> None:
    """At half the default speed, so that the client's own time matters less."""
    rates = {}
    for factor in (1.0, 1.05, 1.2):
        running.tell("speed", STEADY | {NAME: factor, "tokens_per_s": 500})
        record = running.bench(concurrency, requests)
        assert (record["rc"], record["completed"]) == (0, requests), record["output"]
        rates[factor] = record["output_throughput"]
    assert rates[1.05] / rates[1.0] == pytest.approx(1.05, rel=0.02)
    assert rates[1.2] / rates[1.0] == pytest.approx(1.2, rel=0.02)
