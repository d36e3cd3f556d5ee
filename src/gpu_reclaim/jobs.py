"""Long commands on a held host, each a transient unit of its own: the scripts, as shell text.

Each has its own control group and time limit below the stage's slice, so all that it started ends
with it, also what began a session of its own; a lost connection does not end it; and whatever ends
the hold does (`restoring`). In a job's folder are:

    run.sh         what systemd starts
    log            what the command said
    began, ended   seconds since the host's boot
    code           its exit status, once it has one
    gpu, token     its GPU, and whose hold it was started in
    cache/         the one thing that outlives another start
"""

from __future__ import annotations

import codecs
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpu_reclaim.commands import KILL_AFTER_S, Section
from gpu_reclaim.holding import Claim
from gpu_reclaim.launching import END, LOOK, PUT, READ, START, run_script
from gpu_reclaim.lease import HOST, Places
from gpu_reclaim.restoring import filled, functions
from gpu_reclaim.taking import OURS

PREFIX = "gpu-reclaim-job-"
"""Begins the name of every job's unit."""

GPU = "CUDA_VISIBLE_DEVICES"
"""Variable of a job that names its GPU (CUDA C Programming Guide, environment variables)."""

SLACK_S = 60
"""So long after a job's own limit systemd ends it, in seconds, should its script be stuck."""

TERM_S = 5
"""How long a job's processes have between TERM and KILL when its unit is stopped, in seconds."""

STOP_S = 15
"""Longest wait for units to be stopped, in seconds: TERM, then KILL, then some slack."""

MOST_TEXT = 64 * 1024
"""At most so much of a log is read at a time, in bytes: the end of it."""

MOST_FILE = 256 * 1024
"""Longest file that is read, in bytes."""

