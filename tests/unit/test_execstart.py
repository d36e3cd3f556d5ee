"""Where a unit's server flags are, and its command line with others."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import strategies as st

from gpu_reclaim.commands import Section
from gpu_reclaim.errors import BadAnswer, BadInput
from gpu_reclaim.execstart import locate
from gpu_reclaim.lease import TRIAL_FILE, places_in
from gpu_reclaim.servercommand import ServerCommand, drop_in, hides_secrets
from gpu_reclaim.serverunit import Unit, parse_server, show_server
from gpu_reclaim.shellwords import shell_words
from gpu_reclaim.unitfile import parse_exec_start
from gpu_reclaim.unitwords import escaped, quoted
from unit.shells import here, stub
from unit.strategies import always, answer, damaged

FILE = "/etc/systemd/system/sglang.service"
DROP_IN = "/etc/systemd/system/sglang.service.d/10-flags.conf"
PY = "/opt/sglang/bin/python"
LAUNCH = "-m sglang.launch_server"
FLAGS = "--model-path /m --tp 4"


def unit(
    text: str,
    argv: str | list[str] | None = f"{PY} {LAUNCH} {FLAGS}",
    *,
    head: str = "[Unit]\nDescription=x\n\n[Service]\nType=simple\n",
    more: str = "",
    **properties: str,
) -> Unit:
    """A unit with this ExecStart line, and what its main process was started with."""
    shown = {"FragmentPath": FILE, "DropInPaths": "", "NeedDaemonReload": "no", "MainPID": "4711"}
    cat = f"# {FILE}\n{head}{text}\n"
    if more:
        cat += f"\n# {DROP_IN}\n{more}\n"
        shown["DropInPaths"] = DROP_IN
    words = shlex.split(argv) if isinstance(argv, str) else argv or []
    return Unit("sglang.service", {**shown, **properties}, cat, tuple(words), PY)


def words(command_text: str) -> list[str]:
    return shlex.split(command_text)


def again(command: ServerCommand, flags: list[str]) -> ServerCommand:
    """What `locate` finds after the drop-in was written and the server restarted with it."""
    text = drop_in(command, flags)
    (parsed,) = parse_exec_start(text)
    raw = [word.raw for word in parsed.words]
    argv = [
        *raw[: len(raw) - len(flags)],
        *flags,
    ]
    if command.shell:
        found = shell_words(raw[-1])
        assert found is not None
        argv = [word.text for word in found]
    elif raw[0].endswith(("run.sh", "/bash", "/sh")):
        argv = [*words(f"{PY} {LAUNCH}"), *flags]
    return locate(unit("ExecStart=/bin/false", argv, more=text))


# ExecStart, the running command line, and the head and flags to be found.
SHAPES: dict[str, tuple[Unit, str, list[str]]] = {
    "plain": (unit(f"ExecStart={PY} {LAUNCH} {FLAGS}"), f"{PY} {LAUNCH}", words(FLAGS)),
    "continued": (
        unit(f"ExecStart={PY} {LAUNCH} \\\n  --model-path /m \\\n  --tp 4"),
        f"{PY} {LAUNCH}",
        words(FLAGS),
    ),
    "comments in between": (
        unit(
            f"ExecStart={PY} \\\n# why\n  {LAUNCH} \\\n; --tp 2 \\\n  --model-path /m --tp 4 \\\n"
        ),
        f"{PY}    {LAUNCH}",
        words(FLAGS),
    ),
    "options of python": (
        unit(
            f"ExecStart={PY} -u -X dev -O {LAUNCH} {FLAGS}", f"{PY} -u -X dev -O {LAUNCH} {FLAGS}"
        ),
        f"{PY} -u -X dev -O {LAUNCH}",
        words(FLAGS),
    ),
    "module joined": (
        unit(
            f"ExecStart={PY} -msglang.launch_server {FLAGS}", f"{PY} -msglang.launch_server {FLAGS}"
        ),
        f"{PY} -msglang.launch_server",
        words(FLAGS),
    ),
    "no flags": (unit(f"ExecStart={PY} {LAUNCH}", f"{PY} {LAUNCH}"), f"{PY} {LAUNCH}", []),
    "quotes": (
        unit(f"""ExecStart="{PY}" -m 'sglang.launch_server' "--model-path" '/m' --tp "4" """),
        f"\"{PY}\" -m 'sglang.launch_server'",
        words(FLAGS),
    ),
    "path with a space": (
        unit(
            r'ExecStart="/opt/my venv/python" -m sglang.launch_server --model-path "/a b" --tp 4',
            ["/opt/my venv/python", *words(LAUNCH), "--model-path", "/a b", "--tp", "4"],
        ),
        f'"/opt/my venv/python" {LAUNCH}',
        ["--model-path", "/a b", "--tp", "4"],
    ),
    "escapes": (
        unit(
            rf"ExecStart={PY} {LAUNCH} --model-path /a\x20b \u00e9",
            [PY, *words(LAUNCH), "--model-path", "/a b", "é"],
        ),
        f"{PY} {LAUNCH}",
        ["--model-path", "/a b", "é"],
    ),
    "unicode": (
        unit(
            f"ExecStart=/opt/模型/python {LAUNCH} --model-path /モデル/é",
            f"/opt/模型/python {LAUNCH} --model-path /モデル/é",
        ),
        f"/opt/模型/python {LAUNCH}",
        ["--model-path", "/モデル/é"],
    ),
    "JSON": (
        unit(
            f"""ExecStart={PY} {LAUNCH} --json-model-override '{{"a": "b c"}}' --x={{"y":1}}""",
            [PY, *words(LAUNCH), "--json-model-override", '{"a": "b c"}', "--x={y:1}"],
        ),
        f"{PY} {LAUNCH}",
        ["--json-model-override", '{"a": "b c"}', "--x={y:1}"],
    ),
    "flags with =": (
        unit(
            f"ExecStart={PY} {LAUNCH} --model-path=/m --tp=4",
            f"{PY} {LAUNCH} --model-path=/m --tp=4",
        ),
        f"{PY} {LAUNCH}",
        ["--model-path=/m", "--tp=4"],
    ),
    "dollar and percent signs": (
        unit(
            f"ExecStart={PY} {LAUNCH} --x a$$b 50%% $$HOME a$b",
            [PY, *words(LAUNCH), "--x", "a$b", "50%", "$HOME", "a$b"],
        ),
        f"{PY} {LAUNCH}",
        ["--x", "a$b", "50%", "$HOME", "a$b"],
    ),
    "no variables": (
        unit(
            f"ExecStart=:{PY} {LAUNCH} --x a$$b $HOME", [PY, *words(LAUNCH), "--x", "a$$b", "$HOME"]
        ),
        f":{PY} {LAUNCH}",
        ["--x", "a$$b", "$HOME"],
    ),
    "all in a variable": (
        unit(f"EnvironmentFile=/etc/default/sglang\nExecStart={PY} {LAUNCH} $ARGS"),
        f"{PY} {LAUNCH}",
        words(FLAGS),
    ),
    "some in variables": (
        unit(
            f"ExecStart={PY} {LAUNCH} --model-path ${{MODEL}} $MORE --port 80${{N}}1 $LAST",
            f"{PY} {LAUNCH} --model-path '/m x' --a --b --port 8001",
        ),
        f"{PY} {LAUNCH}",
        ["--model-path", "/m x", "--a", "--b", "--port", "8001"],
    ),
    "a variable in the head": (
        unit(f"ExecStart=/usr/bin/env CUDA_VISIBLE_DEVICES=${{GPUS}} ${{PYTHON}} {LAUNCH} {FLAGS}"),
        f"/usr/bin/env CUDA_VISIBLE_DEVICES=${{GPUS}} ${{PYTHON}} {LAUNCH}",
        words(FLAGS),
    ),
    "a template": (
        unit(
            f"ExecStart=%h/venv/python {LAUNCH} --model-path /m/%i --log %n.log",
            f"/root/venv/python {LAUNCH} --model-path /m/qwen --log sglang@qwen.service.log",
        ),
        f"%h/venv/python {LAUNCH}",
        ["--model-path", "/m/qwen", "--log", "sglang@qwen.service.log"],
    ),
    "numactl": (
        unit(f"ExecStart=/usr/bin/numactl --cpunodebind=0 -m 0 {PY} {LAUNCH} {FLAGS}"),
        f"/usr/bin/numactl --cpunodebind=0 -m 0 {PY} {LAUNCH}",
        words(FLAGS),
    ),
    "nice and chrt": (
        unit(f"ExecStart=-nice -n -5 chrt -r 1 {PY} {LAUNCH} {FLAGS}"),
        f"-nice -n -5 chrt -r 1 {PY} {LAUNCH}",
        words(FLAGS),
    ),
    "conda run": (
        unit(
            f"ExecStart=/opt/conda/bin/conda run -n x python {LAUNCH} {FLAGS}",
            f"/opt/conda/bin/python /opt/conda/bin/conda run -n x python {LAUNCH} {FLAGS}",
        ),
        f"/opt/conda/bin/conda run -n x python {LAUNCH}",
        words(FLAGS),
    ),
    "uv run": (
        unit(f"ExecStart=uv run python {LAUNCH} {FLAGS}", f"uv run python {LAUNCH} {FLAGS}"),
        f"uv run python {LAUNCH}",
        words(FLAGS),
    ),
    "sglang serve": (
        unit(
            "ExecStart=/opt/x/bin/sglang serve Qwen/Qwen3 --tp 4",
            "/opt/x/bin/python3 /opt/x/bin/sglang serve Qwen/Qwen3 --tp 4",
        ),
        "/opt/x/bin/sglang serve",
        ["Qwen/Qwen3", "--tp", "4"],
    ),
    "launch_server.py": (
        unit(
            f"ExecStart={PY} /src/sglang/launch_server.py {FLAGS}",
            f"{PY} /src/sglang/launch_server.py {FLAGS}",
        ),
        f"{PY} /src/sglang/launch_server.py",
        words(FLAGS),
    ),
    "prefixes": (unit(f"ExecStart=-+{PY} {LAUNCH} {FLAGS}"), f"-+{PY} {LAUNCH}", words(FLAGS)),
    "another name": (
        unit(f"ExecStart=@{PY} sgl {LAUNCH} {FLAGS}", f"sgl {LAUNCH} {FLAGS}"),
        f"@{PY} sgl {LAUNCH}",
        words(FLAGS),
    ),
    "a drop-in replaces it": (
        unit(
            "ExecStart=/bin/false", more=f"[Service]\nExecStart=\nExecStart={PY} {LAUNCH} {FLAGS}"
        ),
        f"{PY} {LAUNCH}",
        words(FLAGS),
    ),
    "a drop-in says other things": (
        unit(f"ExecStart={PY} {LAUNCH} {FLAGS}", more="[Service]\nRestart=always"),
        f"{PY} {LAUNCH}",
        words(FLAGS),
    ),
    "a file that ends in a continued line": (
        unit(f"ExecStart={PY} {LAUNCH} {FLAGS} \\", more="[Service]\nRestart=always"),
        f"{PY} {LAUNCH}",
        words(FLAGS),
    ),
    "a comment like a file's name": (
        unit(f"# /etc/systemd/system/old.service\nExecStart={PY} {LAUNCH} {FLAGS}"),
        f"{PY} {LAUNCH}",
        words(FLAGS),
    ),
    "set twice with a reset": (
        unit(f"ExecStart=/bin/false\nExecStart=\nExecStart={PY} {LAUNCH} {FLAGS}"),
        f"{PY} {LAUNCH}",
        words(FLAGS),
    ),
    "elsewhere it means nothing": (
        unit(f"ExecStart={PY} {LAUNCH} {FLAGS}\nExecStartPre=/bin/a\n[Install]\nExecStart=/bin/b"),
        f"{PY} {LAUNCH}",
        words(FLAGS),
    ),
    "a wrapper that passes flags on": (
        unit(f"ExecStart=/opt/run.sh {FLAGS}", f"{PY} {LAUNCH} --host 0.0.0.0 {FLAGS}"),
        "/opt/run.sh",
        words(FLAGS),
    ),
    "a wrapper with an argument of its own": (
        unit(f"ExecStart=/bin/bash /opt/run.sh prod {FLAGS}", f"{PY} {LAUNCH} {FLAGS} --host ::"),
        "/bin/bash /opt/run.sh prod",
        words(FLAGS),
    ),
    "a shell that passes flags on": (
        unit(f"""ExecStart=/bin/sh -c 'ulimit -l; exec {PY} {LAUNCH} "$@"' sh {FLAGS}"""),
        f"""/bin/sh -c 'ulimit -l; exec {PY} {LAUNCH} "$@"' sh""",
        words(FLAGS),
    ),
    "an API key": (
        unit(f"ExecStart={PY} {LAUNCH} --api-key hunter2", f"{PY} {LAUNCH} --api-key hunter2"),
        f"{PY} {LAUNCH}",
        ["--api-key", "hunter2"],
    ),
    "a separator as a word": (
        unit(f"ExecStart={PY} {LAUNCH} --x \\; a", [PY, *words(LAUNCH), "--x", ";", "a"]),
        f"{PY} {LAUNCH}",
        ["--x", ";", "a"],
    ),
}

INNER: dict[str, tuple[Unit, str, list[str]]] = {
    "exec": (
        unit(f"ExecStart=/bin/sh -c 'exec {PY} {LAUNCH} {FLAGS}'"),
        f"exec {PY} {LAUNCH}",
        words(FLAGS),
    ),
    "the shell stays": (
        unit(
            f'ExecStart=bash -lc "{PY} {LAUNCH} {FLAGS}"', ["bash", "-lc", f"{PY} {LAUNCH} {FLAGS}"]
        ),
        f"{PY} {LAUNCH}",
        words(FLAGS),
    ),
    "quotes": (
        unit(
            f"""ExecStart=bash -c "exec python {LAUNCH} --x '{{\\"a\\": 1}}' --y \\"b c\\"" """,
            ["python", *words(LAUNCH), "--x", '{"a": 1}', "--y", "b c"],
        ),
        f"exec python {LAUNCH}",
        ["--x", '{"a": 1}', "--y", "b c"],
    ),
    "variables": (
        unit(
            f"""ExecStart=bash -c 'exec python {LAUNCH} $ARGS --m "$$MODEL" --p ${{PORT}}'""",
            ["python", *words(LAUNCH), "--a", "b", "--m", "/a b", "--p", "1"],
        ),
        f"exec python {LAUNCH}",
        ["--a", "b", "--m", "/a b", "--p", "1"],
    ),
    "an environment": (
        unit(f"ExecStart=sh -c 'A=$${{B}} exec %h/python {LAUNCH} {FLAGS}'"),
        f"A=$${{B}} exec %h/python {LAUNCH}",
        words(FLAGS),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_where_the_flags_are(name: str) -> None:
    found, head, flags = SHAPES[name]
    command = locate(found)

    assert (command.head, command.shell, list(command.flags)) == (head, "", flags)
    assert command.file == (DROP_IN if name == "a drop-in replaces it" else FILE)
    assert command.exe == PY


@pytest.mark.parametrize("name", INNER)
def test_where_the_flags_are_in_a_shells_command(name: str) -> None:
    found, shell, flags = INNER[name]
    command = locate(found)

    assert (command.shell, list(command.flags)) == (shell, flags)
    assert command.head.endswith("c")


@pytest.mark.parametrize("name", [*SHAPES, *INNER])
def test_a_drop_in_with_the_same_flags_is_the_same_command(name: str) -> None:
    command = locate({**SHAPES, **INNER}[name][0])
    flags = list(command.flags)
    if name == "a wrapper that passes flags on" or "shell that" in name:
        flags = [*flags, "--x", "a b"]
    found = again(command, flags)

    assert found.head.split() == command.head.split()
    assert (found.shell, found.variables) == (command.shell, command.variables)
    assert found.flags == tuple(flags)
    assert found.from_process is False


@pytest.mark.parametrize(
    ("name", "read"),
    [("plain", False), ("all in a variable", True), ("a template", True), ("JSON", False)],
)
def test_flags_that_the_file_does_not_name_are_read_from_the_server(name: str, read: bool) -> None:
    command = locate(SHAPES[name][0])

    assert (command.from_process, command.private) == (read, read)


PLAIN = f"ExecStart={PY} {LAUNCH} {FLAGS}"

# ExecStart, the running command line, and part of the sentence.
REFUSED: dict[str, tuple[Unit, str]] = {
    "docker": (
        unit(
            f"ExecStart=/usr/bin/docker run --gpus all img python {LAUNCH} {FLAGS}",
            f"docker run img python {LAUNCH} {FLAGS}",
        ),
        "container with docker",
    ),
    "podman": (
        unit("ExecStart=podman start -a sglang", "podman start -a sglang"),
        "container with podman",
    ),
    "docker in a shell": (
        unit("ExecStart=sh -c 'exec docker run img'", "docker run img"),
        "with docker",
    ),
    "docker in a wrapper": (
        unit("ExecStart=/opt/run.sh", f"docker run i python {LAUNCH} --tp 4"),
        "with docker",
    ),
    "no process": (unit(PLAIN, None), "no running main process"),
    "not reloaded": (unit(PLAIN, NeedDaemonReload="yes"), "changed since systemd read them"),
    "reload unknown": (unit(PLAIN, NeedDaemonReload=""), "changed since systemd read them"),
    "edited": (
        unit(PLAIN, f"{PY} {LAUNCH} --model-path /m --tp 2"),
        "other flags than the running",
    ),
    "edited, longer": (unit(PLAIN, f"{PY} {LAUNCH} {FLAGS} --x"), "other flags than the running"),
    "edited, shorter": (
        unit(PLAIN, f"{PY} {LAUNCH} --model-path /m"),
        "other flags than the running",
    ),
    "edited beside a variable": (
        unit(f"ExecStart={PY} {LAUNCH} --tp 4 $ARGS", f"{PY} {LAUNCH} --tp 2 --x"),
        "other flags than the running",
    ),
    "several commands": (unit(f"Type=oneshot\nExecStart=/bin/a\n{PLAIN}"), "has 2 commands"),
    "several on a line": (unit(f"ExecStart=/bin/a ; {PY} {LAUNCH} {FLAGS}"), "has 2 commands"),
    "none": (unit("ExecStop=/bin/a"), "has no commands"),
    "reset only": (unit(PLAIN, more="[Service]\nExecStart="), "has no commands"),
    "a wrapper with the flags in it": (unit("ExecStart=/opt/run.sh"), "/opt/run.sh"),
    "a wrapper that sets such flags": (
        unit("ExecStart=/opt/run.sh --tp 4", f"{PY} {LAUNCH} --speculative-num-steps 3 --tp 4"),
        "/opt/run.sh",
    ),
    "a wrapper that limits requests": (
        unit("ExecStart=/opt/run.sh --tp 4", f"{PY} {LAUNCH} --tp 4 --max-running-requests 9"),
        "/opt/run.sh",
    ),
    "a wrapper with values for flags": (
        unit("ExecStart=/opt/run.sh 4", f"{PY} {LAUNCH} --tp 4"),
        "/opt/run.sh",
    ),
    "a wrapper that changes flags": (
        unit("ExecStart=/opt/run.sh --tp 4", f"{PY} {LAUNCH} --tp 8"),
        "/opt/run.sh",
    ),
    "a wrapper that stays": (
        unit(f"ExecStart=/opt/run.sh {FLAGS}", f"/bin/bash /opt/run.sh {FLAGS}"),
        "does not show where SGLang's flags begin",
    ),
    "a shell's list": (
        unit(f"ExecStart=bash -c 'cd /x && exec {PY} {LAUNCH} {FLAGS}'"),
        "by a script, or by a shell",
    ),
    "a shell's pipe": (
        unit(
            f"ExecStart=bash -c '{PY} {LAUNCH} {FLAGS} 2>&1 | tee /x'",
            ["bash", "-c", f"{PY} {LAUNCH} {FLAGS} 2>&1 | tee /x"],
        ),
        "does not show where",
    ),
    "a shell's substitution": (
        unit(f"ExecStart=bash -c 'exec {PY} {LAUNCH} --m $(cat /x)'", f"{PY} {LAUNCH} --m 1"),
        "by a script, or by a shell",
    ),
    "a shell's pattern": (
        unit(f"ExecStart=bash -c 'exec {PY} {LAUNCH} /m*'", f"{PY} {LAUNCH} /m1"),
        "by a script, or by a shell",
    ),
    "another program": (
        unit("ExecStart=/usr/bin/vllm serve x", "/usr/bin/vllm serve x"),
        "does not show where",
    ),
    "a renamed process": (unit(PLAIN, ["sglang::main"]), "does not show where"),
    "an open quote": (unit(f"ExecStart={PY} {LAUNCH} 'a"), "never closed"),
    "no UTF-8": (unit(rf"ExecStart={PY} {LAUNCH} \xff"), "no UTF-8"),
    "a bad section": (unit(f"[Service\n{PLAIN}"), "section header"),
    "a file that is not shown": (unit(PLAIN, DropInPaths=DROP_IN), "told apart"),
    "a file shown twice": (unit(f"# {FILE}\n{PLAIN}"), "told apart"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_changed(name: str) -> None:
    found, sentence = REFUSED[name]
    with pytest.raises(BadInput) as caught:
        locate(found)

    assert sentence in str(caught.value)
    assert "sglang.service" in caught.value.message
    assert caught.value.remedy or name in ("an open quote", "no UTF-8", "a bad section")


SECRET = "hunter2"


@pytest.mark.parametrize(
    "found",
    [
        unit(
            f"ExecStart={PY} {LAUNCH} --api-key {SECRET}", f"{PY} {LAUNCH} --api-key other-{SECRET}"
        ),
        unit(
            f"ExecStart=/opt/run.sh --api-key {SECRET}", f"/bin/sh /opt/run.sh --api-key {SECRET}"
        ),
        unit(f"ExecStart=/opt/run.sh --api-key {SECRET}", f"{PY} {LAUNCH} --api-key x{SECRET}"),
        unit(f"ExecStart=docker run -e KEY={SECRET} x", f"docker run -e KEY={SECRET} x"),
        unit(f"ExecStart={PY} {LAUNCH} '--api-key {SECRET}", f"{PY} {LAUNCH}"),
        unit(f"ExecStart={PY} {LAUNCH} --api-key {SECRET} \\xff", f"{PY} {LAUNCH}"),
    ],
)
def test_no_secret_stands_in_an_error(found: Unit) -> None:
    with pytest.raises(BadInput) as caught:
        locate(found)

    assert SECRET not in str(caught.value)
    assert SECRET not in repr(found)


def test_no_secret_stands_in_a_values_repr() -> None:
    found = unit(
        f"ExecStart=env HF_TOKEN={SECRET} {PY} {LAUNCH} --api-key {SECRET}",
        f"{PY} {LAUNCH} --api-key {SECRET}",
    )
    command = locate(found)

    assert command.private
    assert SECRET in drop_in(command, list(command.flags))
    assert SECRET not in repr(command)
    assert SECRET not in repr(parse_exec_start(found.text))


@pytest.mark.parametrize(
    ("flags", "secret"),
    [
        ("--api-key x", True),
        ("--admin-api-key=x", True),
        ("--api x", True),
        ("--ssl-keyfile-password x", True),
        ("--ssl-keyf x", True),
        ("--ssl-keyfile /etc/k.pem --ssl-certfile=/etc/c.pem", False),
        ("HF_TOKEN=x", True),
        ("'OPENAI_API_KEY=x'", True),
        ("--model-path /m --tokenizer-path /t --max-total-tokens 1 -a --", False),
        ("", False),
    ],
)
def test_names_of_secrets(flags: str, secret: bool) -> None:
    assert hides_secrets(flags.split()) is secret


def test_a_drop_in_as_it_is_written() -> None:
    command = locate(unit(f"ExecStart=-/usr/bin/numactl -N 0 {PY} {LAUNCH} $ARGS"))

    assert drop_in(command, ["--x", "a b", "50%", "$HOME", "", 'q"\\', "é", ";"]) == (
        "# Written by gpu-reclaim: sglang.service with other flags for SGLang.\n"
        "# To undo: remove this file, then `systemctl daemon-reload` and restart the unit.\n"
        "[Service]\n"
        "ExecStart=\n"
        f"ExecStart=-/usr/bin/numactl -N 0 {PY} {LAUNCH} "
        '--x "a b" 50%% $$HOME "" "q\\"\\\\" "é" ";"\n'
    )


@pytest.mark.parametrize("flag", ["a\0b", "\udcff"])
def test_a_flag_that_no_command_line_can_hold(flag: str) -> None:
    with pytest.raises(BadInput, match="no command line can hold"):
        drop_in(locate(unit(PLAIN)), [flag])


# Lines that systemd 252 was given (`systemd --test`), and the words that it read.
READ_BY_SYSTEMD = [
    (
        "ExecStart=/bin/echo a \\\n# c\n; d\n  b \\\n  \nExecStart=/bin/ls",
        ["/bin/echo a b", "/bin/ls"],
    ),
    ("ExecStart=/bin/echo a\\\\\nExecStart=", []),
    (
        "ExecStart=/bin/echo \\; ; /bin/ls ;x '; ' ';' \\;",
        ["/bin/echo ';'", "/bin/ls ';x' '; ' ';' ';'"],
    ),
    ("ExecStart=/bin/echo a\r\n", ["/bin/echo a"]),
    ('ExecStart=/bin/echo "a\\\nb"', ["/bin/echo 'a b'"]),
    ("ExecStart=/bin/echo a\\\n\nExecStart=/bin/ls", ["/bin/echo a", "/bin/ls"]),
    (r'ExecStart=/bin/echo \d\q "x\.y" \101 \400', [r"/bin/echo '\d\q' 'x\.y' A '\400'"]),
    ("#x\\\nExecStart=/bin/echo z", ["/bin/echo z"]),
    ("execstart=/bin/ls\nExecStart =/bin/echo q=r 's=t'", ["/bin/echo q=r s=t"]),
    ("ExecStart=/bin/echo a\u2028b \u00a0c\x0bd", ["/bin/echo 'a\u2028b' '\u00a0c\x0bd'"]),
    ("ExecStart=!!/bin/echo a\nExecStart=!/bin/ls b", ["/bin/echo a", "/bin/ls b"]),
    ("ExecStart='/bin/echo' \"a'b\" 'c\"d' e'f g'h", ["/bin/echo \"a'b\" 'c\"d' 'ef gh'"]),
    ("ExecStart=/bin/echo a \\", ["/bin/echo a"]),
]


@pytest.mark.parametrize(("text", "commands"), READ_BY_SYSTEMD)
def test_commands_are_read_as_systemd_reads_them(text: str, commands: list[str]) -> None:
    found = parse_exec_start(f"[Service]\n{text}")

    assert [[word.raw for word in x.words] for x in found] == [words(x) for x in commands]


ANY_WORDS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12),
        st.text("a$%{}\"'\\ ;\n\t#x41", max_size=8),
        st.sampled_from(["$FOO", "${FOO}", "%i", "$$", ";", "\\", "é\ufffe", "--api-key"]),
    ),
    max_size=5,
)
COMMANDS = st.sampled_from(
    [
        locate(unit(PLAIN)),
        locate(SHAPES["no variables"][0]),
        locate(SHAPES["path with a space"][0]),
        locate(INNER["exec"][0]),
        locate(INNER["an environment"][0]),
        locate(SHAPES["a template"][0]),
    ]
)


@always(command=COMMANDS, flags=ANY_WORDS)
def test_flags_come_back_from_a_drop_in(command: ServerCommand, flags: list[str]) -> None:
    (parsed,) = parse_exec_start(drop_in(command, flags))
    found = parsed.words
    if command.shell:
        text = found[-1].text.partition("sglang.launch_server")[2]
        assert shlex.split(text) == flags
    else:
        assert [word.text for word in found[len(found) - len(flags) :]] == flags
    assert parsed.line[: len(command.head)] == command.head


@always(raw=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_a_quoted_word_is_one_printable_word(raw: str) -> None:
    text = quoted(escaped(raw))

    assert text.isprintable()
    (command,) = parse_exec_start(f"[Service]\nExecStart=/x {text}")
    assert [word.text for word in command.words] == ["/x", raw]


CAT = st.sampled_from([x.text for x, *_ in [*SHAPES.values(), *INNER.values()]])


@always(3, text=st.one_of(damaged(CAT), st.text(), st.text("[]Service ExecStart=\\\n\"'$%{};#")))
def test_no_text_breaks_the_parser(text: str) -> None:
    found = replace(unit(PLAIN), text=text)
    answer(lambda: locate(found))
    answer(lambda: parse_exec_start(f"[Service]\nExecStart={text}"))
    shell_words(text)


@always(text=st.one_of(st.text(), damaged(st.just("show LoadState=loaded\nfile x\nargv 6100\n"))))
def test_no_answer_breaks_its_parser(text: str) -> None:
    answer(lambda: parse_server(Section(text, 0), "sglang.service"))


# What runs on the host.

SYSTEMCTL = r"""
case $* in
  *ghost*) echo "no such unit" >&2; exit 1;;
  show*)
    printf 'LoadState=loaded\nFragmentPath=%s\n' "${FILE-/x}"
    printf 'MainPID=%s\nNeedDaemonReload=no\n' "$PID";;
  cat*) printf '# /x\n[Service]\nExecStart=a \\\n b\n';;
