"""A held host on which transient units really run, each in a session that stands for its group."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_reclaim import holding, jobs
from gpu_reclaim.commands import Section
from gpu_reclaim.holding import Answer, Claim
from gpu_reclaim.jobs import Job, JobState
from unit.held_host import HeldHost
from unit.shells import here, stub

SYSTEMD_RUN = r"""
import json, os, shutil, signal, subprocess, sys
from pathlib import Path

home = Path(@HOME@)
with (home / "runs").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\n")
words, command = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
options = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
given = dict(two.split("=", 1) for one, two in zip(words, words[1:]) if one == "-p")
unit = options["unit"]


def put(name, state):
    (home / f"{name}.new").write_text(f"ActiveState={state}\nSubState=x\n")
    (home / f"{name}.new").rename(home / f"{name}.state")


if (home / "refuses").exists():
    sys.exit("Failed to start transient service unit: no more\nand that is all")
(home / f"{unit}.pid").unlink(missing_ok=True)
put(unit, "active")
put(options["slice"], "active")
if os.fork():
    sys.exit()
os.setsid()
null = os.open(os.devnull, os.O_RDWR)
for number in range(3):
    os.dup2(null, number)
# The shell under test instead of the machine's own.
command[0] = shutil.which(os.path.basename(command[0]))
job = subprocess.Popen(command, cwd=given["WorkingDirectory"], start_new_session=True)
(home / f"{unit}.pid").write_text(str(job.pid))
code = job.wait()
for stat in Path("/proc").glob("[0-9]*/stat"):
    try:
        session = int(stat.read_text().rpartition(") ")[2].split()[3])
    except OSError:
        continue
    if session == job.pid:
        os.kill(int(stat.parent.name), signal.SIGKILL)
put(unit, "inactive")
"""

STOP_JOBS = r"""
kill_job() {
  for stat in /proc/[0-9]*/stat; do
    read -r line 2>/dev/null <"$stat" || continue
    set -- $1 ${line##*) }
    [ "$5" != "$1" ] || { pid=${stat%/stat}; kill -KILL "${pid#/proc/}"; }
  done
}
case " $* " in
  *" stop "*gpu-reclaim-job-* | *" kill "*gpu-reclaim-job-* | *" stop -- gpureclaim.slice "*)
    printf '%s\n' "$*" >>@HOME@/calls
    set -- " $* "
    for file in @HOME@/gpu-reclaim-job-*.state; do
      grep -qs =active "$file" || continue
      unit=${file##*/}; unit=${unit%.state}
      [ ! -e @HOME@/"$unit".deaf ] || case "$1" in *" stop "*) continue;; esac
      case "$1" in *" $unit "* | *gpureclaim.slice*) ;; *) continue;; esac
      # It may not have come so far yet.
      while [ ! -s @HOME@/"$unit".pid ]; do sleep 0.05; done
      kill_job "$(cat @HOME@/"$unit".pid)"
      while grep -q =active "$file"; do sleep 0.05; done
    done
    [ "${1%gpureclaim.slice *}" = "$1" ] || rm -f @HOME@/gpureclaim.slice.state
    exit 0;;
esac
"""
"""What `stop` does to jobs, and to the slice that they are in; one that is `deaf` needs `kill`."""


class JobHost(HeldHost):
    """A host, held as `t1`, whose jobs run on this machine.

    Attributes:
        runs: What systemd-run was told, call by call.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        timer = (self.tools / "systemd-run").read_text().partition("\n")[2]
        launch = self.tools / "launch"
        launch.write_text(
            f"#!{sys.executable}{SYSTEMD_RUN.replace('@HOME@', repr(str(self.home)))}"
        )
        launch.chmod(0o755)
        stub(
            self.tools,
            "systemd-run",
            f'case "$*" in *--on-active*) {timer}exit;; esac\nexec {launch} "$@"',
        )
        old = (self.tools / "systemctl").read_text().partition("\n")[2]
        stub(self.tools, "systemctl", STOP_JOBS.replace("@HOME@", str(self.home)) + old)
        self.unit("llm.service")

    def start_job(self, job: Job, token: str = "t1") -> Answer:
        return self.answer(jobs.start(Claim(token), job, places=self.places))

    def end_jobs(self, *names: str, token: str = "t1") -> Answer:
        return self.answer(jobs.end(Claim(token), names, places=self.places))

    def answer(self, body: str) -> Answer:
        return holding.parse(self.section(body))

    def section(self, body: str) -> Section:
        return here({"x": body}).section("x")

    def look(self, job: Job, offset: int = 0) -> JobState:
        return self.looks([(job, offset)])[job.name]

    def looks(self, looked: Sequence[tuple[Job, int]]) -> dict[str, JobState]:
        return jobs.parse_look(self.section(jobs.look(looked, places=self.places)), looked)

    def ended(self, job: Job) -> JobState:
        """Its state once nothing of it runs."""
        for _ in range(400):
            found = self.look(job)
            if found.ended:
                return found
            time.sleep(0.05)
        raise AssertionError(f"{job.name} still runs")

    def file(self, job: Job, name: str) -> str | None:
        return jobs.parse_file(self.section(jobs.read_file(job, name)))

    @property
    def runs(self) -> list[str]:
        file = self.home / "runs"
        return file.read_text().splitlines() if file.exists() else []
