"""What comes back, and what does not die."""

from __future__ import annotations

from collections.abc import Callable

from gpu_reclaim.models import Verdict
from guest import units, ways, witness
from guest.kinds import FOLDER, Case, Kind
from lab.guest_files import HOLDER
from lab.waiting import wait_until

BOMB = f"""
import os, signal, subprocess
left = int(os.environ.get("LEFT", "9"))
def again(*_):
    if left:
        rest = os.environ | {{"LEFT": str(left - 1)}}
        subprocess.Popen(["python3", "{FOLDER}/bomb.py"], env=rest, start_new_session=True)
    os._exit(0)
fd = os.open("/dev/nvidia0", os.O_RDWR)
signal.signal(signal.SIGTERM, again)
print("ready", os.getpid(), flush=True)
while True:
    signal.pause()
"""
TITLES = [
    "two\nlines",
    'it\'s "quoted"',
    "gr\u00fc\u00dfe \u6f22\u5b57",
    "$(touch /run/pwned)",
    "x" * 4096,
]


def model(case: Case, *lines: str, name: str = "lab-model", **sections: list[str]) -> None:
    """A unit of the host that holds GPU 0, running."""
    exe = f"ExecStart={HOLDER} --gpus 0 --mib 1500"
    service = [*([] if any(x.startswith("ExecStart=") for x in lines) else [exe]), *lines]
    units.add(case.lab, f"{name}.service", Service=service, **sections)
    case.lab.do(f"systemctl start {name}")
    wait_until("it holds", lambda: witness.memory(case.lab)[0] == 1500)
    case.session["units"] = [name]
    case.victims_of(f"{name}.service")


def restart_always(case: Case) -> None:
    case.lab.start_server()
    case.victims_of(ways.UNIT)


def triggered(kind: str, *lines: str) -> Callable[[Case], None]:
    def play(case: Case) -> None:
        model(case, "Restart=always")
        heading = kind.capitalize()
        units.add(case.lab, f"lab-model.{kind}", **{heading: list(lines)})
        if kind == "socket":
            case.lab.do("systemctl stop lab-model; systemctl start lab-model.socket lab-model")
            wait_until("it holds", lambda: witness.memory(case.lab)[0] == 1500)
            case.victims.clear()
            case.victims_of("lab-model.service")
        else:
            case.lab.do(f"systemctl start lab-model.{kind}")

    return play


def required_by_another(case: Case) -> None:
    model(case)
    units.add(
        case.lab,
        "lab-gateway.service",
        Unit=["Requires=lab-model.service", "After=lab-model.service"],
        Service=["ExecStart=/bin/sleep 600", "Restart=always"],
    )
    case.lab.do("systemctl start lab-gateway")
    case.along |= set(witness.of_unit(case.lab, "lab-gateway.service"))


def required_by_a_protected(case: Case) -> None:
    required_by_another(case)
    case.victims.clear()
    case.along.clear()
    case.session["protect"] = ["lab-gateway.service"]
    case.says += ["systemd would stop lab-gateway.service along with the host's units"]


def pulled_in_meanwhile(case: Case) -> None:
    model(case)
    units.add(
        case.lab,
        "lab-report.service",
        Unit=["Requires=lab-model.service"],
        Service=["ExecStart=/bin/sleep 600"],
    )
    case.meanwhile = lambda: case.lab.do("systemctl start lab-report")
    case.says += ["lab-model.service"]
    case.advises += ["systemctl stop lab-report.service"]


def upheld(case: Case) -> None:
    model(case)
    units.add(
        case.lab,
        "lab-guardian.service",
        Unit=["Upholds=lab-model.service"],
        Service=["ExecStart=/bin/sleep 600"],
    )
    case.lab.do("systemctl start lab-guardian")
    case.says += ["lab-model.service"]
    case.advises += ["systemctl stop lab-guardian.service"]


def started_again_without_gpu_yet(case: Case) -> None:
    """A server that loads its weights runs for minutes before it opens a GPU."""
    holds = f"exec {HOLDER} --gpus 0 --mib 1500"
    model(case, f"ExecStart=/bin/sh -c '[ -e {FOLDER} ] && exec sleep 600; {holds}'")
    case.meanwhile = lambda: case.lab.do(f"mkdir -p {FOLDER}; systemctl start lab-model")
    case.says += ["stopped, and running again: lab-model.service"]
    case.advises += ["`journalctl -u lab-model.service` and `last`"]


