"""What both stand-in servers share: a server's workers, and its files in the state folder.

The workers' titles, what they hold and that they outlive the main process follow the real server.
GPU_LAB_DEV and GPU_LAB_STATE as for the nvidia-smi stand-in.
"""

import importlib
import os
import pathlib
import signal
import sys

DEV = os.environ.get("GPU_LAB_DEV", "/dev")
STATE = pathlib.Path(os.environ.get("GPU_LAB_STATE", "/run/gpu-lab"))
READY = STATE / "server.ready"
SICK = STATE / "server.sick"
CHARGE_MIB = 90000


def start_workers(tensor_parallel: int) -> tuple[int, list[int]]:
    """Starts one worker for each GPU and one without.

    Returns:
        Where each of them writes a dot once it is ready, and their PIDs.
    """
    workers: list[tuple[str, int | None]] = [
        (f"sglang::scheduler_TP{rank}", rank) for rank in range(tensor_parallel)
    ]
    workers.append(("sglang::detokenizer", None))
    reading, writing = os.pipe()
    pids = []
    for title, gpu in workers:
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _become(title, gpu, writing)
        pids.append(pid)
    os.close(writing)
    return reading, pids


def wait_ready(reading: int, pids: list[int]) -> None:
    """Waits until all workers are ready; ends the server where one of them is gone."""
    for _ in pids:
        if os.read(reading, 1) != b".":
            sys.exit("a worker ended before it was ready")


def say_ready() -> None:
    """Tells who waits for the file."""
    READY.write_text(f"{os.getpid()}\n")


def report(pid: int, status: int) -> None:
    """Says that a worker ended."""
    print(f"worker {pid} ended with status {status}", flush=True)


def hold(gpu: int, mib: int) -> None:
    """Holds so much of a GPU for as long as the calling process lives."""
    (STATE / "mem" / str(os.getpid())).write_text(f"{mib}\n")
    # Kept open by their numbers alone.
    for node in ("nvidiactl", "nvidia-uvm", f"nvidia{gpu}"):
        os.open(f"{DEV}/{node}", os.O_RDWR)


def _become(title: str, gpu: int | None, ready: int) -> None:
    """Turns the calling child into a worker; never returns."""
    importlib.import_module("setproctitle").setproctitle(title)
    if gpu is not None:
        hold(gpu, CHARGE_MIB + 100 * gpu)
    os.write(ready, b".")
    os.close(ready)
    while True:
        signal.pause()
