"""Runs in a PID namespace of its own: victims die, and strangers take their pids.

    pid_reuse.py forced ROUNDS SEED    the pid is given again at once, between look and signal
    pid_reuse.py natural ROUNDS SEED   the namespace has few pids, and they go round

Prints what happened as JSON. A stranger ends by itself; one that ends by a signal was hurt.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from gpu_reclaim import signals
from gpu_reclaim.models import Process

VICTIMS = 12
FEW_PIDS = 340
"""Of a namespace's pids the first 300 are given only once (kernel/pid.c, RESERVED_PIDS)."""

CROWD = 12
"""Strangers alive at a time, beside victims and the script's own processes."""


class Round:
    """Some victims, a script that is to end them, and the strangers that come in between."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.strangers: dict[int, int] = {}
        self.hurt: list[int] = []
        self.ended: dict[int, int] = {}
        self.victims = [identity(self.fork(600, deaf=n % 2 == 0)) for n in range(VICTIMS)]
        self.script = 0
        self.said = -1
        # A start time counts in ticks of 10 ms.
        time.sleep(0.03)

    def fork(self, seconds: float, *, deaf: bool = False) -> int:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else signal.SIG_DFL)
            time.sleep(seconds)
            os._exit(0)
        return pid

    def stranger(self, seconds: float) -> None:
        # Spawning is a good deal quicker than a fork of this process.
        pid = os.posix_spawn("/bin/sleep", ["sleep", str(seconds)], os.environ)
        self.strangers[pid] = self.strangers.get(pid, 0) + 1

    def lose(self, victim: Process, *, at_once: bool) -> None:
        """It dies and is collected; at once: a stranger has its pid."""
        self.collect()
        if victim.pid in self.ended:
            return
        os.kill(victim.pid, signal.SIGKILL)
        os.waitpid(victim.pid, 0)
        self.ended[victim.pid] = 0
        if at_once:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(victim.pid - 1))
            self.stranger(1.2)

    def collect(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.strangers.get(pid):
                self.strangers[pid] -= 1
                self.hurt += [pid] if os.WIFSIGNALED(status) else []
            self.ended[pid] = status

    def start(self, grace_s: float) -> None:
        namespace = str(Path("/proc/self/ns/pid").readlink())
        text = signals.end(self.victims, namespace, grace_s=grace_s)
        self.said, mouth = os.pipe()
        os.set_blocking(self.said, False)
        redirect = [(os.POSIX_SPAWN_DUP2, mouth, 1)]
        shell = ["sh", "-c", text]
        self.script = os.posix_spawn("/bin/sh", shell, os.environ, file_actions=redirect)
        os.close(mouth)

    def listen(self, said: bytes = b"") -> bytes:
        try:
            return said + os.read(self.said, 65536)
        except BlockingIOError:
            return said

    def forced(self) -> bytes:
        """Strangers in the place of victims before TERM, and between TERM and KILL."""
        order = self.chance.sample(self.victims, VICTIMS)
        for victim in order[:4]:
            self.lose(victim, at_once=True)
        self.start(grace_s=0.6)
        said = b""
        while said.count(b" TERM\n") < VICTIMS - 4:
            said = self.listen(said)
        for victim in order[4:8]:
            self.lose(victim, at_once=True)
        return self.finish(said)

    def natural(self) -> bytes:
        """Victims die whenever, and pids go round."""
        order = self.chance.sample(self.victims, VICTIMS)
        self.start(grace_s=0.3)
        said = b""
        while self.script not in self.ended:
            if order and self.chance.random() < 0.05:
                self.lose(order.pop(), at_once=False)
            if sum(self.strangers.values()) < CROWD:
                self.stranger(0.01)
            self.collect()
            said = self.listen(said)
        return self.finish(said)

    def finish(self, said: bytes) -> bytes:
        while self.script not in self.ended or any(self.strangers.values()):
            self.collect()
            said = self.listen(said)
            time.sleep(0.002)
        os.close(self.said)
        return said


def identity(pid: int) -> Process:
    """A process as a look would have seen it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return Process(pid=pid, start_time=int(fields[19]))


def main() -> None:
    """Way, rounds and seed are the arguments."""
    way, rounds, chance = sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3]))
    if way == "natural":
        Path("/proc/sys/kernel/pid_max").write_text(str(FEW_PIDS))
        Path("/proc/sys/kernel/ns_last_pid").write_text("300")
    total = {"reused": 0, "changed": 0, "sent": 0, "hurt": 0}
    for _ in range(rounds):
        now = Round(chance)
        said = now.forced() if way == "forced" else now.natural()
        pids = {victim.pid for victim in now.victims}
        total["reused"] += len(pids & set(now.strangers))
        total["changed"] += said.count(b"changed ")
        total["sent"] += said.count(b"sent ")
        total["hurt"] += len(now.hurt)
    sys.stdout.write(json.dumps(total) + "\n")


if __name__ == "__main__":
    main()
