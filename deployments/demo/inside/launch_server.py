"""The pretend inference server: a main process and four workers, each holding a pretend GPU.

As real ones do, the workers carry titles of their own, and go on when only the main process ends.
Worker 1 ignores TERM. Worker 2 closes its descriptor and keeps a mapping alone. All of them end
when their standard input does, so none outlives the demo, however that ends.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
from pathlib import Path

WORKERS = 4
IGNORES_TERM, MAPS_ONLY = 1, 2
CHARGE_MIB = 90_000
PR_SET_NAME = 15

LIBC = ctypes.CDLL(None, use_errno=True)


def start_time() -> str:
    """This process's start, field 22 of its stat file (proc(5)): with the pid its identity."""
    return stat_fields()[19]


def stat_fields() -> list[str]:
    """The fields after the name, which may hold blanks itself."""
    return Path("/proc/self/stat").read_text("utf-8").rpartition(") ")[2].split()


def set_title(title: str, rest: str) -> None:
    """Show another command line: what setproctitle does, with the standard library alone.

    Args:
        title: The first word, as `ps` will show it.
        rest: The second word: what this process belongs to.
    """
    first, last = (int(field) for field in stat_fields()[45:47])
    words = f"{title}\0{rest}\0".encode()
    if len(words) > last - first:
        sys.exit("the command line is too short for the title")
    ctypes.memmove(first, words.ljust(last - first, b"\0"), last - first)
    LIBC.prctl(PR_SET_NAME, title.encode(), 0, 0, 0)


def hold(folder: Path, rank: int) -> None:
    """Open the pretend GPU as CUDA would, and note how much memory it is charged with."""
    (folder / "run/mem" / str(os.getpid())).write_text(f"{CHARGE_MIB + 100 * rank}\n", "utf-8")
    gpu = os.open(folder / f"dev/nvidia{rank}", os.O_RDWR)
    if rank == MAPS_ONLY:
        map_file(gpu)
        os.close(gpu)
    else:
        os.open(folder / "dev/nvidiactl", os.O_RDWR)


def map_file(descriptor: int) -> None:
    """Map a page of the file; Python's own mmap would keep a descriptor open."""
    LIBC.mmap.restype = ctypes.c_void_p
    size = ctypes.c_size_t(mmap.PAGESIZE)
    kind, where = mmap.PROT_READ | mmap.PROT_WRITE, ctypes.c_long(0)
    found = LIBC.mmap(None, size, kind, mmap.MAP_SHARED, descriptor, where)
    if found in (None, ctypes.c_void_p(-1).value):
        sys.exit(f"mmap failed: {os.strerror(ctypes.get_errno())}")


def work(folder: Path, rank: int, ready: int) -> None:
    """Be a worker until standard input ends."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    title = f"sglang::scheduler_TP{rank}"
    set_title(title, str(folder))
    if rank == IGNORES_TERM:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hold(folder, rank)
    note = {"pid": os.getpid(), "start": int(start_time()), "name": title, "holds": rank}
    os.write(ready, f"{json.dumps(note)}\n".encode())
    os.close(ready)
    os.read(0, 1)


def main() -> None:
    """Start the workers, print a line about each, and wait."""
    folder, unit = Path(sys.argv[1]), sys.argv[2]
    reading, writing = os.pipe()
    for rank in range(WORKERS):
        if os.fork() == 0:
            os.close(reading)
            work(folder, rank, writing)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as notes:
        for line in notes:
            print(line, end="")
    main_file = folder / "units" / unit / "main"
    main_file.write_text(f"{os.getpid()} {start_time()}\n", "utf-8")
    print("ready", flush=True)
    os.read(0, 1)


if __name__ == "__main__":
    main()
