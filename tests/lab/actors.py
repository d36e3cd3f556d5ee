"""Who plays in the guest: the server, the holders, the innocents; and how tests move them."""

import itertools
import shlex

from lab import freezer
from lab.container import Container
from lab.errors import LabError
from lab.guest_files import HOLDER, INNOCENTS
from lab.paths import GUEST_STATE, STATE
from lab.processes import Process
from lab.waiting import wait_until

UNIT = "sglang-qwen.service"
MAIN = "launch_server"
_HIDDEN = ".hidden-by-lab"
_KEPT = ("init.scope", "systemd-journald", "dbus", "systemd-logind", "ssh", *INNOCENTS)
_SETTINGS = "etc/systemd/system"
_RESTORE = f"""
for unit in $added $(ls /run/systemd/transient); do units="$units $unit"; done
systemctl stop gpu-reclaim-deadman.timer gpu-reclaim-deadman.service
rm -f /run/gpu-reclaim/hold
systemctl stop {UNIT} 'sglang-*.service' $units
for entry in $added; do rm -rf "/{_SETTINGS}/$entry"; done
changed=$added
for entry in /run/systemd/system/* /run/systemd/system.control/*; do
    [ -e "$entry" ] || [ -L "$entry" ] || continue
    rm -rf "$entry" && changed=1
done
rm -rf /run/gpu-reclaim* /var/lib/gpu-reclaim* /etc/gpu-reclaim*
[ -z "$changed" ] || systemctl daemon-reload
systemctl reset-failed
[ "$(hostname)" = "$name" ] || {{ hostname "$name"; echo "$name" >/etc/hostname; }}
systemctl start ssh.service {" ".join(INNOCENTS)} || exit
command -v fuser >/dev/null
"""
_HEALTH = """
exec /usr/bin/python3 -c '
import http.client
line = http.client.HTTPConnection("127.0.0.1", 30000, timeout=5)
try:
    line.request("GET", "/health")
    print(line.getresponse().status)
except OSError:
    print(0)
'
"""


