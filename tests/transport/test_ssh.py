"""Scripts over SSH, on good days and bad ones, against a server in this process."""

from __future__ import annotations

import ctypes
import queue
import subprocess
import threading
from pathlib import Path

import pytest

from gpu_reclaim.commands import Guard, Script
from gpu_reclaim.errors import (
    AccessRefused,
    BadAnswer,
    BadInput,
    CommandFailed,
    IdentityMismatch,
    Incomplete,
    LinkLost,
    OutcomeUnknown,
    TimedOut,
    Unreachable,
)
from gpu_reclaim.transport import Transport
from gpu_reclaim.transport.ssh import SshTransport
from transport.conftest import Connect, Serve, options
from transport.ssh_server import Call, Relay, promptly, real_shell

HELLO = Script("hello", {"a": "echo hello"})
SHORT = Script("hello", {"a": "echo hello"}, timeout_s=0.3)
MIB = 1 << 20


def test_it_is_a_transport(link: Connect) -> None:
    transport: Transport = link(22)
    assert transport.name == "ssh root@127.0.0.1"


def test_a_script_is_run_and_its_sections_are_found(serve: Serve, link: Connect) -> None:
    script = Script("two", {"a": "echo 'it''s'; echo \"$X\"; exit 3", "b": "echo oops >&2"})
    result = link(serve().port).run(script)
    assert (result.section("a").text, result.section("a").code) == ("its\n\n", 3)
    assert (result.section("b").text, result.stderr, result.exit_code) == ("", "oops\n", 0)
    assert result.where.startswith("ssh root@127.0.0.1:")
    assert result.seconds > 0


def test_no_word_of_the_script_is_on_the_far_side_command_line(serve: Serve, link: Connect) -> None:
    server = serve()
    link(server.port).run(Script("x", {"a": "echo wordinside"}, timeout_s=12.5))
    assert server.calls == ["timeout -k 5 12.5 sh -s"]


def test_one_connection_serves_many_scripts(serve: Serve, link: Connect) -> None:
    server = serve()
    transport = link(server.port)
    for number in range(12):  # more than the 10 sessions sshd allows at a time (MaxSessions)
        assert (
            transport.run(Script("x", {"a": f"echo {number}"})).section("a").text == f"{number}\n"
        )
    assert len(server.connections) == 1


def test_a_connection_lost_between_scripts_is_opened_again(serve: Serve, link: Connect) -> None:
    server = serve()
    transport = link(server.port)
    transport.run(HELLO)
    server.connections[0].close()
    assert transport.run(HELLO).exit_code == 0
    assert len(server.connections) == 2


def test_a_connection_that_is_silently_dead_is_opened_again(serve: Serve, link: Connect) -> None:
    server = serve()
    with Relay(server.port) as relay:
        transport = link(relay.port, connect_timeout_s=2)
        transport.run(HELLO)
        relay.freeze()
        assert transport.run(HELLO).exit_code == 0
    assert len(server.connections) == 2


def test_close_can_be_called_at_any_time(serve: Serve, link: Connect) -> None:
    server = serve()
    transport = link(server.port)
    transport.close()
    transport.run(HELLO)
    transport.close()
    transport.close()
    assert transport.run(HELLO).exit_code == 0


