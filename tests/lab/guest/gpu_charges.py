"""How much memory each stand-in GPU uses: charged to processes that really hold its node now.

Where it looks, each with an environment variable of its own:

    GPU_LAB_DEV    the folder with nvidia0..N (default /dev; regular files will do)
    GPU_LAB_STATE  the folder with the files that change its behaviour (default /run/gpu-lab)
    GPU_LAB_PROC   the process table (default STATE/proc where there is one, else /proc; the lab
                   mounts its host's there, because a GPU's memory counts across all guests)

Files in the state folder, all optional:

    mem/PID   MiB charged to that holder: one number for each GPU held, or "gpu mib" lines
    lag       seconds for which memory stays after a call first sees its holder gone
    stuck     "gpu mib" lines: memory in use with no holder
    override  "gpu field value" lines, e.g. "2 memory.used [N/A]"
    missing   GPU indexes whose rows are left out
    apps      real (default) | none | hostpids: what --query-compute-apps lists
    delay     seconds that each call takes
    fail      "rc text": exit with rc, print only the text
    calls     written: one line for each call, "monotonic_ns <TAB> argv <TAB> MiB used by GPU"
    ledger    written, while there is a lag: who was seen with how much

No imports beyond what starts in a few milliseconds (no pathlib): tests poll it in tight loops.
"""

# ruff: noqa: PTH110, PTH115, PTH116, PTH119, PTH123, PTH208

import fcntl
import os
import time

DEV = os.environ.get("GPU_LAB_DEV", "/dev")
STATE = os.environ.get("GPU_LAB_STATE", "/run/gpu-lab")
PROC = os.environ.get("GPU_LAB_PROC") or (
    STATE + "/proc" if os.path.exists(STATE + "/proc/self") else "/proc"
)
GPUS, TOTAL, RESERVED, DEFAULT_CHARGE = 4, 97887, 637, 1024
FREE_RIDERS = ("nvidia-persistenced", "nvidia-smi")
Holders = dict[tuple[str, int], dict[int, int]]


