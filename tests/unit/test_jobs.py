"""Jobs on a held host: the real scripts in a real shell, with units that really run."""

from __future__ import annotations

import itertools
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_reclaim import jobs
from gpu_reclaim.commands import Section
from gpu_reclaim.jobs import Job, JobState
from unit.job_host import JobHost
from unit.shells import stub

TABLE = "E=256,N=256,device_name=X,dtype=fp8_w8a8,block_shape=[128, 128].json"


@pytest.fixture
def host(tools: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobHost]:
    """A host whose one unit was stopped under a hold."""
    made = JobHost(tmp_path)
    monkeypatch.setenv("PATH", f"{made.tools}:{os.environ['PATH']}")
    assert made.take("llm.service").status == "taken"
    made.stop("llm.service")
    yield made
    made.section("systemctl stop -- gpureclaim.slice")


def job(host: JobHost, script: str, name: str = "one", **more: object) -> Job:
    """A job of that name which runs a script."""
    values: dict[str, object] = {"folder": str(host.home / "jobs" / name), "limit_s": 60}
    return Job(name=name, argv=["sh", "-c", script], **{**values, **more})  # type: ignore[arg-type]


def marker(host: JobHost, name: str) -> Path:
    return host.home / name


def seen(path: Path) -> bool:
    """The file is there, within some time."""
    for _ in range(400):
        if path.exists():
            return True
        time.sleep(0.05)
    return False


def test_what_systemd_is_told(host: JobHost) -> None:
    one = job(host, "true", limit_s=90.2, env={"KEY_OF_IT": "not seen"})
    assert host.start_job(one).status == "taken"
    host.ended(one)
    words = json.loads(host.runs[0])
    assert words[: words.index("--description=gpu-reclaim: a job on held GPUs")] == [
        *("--quiet", "--collect", "--no-block", "--unit=gpu-reclaim-job-one.service"),
        "--slice=gpureclaim.slice",
    ]
    given = [two for first, two in itertools.pairwise(words) if first == "-p"]
    assert f"WorkingDirectory={one.folder}" in given
    assert {"RuntimeMaxSec=151", "TimeoutStopSec=5"} <= set(given)
    assert {"KillMode=control-group", "Restart=no"} <= set(given)
    assert words[-3:] == ["--", "/bin/sh", "./run.sh"]
    assert "not seen" not in host.runs[0]


@pytest.mark.parametrize("code", [0, 3])
def test_how_it_ended(host: JobHost, code: int) -> None:
    one = job(host, f"echo out; echo err >&2; sleep 1.2; exit {code}", env={jobs.GPU: "GPU-1"})
    host.start_job(one)
    assert host.look(one).active
    found = host.ended(one)
    assert (found.code, found.text, found.offset) == (code, "out\nerr\n", 8)
    assert (found.gpu, found.token) == ("GPU-1", "t1")
    assert 1.1 <= found.seconds < 10
    assert host.look(one).seconds == found.seconds


def test_its_limit_ends_it(host: JobHost) -> None:
    one = job(host, "echo begun; sleep 60", limit_s=0.5)
    host.start_job(one)
    found = host.ended(one)
    assert found.code in (124, 143)
    assert found.text.startswith("begun\n")


def test_what_it_is_given(host: JobHost) -> None:
    """Quotes, blanks and `$` everywhere; its folder is read by nobody else."""
    folder = str(host.home / 'it\'s a $(dir) "x" %n @RUN@')
    words = ["sh", "-c", 'printf "%s|" "$@" "$V" "$PWD"', "x", "a b", "it's", "$HOME", "@RUN@", ""]
    text = "{\"a\": 'b'}\n\n$x `y` \\n @RUN@ %s\u2603"
    one = Job("one", folder, words, {"V": "1 'two'\n$3"}, {"-n space.json": text, TABLE: ""})
    assert host.start_job(one).status == "taken"
    found = host.ended(one)
    assert found.text == f"a b|it's|$HOME|@RUN@||1 'two'\n$3|{folder}|"
    assert found.files == ("-n space.json", TABLE)
    assert (host.file(one, "-n space.json"), host.file(one, TABLE)) == (text, "")
    for path in (Path(folder), Path(folder, "log"), Path(folder, "run.sh"), Path(folder, TABLE)):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_started_twice_it_runs_once(host: JobHost) -> None:
    one = job(host, f"echo x >>{marker(host, 'began')}; sleep 60")
    host.start_job(one)
    assert seen(marker(host, "began"))
    assert host.start_job(one).status == "taken"
    assert len(host.runs) == 1