def test_close_never_raises(serve: Serve, link: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = link(serve().port)
    transport.run(HELLO)

    def fail(_: object) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr("paramiko.Transport.close", fail)
        patch.setattr("gpu_reclaim.transport.ssh_wire.Wire.close", fail)
        transport.close()


def test_another_thread_is_refused(serve: Serve, link: Connect) -> None:
    server = serve()
    transport = link(server.port)
    transport.run(HELLO)
    with pytest.raises(BadInput, match="belongs to thread 'MainThread'"):
        promptly(lambda: transport.run(HELLO))
    assert len(server.calls) == 1
    transport.close()
    promptly(lambda: transport.run(HELLO))


def test_the_guard_travels_with_the_script(serve: Serve, keys: Path) -> None:
    transport = SshTransport(options(keys, serve().port), Guard(hostname="not-this-machine"))
    with pytest.raises(IdentityMismatch, match="not-this-machine"):
        transport.run(HELLO)
    transport.close()


def test_a_banner_of_the_login_shell_does_not_matter(serve: Serve, link: Connect) -> None:
    def motd(call: Call) -> None:
        call.say("Welcome!\nLast login: never\n\n@gr- begin\n")
        real_shell(call)

    assert link(serve(motd).port).run(HELLO).section("a").text == "hello\n"


def test_bytes_that_are_no_utf8(serve: Serve, link: Connect) -> None:
    def raw(call: Call) -> None:
        call.channel.sendall_stderr(b"\xc3\x28")
        call.answer(b"a\xff\x00\r\n\x1b[31m\xe2\x82\xac")
        call.exit(0)

    result = link(serve(raw).port).run(HELLO)
    assert result.section("a").text == "a\\xff\x00\r\n\x1b[31m\u20ac"
    assert result.stderr == "\\xc3("


@pytest.mark.parametrize("first", ["stdout", "stderr"])
def test_both_streams_beyond_their_windows(serve: Serve, link: Connect, first: str) -> None:
    def flood(call: Call) -> None:
        mark = call.begin()
        if first == "stdout":
            call.say(b"o" * 3 * MIB)
        call.channel.sendall_stderr(b"e" * 3 * MIB)
        if first == "stderr":
            call.say(b"o" * 3 * MIB)
        call.answer(mark=mark)
        call.exit(0)

    result = link(serve(flood).port).run(HELLO)
    assert result.section("a").text == "o" * 3 * MIB
    assert result.stderr == "e" * 3 * MIB


def test_a_far_side_that_writes_before_it_reads(serve: Serve, link: Connect) -> None:
    def write_first(call: Call) -> None:
        call.say(b"o" * 3 * MIB)
        call.channel.sendall_stderr(b"e" * 3 * MIB)
        call.answer()
        call.exit(0)

    script = Script("big", {"a": "# " + "x" * 3 * MIB})
    assert len(link(serve(write_first).port).run(script).stdout) > 3 * MIB


def test_a_large_script_arrives_whole(serve: Serve, link: Connect) -> None:
    lines = [f"{number:01023}" for number in range(5 * 1024)]
    body = "cksum <<'END'\n" + "\n".join(lines) + "\nEND"
    result = link(serve().port).run(Script("big", {"a": body}))
    expected = subprocess.run(
        ["cksum"], input="\n".join([*lines, ""]), check=True, capture_output=True, text=True
    )
    assert result.section("a").text == expected.stdout


def test_the_end_of_its_input_is_told(serve: Serve, link: Connect) -> None:
    """`script()` returns at the end of input only."""
    seen: list[str] = []

    def note(call: Call) -> None:
        seen.append(call.script())
        call.exit(0)

    with pytest.raises(Incomplete):
        link(serve(note).port).run(HELLO)
    assert seen[0].endswith(" end'\n")


def test_a_command_that_ends_without_reading_its_input(serve: Serve, link: Connect) -> None:
    def leave(call: Call) -> None:
        call.channel.recv(1)
        call.say("not today\n")
        call.exit(9)

    script = Script("big", {"a": "# " + "x" * 5 * MIB})
    with pytest.raises(Incomplete, match="exit status 9"):
        link(serve(leave).port).run(script)


@pytest.mark.parametrize("marker", [False, True])
def test_a_channel_closed_without_exit_status(serve: Serve, link: Connect, marker: bool) -> None:
    def close(call: Call) -> None:
        mark = call.begin()
        if marker:
            call.answer("text", mark)
        call.channel.close()

    transport = link(serve(close).port)
    if marker:
        assert transport.run(HELLO).exit_code is None
    else:
        with pytest.raises(Incomplete, match="exit status None"):
            transport.run(HELLO)


def test_a_command_ended_by_a_signal(serve: Serve, link: Connect) -> None:
    def die(call: Call) -> None:
        call.begin()
        call.signal("KILL")

    with pytest.raises(Incomplete) as caught:
        link(serve(die).port).run(HELLO)
    assert caught.value.result is not None
    assert caught.value.result.exit_code is None


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (124, TimedOut, "did not end within 30 s"),
        # Long before its limit it was not the limit that killed it.
        (137, Incomplete, "did not finish"),
    ],
)
def test_the_far_sides_own_time_limit(
    serve: Serve, link: Connect, code: int, kind: type[OutcomeUnknown], said: str
) -> None:
    def late(call: Call) -> None:
        call.begin()
        call.exit(code)

    with pytest.raises(kind, match=said):
        link(serve(late).port).run(HELLO)


