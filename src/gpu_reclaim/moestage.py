"""The stage that has the GPUs to itself: batch sizes tuned, or kernels timed, one on each GPU."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from gpu_reclaim import moeoutput, running
from gpu_reclaim.commands import Script, printable
from gpu_reclaim.errors import BadInput
from gpu_reclaim.jobs import Job
from gpu_reclaim.moeconfigs import parse_table
from gpu_reclaim.moefound import MoeFound
from gpu_reclaim.moejobs import SPACE_FILE, timing_job, tuning_job
from gpu_reclaim.running import Done
from gpu_reclaim.session import Session
from gpu_reclaim.trial import without
from gpu_reclaim.tuning import KernelTime, TunedSize

log = logging.getLogger(__name__)

FINAL_CODES = (0, 124)
"""Exit statuses after which a size that failed would fail again: what it wrote cannot be used, or
its time was over (of coreutils' `timeout`)."""

KILLED = 137
"""Exit status of a process that was killed: by `timeout`, or by the kernel, for memory."""

SAY_S = 30
"""How often a job's present line is in the log, in seconds."""

SAID_LINES = 15
"""Last lines of a script that failed, kept for people."""

OUTSIDE = "it was ended from outside"
"""What is said of a script that somebody else ended; the next run tries that size again."""

Progress = Callable[[Job, tuple[int, int] | None], None]
"""Told how many rows a job has tried, of how many; None where it does not say."""


@dataclass(frozen=True)
class Window:
    """When the stage must stop.

    Attributes:
        now: Seconds, by a clock that never goes back.
        until: End of it by that clock; infinite: none.
        size_s: Seconds that one batch size is expected to take.
    """

    now: Callable[[], float]
    until: float
    size_s: float

    @property
    def over(self) -> bool:
        """It is time to stop."""
        return self.now() >= self.until

    @property
    def fits(self) -> bool:
        """One more batch size may end in time."""
        return self.now() + self.size_s <= self.until


def tune(
    session: Session,
    moe: MoeFound,
    sizes: Sequence[int],
    *,
    limit_s: float,
    window: Window,
    progress: Progress,
) -> Iterator[TunedSize]:
    """Tune batch sizes, one on each GPU; each is yielded as soon as it is done.

    Args:
        session: The host; its GPUs are free and held.
        moe: What was found.
        sizes: Token numbers, in order.
        limit_s: Longest time of one, in seconds.
        window: When no more are begun, and what runs is ended.
        progress: Told how far each is.

    Raises:
        BadInput: The script makes a file that the server would never read.
        CommandFailed: A job could not be started or ended.
        HoldLost: The host is not ours any more.
        TransportError: As `run_queue`.
    """
    given = [tuning_job(session, moe, size, limit_s) for size in sizes]
    tokens = {job.name: size for job, size in zip(given, sizes, strict=True)}
    lines = _Lines(session, moe, progress)
    for done in running.run_queue(
        session,
        given,
        [str(device.index) for device in moe.devices],
        on_text=lines.hear,
        may_start=lambda _: window.fits,
        over=lambda: window.over,
    ):
        yield _size(session, moe, tokens[done.job.name], done)


def drop_caches(session: Session, moe: MoeFound) -> None:
    """Remove what was compiled for sizes and kernels that are done: hundreds of MB.

    Raises:
        TransportError: As `Transport.run`.
    """
    place = shlex.quote(moe.place)
    text = (
        f"[ ! -d {place} ] || find {place} -mindepth 2 -maxdepth 2 -name cache -exec rm -rf {{}} +"
    )
    session.links.run(Script("remove caches", {"caches": text}, writes=True))


@dataclass
class _Lines:
    """What the scripts say, on its way to the log."""

    session: Session
    moe: MoeFound
    progress: Progress
    heard: dict[str, str] = field(default_factory=dict)
    said: dict[str, float] = field(default_factory=dict)

    def hear(self, job: Job, text: str) -> None:
        """Look at new output; the first line that names a file is what matters most."""
        whole = self.heard[job.name] = (self.heard.get(job.name, "") + text)[-20_000:]
        seen = moeoutput.parse_log(whole)
        if seen.planned_name and seen.planned_name != str(self.moe.name):
            raise BadInput(
                f"{self.session.host}: the tuning script makes {printable(seen.planned_name)}, "
                f"and the server asks for {self.moe.name}",
                remedy="the checkout does not know this model as the server does",
            )
        self.progress(job, seen.progress)
        now = self.session.clock()
        if now - self.said.get(job.name, -SAY_S) >= SAY_S:
            self.said[job.name] = now
            line = last_line(_blotted(self.moe, text))
            log.info("%s: %s: %s", self.session.host, job.name, line)


def _blotted(moe: MoeFound, text: str) -> str:
    """What a script said, without secrets."""
    return without([text], [moe.found.server.api_key])


def last_line(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return printable(lines[-1], limit=200) if lines else ""


def harvest(session: Session, moe: MoeFound, sizes: Sequence[int]) -> list[TunedSize]:
    """What scripts of a run that died have finished meanwhile, and nobody put on record.

    Raises:
        TransportError: As `Transport.run`.
    """
    given = {size: tuning_job(session, moe, size, 1) for size in sizes}
    states = running.look_at(session, [(job, 0) for job in given.values()])
    ended = [
        Done(job, states[job.name].gpu, states[job.name], states[job.name].text)
        for job in given.values()
        if states[job.name].code == 0 and states[job.name].ended
    ]
    sizes_of = {job.name: size for size, job in given.items()}
    found = [_size(session, moe, sizes_of[done.job.name], done) for done in ended]
    return [size for size in found if size.row]


def _size(session: Session, moe: MoeFound, tokens: int, done: Done) -> TunedSize:
    limit = done.job.limit_s
    size = TunedSize(
        tokens=tokens,
        seconds=done.state.seconds,
        limit_s=limit,
        gpu=done.gpu,
        at=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
    )
    row = _row(session, moe, tokens, done)
    if isinstance(row, str):
        log.warning("%s: batch size %d: %s", session.host, tokens, row)
        words = _blotted(moe, done.text).split("\n")
        lines = [printable(line, limit=400) for line in words if line.strip()]
        detail = "\n".join(lines[-SAID_LINES:])
        # At its limit one that is deaf to TERM is killed.
        late = done.state.code == KILLED and not _killed_early(done)
        final = done.state.code in FINAL_CODES or late or moeoutput.is_final(done.text)
        return size.model_copy(update={"failure": row, "detail": detail, "final": final})
    log.info("%s: batch size %d: %s", session.host, tokens, row)
    return size.model_copy(update={"row": row})


def _row(
    session: Session, moe: MoeFound, tokens: int, done: Done
) -> Mapping[str, int | bool] | str:
    """What the script found; or, as one sentence, why that cannot be used."""
    name, code = moe.name, done.state.code
    if code != 0:
        return _failure(moe, done)
    if str(name) not in done.state.files:
        others = [file for file in done.state.files if file != SPACE_FILE]
        wrote = f"it wrote {printable(', '.join(others), limit=300)}" if others else "it wrote none"
        return f"it ended well without the file that the server asks for: {wrote}"
    text = running.file_of(session, done.job, str(name))
    try:
        table = parse_table(text or "", name)
    except BadInput as error:
        return f"what it wrote cannot be used: {error.message}"
    if list(table) != [tokens]:
        return f"it was asked for {tokens}, and wrote {', '.join(map(str, table))}"
    return table[tokens]


def _failure(moe: MoeFound, done: Done) -> str:
    if done.state.code is None:
        return OUTSIDE
    if _killed_early(done):
        return "it was killed; perhaps the host ran out of memory"
    return moeoutput.failure(done.state.code, _blotted(moe, done.text), done.job.limit_s)


def _killed_early(done: Done) -> bool:
    return done.state.code == KILLED and done.state.seconds < done.job.limit_s


def time_kernels(
    session: Session,
    moe: MoeFound,
    arms: Mapping[str, str],
    *,
    window: Window,
    progress: Progress,
) -> Iterator[KernelTime]:
    """Time each arm's kernel at each size, without a server.

    Args:
        session: The host; its GPUs are free and held.
        moe: What was found.
        arms: Overlay of each arm; empty for what the server uses now.
        window: When no more are begun, and what runs is ended.
        progress: Told when a job says something.

    Raises:
        As `tune`.
    """
    pairs = [(arm, size) for size in moe.sizes for arm in arms]
    named = [(f"kernel-{number}", pair) for number, pair in enumerate(pairs)]
    by_name = dict(named)
    given = [
        timing_job(session, moe, name, size, arms[arm]) for name, (arm, size) in by_name.items()
    ]
    for done in running.run_queue(
        session,
        given,
        [str(device.index) for device in moe.devices],
        on_text=lambda job, text: progress(job, moeoutput.parse_log(text).progress),
        may_start=lambda _: window.fits,
        over=lambda: window.over,
    ):
        yield _kernel(session, moe, by_name[done.job.name], done)


def _kernel(session: Session, moe: MoeFound, what: tuple[str, int], done: Done) -> KernelTime:
    arm, tokens = what
    us = moeoutput.parse_log(done.text).kernel_us.get(tokens)
    if done.state.code == 0 and us is not None:
        log.info("%s: %s at %d tokens: %.1f us", session.host, arm, tokens, us)
        return KernelTime(arm=arm, tokens=tokens, us=us)
    why = "it told no time" if done.state.code == 0 else _failure(moe, done)
    log.warning("%s: %s at %d tokens: %s", session.host, arm, tokens, why)
    return KernelTime(arm=arm, tokens=tokens, failure=why)