def test_a_start_that_systemd_has_only_queued_is_not_made_twice(host: JobHost) -> None:
    one = job(host, "true")
    host.start_job(one)
    host.ended(one)
    (host.home / f"{one.unit}.state").write_text("ActiveState=inactive\nJob=77\n")
    assert host.start_job(one).status == "taken"
    assert len(host.runs) == 1


def test_started_anew_only_the_cache_is_left(host: JobHost) -> None:
    script = "echo old; mkdir -p cache/a .deep/b; : >cache/a/c; : >old.json; exit 4"
    one = job(host, script, files={"in.json": "1"})
    host.start_job(one)
    assert host.ended(one).files == ("in.json", "old.json")
    again = job(host, "ls -A; sleep 60")
    host.start_job(again)
    assert seen(Path(one.folder, "log"))
    time.sleep(0.3)
    found = host.look(again)
    assert (found.active, found.code, found.files) == (True, None, ())
    left = ["began", "cache", "gpu", "log", "run.sh", "token"]
    assert found.text.split() == left
    assert Path(one.folder, "cache/a/c").exists()


def test_a_folder_that_is_no_jobs_is_left_alone(host: JobHost) -> None:
    one = job(host, "true")
    Path(one.folder).mkdir(parents=True)
    Path(one.folder, "thesis.txt").touch()
    answer = host.start_job(one)
    assert answer.status == "unset"
    assert answer.why == f"{one.unit} could not be started: {one.folder} is no job's folder"
    assert sorted(x.name for x in Path(one.folder).iterdir()) == ["thesis.txt"]
    assert host.runs == []


def test_a_start_that_was_cut_leaves_a_folder_that_serves(host: JobHost) -> None:
    one = job(host, "echo new")
    Path(one.folder, "cache").mkdir(parents=True)
    Path(one.folder, "token.new").touch()
    assert host.start_job(one).status == "taken"
    assert host.ended(one).text == "new\n"


def test_an_old_code_never_stands_beside_a_new_token(host: JobHost) -> None:
    """The start is cut as soon as the token is there."""
    one = job(host, "exit 7")
    host.start_job(one)
    host.ended(one)
    Path(one.folder, "token").write_text("another night")
    stub(host.tools, "find", "exit 1")
    assert host.start_job(one).status == "unset"
    (host.tools / "find").unlink()
    found = host.look(one)
    assert (found.token, found.code) == ("t1", None)


def test_what_cannot_be_written_or_started_is_told(host: JobHost) -> None:
    Path(host.home, "jobs").touch()
    one = job(host, "true")
    why = f"{one.unit} could not be started: "
    answer = host.start_job(one)
    assert (answer.status, answer.why) == ("unset", f"{why}its folder could not be written")
    (host.home / "jobs").unlink()
    (host.home / "refuses").touch()
    answer = host.start_job(one)
    assert answer.status == "unset"
    assert answer.why == f"{why}Failed to start transient service unit: no more"


def test_without_systemd_nothing_is_started(host: JobHost) -> None:
    stub(host.tools, "systemctl", "exit 1")
    one = job(host, "true")
    assert host.start_job(one).status == "unset"
    assert host.runs == []
    # Nobody knows whether it runs.
    assert host.look(one).active