def state(name: str) -> str:
    """Returns a state file's text, stripped; empty where there is none."""
    try:
        with open(f"{STATE}/{name}", encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def node_ids() -> dict[int, tuple[int, int]]:
    """Returns each GPU's device node as (st_dev, st_ino), by GPU index."""
    found = {}
    for index in range(GPUS):
        try:
            status = os.stat(f"{DEV}/nvidia{index}")
        except OSError:
            continue
        found[index] = (status.st_dev, status.st_ino)
    return found


def gpu_of(link: str, path: str, nodes: dict[int, tuple[int, int]]) -> int | None:
    """Says which GPU an open file is: by inode (bind mounts), else by name (unlinked nodes)."""
    name = link.removesuffix(" (deleted)").rpartition("/")[2]
    if not name.startswith("nvidia"):
        return None
    try:
        status = os.stat(path)
    except OSError:
        status = None
    for index, ids in nodes.items():
        same = status is not None and (status.st_dev, status.st_ino) == ids
        if same or link.removesuffix(" (deleted)") == f"{DEV}/nvidia{index}":
            return index
    return None


def opened(task: str, nodes: dict[int, tuple[int, int]]) -> set[int]:
    """Returns the GPUs for which a task has an open descriptor."""
    found: set[int] = set()
    try:
        for entry in os.listdir(task + "/fd"):
            path = f"{task}/fd/{entry}"
            index = gpu_of(os.readlink(path), path, nodes)
            if index is not None:
                found.add(index)
    except OSError:
        pass  # gone, or not ours to see: the real driver would know, this stand-in does not
    return found


def mapped(task: str, nodes: dict[int, tuple[int, int]]) -> set[int]:
    """Returns the GPUs of which a task has a mapping; a descriptor may be closed by then."""
    found: set[int] = set()
    try:
        with open(task + "/maps", errors="replace", encoding="utf-8") as file:
            lines = [line for line in file if "/nvidia" in line]
    except OSError:
        return found
    for line in lines:
        fields = line.rstrip("\n").split(None, 5)
        for index, (_, inode) in nodes.items():
            # The path settles it, not the inode alone: inode numbers repeat between file systems.
            link = fields[5].removesuffix(" (deleted)")
            named = link.endswith(f"/nvidia{index}")
            if link == f"{DEV}/nvidia{index}" or (named and int(fields[4]) == inode):
                found.add(index)
    return found


def tasks(process: str) -> list[str]:
    """Returns the folders to look into: the threads' too, where the main thread has ended."""
    try:
        with open(process + "/stat", errors="replace", encoding="utf-8") as file:
            ended = file.read().rpartition(")")[2].split()[0] == "Z"
        if ended:
            return [f"{process}/task/{tid}" for tid in os.listdir(process + "/task")]
    except OSError:
        return []
    return [process]


def title(pid: str) -> str:
    """Returns the first word of a process's command line, else its short name."""
    try:
        with open(f"{PROC}/{pid}/cmdline", errors="replace", encoding="utf-8") as file:
            first = file.read().split("\0")[0]
        with open(f"{PROC}/{pid}/comm", errors="replace", encoding="utf-8") as file:
            return first or file.read().strip()
    except OSError:
        return ""


def namespace_pid(pid: str) -> str:
    """Returns a process's PID in its own, innermost namespace."""
    try:
        with open(f"{PROC}/{pid}/status", errors="replace", encoding="utf-8") as file:
            for line in file:
                if line.startswith("NSpid:"):
                    return line.split()[-1]
    except OSError:
        pass
    return pid


def charges(pid: str, gpus: set[int]) -> dict[int, int]:
    """Returns the MiB charged to a holder for each GPU it holds."""
    try:
        executable = os.path.basename(os.readlink(f"{PROC}/{pid}/exe"))
    except OSError:
        executable = ""
    if {executable, os.path.basename(title(pid))} & set(FREE_RIDERS):
        return {}
    inner = namespace_pid(pid)  # through the holder's own root: each guest counts for itself
    for path in (f"{PROC}/{pid}/root{STATE}/mem/{inner}", f"{STATE}/mem/{inner}"):
        try:
            with open(path, encoding="utf-8") as file:
                words = file.read().replace(":", " ").split()
        except OSError:
            continue
        if len(words) == 1:
            return dict.fromkeys(gpus, int(words[0]))
        given = {int(gpu): int(mib) for gpu, mib in zip(words[::2], words[1::2], strict=True)}
        return {gpu: given.get(gpu, 0) for gpu in gpus}
    return dict.fromkeys(gpus, DEFAULT_CHARGE)


def start_time(pid: str) -> int:
    """Returns a process's start in clock ticks after boot; 0 where it is gone."""
    try:
        with open(f"{PROC}/{pid}/stat", errors="replace", encoding="utf-8") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def holders(nodes: dict[int, tuple[int, int]]) -> Holders:
    """Returns every charged holder, as (PID in PROC, start time) -> {GPU: MiB}."""
    found: Holders = {}
    for pid in os.listdir(PROC):
        if not pid.isdigit():
            continue
        gpus: set[int] = set()
        for task in tasks(f"{PROC}/{pid}"):
            gpus |= opened(task, nodes) | mapped(task, nodes)
        charged = charges(pid, gpus) if gpus else {}
        if charged:
            found[pid, start_time(pid)] = charged
    return found


def lingering(current: Holders) -> list[tuple[int, int]]:
    """Returns (GPU, MiB) still in use by holders that have gone, and keeps the ledger."""
    lag = float(state("lag") or 0)
    if not lag:
        return []
    now = time.monotonic()
    with open(STATE + "/ledger", "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        entries = [line.split() for line in file.readlines()]
        known = {(pid, start, gpu): (mib, gone) for pid, start, gpu, mib, gone in entries}
        held = {
            (pid, str(start), str(gpu)): str(mib)
            for (pid, start), charged in current.items()
            for gpu, mib in charged.items()
        }
        kept = {key: (mib, "-") for key, mib in held.items()}
        for key, (mib, gone) in known.items():
            since = str(now) if gone == "-" else gone
            if key not in held and now - float(since) < lag:
                kept[key] = (mib, since)
        file.truncate(0)
        file.writelines(" ".join((*key, *value)) + "\n" for key, value in kept.items())
    return [(int(key[2]), int(mib)) for key, (mib, gone) in kept.items() if gone != "-"]


def used(current: Holders, nodes: dict[int, tuple[int, int]]) -> dict[int, int]:
    """Returns the MiB in use on each GPU that has a node: held, lingering and stuck memory."""
    sums = dict.fromkeys(nodes, 0)
    parts = [pair for charged in current.values() for pair in charged.items()]
    parts += lingering(current)
    stuck = state("stuck").split()
    parts += [(int(gpu), int(mib)) for gpu, mib in zip(stuck[::2], stuck[1::2], strict=True)]
    for gpu, mib in parts:
        if gpu in sums:
            sums[gpu] = min(sums[gpu] + mib, TOTAL - RESERVED)
    return sums


def own_pid(pid: str) -> str | None:
    """Translates a PID of PROC for the caller's namespace; none where it is not visible there."""
    try:
        if os.readlink(f"{PROC}/{pid}/ns/pid") == os.readlink("/proc/self/ns/pid"):
            return namespace_pid(pid)
    except OSError:
        pass
    return None


def record(argv: list[str], sums: dict[int, int]) -> None:
    """Appends one line on this call, so that tests can look at readings instead of a clock."""
    readings = ",".join(f"{gpu}:{mib}" for gpu, mib in sums.items())
    try:
        with open(STATE + "/calls", "a", encoding="utf-8") as file:
            file.write(f"{time.monotonic_ns()}\t{' '.join(argv)}\t{readings}\n")
    except OSError:
        pass  # no state folder: nobody wants to know
