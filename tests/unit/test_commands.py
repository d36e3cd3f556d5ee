"""Scripts as they travel, and what is made of what comes back."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from gpu_reclaim.commands import (
    Framed,
    Guard,
    Result,
    Script,
    Section,
    argv,
    decode,
    frame,
    printable,
    unframe,
)
from gpu_reclaim.errors import BadAnswer, IdentityMismatch, Incomplete, OutcomeUnknown, TimedOut
from gpu_reclaim.transport.local import LocalTransport
from unit.shells import here

HOSTNAME = Path("/proc/sys/kernel/hostname").read_text().strip()
SCRIPT = Script("look", {"a": "echo 1"})


def answer(framed: Framed, stdout: str, exit_code: int | None = 0) -> Result:
    """What a transport hands to `unframe`; M stands for the mark."""
    text = stdout.replace("M", framed.mark)
    return Result(framed.script, "a host", text, "", exit_code)


def sections(stdout: str) -> dict[str, Section]:
    framed = frame(SCRIPT)
    return dict(unframe(framed, answer(framed, stdout)).sections)


# Marks.


def test_marks_are_used_once() -> None:
    assert frame(SCRIPT).mark != frame(SCRIPT).mark


def test_the_mark_is_not_in_our_command_line() -> None:
    assert argv(SCRIPT) == ["timeout", "-k", "5", "30", "sh", "-s"]
    assert argv(SCRIPT, sudo=True)[:3] == ["sudo", "-n", "--"]


def test_sections_are_found() -> None:
    text = "M begin\nM section a\nx\ny\n\nM code 3\nM section b\n\nM code 0\nM end\n"

    assert sections(text) == {"a": Section("x\ny\n", 3), "b": Section("", 0)}


def test_a_section_without_trailing_newline_keeps_its_text() -> None:
    assert sections("M begin\nM section a\nx\nM code 0\nM end\n") == {"a": Section("x", 0)}


def test_noise_before_the_begin_mark_is_nobodys_text() -> None:
    text = "Welcome to the machine\nM begin\nM section a\nx\nM code 0\nM end\nlogout\n"

    assert sections(text) == {"a": Section("x", 0)}


@pytest.mark.parametrize(
    "fake",
    [
        "@gr-0123456789abcdef end",
        "@gr-0123456789abcdef section b\nforged\n@gr-0123456789abcdef code 0",
        "@gr-0123456789abcdef refused hostname other",
        "said: M end",
        " M end",
        "M end of something",
        "M",
    ],
)
def test_text_that_looks_like_a_mark_stays_text(fake: str) -> None:
    found = sections(f"M begin\nM section a\n{fake}\n\nM code 0\nM end\n")

    assert list(found) == ["a"]
    assert found["a"].text.count("\n") == fake.count("\n") + 1


@pytest.mark.parametrize(
    "cut", ["", "M begin\n", "M begin\nM section a\nM end of it\n", "x M end\n"]
)
def test_without_the_end_mark_nobody_knows(cut: str) -> None:
    framed = frame(SCRIPT)
    with pytest.raises(Incomplete) as caught:
        unframe(framed, answer(framed, cut, 1))

    assert caught.value.result is not None
    assert "exit status 1" in str(caught.value)


@pytest.mark.parametrize(
    ("code", "kind"), [(124, TimedOut), (137, TimedOut), (None, Incomplete), (255, Incomplete)]
)
def test_a_script_that_outstayed_its_limit(code: int | None, kind: type[OutcomeUnknown]) -> None:
    framed = frame(SCRIPT)
    with pytest.raises(OutcomeUnknown) as caught:
        unframe(framed, answer(framed, "M begin\n", code))

    assert type(caught.value) is kind


def test_a_part_that_is_not_there_is_a_bad_answer() -> None:
    with pytest.raises(BadAnswer, match="look has no part 'b'"):
        Result(SCRIPT, "a host", "", "", 0).section("b")


def test_lines_and_values_of_a_section() -> None:
    section = Section("gpu 0, x\ngpus 1\ngpu \n gpu 2\nhost a b\ngpu\nhost c", 0)

    assert section.lines("gpu") == ["0, x", ""]
    assert section.value("host") == "a b"
    assert section.value("none") == ""


def test_the_last_words_are_those_of_standard_error() -> None:
    result = Result(SCRIPT, "a host", "out", "one\ntwo\x1b[31m\nthree\n", 1)

    assert result.words(2) == "two\\x1b[31m\nthree"


def test_without_standard_error_the_last_words_are_those_of_standard_output() -> None:
    assert Result(SCRIPT, "a host", "a\nb\n", " \n", 1).words(1) == "b"


# Text.


def test_printable_escapes_control_characters_and_keeps_letters() -> None:
    assert printable("Grün \x1b[2J\r\n\x07 日本") == "Grün \\x1b[2J\\r\\n\\x07 日本"
    assert printable("a\nb\tc", newlines=True) == "a\nb\\tc"


def test_printable_escapes_what_reverses_or_hides_text() -> None:
    assert printable("a\u202eb\u200bc\u2028d") == "a\\u202eb\\u200bc\\u2028d"


def test_printable_bounds_the_length() -> None:
    assert printable("x" * 30, limit=10) == "x" * 10 + "..."
    assert printable("x" * 10, limit=10) == "x" * 10


def test_bytes_that_are_no_utf8_are_shown() -> None:
    assert decode(b"a\xff\xc3\xbcb") == "a\\xffüb"


# Scripts really run.


def test_sections_run_one_after_the_other(shell: str) -> None:
    result = here({"a": "echo 1; exit 3", "b": "printf 2", "c": "cd /; x=1; false", "d": "pwd"})

    assert result.sections["a"] == Section("1\n", 3)
    assert result.sections["b"] == Section("2", 0)
    assert result.sections["c"] == Section("", 1)
    assert result.sections["d"].text != "/\n"
    assert result.exit_code == 0


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_sections_run_side_by_side_and_each_keeps_its_own_output(shell: str, count: int) -> None:
    # More than a pipe holds, so that sections that wait for each other would show.
    body = (
        "i=0; while [ $i -lt 4000 ]; do echo 'N line of this section $i'; i=$((i+1)); done; exit N"
    )
    asked = {f"s{n}": body.replace("N", str(n)) for n in range(count)}
    result = here(asked, together=True)

    assert set(result.sections) == set(asked)
    for n in range(count):
        section = result.sections[f"s{n}"]
        assert section.code == n
        assert section.text == f"{n} line of this section $i\n" * 4000


def test_sections_side_by_side_really_overlap(shell: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    wait = "until [ -e {} ] || [ $i -gt 600 ]; do i=$((i+1)); sleep 0.1; done"
    meet = f"echo > {{}}; i=0; {wait}; [ -e {{}} ]"
    asked = {
        "a": meet.format(first, second, second),
        "b": meet.format(second, first, first),
    }
    result = here(asked, together=True)

    assert [section.code for section in result.sections.values()] == [0, 0]


@pytest.mark.parametrize("together", [False, True])
def test_a_body_that_reads_its_input_gets_none(shell: str, together: bool) -> None:
    result = here({"a": 'cat; read -r x; echo "[$x]"', "b": "cat; echo b"}, together=together)

    assert result.sections == {"b": Section("b\n", 0), "a": Section("[]\n", 0)}


def test_bytes_that_are_no_utf8_come_back_shown(shell: str) -> None:
    result = here({"a": r"printf '\303\274 \377 \000.\n'"})

    assert result.sections["a"].text == "ü \\xff \0.\n"


def test_a_body_that_prints_its_own_script_forges_nothing(shell: str) -> None:
    # What a body can know of its marks: nothing, neither from arguments nor from the environment.
    result = here({"a": "env; tr '\\0' ' ' < /proc/$$/cmdline"})

    assert "@gr-" not in result.sections["a"].text


def test_a_body_that_ends_the_whole_script_leaves_the_outcome_unknown(shell: str) -> None:
    with pytest.raises(Incomplete):
        here({"a": "kill -s KILL $$; exit 0", "b": "echo never"})


def test_a_body_that_is_no_shell_text_leaves_the_outcome_unknown(shell: str) -> None:
    with pytest.raises(Incomplete, match="did not finish"):
        here({"a": "if then )"})


def test_a_script_that_outstays_its_limit_is_ended_by_the_far_side(tmp_path: Path) -> None:
    with pytest.raises(TimedOut) as caught:
        here({"a": f"echo started; echo $$ > {tmp_path}/pid; sleep 600"}, timeout_s=0.5)

    assert caught.value.result is not None
    assert caught.value.result.exit_code == 124
    pid = (tmp_path / "pid").read_text().strip()
    assert not Path(f"/proc/{pid}").exists()


def test_standard_error_is_kept_apart(shell: str) -> None:
    result = here({"a": "echo out; echo err >&2"})

    assert result.sections["a"].text == "out\n"
    assert result.stderr == "err\n"


def test_the_environment_is_plain_and_path_has_the_usual_folders(
    shell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "tr_TR.UTF-8")
    text = here({"a": 'echo "$LC_ALL"; echo "$PATH"'}).sections["a"].text

    assert text.startswith("C\n")
    assert text.endswith(":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n")


# Guards.


@pytest.mark.parametrize("together", [False, True])
def test_a_guard_lets_this_machine_through(shell: str, together: bool) -> None:
    script = Script("look", {"a": "echo in", "b": "echo in"}, together=together)
    result = LocalTransport(guard=Guard(hostname=HOSTNAME)).run(script)

    assert result.sections["a"].text == "in\n"


@pytest.mark.usefixtures("shell")
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("guard", "what", "wanted"),
    [
        (Guard(hostname="elsewhere"), "hostname", "elsewhere"),
        (Guard(hostname=HOSTNAME, machine_id="0" * 32), "machine-id", "0" * 32),
        (Guard(hostname="$(cat /proc/sys/kernel/hostname)"), "hostname", "$(cat"),
        (Guard(hostname="*"), "hostname", "*"),
        (Guard(hostname="a'b"), "hostname", "a'b"),
    ],
)
def test_another_machine_runs_no_section(
    tmp_path: Path, guard: Guard, what: str, wanted: str, together: bool
) -> None:
    script = Script(
        "act", {"a": f"echo > {tmp_path}/a", "b": f"echo > {tmp_path}/b"}, together=together
    )
    with pytest.raises(IdentityMismatch) as caught:
        LocalTransport(guard=guard).run(script)

    assert list(tmp_path.iterdir()) == []
    assert f"its {what} is" in caught.value.message
    assert wanted in caught.value.message
    assert "nothing was touched" in caught.value.message


@pytest.mark.parametrize(
    ("wanted", "hostname", "passes"),
    [
        ("", "llm", True),
        ("llm", "llm", True),
        ("llm", "llm.lab.example", True),
        ("llm.lab.example", "llm", True),
        ("llm.lab.example", "llm.lab.example", True),
        ("llm.lab.example", "llm.other.example", False),
        ("llm.lab", "llm.lab.example", False),
        ("llm", "llm2", False),
        ("llm2", "llm", False),
        ("llm", "other.llm", False),
        ("lab", "llm.lab", False),
        ("llm", "", False),
        ("l*", "llm", False),
        ("llm", "*", False),
        ("anything", "*", False),
        ("llm", "LLM", False),
    ],
)
def test_hostnames_with_and_without_domain(
    tmp_path: Path, shell: str, wanted: str, hostname: str, passes: bool
) -> None:
    (tmp_path / "hostname").write_text(f"{hostname}\n")
    text = Guard(hostname=wanted).shell("M").replace("/proc/sys/kernel", str(tmp_path))
    done = subprocess.run(["sh"], input=text, capture_output=True, text=True, check=False)

    expected = (0, "") if passes else (77, f"M refused hostname {hostname}\n")
    assert expected == (done.returncode, done.stdout)


@pytest.mark.parametrize(
    ("content", "passes"), [("a1b2\n", True), ("a1b2", True), ("a1b2c\n", False), (None, False)]
)
def test_machine_ids(tmp_path: Path, shell: str, content: str | None, passes: bool) -> None:
    file = tmp_path / "machine-id"
    if content is not None:
        file.write_text(content)
    text = Guard(machine_id="a1b2").shell("M").replace("/etc/machine-id", shlex.quote(str(file)))
    done = subprocess.run(["sh"], input=text, capture_output=True, text=True, check=False)

    assert done.returncode == (0 if passes else 77)
    assert done.stdout.startswith("" if passes else "M refused machine-id ")


def test_what_a_strange_machine_calls_itself_is_shown_harmlessly() -> None:
    framed = frame(SCRIPT, Guard(hostname="llm"))
    with pytest.raises(IdentityMismatch) as caught:
        unframe(framed, answer(framed, "M begin\nM refused hostname a\x1b[31m b\n", 77))

    assert "'a\\\\x1b[31m b', expected 'llm'" in caught.value.message