_NAME = re.compile(r"[a-z0-9-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN = frozenset({"run.sh", "log", "code", "began", "ended", "gpu", "token", "cache"})
_CONTINUED = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that begin no character."""


@dataclass(frozen=True)
class Job:
    """A long command on one GPU.

    Attributes:
        name: Names its unit: small letters, digits and `-`.
        folder: Its own work directory, an absolute path; all in it but `cache` is deleted at start.
        argv: The command.
        env: Variables of it; they hold no secret.
        files: Name to text of what is put into the folder first.
        limit_s: Longest time that it may take, in seconds.

    Raises:
        ValueError: One of them cannot be.
    """

    name: str
    folder: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    limit_s: float = 3600

    def __post_init__(self) -> None:
        """Look whether it can be written as a unit and a folder."""
        bad_files = [x for x in self.files if not _plain(x) or x.removesuffix(".new") in _OWN]
        checks = {
            f"name {self.name!r}": _NAME.fullmatch(self.name),
            f"folder {self.folder!r}": re.fullmatch(r"/[^/\n][^\n]*", self.folder),
            "empty command": self.argv,
            "limit": self.limit_s > 0,
            "name of a variable": all(_VARIABLE.fullmatch(x) for x in self.env),
            f"file names {bad_files}": not bad_files,
        }
        wrong = [what for what, good in checks.items() if not good]
        if wrong:
            raise ValueError(f"a job cannot have this: {', '.join(wrong)}")

    @property
    def unit(self) -> str:
        """Name of its unit."""
        return f"{PREFIX}{self.name}.service"


@dataclass(frozen=True)
class JobState:
    """What a look at a job found.

    Attributes:
        active: Its unit runs, is just starting or stopping, or systemd did not say.
        code: Exit status of its command; None where it has none (yet). 124 or 137: it was ended
            at its limit.
        seconds: How long it has run, or ran.
        text: What it said since the last look, carriage returns as newlines.
        offset: Where in its log the next look shall begin, in bytes.
        files: Names of the JSON files in its folder.
        gpu: The GPU that it was started on; empty where it is not known.
        token: Of the hold that it was started in.
    """

    active: bool
    code: int | None = None
    seconds: float = 0
    text: str = field(default="", repr=False)
    offset: int = 0
    files: tuple[str, ...] = ()
    gpu: str = ""
    token: str = field(default="", repr=False)

    @property
    def ended(self) -> bool:
        """Nothing of it runs. Without a code it was killed from outside, or never started."""
        return not self.active


def start(claim: Claim, job: Job, *, places: Places = HOST) -> str:
    """Shell text that starts a job; the answer is that of `holding.parse`.

    One that runs already in this hold is left alone.

    Args:
        claim: Whose hold it is.
        job: What to start.
        places: Where things are.
    """
    life = math.ceil(job.limit_s) + SLACK_S
    names = f"UNIT={job.unit} FOLDER={shlex.quote(job.folder)} LIFE={life} GRACE={TERM_S}"
    script = run_script(job.argv, job.env, math.ceil(job.limit_s), KILL_AFTER_S)
    own = {"gpu": job.env.get(GPU, ""), **job.files, "run.sh": script}
    puts = [f"  put {shlex.quote(name)} {shlex.quote(text)} &&" for name, text in own.items()]
    fill = "\n".join(["fill() {", *puts, '  put began "$(uptime)"', "}"])
    head = [functions(places), claim.shell(), names, OURS, PUT, fill]
    return "\n".join([*head, filled(START, places)])


def look(jobs: Sequence[tuple[Job, int]], *, places: Places = HOST) -> str:
    """Shell text that prints the states of jobs; touches nothing.

    Args:
        jobs: Each with the place in its log that was read last, in bytes.
        places: Where things are.
    """
    body = LOOK.replace("@MOST@", str(MOST_TEXT)).replace("@PREFIX@", PREFIX)
    calls = [f"look_at {job.name} {shlex.quote(job.folder)} {offset}" for job, offset in jobs]
    return "\n".join([functions(places), PUT, body, *calls])


def parse_look(section: Section, jobs: Sequence[tuple[Job, int]]) -> dict[str, JobState]:
    """The states that `look` printed, by the jobs' names."""
    return {job.name: _state(section, job.name, offset) for job, offset in jobs}


def _state(section: Section, name: str, asked: int) -> JobState:
    def said(word: str) -> str:
        return section.value(f"{name} {word}")

    active = said("state") not in ("inactive", "failed")
    code = said("code")
    began, ended = _number(said("began")), _number(said("ended") or said("now"))
    text, offset = _text(said("hex"), int(_number(said("from"))), asked, final=not active)
    return JobState(
        active=active,
        code=int(code) if code.isdecimal() else None,
        # After a restart of the host it begins to count anew.
        seconds=max(0.0, ended - began),
        text=text,
        offset=offset,
        files=tuple(section.lines(f"{name} file")),
        gpu=said("gpu"),
        token=said("token"),
    )


def _text(shown: str, start_at: int, asked: int, *, final: bool) -> tuple[str, int]:
    """New output, and where it ends; a character of which a part is missing waits for it."""
    data = bytes.fromhex(shown)
    offset = start_at + len(data)
    if start_at > asked:
        data = data.lstrip(_CONTINUED)
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    text = decoder.decode(data, final=final)
    cut, _ = decoder.getstate()
    return text.replace("\r\n", "\n").replace("\r", "\n"), offset - len(cut)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def read_file(job: Job, name: str) -> str:
    """Shell text that prints one file of a job's folder, if it has at most `MOST_FILE` bytes.

    Raises:
        ValueError: That is no name of a file.
    """
    if not _plain(name):
        raise ValueError(f"no name of a job's file: {name!r}")
    file = shlex.quote(f"{job.folder}/{name}")
    return f"FILE={file}\n{READ.replace('@MOST@', str(MOST_FILE))}"


def parse_file(section: Section) -> str | None:
    """The file's text; None where it is not there, is too long, or is no text."""
    shown = section.lines("hex")
    try:
        return bytes.fromhex(shown[0]).decode() if shown else None
    except ValueError:
        return None


def end(claim: Claim, names: Sequence[str], *, places: Places = HOST) -> str:
    """Shell text that ends jobs with all that they started; those that ended are no trouble.

    Args:
        claim: Whose hold it is.
        names: The jobs' names.
        places: Where things are.
    """
    units = " ".join(f"{PREFIX}{name}.service" for name in names)
    body = filled(END, places).replace("@STOP@", str(STOP_S))
    head = [functions(places), claim.shell(), f"UNITS_OF_JOBS={shlex.quote(units)}", OURS]
    return "\n".join([*head, body])


def _plain(name: str) -> bool:
    return not (name in ("", ".", "..") or "/" in name or "\n" in name)
