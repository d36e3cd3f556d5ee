"""Whose a holder is: owners, the protected, and GPUs that nobody asked for."""

from __future__ import annotations

from collections.abc import Callable

from gpu_reclaim.models import Verdict
from guest import units, witness
from guest.kinds import FOLDER, Case, Kind
from lab.guest_files import HOLDER
from lab.waiting import wait_until

ID = "3f4e5a6b7c8d9e0f1a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f7081"
SLURM = "; ".join(
    [
        "for line in $(cat /proc/self/cgroup)",
        "do path=${line##*:}; tree=$(case $line in 0::*) echo /sys/fs/cgroup/unified;; "
        "*:name=systemd:*) echo /sys/fs/cgroup/systemd;; esac)",
        '[ -n "$tree" ] && [ -d "$tree$path" ] || continue',
        'mkdir -p "$tree$path/job_71/step_0" && echo $$ >"$tree$path/job_71/step_0/cgroup.procs"',
        "done",
        f"exec {HOLDER} --gpus 0 --mib 2000",
    ]
)


def owned(unit: str) -> Callable[[Case], None]:
    """A holder that is to be ended, whoever it belongs to."""

    def play(case: Case) -> None:
        case.hold("--gpus", "0", "--mib", "2000", unit=unit)

    return play


def managed(unit: str, command: str) -> Callable[[Case], None]:
    """A holder that its own manager has to stop."""

    def play(case: Case) -> None:
        case.hold("--gpus", "0", "--mib", "2000", unit=unit, victim=False)
        case.says += [command, "nothing was touched"]
        case.advises += [command]

    return play


def of_nobody(case: Case) -> None:
    case.hold("--gpus", "0")


def container_named(case: Case) -> None:
    case.hold("--gpus", "0", "--mib", "2000", unit=f"docker-{ID}.scope")
    case.policy["match"] = ["lab-holder"]


def slurm(case: Case) -> None:
    case.lab.do(f"mkdir -p {FOLDER}; cat >{FOLDER}/step <<'EOF'\n{SLURM}\nEOF")
    case.hold(f"{FOLDER}/step", program="sh", unit="slurmstepd.scope", victim=False)
    case.says += ["Slurm step 71.0"]
    case.advises += ["scancel 71"]


def every_node_open(wanted: int, *, ended: bool) -> Callable[[Case], None]:
    """It computes on GPU 1, and has every GPU's node open, as CUDA programs do."""

    def play(case: Case) -> None:
        pid = case.hold("--gpus", "0,1,2,3", victim=ended)
        case.lab.smi(f"mem/{pid}", "1 2000")
        case.lab.smi("apps", "real")
        case.policy["gpus"] = [wanted]

    return play


def both_wanted_and_not(case: Case) -> None:
    case.hold("--gpus", "1,2", "--mib", "2000", victim=False)
    case.hold("--gpus", "0", "--mib", "2000", victim=False)
    case.policy["gpus"] = [0, 1]
    case.says += ["it also uses GPU 2, which you did not ask for"]


def neighbours(case: Case) -> None:
    case.hold("--gpus", "0", "--mib", "2000")
    case.hold("--gpus", "1", "--mib", "2000")
    case.hold("--gpus", "2", "--mib", "2000", victim=False)
    case.hold("--gpus", "3", "--mib", "2000", unit="lab-hold-x.service", victim=False)
    case.policy["gpus"] = [0, 1]


def persistenced_at_zero(case: Case) -> None:
    assert any("persistenced" in title for title in witness.innocents(case.lab).values())


def called(name: str, *, ended: bool, mib: int = 2000) -> Callable[[Case], None]:
    def play(case: Case) -> None:
        program = case.holder_called(name)
        case.hold("--gpus", "3", "--mib", str(mib), program=program, victim=ended)
        if not ended and mib:
            case.says += [f"held by what must not be ended: {name} (pid "]

    return play


def titled(title: str) -> Callable[[Case], None]:
    def play(case: Case) -> None:
        case.hold("--gpus", "3", "--title", title)

    return play


def dcgm(case: Case, *lines: str) -> None:
    program = case.holder_called("nv-hostengine")
    exe = f"ExecStart={program} --gpus 0 --mib 800 {' '.join(x for x in lines if x[0] == '-')}"
    rest = [line for line in lines if line[0] != "-"]
    units.add(case.lab, "nvidia-dcgm.service", Service=[exe, "Restart=always", *rest])
    case.lab.do("systemctl start nvidia-dcgm")
    wait_until("it holds", lambda: witness.memory(case.lab)[0] == 800)


def dcgm_not_named(case: Case) -> None:
    dcgm(case)
    case.advises += ["systemctl stop nvidia-dcgm.service"]


def dcgm_named(case: Case) -> None:
    dcgm(case)
    case.victims_of("nvidia-dcgm.service")
    case.policy["match"] = ["nvidia-dcgm.service"]