def test_nobody_else_starts_or_ends_a_job(host: JobHost) -> None:
    one, two = job(host, "sleep 60"), job(host, "true", "two")
    host.start_job(one)
    assert host.start_job(two, token="other").status == "lost"
    assert host.end_jobs("one", token="other").status == "lost"
    host.expire()
    assert host.start_job(two).status == "lost"
    assert host.end_jobs("one").status == "lost"
    assert host.look(one).active
    assert not Path(two.folder).exists()


def test_what_runs_since_another_hold_is_not_taken_for_ours(host: JobHost) -> None:
    one = job(host, "sleep 60")
    host.start_job(one)
    Path(one.folder, "token").write_text("another night")
    answer = host.start_job(one)
    assert answer.status == "running"
    assert answer.why == f"{one.unit} runs since an earlier hold"


@pytest.mark.parametrize("end", ["restore", "dead man"])
def test_whatever_ends_the_hold_ends_it(host: JobHost, end: str) -> None:
    one = job(host, "sleep 60 & sleep 60")
    host.start_job(one)
    if end == "restore":
        host.restore()
    else:
        host.expire()
        host.dead_man()
    found = host.look(one)
    assert (found.ended, found.code) == (True, None)
    assert host.state("llm.service") == "active"
    assert host.traces == []


def test_jobs_are_ended_with_what_they_started(host: JobHost) -> None:
    names = ("one", "two", "three")
    each = {name: job(host, f"echo; sleep 60 & sleep 60; : >{name}", name) for name in names}
    for one in each.values():
        host.start_job(one)
        assert seen(Path(one.folder, "log"))
        assert seen(host.home / f"{one.unit}.pid")
    (host.home / "gpu-reclaim-job-two.service.deaf").touch()
    assert host.end_jobs("one", "two", "gone").status == "taken"
    found = host.looks([(one, 0) for one in each.values()])
    assert [found[name].active for name in names] == [False, False, True]
    assert [found[name].code for name in names] == [None] * 3
    killed = [x for x in host.calls if x.startswith("kill ")]
    assert killed == ["kill -s KILL -- gpu-reclaim-job-two.service"]


def test_one_that_does_not_end_is_told(host: JobHost) -> None:
    stub(host.tools, "sleep", ":")
    host.unit("gpu-reclaim-job-stuck.service")
    (host.home / "gpu-reclaim-job-stuck.service.deaf").touch()
    (host.tools / "systemctl").write_text(
        (host.tools / "systemctl").read_text().replace('*" kill "*gpu-reclaim', '*" kill "*no')
    )
    answer = host.end_jobs("stuck")
    assert answer.status == "unset"
    assert answer.why == "not stopped: gpu-reclaim-job-stuck.service"
    host.stop("gpu-reclaim-job-stuck.service")


def test_a_log_is_read_on_from_where_it_was(host: JobHost) -> None:
    """Lines that look like ours, carriage returns, bytes that are no text, half characters."""
    one = job(host, "sleep 60")
    host.start_job(one)
    assert seen(Path(one.folder, "log"))
    log = Path(one.folder, "log")
    log.write_bytes(b"one code 0\none state inactive\nstatus lost\r\n  5%|\xe2\x96")
    first = host.look(one)
    assert first.text == "one code 0\none state inactive\nstatus lost\n  5%|"
    assert (first.active, first.code) == (True, None)
    with log.open("ab") as file:
        file.write(b"\x88|\r 10%\xff|")
    second = host.look(one, first.offset)
    assert second.text == "\u2588|\n 10%\\xff|"
    third = host.look(one, second.offset)
    assert (third.text, third.offset) == ("", log.stat().st_size)


def test_the_end_of_a_log_is_not_waited_for(host: JobHost) -> None:
    one = job(host, r"printf 'cut \342\226'")
    host.start_job(one)
    found = host.ended(one)
    assert (found.text, found.offset) == ("cut \\xe2\\x96", 6)


