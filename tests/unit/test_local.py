"""This very machine as a transport; and the scripted one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gpu_reclaim.commands import Script, Section
from gpu_reclaim.errors import BadAnswer, Incomplete, TimedOut, Unreachable
from gpu_reclaim.transport.local import LocalTransport
from gpu_reclaim.transport.scripted import ScriptedTransport
from unit.actors import wait_for
from unit.shells import here, stub


def test_a_machine_without_timeout_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unreachable, match="cannot start") as caught:
        here({"a": "echo"})

    assert "coreutils" in caught.value.remedy


def test_both_streams_are_drained_together() -> None:
    line = r"printf '%01000d\n' 0; printf '%01000d\n' 0 >&2; i=$((i+1))"
    body = f"i=0; while [ $i -lt 300 ]; do {line}; done"
    result = here({"a": body})

    assert len(result.sections["a"].text) == 300 * 1001
    assert len(result.stderr) == 300 * 1001


def test_a_script_larger_than_a_pipe_arrives_whole() -> None:
    body = "\n".join(f": {'x' * 100} {n}" for n in range(3000)) + "\necho whole"

    assert here({"a": body}).sections["a"].text == "whole\n"


def test_a_sudo_that_refuses_leaves_the_outcome_unknown_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, "sudo", "echo 'sudo: a password is required' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(Incomplete, match="a password is required"):
        LocalTransport(sudo=True).run(Script("look", {"a": "echo"}))


def test_a_script_that_outlives_even_its_own_limit_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A timeout that does not keep time.
    stub(tmp_path, "timeout", f"echo $$ > {tmp_path}/pid; shift 3; exec sleep 600")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("gpu_reclaim.transport.local.REMOTE_SLACK_S", 0.1)
    with pytest.raises(TimedOut, match="did not end within"):
        here({"a": "echo"}, timeout_s=0.1)

    pid = (tmp_path / "pid").read_text().strip()
    assert not Path(f"/proc/{pid}").exists()


def test_a_run_that_is_cancelled_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cancelled(BaseException):
        pass

    pid_file = tmp_path / "pid"

    def cancel(*_: object, **__: object) -> None:
        wait_for(lambda: pid_file.exists() and pid_file.read_text() != "", "started")
        raise Cancelled

    stub(tmp_path, "timeout", f"echo $$ > {pid_file}; exec sleep 600")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("subprocess.Popen.communicate", cancel)
    with pytest.raises(Cancelled):
        here({"a": "echo"})

    assert not Path(f"/proc/{pid_file.read_text().strip()}").exists()


def test_scripts_may_run_at_the_same_time() -> None:
    results: list[str] = []
    threads = [
        threading.Thread(
            target=lambda n=n: results.append(here({"a": f"echo {n}"}).sections["a"].text)
        )
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(results) == ["0\n", "1\n", "2\n", "3\n"]


# Scripted.


def test_the_scripted_transport_answers_and_remembers() -> None:
    link = ScriptedTransport(lambda script: {"a": script.name, "b": Section("x", 3)}, stderr="err")
    script = Script("look", {"a": "", "b": ""})
    result = link.run(script)

    assert result.sections == {"a": Section("look", 0), "b": Section("x", 3)}
    assert (result.where, result.stderr, result.exit_code) == ("scripted", "err", 0)
    assert link.asked == [script]
    with pytest.raises(BadAnswer):
        result.section("c")


def test_the_scripted_transport_raises_what_it_is_given() -> None:
    link = ScriptedTransport(lambda _: Unreachable("away"))
    with pytest.raises(Unreachable, match="away"):
        link.run(Script("look", {}))

    assert len(link.asked) == 1