def dcgm_named_by_block(case: Case) -> None:
    dcgm(case)
    case.session["units"] = ["nvidia-dcgm"]
    case.says += ["nvidia-dcgm.service is never stopped; nothing was touched"]
    case.advises += ["the policy's match names it in full"]


def dcgm_deaf(case: Case) -> None:
    """systemd would send KILL after its time limit, which has frozen GPUs."""
    dcgm(case, "--ignore-term", "TimeoutStopSec=1")
    case.policy["match"] = ["nvidia-dcgm.service"]
    case.says += ["nv-hostengine (pid "]


def mps(case: Case, clients: str = "") -> None:
    """A control daemon whose server holds the GPUs, and the command that speaks to it."""
    server = case.holder_called("nvidia-cuda-mps-server")
    case.lab.do(f"cp /bin/dash {FOLDER}/nvidia-cuda-mps-control")
    control = f"{FOLDER}/nvidia-cuda-mps-control"
    case.hold("-c", f"{server} --gpus 0 --mib 900 & wait", program=control, victim=not clients)
    titles = {pid: title for pid, (_, title) in case.lab.processes().items()}
    (pid,) = [pid for pid, title in titles.items() if title.startswith(server)]
    if not clients:
        (parent,) = [pid for pid, title in titles.items() if title.startswith(control)]
        case.along.add(witness.identity(case.lab, parent))
    command = "/usr/local/bin/nvidia-cuda-mps-control"
    case.lab.do(
        f"cat >{command} <<'EOF'\n#!/bin/sh\nread -r word rest\ncase $word in\n"
        f"get_server_list) echo {pid};;\nget_client_list) echo '{clients}';;\nquit) kill {pid};;\n"
        f"esac\nEOF\nchmod +x {command}"
    )
    case.cleanup.callback(case.lab.do, f"rm -f {command}")


def mps_with_clients(case: Case) -> None:
    mps(case, clients="4711")
    case.says += ["it still has clients (4711)"]


OWNERS, PROTECTED, ORDERS, SCOPE = "owners", "protected", "orders", "scope"
HELD = Verdict.HELD_BY_PROTECTED
KINDS = [
    Kind(OWNERS, "a unit that is not the host's", Verdict.CLEAN, owned("lab-hold-x.service")),
    Kind(OWNERS, "a scope", Verdict.CLEAN, owned("lab-hold-x.scope")),
    Kind(OWNERS, "a login session", Verdict.CLEAN, owned("session-c71.scope")),
    Kind(OWNERS, "nobody", Verdict.CLEAN, of_nobody),
    Kind(
        OWNERS, "a docker container", HELD, managed(f"docker-{ID}.scope", f"docker stop {ID[:12]}")
    ),
    Kind(
        OWNERS, "a podman container", HELD, managed(f"libpod-{ID}.scope", f"podman stop {ID[:12]}")
    ),
    Kind(
        OWNERS,
        "a containerd container",
        HELD,
        managed(f"cri-containerd-{ID}.scope", f"crictl stop {ID[:12]}"),
    ),
    Kind(OWNERS, "a container that match names", Verdict.CLEAN, container_named),
    Kind(OWNERS, "a Slurm step", HELD, slurm),
    Kind(SCOPE, "every node open, its GPU wanted", Verdict.CLEAN, every_node_open(1, ended=True)),
    Kind(
        SCOPE, "every node open, another GPU wanted", Verdict.CLEAN, every_node_open(0, ended=False)
    ),
    Kind(SCOPE, "one on wanted and unwanted GPUs", HELD, both_wanted_and_not),
    Kind(SCOPE, "neighbours on other GPUs", Verdict.CLEAN, neighbours),
    Kind(PROTECTED, "persistenced without memory", Verdict.CLEAN, persistenced_at_zero),
    Kind(PROTECTED, "a display with memory", HELD, called("Xorg", ended=False)),
    Kind(
        PROTECTED, "DCGM without memory", Verdict.CLEAN, called("nv-hostengine", ended=False, mib=0)
    ),
    Kind(
        PROTECTED, "a user's program with a like name", Verdict.CLEAN, called("my-Xorg", ended=True)
    ),
    Kind(PROTECTED, "a title that pretends", Verdict.CLEAN, titled("nv-hostengine")),
    Kind(ORDERS, "DCGM that nobody named", HELD, dcgm_not_named),
    Kind(ORDERS, "DCGM among the host's units", None, dcgm_named_by_block),
    Kind(ORDERS, "DCGM that the policy names", Verdict.CLEAN, dcgm_named),
    Kind(ORDERS, "DCGM that ignores TERM: no KILL", HELD, dcgm_deaf),
    Kind(ORDERS, "MPS without clients quits", Verdict.CLEAN, mps),
    Kind(ORDERS, "MPS with clients stays", HELD, mps_with_clients),
]