def test_of_much_output_the_end_is_read(host: JobHost) -> None:
    one = job(host, "true")
    host.start_job(one)
    host.ended(one)
    text = "\u2603" * 40_000 + "end"
    Path(one.folder, "log").write_text(text)
    found = host.look(one, 5)
    assert found.offset == 120_003
    # 64 KiB do not begin with a character here.
    assert found.text == text[-(3 + (65536 - 3) // 3) :]
    assert host.look(one, 200_000).offset == 120_003
    exact = host.look(one, 120_003 - 65536)
    assert (exact.text.lstrip("\\x0123456789abcdef"), exact.offset) == (found.text, 120_003)


def test_files_that_are_no_tables_are_not_told(host: JobHost) -> None:
    one = job(host, "mkdir dir.json; : >'a\nb.json'; : >x.txt; ln -s x.txt link.json; : >a.json")
    host.start_job(one)
    assert host.ended(one).files == ("a.json",)


def test_a_file_is_read_whole_or_not(host: JobHost) -> None:
    one = job(host, "true")
    host.start_job(one)
    host.ended(one)
    place = Path(one.folder)
    (place / TABLE).write_text("x" * jobs.MOST_FILE)
    (place / "long").write_text("x" * (jobs.MOST_FILE + 1))
    (place / "raw").write_bytes(b"\xff")
    assert host.file(one, TABLE) == "x" * jobs.MOST_FILE
    assert [host.file(one, name) for name in ("long", "raw", "gone", "cache")] == [None] * 4


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\nb"])
def test_no_file_of_another_folder_is_read(name: str) -> None:
    with pytest.raises(ValueError, match="no name of a job's file"):
        jobs.read_file(Job("one", "/x", ["true"]), name)


def test_a_job_that_never_was(host: JobHost) -> None:
    one = job(host, "true")
    assert host.look(one) == JobState(active=False)
    assert host.look(one).ended


def test_after_a_restart_of_the_host_time_is_not_negative() -> None:
    one = Job("one", "/x", ["true"])
    text = "one state inactive\none began 500.5\none now 20.1\none code x\n"
    found = jobs.parse_look(Section(text, 0), [(one, 7)])["one"]
    assert (found.seconds, found.code, found.offset) == (0, None, 0)


def test_names_that_begin_alike_are_kept_apart() -> None:
    each = [(Job(name, "/x", ["true"]), 0) for name in ("a", "a-b")]
    text = "a-b state inactive\na-b code 1\na state active\n"
    found = jobs.parse_look(Section(text, 0), each)
    assert [found[x].code for x in ("a", "a-b")] == [None, 1]
    assert [found[x].active for x in ("a", "a-b")] == [True, False]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"name": "A"}, "name 'A'"),
        ({"name": ""}, "name ''"),
        ({"name": "a\n"}, "name"),
        ({"folder": "x"}, "folder 'x'"),
        ({"folder": "/"}, "folder '/'"),
        ({"folder": "/a\nb"}, "folder"),
        ({"argv": []}, "empty command"),
        ({"limit_s": 0}, "limit"),
        ({"env": {"a-b": "1"}}, "name of a variable"),
        ({"files": {"../x": ""}}, r"file names \['../x'\]"),
        ({"files": {"run.sh": ""}}, r"file names \['run.sh'\]"),
        ({"files": {"code.new": ""}}, r"file names \['code.new'\]"),
    ],
)
def test_what_a_job_cannot_have(wrong: dict[str, object], why: str) -> None:
    values: dict[str, object] = {"name": "one", "folder": "/x", "argv": ["true"]}
    with pytest.raises(ValueError, match=why):
        Job(**{**values, **wrong})  # type: ignore[arg-type]


def test_what_a_job_is_given_is_not_shown() -> None:
    shown = repr(Job("one", "/x", ["true"], {"A": "secret"}, {"f": "secret"}))
    assert "secret" not in shown
