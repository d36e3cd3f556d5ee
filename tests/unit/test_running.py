"""A queue of jobs over GPUs, by the scripted clock: who is started, waited for, and ended."""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpu_reclaim import jobs, running, trial
from gpu_reclaim.commands import Script
from gpu_reclaim.errors import BadAnswer, CommandFailed, HoldLost, LinkLost, Unreachable
from gpu_reclaim.jobs import Job
from gpu_reclaim.running import Done
from gpu_reclaim.session import Session
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.local import LocalTransport
from gpu_reclaim.transport.scripted import Answer, ScriptedTransport
from unit.job_host import JobHost
from unit.scenery import Clock

LOOK = "look at the jobs"


def job(name: str, seconds: float = 10) -> Job:
    """A job that takes so long on the pretend host."""
    return Job(name, f"/jobs/{name}", ["run", str(seconds)], {"A": "1"})


@dataclass
class Unit:
    began: float
    ends: float
    code: int | None = 0
    gpu: str = "0"
    token: str = "t"
    log: bytes = b""
    delay: float = 0


@dataclass
class JobsHost:
    """A host whose jobs take their time by the scripted clock.

    Attributes:
        units: Jobs that were ever started there.
        seconds: How long each takes; 10 where nothing is said.
        codes: Exit statuses other than 0; None: killed from outside.
        delay: How long systemd leaves a start in its queue.
        hook: Called with each script before it is answered; what it returns is the answer.
        after: The same, once it is answered.
    """

    clock: Clock = field(default_factory=Clock)
    units: dict[str, Unit] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    codes: dict[str, int | None] = field(default_factory=dict)
    delay: float = 0
    hook: Callable[[Script], Answer | None] = lambda _: None
    after: Callable[[Script], Answer | None] = lambda _: None
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.way = ScriptedTransport(self.answer)
        self.session = Session(
            "llm",
            Links(self.way),
            token="t",
            clock=self.clock.read,
            sleep=self.clock.sleep,
        )

    def answer(self, script: Script) -> Answer:
        told = self.hook(script)
        if told is not None:
            return told
        if script.name == LOOK:
            found: Answer = {"jobs": self._look(script.sections["jobs"])}
        elif script.name == "end jobs":
            found = self._end(script.sections["hold"])
        else:
            found = self._start(script.name.removeprefix("start job "), script.sections["hold"])
        return self.after(script) or found

    def _at(self) -> str:
        return f"{self.clock.now - 1000:g}"

    def _start(self, name: str, text: str) -> Answer:
        unit = self.units.get(name)
        if unit is None or unit.ends <= self.clock.now:
            gpu = shlex.split(next(x for x in text.split("\n") if x.startswith("  put gpu")))[2]
            began = self.clock.now
            ends = began + self.seconds.get(name, 10)
            code = self.codes.get(name, 0)
            self.units[name] = Unit(began, ends, code, gpu, delay=self.delay)
            self.events.append(f"{self._at()} start {name} on {gpu}")
        return {"hold": "status taken"}

    def _end(self, text: str) -> Answer:
        line = next(x for x in text.split("\n") if x.startswith("UNITS_OF_JOBS="))
        names = shlex.split(line)[0].partition("=")[2].split()
        names = [x.removeprefix(jobs.PREFIX).removesuffix(".service") for x in names]
        self.events.append(f"{self._at()} end {' '.join(names)}")
        for name in names:
            unit = self.units.get(name)
            if unit and unit.ends > self.clock.now:
                unit.ends, unit.code = self.clock.now, None
        return {"hold": "status taken"}

    def _look(self, text: str) -> str:
        calls = [shlex.split(x)[1:] for x in text.split("\n") if x.startswith("look_at ")]
        return "".join(self._shown(name, int(offset)) for name, _, offset in calls)

    def _shown(self, name: str, offset: int) -> str:
        unit, now = self.units.get(name), self.clock.now
        if unit is None:
            return f"{name} state inactive\n"
        up = unit.began + unit.delay <= now < unit.ends
        lines = [f"state {'active' if up else 'inactive'}"]
        lines += [f"code {unit.code}"] if unit.ends <= now and unit.code is not None else []
        lines += [f"began {unit.began}", f"now {min(now, unit.ends)}", f"gpu {unit.gpu}"]
        lines += [f"token {unit.token}", f"from {offset}", f"hex {unit.log[offset:].hex()}"]
        return "".join(f"{name} {line}\n" for line in lines)

    def queue(
        self,
        *given: Job,
        gpus: str = "01",
        may_start: Callable[[Job], bool] = lambda _: True,
        over: Callable[[], bool] = lambda: False,
    ) -> Iterator[Done]:
        def on_text(one: Job, text: str) -> None:
            self.events.append(f"{self._at()} {one.name} said {text!r}")

        return running.run_queue(
            self.session, given, list(gpus), on_text=on_text, may_start=may_start, over=over
        )

    def run(self, *given: Job, **more: object) -> list[str]:
        """Work the queue off; each job that is yielded is told among the events."""
        for done in self.queue(*given, **more):  # type: ignore[arg-type]
            self.events.append(
                f"{self._at()} done {done.job.name} on {done.gpu}: {done.state.code}"
            )
        return self.events


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said as a warning; another test may have turned on what is less."""
    # A logger that propagates nothing is captured twice.
    records = {id(x): x for x in caplog.records}.values()
    return [x.getMessage() for x in records if x.levelno >= logging.WARNING]


@pytest.fixture
def host() -> JobsHost:
    return JobsHost()


A, B, C, D = (job(name) for name in "abcd")


def test_each_gpu_takes_the_next_one_as_soon_as_it_is_free(host: JobsHost) -> None:
    host.seconds = {"a": 19, "b": 3, "c": 3}
    host.codes = {"b": 7}
    assert host.run(A, B, C, D) == [
        "0 start a on 0",
        "0 start b on 1",
        "4 done b on 1: 7",
        "4 start c on 1",
        "8 done c on 1: 0",
        "8 start d on 1",
        "18 done d on 1: 0",
        "20 done a on 0: 0",
    ]
    assert set(host.clock.sleeps) == {trial.POLL_S}


def test_nothing_to_do(host: JobsHost) -> None:
    assert host.run() == []
    assert host.way.asked == []


def test_the_jobs_own_values_stay_as_they_were(host: JobsHost) -> None:
    done = next(host.queue(A, gpus="1"))
    assert done.job == A
    text = next(x for x in host.way.asked if x.name == "start job a").sections["hold"]
    assert "export CUDA_VISIBLE_DEVICES=1" in text
    assert "export A=1" in text


def test_two_of_one_name(host: JobsHost) -> None:
    with pytest.raises(ValueError, match="two jobs have the same name"):
        host.run(A, A)


def test_a_start_that_is_only_queued_is_no_end(host: JobsHost) -> None:
    host.delay = 3
    assert host.run(A)[-1] == "10 done a on 0: 0"


def test_killed_from_outside(host: JobsHost) -> None:
    """Seen to end at once only after it may still have been queued."""
    host.seconds, host.codes = {"a": 1, "b": 7}, {"a": None, "b": None}
    assert host.run(A, B)[2:] == ["6 done a on 0: None", "8 done b on 1: None"]


def test_one_that_ends_at_once_with_a_code_is_seen_at_once(host: JobsHost) -> None:
    host.seconds, host.codes = {"a": 0.5}, {"a": 127}
    assert host.run(A)[-1] == "2 done a on 0: 127"


def test_what_it_says_is_told_as_it_comes(host: JobsHost) -> None:
    def more(script: Script) -> None:
        if host.units and script.name == LOOK:
            host.units["a"].log += b"x\r"

    host.hook = more
    host.seconds = {"a": 3}
    done = list(host.queue(A))
    assert host.events[1:] == ["2 a said 'x\\n'", "4 a said 'x\\n'"]
    assert [x.text for x in done] == ["x\nx\n"]
    assert done[0].state.offset == 4


def test_of_a_long_log_the_end_is_given(host: JobsHost) -> None:
    def more(script: Script) -> None:
        if host.units and script.name == LOOK:
            host.units["a"].log += b"y" * 60_000 + b"z"

    host.hook = more
    host.seconds = {"a": 3}
    text = next(host.queue(A)).text
    assert len(text) == jobs.MOST_TEXT
    assert text.endswith("yz")
    assert text.count("z") == 2


def test_a_lost_link_is_waited_out(host: JobsHost) -> None:
    def lost(_: Script) -> Answer | None:
        return LinkLost("gone") if 1004 <= host.clock.now < 1100 else None

    host.hook = lost
    closed = []
    host.way.close = lambda: closed.append(1)  # type: ignore[method-assign]
    assert host.run(A, B) == [
        "0 start a on 0",
        "0 start b on 1",
        "100 done a on 0: 0",
        "100 done b on 1: 0",
    ]
    assert len(closed) == 48


def test_who_cannot_be_reached_for_long_is_an_error(
    host: JobsHost, caplog: pytest.LogCaptureFixture
) -> None:
    host.hook = lambda _: Unreachable("no way") if host.clock.now >= 1004 else None
    with caplog.at_level(logging.WARNING), pytest.raises(Unreachable, match="no way"):
        host.run(A)
    assert host.clock.now == 1004 + running.LOST_S
    assert warned(caplog) == ["llm: jobs may still run: no way"]


@pytest.mark.parametrize("before", [True, False])
def test_a_start_whose_answer_is_lost_is_looked_at(host: JobsHost, before: bool) -> None:
    """Whether it was begun or not, it runs once in the end."""

    def lost(script: Script) -> Answer | None:
        return LinkLost("gone") if script.name == "start job a" and host.clock.now < 1001 else None

    if before:
        host.hook = lost
        assert host.run(A)[0] == "2 start a on 0"
    else:
        host.after = lost
        assert host.run(A) == ["0 start a on 0", "10 done a on 0: 0"]
    assert len(host.units) == 1


def test_one_that_ended_while_its_start_was_unsure_is_not_run_again(host: JobsHost) -> None:
    host.seconds = {"a": 1}
    host.after = lambda script: LinkLost("gone") if script.name == "start job a" else None
    assert host.run(A) == ["0 start a on 0", "2 done a on 0: 0"]


def test_a_start_that_never_gets_through(host: JobsHost) -> None:
    host.hook = lambda script: LinkLost("gone") if script.name == "start job b" else None
    closed = []
    host.way.close = lambda: closed.append(1)  # type: ignore[method-assign]
    with pytest.raises(LinkLost):
        host.run(A, B)
    assert host.events == ["0 start a on 0", "4 end a b"]
    assert len(closed) == running.START_TRIES - 1


def test_one_that_may_not_start_waits_and_others_go_on(host: JobsHost) -> None:
    def may(one: Job) -> bool:
        return one.name != "a" or host.clock.now >= 1010

    assert host.run(A, B, C, gpus="0", may_start=may) == [
        "0 start b on 0",
        "10 done b on 0: 0",
        "10 start a on 0",
        "20 done a on 0: 0",
        "20 start c on 0",
        "30 done c on 0: 0",
    ]


def test_where_nothing_may_start_it_ends(host: JobsHost) -> None:
    assert host.run(A, B, may_start=lambda one: one.name == "b") == [
        "0 start b on 0",
        "10 done b on 0: 0",
    ]
    assert host.run(A, may_start=lambda _: False)[2:] == []


def test_when_it_is_over_all_are_ended_and_none_is_yielded(host: JobsHost) -> None:
    host.seconds = {"a": 5}
    found = host.run(A, B, C, over=lambda: host.clock.now >= 1008)
    assert found == [
        "0 start a on 0",
        "0 start b on 1",
        "6 done a on 0: 0",
        "6 start c on 0",
        "8 end b c",
    ]


def test_an_end_that_does_not_get_through_is_tried_again(host: JobsHost) -> None:
    def lost(script: Script) -> Answer | None:
        return LinkLost("gone") if script.name == "end jobs" and host.clock.now < 1020 else None

    host.hook = lost
    host.seconds = {"a": 100}
    assert host.run(A, over=lambda: host.clock.now >= 1008)[-1] == "20 end a"


def test_what_an_earlier_attempt_began_is_gone_on_with(host: JobsHost) -> None:
    host.units = {
        "a": Unit(990, 1007, 0, "1", log=b"so far\n"),
        "b": Unit(980, 990, 3, "0", log=b"all\n"),
    }
    assert host.run(A, B, C, D) == [
        "0 a said 'so far\\n'",
        "0 b said 'all\\n'",
        "0 done b on 0: 3",
        "0 start c on 0",
        "8 done a on 1: 0",
        "8 start d on 1",
        "10 done c on 0: 0",
        "18 done d on 1: 0",
    ]


def test_a_code_of_another_night_does_not_count(host: JobsHost) -> None:
    host.units = {"a": Unit(900, 950, 0, "1", "another", b"old")}
    assert host.run(A) == ["0 start a on 0", "10 done a on 0: 0"]


def test_one_that_was_killed_in_an_earlier_attempt_is_run_again(host: JobsHost) -> None:
    host.units = {"a": Unit(980, 990, None, "1", log=b"old")}
    assert host.run(A) == ["0 start a on 0", "10 done a on 0: 0"]


def test_closed_early_it_ends_what_runs(host: JobsHost) -> None:
    host.seconds = {"a": 3, "b": 100}
    queue = host.queue(A, B, C)
    assert next(queue).job == A
    queue.close()  # type: ignore[attr-defined]
    assert host.events[2:] == ["4 end b"]


def test_an_error_of_the_callers_ends_what_runs(host: JobsHost) -> None:
    def fails() -> bool:
        if host.clock.now > 1003:
            raise RuntimeError("bug")
        return False

    with pytest.raises(RuntimeError, match="bug"):
        host.run(A, B, over=fails)
    assert host.events[2:] == ["4 end a b"]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [("status unset\nwhy no room", CommandFailed), ("status lost", HoldLost), ("", BadAnswer)],
)
def test_a_start_that_is_refused_ends_the_others(
    host: JobsHost, answer: str, kind: type[Exception]
) -> None:
    host.hook = lambda script: {"hold": answer} if script.name == "start job b" else None
    with pytest.raises(kind):
        host.run(A, B)
    assert host.events == ["0 start a on 0", "0 end a b"]


def test_an_end_that_fails_does_not_hide_why_it_was_ended(
    host: JobsHost, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(script: Script) -> Answer | None:
        answers = {"start job b": "status unset\nwhy no room", "end jobs": "status lost"}
        return {"hold": answers[script.name]} if script.name in answers else None

    host.hook = refuse
    with pytest.raises(CommandFailed, match="no room"):
        host.run(A, B)
    assert warned(caplog) == ["llm: jobs may still run: llm: the hold is no longer ours"]


# One by one.


def test_who_writes(host: JobsHost) -> None:
    running.start_job(host.session, A)
    running.look_at(host.session, [(A, 0)])
    running.end_jobs(host.session, [A])
    running.end_jobs(host.session, [])
    assert [(x.name, x.writes) for x in host.way.asked] == [
        ("start job a", True),
        (LOOK, False),
        ("end jobs", True),
    ]


def test_a_file_of_a_job(host: JobsHost) -> None:
    host.hook = lambda _: {"file": "hex 7b7d\n"}
    assert running.file_of(host.session, A, "x y.json") == "{}"
    assert "'/jobs/a/x y.json'" in host.way.asked[0].sections["file"]
    host.hook = lambda _: {"file": ""}
    assert running.file_of(host.session, A, "x") is None


def test_a_queue_on_a_real_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts and their parsers as they are; also after an earlier attempt."""
    real = JobHost(tmp_path)
    monkeypatch.setenv("PATH", f"{real.tools}:{os.environ['PATH']}")
    assert real.take("llm.service").status == "taken"
    real.stop("llm.service")
    session = Session("llm", Links(LocalTransport()), token="t1", places=real.places)
    session.sleep = lambda _: time.sleep(0.1)
    given = [
        Job(name, f"{tmp_path}/my jobs/{name}", ["sh", "-c", f"{text}; echo $CUDA_VISIBLE_DEVICES"])
        for name, text in (("a", "sleep 60"), ("b", "echo 1 >b.json"), ("c", "exit 3"))
    ]
    said: list[str] = []
    rest = {"may_start": lambda _: True, "over": lambda: "c" in said}

    def on_text(one: Job, text: str) -> None:
        said.append(f"{one.name} {text}")

    def done(before: Sequence[Job]) -> list[tuple[str, str, int | None, str]]:
        found = []
        for one in running.run_queue(session, before, ["0", "1"], on_text=on_text, **rest):  # type: ignore[arg-type]
            found.append((one.job.name, one.gpu, one.state.code, one.text))
            said.append(one.job.name)
        return found

    assert done(given) == [("b", "1", 0, "1\n"), ("c", "1", 3, "")]
    assert running.file_of(session, given[1], "b.json") == "1\n"
    assert real.ended(given[0]).code is None
    starts = len(real.runs)
    assert done(given[1:]) == [("b", "1", 0, "1\n"), ("c", "1", 3, "")]
    assert len(real.runs) == starts == 3
