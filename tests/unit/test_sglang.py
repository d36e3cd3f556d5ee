"""Whether a server serves: asked by a real interpreter of a real port, and waited for."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gpu_reclaim import sglang
from gpu_reclaim.commands import Script, Section
from gpu_reclaim.errors import BadAnswer, LinkLost, Unreachable
from gpu_reclaim.serving import Server, wait_healthy
from gpu_reclaim.sglang import Answer as Health
from gpu_reclaim.sglang import Ask, ask, ask_health, parse_answers, parse_health
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.scripted import Answer, ScriptedTransport
from unit.scenery import Host, Scene, scene
from unit.shells import here
from unit.values import said

UNIT = "sglang.service"


class Handler(BaseHTTPRequestHandler):
    code = 200
    paths: list[str] = []  # noqa: RUF012 - one for each server, see `serving`
    heard: list[tuple[str, bytes]] = []  # noqa: RUF012

    def do_GET(self) -> None:
        # `path` itself has lost a doubled slash.
        self.paths.append(self.requestline.split()[1])
        self.send_response(self.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.heard.append((self.headers.get("Authorization", ""), body))
        answer = json.dumps({"said": "a\nb"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(code: int) -> Iterator[tuple[str, list[str]]]:
    """A server on this machine that answers so: its address, and which paths it was asked."""
    paths: list[str] = []
    kind = type("Answering", (Handler,), {"code": code, "paths": paths})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", paths
        finally:
            server.shutdown()
            thread.join()


def nobody() -> str:
    """The address of a port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def code_of(section: Section) -> int | None:
    health = parse_health(section)
    return None if health is None else health.code


def asked(url: str, python: str = sys.executable) -> Section:
    return here({"health": ask_health(python, url)}).section("health")


@pytest.mark.parametrize("code", [200, 503, 404])
@pytest.mark.parametrize("end", ["", "/"])
def test_the_status_is_read_from_a_real_server(tools: str, code: int, end: str) -> None:
    with serving(code) as (url, paths):
        section = asked(url + end)

    assert code_of(section) == code
    assert paths == ["/health"]


