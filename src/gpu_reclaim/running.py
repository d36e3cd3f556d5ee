"""Jobs on the GPUs of a held host: started, looked at, ended, and a queue of them worked off."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from gpu_reclaim import hold, jobs
from gpu_reclaim.commands import Script
from gpu_reclaim.errors import GpuReclaimError, TransportError
from gpu_reclaim.jobs import Job, JobState
from gpu_reclaim.session import Session
from gpu_reclaim.trial import BEGIN_S, POLL_S, act

T = TypeVar("T")

log = logging.getLogger(__name__)

LOST_S = 240.0
"""So long a host that cannot be reached is waited for, in seconds: jobs run on meanwhile."""

START_TRIES = 3
"""So often a start whose answer was lost is tried."""


def start_job(session: Session, job: Job) -> None:
    """Start a job; one that runs already in this hold is left alone. Raises as `trial.act`."""
    body = jobs.start(hold.claim(session), job, places=session.places)
    act(session, f"start job {job.name}", body)


def end_jobs(session: Session, ended: Sequence[Job]) -> None:
    """End jobs, with all that they started. Raises as `trial.act`."""
    names = [job.name for job in ended]
    if names:
        act(session, "end jobs", jobs.end(hold.claim(session), names, places=session.places))


def look_at(session: Session, looked: Sequence[tuple[Job, int]]) -> dict[str, JobState]:
    """The states of jobs, each given with the place in its log that was read last, in bytes.

    Raises:
        TransportError: As `Transport.run`.
    """
    parts = {"jobs": jobs.look(looked, places=session.places)}
    # What a job said is not for people as it is.
    result = session.links.run(Script("look at the jobs", parts, together=True))
    return jobs.parse_look(result.section("jobs"), looked)


def file_of(session: Session, job: Job, name: str) -> str | None:
    """The text of a file in a job's folder; None where it is not there, too long, or no text.

    Raises:
        TransportError: As `Transport.run`.
    """
    script = Script("read a file of a job", {"file": jobs.read_file(job, name)}, together=True)
    return jobs.parse_file(session.links.run(script).section("file"))


@dataclass(frozen=True)
class Done:
    """A job that ended.

    Attributes:
        job: As it was given.
        gpu: Where it ran.
        state: The last look at it; without a code it was killed from outside.
        text: The end of its log, at most `jobs.MOST_TEXT` characters.
    """

    job: Job
    gpu: str
    state: JobState
    text: str = field(repr=False)


def run_queue(
    session: Session,
    given: Sequence[Job],
    gpus: Sequence[str],
    *,
    on_text: Callable[[Job, str], None],
    may_start: Callable[[Job], bool],
    over: Callable[[], bool],
) -> Iterator[Done]:
    """Run jobs, one per GPU; each GPU takes the next one as soon as it is free.

    What an earlier attempt in this hold began is gone on with, and what it saw to its end is
    yielded at once. Closed early, or by an error, it ends what runs.

    Args:
        session: A host that this session holds.
        given: The jobs, in order, each with a name of its own.
        gpus: The GPUs, as CUDA_VISIBLE_DEVICES names them.
        on_text: Told of new output of a job.
        may_start: Whether a job may be started now; if not, the others are asked.
        over: Whether it is time to stop; what runs is ended then, and not yielded.

    Yields:
        Each job that ended, as soon as it is seen.

    Raises:
        ValueError: Two jobs have the same name.
        CommandFailed: A job could not be started or ended.
        HoldLost: The hold is no longer ours.
        TransportError: The host could not be reached for `LOST_S`, or a start did not get through.
    """
    if len({job.name for job in given}) < len(given):
        raise ValueError("two jobs have the same name")
    queue = _Queue(session, gpus, on_text, waiting=list(given), unsure=list(given))
    try:
        while True:
            yield from queue.found()
            if over():
                queue.end()
                return
            queue.fill(may_start)
            if not queue.begun:
                return
            session.sleep(POLL_S)
            yield from queue.ended()
    finally:
        queue.let_go()


@dataclass
class _Run:
    job: Job
    gpu: str
    began: float
    offset: int = 0
    text: str = ""


@dataclass
class _Queue:
    """Jobs that wait and that run.

    Attributes:
        waiting: Jobs that were not started, as far as is known.
        unsure: Those of them that perhaps were: by an earlier attempt, or the answer was lost.
        running: Jobs that were started and have not been seen to end, by name.
    """

    session: Session
    gpus: Sequence[str]
    on_text: Callable[[Job, str], None]
    waiting: list[Job]
    unsure: list[Job]
    running: dict[str, _Run] = field(default_factory=dict)
    tries: Counter[str] = field(default_factory=Counter)

    @property
    def begun(self) -> list[Job]:
        """All that runs or may run."""
        return [run.job for run in self.running.values()] + self.unsure

    def found(self) -> Iterator[Done]:
        """Take over what was started of the unsure ones; yield those that have ended."""
        if not self.unsure:
            return
        looked = [(job, 0) for job in self.unsure]
        states = self._patiently(lambda: look_at(self.session, looked))
        for job in self.unsure:
            state = states[job.name]
            # A code of another hold's says nothing.
            if state.token == self.session.token and (state.active or state.code is not None):
                self.waiting.remove(job)
                self.running[job.name] = _Run(job, state.gpu, self.session.clock())
        self.unsure = []
        yield from self._told({name: states[name] for name in self.running if name in states})

    def fill(self, may_start: Callable[[Job], bool]) -> None:
        """Start a job on every free GPU."""
        busy = {run.gpu for run in self.running.values()}
        for gpu in [x for x in self.gpus if x not in busy]:
            job = next((job for job in self.waiting if may_start(job)), None)
            if job is None or not self._start(job, gpu):
                return

    def _start(self, job: Job, gpu: str) -> bool:
        self.unsure.append(job)
        self.tries[job.name] += 1
        try:
            start_job(self.session, replace(job, env={**job.env, jobs.GPU: gpu}))
        except TransportError:
            if self.tries[job.name] >= START_TRIES:
                raise
            self.session.links.close()
            return False
        self.unsure.remove(job)
        self.waiting.remove(job)
        self.running[job.name] = _Run(job, gpu, self.session.clock())
        log.info("%s: job %s runs on GPU %s", self.session.host, job.name, gpu)
        return True

    def ended(self) -> Iterator[Done]:
        """Look at what runs; yield those that have ended."""
        looked = [(run.job, run.offset) for run in self.running.values()]
        if looked:
            yield from self._told(self._patiently(lambda: look_at(self.session, looked)))

    def _told(self, states: dict[str, JobState]) -> Iterator[Done]:
        done = []
        for name, state in states.items():
            run = self.running[name]
            run.offset = state.offset
            run.text = (run.text + state.text)[-jobs.MOST_TEXT :]
            queued = self.session.clock() - run.began < BEGIN_S
            if state.ended and (state.code is not None or not queued):
                del self.running[name]
                done.append(Done(run.job, run.gpu, state, run.text))
            if state.text:
                self.on_text(run.job, state.text)
        yield from done

    def _patiently(self, ask: Callable[[], T]) -> T:
        since = self.session.clock()
        while True:
            try:
                return ask()
            except TransportError:
                if self.session.clock() - since >= LOST_S:
                    raise
                self.session.links.close()
                self.session.sleep(POLL_S)

    def end(self) -> None:
        """End all that runs."""
        self._patiently(lambda: end_jobs(self.session, self.begun))
        self.running, self.unsure = {}, []

    def let_go(self) -> None:
        """End what still runs, when an error is on its way already."""
        try:
            end_jobs(self.session, self.begun)
        except GpuReclaimError as error:
            # The end of the hold ends them too.
            log.warning("%s: jobs may still run: %s", self.session.host, error.message)
