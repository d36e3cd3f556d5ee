"""Seen from where, and what nvidia-smi may say."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from gpu_reclaim.models import Verdict
from guest import witness
from guest.kinds import Case, Kind
from lab.guest_files import HOLDER
from lab.paths import RUN

DEV_N = "; ".join(
    [
        "mount -t tmpfs none /mnt",
        "mknod /mnt/node c 1 5",
        "mount --bind /mnt/node /dev/nvidia0",
        f"exec {HOLDER} --gpus 0 --mib 3000",
    ]
)
"""As Proxmox's devN: the same number, but another node than the host's."""


def on_the_node(case: Case) -> None:
    child = subprocess.Popen(
        [RUN / "holder", "--gpus", "0"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    case.cleanup.callback(child.wait)
    case.cleanup.callback(child.kill)
    assert child.stdout is not None
    assert child.stdout.readline().startswith(b"ready")
    case.says += ["held by the node itself: holder (pid ", "on the node)"]
    case.advises += ["ask whoever runs it"]


def in_another_guest(case: Case) -> None:
    case.session["other"] = case.second()
    case.lab.hold("--gpus", "0", "--mib", "4000", guest=case.second())
    case.says += ["GPU 0: 4000 MiB in use, held by guest 130: lab-holder"]


def in_another_guest_by_dev_n(case: Case) -> None:
    case.session["other"] = case.second()
    case.lab.hold("-m", "sh", "-c", DEV_N, guest=case.second(), program="unshare")
    # The host's fuser goes by inode, and sees nobody but those of the shared nodes.
    innocents = {each.host_pid for each in case.lab.guest.processes() if each.holds_gpu()}
    theirs = {each.host_pid for each in case.second().processes() if each.holds_gpu()}
    seen = subprocess.run(["fuser", "/dev/nvidia0"], capture_output=True, text=True, check=False)
    named = {int(word) for word in seen.stdout.split()}
    assert named & innocents
    assert any(pid not in named for pid in theirs)
    case.says += ["held by guest 130: lab-holder"]


def by_dev_n_in_the_guest(case: Case) -> None:
    case.hold("-m", "sh", "-c", DEV_N, program="unshare")


def listed_by_foreign_pids(case: Case) -> None:
    case.lab.smi("apps", "hostpids")
    case.hold("--gpus", "1", "--mib", "2000", victim=False)
    case.policy["gpus"] = [1]
    case.says += ["nvidia-smi does not tell which GPU they use"]


def memory_of_nobody(case: Case) -> None:
    case.lab.smi("stuck", "2 7000\n")
    case.says += ["GPU 2: 7000 MiB in use and no holder can be seen"]
    case.advises += ["GPU reset or reboot, decided by a person"]


def mig_at_rest(case: Case) -> None:
    case.lab.smi("override", "0 mig.mode.current Enabled\n")
    case.lab.smi("stuck", "0 59\n")


def mig_at_rest_but_strict(case: Case) -> None:
    mig_at_rest(case)
    case.policy["strict_zero"] = True
    case.advises += ["MIG instances take 10 to 60 MiB"]


def reserve_counted(case: Case) -> None:
    rows = "".join(f"{gpu} driver_version 470.256.02\n" for gpu in range(4))
    case.lab.smi("override", rows)
    case.lab.smi("stuck", "".join(f"{gpu} 448\n" for gpu in range(4)))
    case.advises += ["drivers before 510 count their own reserve"]


def busy_without_memory(case: Case) -> None:
    case.lab.smi("override", "".join(f"{gpu} utilization.gpu 100\n" for gpu in range(4)))


def reading(value: str) -> Callable[[Case], None]:
    def play(case: Case) -> None:
        case.lab.start_server()
        case.lab.smi("override", f"2 memory.used {value}\n")
        case.says += ["GPU 2", "nothing was touched"]

    return play


def failing(text: str, word: str) -> Callable[[Case], None]:
    def play(case: Case) -> None:
        case.lab.start_server()
        case.lab.smi("fail", text)
        case.says += [word, "nothing was touched"]

    return play


def row_missing(case: Case) -> None:
    case.lab.start_server()
    case.lab.smi("missing", "1")
    case.says += ["3 GPUs answer, 4 are expected; nothing was touched"]


def other_gpu(case: Case) -> None:
    uuid = "GPU-99999999-0000-0000-0000-000000000000"
    case.hold("--gpus", "0")
    case.meanwhile = lambda: case.lab.smi("override", f"2 uuid {uuid}\n")
    case.says += ["GPUs seen before are gone: 2 (GPU-"]


def fewer_gpus_later(case: Case) -> None:
    case.hold("--gpus", "0")
    case.session["expected_gpus"] = None
    case.meanwhile = lambda: case.lab.smi("missing", "3")
    case.says += ["GPUs seen before are gone: 3 (GPU-"]


def memory_drains_late(case: Case) -> None:
    case.lab.smi("lag", "0.7")
    case.lab.start_server()
    case.victims_of("sglang-qwen.service")
    case.policy["settle_timeout_s"] = 30
    assert witness.memory(case.lab)[0] == 90000


SEEN = "seen from where"
KINDS = [
    Kind(SEEN, "a holder on the node itself", Verdict.HELD_BY_OTHER_GUEST, on_the_node),
    Kind(SEEN, "a holder in another guest", Verdict.HELD_BY_OTHER_GUEST, in_another_guest),
    Kind(
        SEEN,
        "another guest with devN nodes, which fuser on the node misses",
        Verdict.HELD_BY_OTHER_GUEST,
        in_another_guest_by_dev_n,
    ),
    Kind(SEEN, "a devN node in the guest", Verdict.CLEAN, by_dev_n_in_the_guest),
    Kind(SEEN, "pids of another namespace", Verdict.HELD_UNSEEN, listed_by_foreign_pids),
    Kind(SEEN, "memory in use, no process", Verdict.HELD_UNSEEN, memory_of_nobody),
    Kind(SEEN, "MIG at rest", Verdict.RESIDUE, mig_at_rest),
    Kind(SEEN, "MIG at rest, strict zero", Verdict.HELD_UNSEEN, mig_at_rest_but_strict),
    Kind(SEEN, "a reserve counted as used", Verdict.HELD_UNSEEN, reserve_counted),
    Kind(SEEN, "100 % utilisation without memory", Verdict.CLEAN, busy_without_memory),
    Kind(SEEN, "[N/A]", Verdict.UNKNOWN, reading("[N/A]")),
    Kind(SEEN, "-", Verdict.UNKNOWN, reading("-")),
    Kind(
        SEEN, "[Insufficient Permissions]", Verdict.UNKNOWN, reading("[Insufficient Permissions]")
    ),
    Kind(SEEN, "[Unknown Error]", Verdict.DRIVER_FAULT, reading("[Unknown Error]")),
    Kind(SEEN, "GPU is lost", Verdict.DRIVER_FAULT, reading("[GPU is lost]")),
    Kind(
        SEEN,
        "a GPU off the bus",
        Verdict.DRIVER_FAULT,
        failing("15 Unable to determine the device handle for GPU0000:01:00.0: GPU is lost", "15"),
    ),
    Kind(
        SEEN,
        "a header and nothing else",
        Verdict.DRIVER_FAULT,
        failing("0 # Idx  #  C/G", "no GPU"),
    ),
    Kind(SEEN, "a row missing", Verdict.GPU_MISSING, row_missing),
    Kind(SEEN, "another GPU in its place", Verdict.GPU_MISSING, other_gpu),
    Kind(SEEN, "fewer GPUs at the end", Verdict.GPU_MISSING, fewer_gpus_later),
    Kind(SEEN, "memory released late", Verdict.CLEAN, memory_drains_late),
]