esac
"""


@pytest.fixture
def systemctl(tools: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "stubs"
    folder.mkdir()
    stub(folder, "systemctl", SYSTEMCTL)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PID", "0")


@pytest.mark.usefixtures("systemctl")
def test_a_unit_is_shown_with_its_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = ["a b", "c\nd", "", "é\\n"]
    argv = [sys.executable, "-c", "import time; time.sleep(60)", *odd]
    with subprocess.Popen(argv) as process:
        monkeypatch.setenv("PID", str(process.pid))
        try:
            section = here({"server": show_server("sglang")}).section("server")
        finally:
            process.kill()
    found = parse_server(section, "sglang.service")

    assert found.argv == tuple(argv)
    assert found.exe == str(Path(sys.executable).resolve())
    assert found.properties["NeedDaemonReload"] == "no"
    assert found.text == "# /x\n[Service]\nExecStart=a \\\n b"


@pytest.mark.usefixtures("systemctl")
def test_a_unit_without_a_main_process_has_no_command_line() -> None:
    found = parse_server(here({"x": show_server("sglang")}).section("x"), "sglang.service")

    assert (found.argv, found.exe) == ((), "")


@pytest.mark.usefixtures("systemctl")
def test_whether_a_drop_in_can_be_written_is_seen(tmp_path: Path) -> None:
    """Root may write to everything but a read-only file system, and to what is not there."""
    places = places_in(str(tmp_path))
    section = here({"x": show_server("sglang", places)}).section("x")
    assert parse_server(section, "sglang.service").fixed
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    section = here({"x": show_server("sglang", places)}).section("x")
    assert not parse_server(section, "sglang.service").fixed


@pytest.fixture
def edits(systemctl: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Edits:
    made = Edits(tmp_path)
    monkeypatch.setenv("FILE", str(made.home / "it's a unit"))
    made.write("it's a unit", "[Service]\nExecStart=/x\n")
    made.write(f"{ETC}/override.conf", "[Service]\nNice=1\n")
    return made


ETC, RUN = (f"{x}systemd/system/sglang.service.d" for x in ("etc/", ""))


@dataclass
class Edits:
    """A unit's files, and the checksum of them."""

    home: Path

    def write(self, name: str, text: str) -> None:
        file = self.home / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    @property
    def print(self) -> str:
        text = show_server("sglang", places_in(str(self.home)))
        return parse_server(here({"x": text}).section("x"), "sglang.service").print