class Actors:
    """Moves and watches the processes of `guest`."""

    guest: Container

    def __init__(self) -> None:
        """Starts with nothing hidden."""
        self._hidden: list[str] = []
        self._numbers = itertools.count(1)
        self._settings: set[str] = set()

    def do(self, script: str, timeout: float = 30) -> str:
        """Runs a script in the guest that must succeed, and returns its output.

        Raises:
            LabError: It failed; both streams are shown.
        """
        done = self.guest.attach("set -e\n" + script, timeout)
        if done.returncode != 0:
            raise LabError(f"{script}\nended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def processes(self) -> dict[int, tuple[int, str]]:
        """Returns all processes of the guest: PID -> (start time in clock ticks, title)."""
        return {process.pid: (process.start, process.title) for process in self.guest.processes()}

    def process(self, pid: int) -> Process | None:
        """Returns one process by its PID in the guest, or none."""
        return next((each for each in self.guest.processes() if each.pid == pid), None)

    def start_server(self) -> dict[str, int]:
        """Starts the server's unit, waits until its workers hold their GPUs; see server_pids."""
        self.do(f"systemctl start {UNIT}")
        self.wait_ready()
        return self.server_pids()

    def wait_ready(self, timeout: float = 15) -> None:
        """Waits until the running main process has said that all its workers hold."""
        wait_until("the server is ready", self._ready, timeout)

    def _ready(self) -> bool:
        ready = STATE / "server.ready"
        main = self.server_pids().get(MAIN)
        return main is not None and ready.exists() and ready.read_text().strip() == str(main)

    def server_pids(self) -> dict[str, int]:
        """Returns the unit's processes: title -> PID; the main process is "launch_server"."""
        return {
            MAIN if "launch_server.py" in process.title else process.title: process.pid
            for process in self.guest.processes()
            if process.in_unit(UNIT) and process.state != "Z"
        }

    def health(self) -> int:
        """Returns what the server answers to GET /health; 0: it does not answer.

        A state file "server.sick" (see `Lab.smi`) makes it 503 whenever it runs.
        """
        return int(self.do(_HEALTH))

    def hold(
        self,
        *arguments: str,
        unit: str | None = None,
        guest: Container | None = None,
        program: str = HOLDER,
    ) -> int:
        """Starts a holder and returns its PID in the guest; see guest/holder.c for arguments.

        Args:
            arguments: The holder's own.
            unit: A transient unit to run it in, "lab-hold-x.service" or ".scope"; none: no unit,
                its parent is the guest's first process.
            guest: Another guest than the lab's first.
            program: A copy of the holder under another name, made by the test.

        Raises:
            LabError: It could not hold.
        """
        name = f"hold-{next(self._numbers)}.out"
        output = f"{GUEST_STATE}/{name}"
        command = shlex.join([*_wrapped(unit), program, *arguments])
        script = f"{command} </dev/null >{output} 2>&1 &\n"
        if unit is not None and not unit.endswith(".scope"):
            script = command.replace("OUTPUT", output, 1) + "\n"
        done = (guest or self.guest).attach(script)
        if done.returncode != 0:
            raise LabError(f"{command}: {done.stderr}")
        path = STATE / name
        wait_until(f"{command} holds", lambda: path.exists() and path.read_text().endswith("\n"))
        words = path.read_text().split()
        if words[0] != "ready":
            raise LabError(f"{command}: {' '.join(words)}")
        return int(words[1])

    def freeze(self, pid: int) -> None:
        """Makes a process of the guest unkillable (state D), until `thaw` or `reset`."""
        process = self.process(pid)
        if process is None:
            raise LabError(f"there is no process {pid}")
        freezer.freeze(process)

    def thaw(self) -> None:
        """Lets all frozen processes go on."""
        freezer.thaw()

    def set_hostname_in_guest(self, name: str) -> None:
        """Changes the running guest's name; `reset` changes it back."""
        self.do(f"hostname {shlex.quote(name)}; echo {shlex.quote(name)} >/etc/hostname")

    def stop_guest_sshd(self) -> None:
        """Stops the guest's SSH server, and ends the sessions it serves."""
        self.do("systemctl stop ssh.service")
        for process in self.guest.processes():
            if process.in_unit("ssh.service"):
                process.end()

    def start_guest_sshd(self) -> None:
        """Starts the guest's SSH server again."""
        self.do("systemctl start ssh.service")

    def hide(self, path: str) -> None:
        """Moves a file of the guest out of the way, for instance "/usr/bin/fuser"."""
        self.do(f"mv {shlex.quote(path)} {shlex.quote(path + _HIDDEN)}")
        self._hidden.append(path)

    def unhide(self, path: str) -> None:
        """Puts a hidden file back."""
        self.do(f"mv {shlex.quote(path + _HIDDEN)} {shlex.quote(path)}")
        self._hidden.remove(path)

    def restore_guest(self, hostname: str) -> None:
        """Brings the guest back to idle; `Lab.reset` does this and more."""
        freezer.thaw()
        for path in list(self._hidden):
            self.unhide(path)
        added = " ".join(self._unit_files() - self._settings)
        settings = f"name={shlex.quote(hostname)}; added={shlex.quote(added)}\n"
        done = self.guest.attach(settings + _RESTORE)
        self._end_leftovers()
        if done.returncode != 0:
            raise LabError(f"reset: {done.stdout}{done.stderr}")

    def remember_settings(self) -> None:
        """Remembers which unit files there are: whatever a test adds goes with `reset`."""
        self._settings = self._unit_files()

    def _unit_files(self) -> set[str]:
        return {entry.name for entry in (self.guest.rootfs / _SETTINGS).iterdir()}

    def _end_leftovers(self) -> None:
        wait_until("leftovers have ended", self._none_left)

    def _none_left(self) -> bool:
        leftovers = self._leftovers()
        for process in leftovers:
            process.end()
        return not leftovers

    def _leftovers(self) -> list[Process]:
        """Returns who is in no unit of the idle guest, and holders other than the innocents.

        Sessions of the guest's sshd stay, as far as they hold nothing: a test may keep one open.
        """
        return [
            process
            for process in self.guest.processes()
            if not any(map(process.in_unit, _KEPT))
            or (process.holds_gpu() and not any(map(process.in_unit, INNOCENTS)))
        ]


def _wrapped(unit: str | None) -> list[str]:
    if unit is None:
        return ["setsid"]
    if unit.endswith(".scope"):
        return ["systemd-run", "--quiet", "--scope", f"--unit={unit}"]
    streams = ["--property=StandardOutput=file:OUTPUT", "--property=StandardError=inherit"]
    return ["systemd-run", "--quiet", "--collect", f"--unit={unit}", *streams]