def test_who_refuses_the_connection_is_told_with_the_systems_words(tools: str) -> None:
    health = parse_health(asked(nobody()))

    assert health is not None
    assert health.code == 0
    assert "Connection refused" in health.text
    assert str(health).startswith("no answer (")


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_a_proxy_in_the_environment_is_not_asked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What answers there would be another machine."""
    with serving(503) as (proxy, others), serving(200) as (url, _):
        monkeypatch.setenv(name, proxy)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)

        assert code_of(asked(url)) == 200
    assert others == []


def test_a_server_that_says_nothing_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        health = parse_health(asked(f"http://127.0.0.1:{mute.getsockname()[1]}"))

    assert health is not None
    assert (health.code, health.text) == (0, "timed out")


def test_no_word_of_an_address_is_run(tools: str) -> None:
    section = asked("http://127.0.0.1:1/$(echo run >&2);echo answer 0 200 0 '")

    assert code_of(section) != 200


def test_the_interpreters_path_may_have_a_space(tools: str, tmp_path: Path) -> None:
    python = tmp_path / "my venv" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    with serving(200) as (url, _):
        assert code_of(asked(url, str(python))) == 200


def test_another_service_on_its_port_is_no_missing_interpreter() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        health = parse_health(asked(f"http://127.0.0.1:{other.getsockname()[1]}"))
        thread.join()

    assert health is not None
    assert (health.code, str(health)) == (0, "no answer (SSH-2.0-OpenSSH_9.2)")


@pytest.mark.parametrize("python", ["/opt/no such/python3", "false"])
def test_an_interpreter_that_cannot_be_run_gives_no_answer(python: str) -> None:
    assert parse_health(asked(nobody(), python)) is None


@pytest.mark.parametrize(
    ("text", "health"),
    [
        ('answer 0 200 0.010 "ok"\n', Health(200, "ok", 0.01)),
        ('warning: x\nanswer 0 503 0.1 ""\n', Health(503, "", 0.1)),
        ('answer 0 0 25.001 "timed out"\n', Health(0, "timed out", 25.001)),
        ("answer 0 200 0.1 {cut\n", Health(200, "", 0.1)),
        ("answer\n", None),
        ("answer 0 OK 0 x\n", None),
        ("answer 0 200 soon x\n", None),
        ("", None),
    ],
)
def test_lines_of_an_answer(text: str, health: Health | None) -> None:
    assert parse_health(Section(text, 0)) == health


def test_several_requests_with_bodies_and_a_key(tools: str) -> None:
    """The key and the prompt stand in no command line, and no word of them is run."""
    Handler.heard.clear()
    prompt = "it's $(echo run) \\ \n@gr-python\n\u2603"
    asks = [Ask("/health"), Ask("/generate", {"text": prompt}), Ask("/no")]
    with serving(404) as (url, _):
        section = here({"x": ask(sys.executable, url, asks, "se'cret")}).section("x")

    first, second, third = parse_answers(section)
    assert (first.code, second.code, third.code) == (404, 200, 404)
    assert second.json() == {"said": "a\nb"}
    assert first.json() == {}
    assert Handler.heard == [("Bearer se'cret", json.dumps({"text": prompt}).encode())]
    assert "secret" not in repr(Ask("/health"))


def test_requests_at_the_same_time_are_told_in_their_order(tools: str) -> None:
    """None of them is answered before all have come."""
    gate = threading.Barrier(8)

    class Waiting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            gate.wait(30)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.path.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Waiting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        text = ask(sys.executable, url, [Ask(f"/{x}") for x in range(8)], together=True)
        found = parse_answers(here({"x": text}).section("x"))
    finally:
        server.shutdown()
        server.server_close()
    assert [answer.text for answer in found] == [f"/{x}" for x in range(8)]


def test_health_for_people() -> None:
    assert (str(Health(503)), str(Health(0, "timed out"))) == (
        "HTTP 503",
        "no answer (timed out)",
    )


# Waiting for it.


def loading(answers: list[Answer], ready_s: float = 600) -> tuple[Scene, Server]:
    """A host whose server answers so, one after the other, and then always like the last."""

    def answer(script: Script) -> Answer:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    made = scene(Host())
    made.direct = ScriptedTransport(answer)
    made.session.links = Links(made.direct)
    return made, Server(UNIT, "http://127.0.0.1:30000", "/opt/sglang/bin/python", ready_s)


REFUSED: Answer = {"health": 'answer 0 0 0.001 "Connection refused"\n'}
LOADS: Answer = {"health": 'answer 0 503 0.001 ""\n'}
SERVES: Answer = {"health": 'answer 0 200 0.5 ""\n'}


def test_a_server_is_waited_for_until_it_serves() -> None:
    made, server = loading([REFUSED, LOADS, LOADS, SERVES])

    assert wait_healthy(made.session, server) == (True, f"{UNIT} serves again after 5 s")
    assert made.clock.sleeps == [1, 1.5, 2.25]
    text = made.direct.asked[0].sections["health"]
    assert text.startswith("/opt/sglang/bin/python - <<")
    assert "http://127.0.0.1:30000" in text
    assert "/health" in text
    assert not made.direct.asked[0].writes


def test_a_server_that_serves_already_is_not_waited_for() -> None:
    made, server = loading([SERVES])

    assert wait_healthy(made.session, server)[0] is True
    assert made.clock.sleeps == []


def test_a_server_that_never_serves_is_told_with_its_last_answer() -> None:
    made, server = loading([REFUSED, LOADS], ready_s=120)
    serves, why = wait_healthy(made.session, server)

    assert serves is False
    assert why.startswith(f"{UNIT} did not serve within 11")
    assert why.endswith(" s: HTTP 503")
    assert sum(made.clock.sleeps) <= 120
    assert max(made.clock.sleeps) == 10


@pytest.mark.parametrize("trouble", [LinkLost("the link is lost"), Unreachable("no route")])
def test_a_broken_connection_is_asked_over_again(trouble: Exception) -> None:
    made, server = loading([trouble, SERVES])

    assert wait_healthy(made.session, server)[0] is True


def test_a_connection_that_stays_broken_is_the_reason() -> None:
    made, server = loading([Unreachable("no route", remedy="x")], ready_s=5)

    assert wait_healthy(made.session, server) == (
        False,
        f"{UNIT} did not serve within 5 s: no route",
    )


def test_an_interpreter_that_is_not_there_is_no_reason_to_wait() -> None:
    made, server = loading([{"health": Section("", 127)}])
    with pytest.raises(BadAnswer, match="/opt/sglang/bin/python cannot be run there") as caught:
        wait_healthy(made.session, server)

    assert "LlmServer" in caught.value.remedy
    assert made.clock.sleeps == []


def test_a_long_wait_says_now_and_then_that_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    made, server = loading([LOADS], ready_s=300)
    with caplog.at_level(logging.INFO, "gpu_reclaim"):
        wait_healthy(made.session, server)

    lines = [line for line in said(caplog) if "does not serve yet" in line]
    assert lines == [f"llm: {UNIT} does not serve yet: HTTP 503"] * 4