@pytest.mark.parametrize(
    "name", ["50-gpu-reclaim-hold.conf", "gpu-reclaim-no-kill.conf", TRIAL_FILE, "note.txt"]
)
@pytest.mark.parametrize("folder", [ETC, RUN])
def test_what_a_hold_or_a_trial_writes_is_no_edit(edits: Edits, folder: str, name: str) -> None:
    before = edits.print
    edits.write(f"{folder}/{name}", "[Service]\nRestart=no\n")

    assert edits.print == before
    assert re.fullmatch(r"\d+ \d+", before)


@pytest.mark.parametrize(
    "name",
    [
        "it's a unit",
        f"{ETC}/override.conf",
        f"{ETC}/10-new.conf",
        f"{RUN}/10-new.conf",
        # What another tuning has kept.
        f"{ETC}/zz-gpu-reclaim.conf",
        f"{RUN}/zz-gpu-reclaim.conf",
        f"{ETC}/zz-gpu-reclaim-moe.conf",
    ],
)
def test_every_other_edit_is_one(edits: Edits, name: str) -> None:
    before = edits.print
    edits.write(name, "[Service]\nNice=2\n")
    assert edits.print != before


def test_a_drop_in_that_is_gone_is_an_edit_too(edits: Edits) -> None:
    before = edits.print
    (edits.home / ETC / "override.conf").unlink()
    assert edits.print != before


@pytest.mark.usefixtures("systemctl")
def test_a_unit_that_systemd_does_not_show_is_no_answer() -> None:
    section = here({"x": show_server("ghost")}).section("x")
    with pytest.raises(BadAnswer, match="did not show the unit"):
        parse_server(section, "ghost.service")


def test_no_environment_is_read() -> None:
    assert "environ" not in show_server("sglang").lower()


def test_a_unit_name_is_checked() -> None:
    with pytest.raises(BadInput, match="no systemd unit name"):
        show_server("a; rm -rf /")