def supervisor(case: Case) -> None:
    loop = f"while :; do {HOLDER} --gpus 0 --mib 700; done"
    case.lab.do(f"setsid sh -c {loop!r} </dev/null >/run/gpu-lab/loop.out 2>&1 &")
    wait_until("it holds", lambda: witness.memory(case.lab)[0] == 700)
    case.victims |= {
        (pid, start)
        for pid, (start, title) in case.lab.processes().items()
        if title == f"{HOLDER} --gpus 0 --mib 700"
    }
    case.says += ["new holders appeared: lab-holder (pid ", "started by sh (pid "]


def person(case: Case) -> None:
    case.hold("--gpus", "1")
    case.meanwhile = lambda: case.lab.hold("--gpus", "0", "--mib", "700", unit="session-c9.scope")
    case.policy["stable_samples"] = 3
    case.says += ["new holders appeared: lab-holder (pid ", "session session-c9"]
    case.advises += ["loginctl terminate-session c9"]


def restarts_later(case: Case) -> None:
    model(case, "Restart=always", "RestartSec=600")
    case.session["units"] = [ways.UNIT]
    case.says += ["systemd starts lab-model.service again"]
    case.advises += ["systemctl stop lab-model.service"]


def waits_to_restart(case: Case) -> None:
    model(case, "Restart=always", "RestartSec=600")
    case.lab.do("systemctl kill -s KILL lab-model")
    wait_until("it waits", lambda: witness.state_of(case.lab, "lab-model") == "activating")
    case.victims.clear()


def hanging_stop(case: Case) -> None:
    model(case, "ExecStop=/bin/sleep 600", "TimeoutStopSec=infinity")


def refuses_stop(case: Case) -> None:
    model(case, Unit=["RefuseManualStop=yes"])
    case.victims.clear()
    case.says += ["lab-model.service refuses to be stopped by hand", "nothing was touched"]
    case.cleanup.callback(case.lab.do, "systemctl kill -s KILL lab-model")


def start_limit(case: Case) -> None:
    units.add(
        case.lab,
        "lab-model.service",
        Unit=["StartLimitBurst=1", "StartLimitIntervalSec=600"],
        Service=["ExecStart=/bin/false", "Restart=always", "RestartSec=0"],
    )
    case.lab.attach("systemctl start lab-model")
    wait_until("it failed", lambda: witness.state_of(case.lab, "lab-model") == "failed")
    case.session["units"] = ["lab-model"]


def template_by_alias(case: Case) -> None:
    exe = f"ExecStart={HOLDER} --gpus %i --mib 1500"
    units.add(case.lab, "lab-model@.service", Service=[exe])
    units.alias(case.lab, "llm@0.service", "lab-model@.service")
    case.lab.do("systemctl start lab-model@0")
    wait_until("it holds", lambda: witness.memory(case.lab)[0] == 1500)
    case.session["units"] = ["lab-model@0"]
    case.victims_of("lab-model@0.service")


def masked_before(case: Case) -> None:
    text = f"[Service]\nExecStart={HOLDER} --gpus 0 --mib 1500\nRestart=always\n"
    path = "/run/systemd/system/lab-masked.service"
    case.lab.do(f"mkdir -p /run/systemd/system; cat >{path} <<'EOF'\n{text}EOF")
    case.lab.do("systemctl daemon-reload; systemctl start lab-masked")
    wait_until("it holds", lambda: witness.memory(case.lab)[0] == 1500)
    case.lab.attach("systemctl mask lab-masked")
    case.session["units"] = ["lab-masked"]
    case.victims_of("lab-masked.service")

    def still_masked() -> None:
        assert case.lab.attach("systemctl is-enabled lab-masked").stdout.strip() == "masked"

    case.cleanup.callback(still_masked)


def ignores_term(case: Case) -> None:
    case.hold("--gpus", "0", "--ignore-term")


def stopped(case: Case) -> None:
    pid = case.hold("--gpus", "0")
    case.lab.do(f"kill -STOP {pid}")