@pytest.mark.parametrize("said", ["nothing", "begin", "half"])
def test_a_connection_that_breaks_while_it_runs(serve: Serve, link: Connect, said: str) -> None:
    def drop(call: Call) -> None:
        if said == "nothing":
            call.script()
        else:
            call.begin()
        if said == "half":
            call.say("half a li")
        call.drop()

    server = serve(drop)
    transport = link(server.port)
    with pytest.raises(LinkLost, match="nobody knows what it did") as caught:
        transport.run(Script("kill", {"a": "x"}, writes=True))
    assert caught.value.result is not None
    assert caught.value.result.stdout.endswith(
        {"nothing": "", "begin": "section a\n", "half": "half a li"}[said]
    )
    assert len(server.calls) == 1  # nothing is repeated


def test_a_whole_answer_counts_although_the_connection_breaks_then(
    serve: Serve, link: Connect
) -> None:
    def drop(call: Call) -> None:
        call.answer("text")
        call.channel.send_exit_status(0)
        call.channel.shutdown_write()
        call.drop()

    transport = link(serve(drop).port)
    assert transport.run(HELLO).section("a").text == "text"
    assert transport.run(HELLO).section("a").text == "text"


@pytest.mark.usefixtures("script_slack")
@pytest.mark.parametrize("day", ["silent", "trickle", "reads nothing"])
def test_the_deadline_holds_for_the_whole_command(serve: Serve, link: Connect, day: str) -> None:
    def behave(call: Call) -> None:
        if day == "reads nothing":
            call.hang()
        call.begin()
        if day == "silent":
            call.hang()
        while not call.server.over.wait(0.01):
            call.say(".")

    filler = "# " + "x" * 3 * MIB if day == "reads nothing" else "x"
    transport = link(serve(behave).port)
    with pytest.raises(TimedOut, match=r"gave no end within 0\.3 s"):
        promptly(lambda: transport.run(Script("slow", {"a": filler}, timeout_s=0.3)))


@pytest.mark.usefixtures("script_slack")
def test_a_dead_peer_does_not_block_a_write_for_ever(serve: Serve, link: Connect) -> None:
    server = serve(Call.hang, window=1 << 30)
    with Relay(server.port) as relay:
        server.on_command = relay.freeze
        transport = link(relay.port)
        script = Script("big", {"a": "# " + "x" * 24 * MIB}, timeout_s=0.3)
        with pytest.raises(TimedOut):
            promptly(lambda: transport.run(script))


@pytest.mark.usefixtures("script_slack")
def test_after_a_timeout_the_connection_is_not_used_again(serve: Serve, link: Connect) -> None:
    server = serve(Call.hang)
    transport = link(server.port)
    with pytest.raises(TimedOut):
        transport.run(SHORT)
    server.handler = real_shell
    assert transport.run(HELLO).exit_code == 0
    assert len(server.connections) == 2


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_without_end(
    serve: Serve, link: Connect, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("ssh", "ssh_exchange"):
        monkeypatch.setattr(f"gpu_reclaim.transport.{module}.MAX_OUTPUT", MIB)

    def shout(call: Call) -> None:
        write = call.say if stream == "stdout" else call.channel.sendall_stderr
        while True:
            write(b"x" * 65536)

    with pytest.raises(BadAnswer, match="more than 1 MiB"):
        link(serve(shout).port).run(HELLO)


def test_something_left_behind_that_holds_the_output_open(
    serve: Serve, link: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_reclaim.transport.ssh_exchange.LINGER_S", 0.05)

    def linger(call: Call) -> None:
        call.answer("text")
        call.channel.send_exit_status(0)
        call.hang()

    assert link(serve(linger).port).run(HELLO).section("a").text == "text"


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"channels": False}, "opens no session: .*prohibited"),
        ({"commands": False}, "starts no command"),
        ({"commands": None}, "starts no command: no answer"),
    ],
)
def test_a_session_that_cannot_be_opened(
    serve: Serve, link: Connect, attributes: dict[str, bool | None], words: str
) -> None:
    server = serve(**attributes)
    transport = link(server.port, connect_timeout_s=1)
    with pytest.raises(Unreachable, match=words) as caught:
        promptly(lambda: transport.run(HELLO))
    assert f"root@127.0.0.1:{server.port}" in str(caught.value)
    assert server.calls == []


def test_a_connection_that_breaks_before_the_command_was_started(
    serve: Serve, link: Connect
) -> None:
    server = serve()

    def drop() -> None:
        server.connections[0].close()

    server.on_command = drop
    with pytest.raises(Unreachable, match="starts no command"):
        link(server.port).run(HELLO)


