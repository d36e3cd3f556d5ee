"""As much of Ray as the tuning scripts need: processes of its titles, each in its own session.

They are ended with the script, also where it is told to end (SIGTERM). SIGKILL leaves them behind.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lab.guest.sglang_workers import DEV, hold
else:
    from sglang_workers import DEV, hold

SERVICES = ("gcs_server", "raylet")
WORKER = "BenchmarkWorker"
CHARGE_MIB = 9000
CYAN, PLAIN = "\x1b[36m", "\x1b[0m"
LINE = "{cyan}({worker} pid={pid}){plain} {text}"
"""How Ray repeats what a worker printed."""
DIED = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
FAILED = """\
Traceback (most recent call last):
  File "{script}", in main
    {method} = ray.get(outputs)
ray.exceptions.RayTaskError({kind}): ray::{worker}.{method}() (pid={pid})
{error}"""
Say = Callable[..., None]
"""Tells the script something: `text` for its output, `done` of `total` candidates."""
Work = Callable[[Any, Say], Any]
"""Does one job."""


def visible_gpus() -> list[int]:
    """The GPUs of this process.

    Raises:
        KeyError: There are none; as the real script ends.
    """
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        gpus = sorted(int(node.name[6:]) for node in Path(DEV).glob("nvidia[0-9]*"))
    else:
        gpus = [int(each) for each in said.split(",") if each.strip() not in ("", "-1")]
    if not gpus:
        raise KeyError("GPU")
    return gpus


class Cluster:
    """Ray's processes, inside a `with` block.

    Attributes:
        leaves: At the end, raylet and one worker live on.
    """

    def __init__(self, method: str) -> None:
        """Starts nothing yet; the method names the workers.

        Raises:
            KeyError: There is no GPU.
        """
        self._gpus = visible_gpus()
        self.leaves = False
        self._method = method
        self._reading, self._writing = os.pipe()
        self._pids: list[int] = []

    def __enter__(self) -> "Cluster":
        print("INFO worker.py -- Started a local Ray instance.", file=sys.stderr, flush=True)
        signal.signal(signal.SIGCHLD, self._on_death)
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, _on_term)
        for title in SERVICES:
            self._start(title, _rest)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kept = self._pids[1:3] if self.leaves else []
        for pid in self._pids:
            if pid not in kept:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGTERM)
                    os.waitpid(pid, 0)

    def run(self, work: Work, jobs: list[Any]) -> list[Any]:
        """Hands the jobs out in turn, one worker for each GPU; returns the answers.

        Raises:
            SystemExit: One of them failed: all is lost.
        """
        for place, gpu in enumerate(self._gpus):
            numbers = range(place, len(jobs), len(self._gpus))
            self._start(f"ray::{WORKER}.{self._method}", self._worker(work, jobs, numbers, gpu))
        answers: dict[int, Any] = {}
        with os.fdopen(self._reading) as messages:
            while len(answers) < len(jobs):
                self._take(json.loads(messages.readline()), answers)
        print(file=sys.stderr)
        return [answers[number] for number in range(len(jobs))]

    def _take(self, message: dict[str, Any], answers: dict[int, Any]) -> None:
        pid = message["pid"]
        if "answer" in message:
            answers[message["number"]] = message["answer"]
        if "text" in message:
            text = message["text"]
            print(LINE.format(cyan=CYAN, plain=PLAIN, worker=WORKER, pid=pid, text=text))
        if "done" in message:
            bar = "#" * (10 * message["done"] // message["total"])
            share = f"{100 * message['done'] // message['total']:3}%|{bar:<10}|"
            count = f"{message['done']}/{message['total']} [00:01<00:01, 96.00it/s]"
            print(f"\r{share} {count}", end="", file=sys.stderr)
            sys.stderr.flush()
        if "error" in message:
            known = {"script": sys.argv[0], "method": self._method, "worker": WORKER}
            sys.exit("\n" + FAILED.format(**known | message))

    def _worker(self, work: Work, jobs: list[Any], numbers: range, gpu: int) -> Callable[[], None]:
        def say(**message: Any) -> None:
            line = json.dumps({"pid": os.getpid(), **message}) + "\n"
            os.write(self._writing, line.encode())

        def serve() -> None:
            hold(gpu, CHARGE_MIB + 100 * gpu)
            for number in numbers:
                try:
                    say(number=number, answer=work(jobs[number], say))
                except Exception as error:  # whatever it is, the script gets to know
                    said = "".join(traceback.format_exception(error)).partition("\n")[2]
                    say(kind=type(error).__name__, error=said.rstrip())
            _rest()

        return serve

    def _start(self, title: str, serve: Callable[[], None]) -> None:
        # Nobody is started and then forgotten.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGCHLD))
        pid = os.fork()
        if pid:
            self._pids.append(pid)
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
            return
        try:
            _detach(title)
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
            serve()
        finally:
            os._exit(1)

    def _on_death(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        sys.exit(DIED)


def _detach(title: str) -> None:
    """Makes a session of its own of the calling child; what it prints goes to Ray's log files."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    importlib.import_module("setproctitle").setproctitle(title)


def _on_term(number: int, frame: FrameType | None) -> None:
    del frame
    sys.exit(number)


def _rest() -> None:
    while True:
        signal.pause()