def frozen(case: Case) -> None:
    pid = case.hold("--gpus", "1", "--mib", "3000", victim=False)
    case.lab.freeze(pid)
    case.says += [f"still there after KILL: lab-holder (pid {pid}, none, state D)"]
    case.advises += ["plan a reboot"]


def leader_gone(case: Case) -> None:
    case.hold("--gpus", "0", "--leader-exits")


def parent_gone(case: Case) -> None:
    case.hold("--gpus", "0", "--orphan")


def fork_bomb(generations: int) -> Callable[[Case], None]:
    def play(case: Case) -> None:
        case.lab.do(f"mkdir -p {FOLDER}; cat >{FOLDER}/bomb.py <<'EOF'{BOMB}EOF")
        command = f"LEFT={generations} exec python3 {FOLDER}/bomb.py"
        case.hold("-c", command, program="sh")
        case.policy["term_grace_s"] = 3
        if generations > 2:
            case.says += ["new holders appeared: python3 bomb.py (pid "]

    return play


def crowd(case: Case) -> None:
    case.lab.do(
        "setsid sh -c 'i=0; while [ $i -lt 2000 ]; do sleep 900 & i=$((i + 1)); done; wait'"
        " </dev/null >/dev/null 2>&1 &"
    )
    wait_until("they are there", lambda: len(case.lab.processes()) > 2000, 60)
    case.hold("--gpus", "0")


def titles(case: Case) -> None:
    for number, title in enumerate(TITLES):
        case.hold("--gpus", str(number % 4), "--title", title)


BACK, DIE = "it comes back", "it does not die"
KINDS = [
    Kind(BACK, "Restart=always with KillMode=process", Verdict.CLEAN, restart_always),
    Kind(BACK, "a socket", Verdict.CLEAN, triggered("socket", "ListenStream=31001")),
    Kind(BACK, "a timer", Verdict.CLEAN, triggered("timer", "OnActiveSec=1h")),
    Kind(BACK, "a path", Verdict.CLEAN, triggered("path", "PathExists=/etc/hostname")),
    Kind(BACK, "another unit requires it", Verdict.CLEAN, required_by_another),
    Kind(BACK, "a protected unit requires it", None, required_by_a_protected),
    Kind(BACK, "another unit pulls it in meanwhile", Verdict.RESPAWNED, pulled_in_meanwhile),
    Kind(BACK, "another unit upholds it", Verdict.RESPAWNED, upheld),
    Kind(
        BACK, "it runs again, without a GPU yet", Verdict.RESPAWNED, started_again_without_gpu_yet
    ),
    Kind(BACK, "a supervisor outside systemd", Verdict.RESPAWNED, supervisor),
    Kind(BACK, "a person, during the wait", Verdict.RESPAWNED, person),
    Kind(BACK, "another unit's RestartSec", Verdict.RESPAWNED, restarts_later),
    Kind(BACK, "activating (auto-restart)", Verdict.CLEAN, waits_to_restart),
    Kind(BACK, "a stop that hangs for ever", Verdict.CLEAN, hanging_stop),
    Kind(BACK, "RefuseManualStop", Verdict.UNKNOWN, refuses_stop),
    Kind(BACK, "start limit reached", Verdict.CLEAN, start_limit),
    Kind(BACK, "an instance of a template", Verdict.CLEAN, template_by_alias),
    Kind(BACK, "masked before we came", Verdict.CLEAN, masked_before),
    Kind(DIE, "TERM ignored", Verdict.CLEAN, ignores_term),
    Kind(DIE, "SIGSTOP", Verdict.CLEAN, stopped),
    Kind(DIE, "state D", Verdict.UNKILLABLE, frozen),
    Kind(DIE, "a dead leader with living threads", Verdict.CLEAN, leader_gone),
    Kind(DIE, "a dead parent", Verdict.CLEAN, parent_gone),
    Kind(DIE, "workers that start workers, twice", Verdict.CLEAN, fork_bomb(2)),
    Kind(DIE, "workers that start workers without end", Verdict.RESPAWNED, fork_bomb(90)),
    Kind(DIE, "2,000 processes", Verdict.CLEAN, crowd),
    Kind(DIE, "titles of every kind", Verdict.CLEAN, titles),
]