def test_a_cancellation_reaches_a_silent_wait(serve: Serve, link: Connect) -> None:
    begun = threading.Event()

    def silent(call: Call) -> None:
        call.begin()
        begun.set()
        call.hang()

    server = serve(silent)
    transport = link(server.port)
    raised: queue.Queue[BaseException] = queue.Queue()

    def body() -> None:
        try:
            transport.run(HELLO)
        except BaseException as error:  # handed to the test, which judges it
            raised.put(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    assert begun.wait(60)
    # How a thread is cancelled: the exception arrives between two bytecodes.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
    )
    # Long before the 35 s that the script may take.
    assert isinstance(raised.get(timeout=15), KeyboardInterrupt)
    server.connections[0].join(60)
    assert not server.connections[0].is_active()


STUB_SUDO = """#!/bin/sh
{refusal}
[ "$1 $2" = "-n --" ] || exit 99
shift 2
exec "$@"
"""


def stub(folder: Path, name: str, text: str) -> str:
    """Put a program into a folder; a PATH that begins with it."""
    file = folder / name
    file.write_text(text)
    file.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_sudo(serve: Serve, link: Connect, tmp_path: Path) -> None:
    server = serve(path=stub(tmp_path, "sudo", STUB_SUDO.format(refusal="")))
    assert link(server.port, sudo=True).run(HELLO).section("a").text == "hello\n"
    assert server.calls == ["sudo -n -- timeout -k 5 30 sh -s"]


@pytest.mark.parametrize(
    "refusal",
    [
        "sudo: a password is required",
        "sudo: il est nécessaire de saisir un mot de passe",
        "sudo: a terminal is required to read the password; either use the -S option",
        "deploy is not in the sudoers file.  This incident will be reported.",
        "Sorry, user deploy is not allowed to execute '/usr/bin/timeout -k 5 30 sh -s' as root on "
        "node.\nsudo: exit",
    ],
)
def test_sudo_that_refuses(serve: Serve, link: Connect, tmp_path: Path, refusal: str) -> None:
    lines = f"cat >&2 <<'END'\n{refusal}\nEND\nexit 1"
    server = serve(path=stub(tmp_path, "sudo", STUB_SUDO.format(refusal=lines)))
    with pytest.raises(AccessRefused, match="sudo refused") as caught:
        link(server.port, sudo=True).run(HELLO)
    assert "root ALL=(root) NOPASSWD: /usr/bin/timeout" in str(caught.value)
    assert refusal.split("\n", maxsplit=1)[0] in str(caught.value)


def test_sudo_that_only_complains(serve: Serve, link: Connect, tmp_path: Path) -> None:
    lines = "echo 'sudo: unable to resolve host node' >&2"
    server = serve(path=stub(tmp_path, "sudo", STUB_SUDO.format(refusal=lines)))
    script = Script("x", {"a": "exit 1"})
    assert link(server.port, sudo=True).run(script).section("a").code == 1


@pytest.mark.parametrize("code", [1, 127])
def test_a_script_that_has_begun_was_not_refused(serve: Serve, link: Connect, code: int) -> None:
    def cut(call: Call) -> None:
        call.begin()
        call.channel.sendall_stderr(b"sudo: unable to resolve host node\n")
        call.exit(code)

    with pytest.raises(Incomplete, match=f"exit status {code}"):
        link(serve(cut).port, sudo=True).run(HELLO)


def test_sudo_that_is_missing(serve: Serve, link: Connect, tmp_path: Path) -> None:
    with pytest.raises(AccessRefused, match="sudo is missing"):
        link(serve(path=str(tmp_path)).port, sudo=True).run(HELLO)


def test_a_far_side_without_timeout(serve: Serve, link: Connect, tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="`timeout` or `sh` is missing") as caught:
        link(serve(path=str(tmp_path)).port).run(HELLO)
    assert "coreutils" in str(caught.value)
    assert "not found" in str(caught.value)


def test_a_far_side_without_timeout_under_sudo(serve: Serve, link: Connect, tmp_path: Path) -> None:
    lines = "echo 'sudo: timeout: command not found' >&2; exit 1"
    server = serve(path=stub(tmp_path, "sudo", STUB_SUDO.format(refusal=lines)))
    with pytest.raises(CommandFailed, match="`timeout` or `sh` is missing"):
        link(server.port, sudo=True).run(HELLO)


def test_127_in_a_section_is_the_sections_own(serve: Serve, link: Connect) -> None:
    result = link(serve().port).run(Script("x", {"a": "no-such-tool"}))
    assert result.section("a").code == 127
