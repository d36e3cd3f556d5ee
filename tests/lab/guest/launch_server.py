"""A stand-in for an SGLang server: a main process, four GPU workers, one worker without a GPU.

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
CHARGE_MIB = 90000


def become(title: str, gpu: int | None, ready: int) -> None:
    """Turns the calling child into a worker; never returns."""
    importlib.import_module("setproctitle").setproctitle(title)
    # Kept open for as long as the process lives, by their numbers alone.
    if gpu is not None:
        (STATE / "mem" / str(os.getpid())).write_text(f"{CHARGE_MIB + 100 * gpu}\n")
        for node in ("nvidiactl", "nvidia-uvm", f"nvidia{gpu}"):
            os.open(f"{DEV}/{node}", os.O_RDWR)
    os.write(ready, b".")
    os.close(ready)
    while True:
        signal.pause()


def main() -> None:
    """Starts the workers, says so, and waits until one of them ends."""
    READY.unlink(missing_ok=True)
    tensor_parallel = int(sys.argv[sys.argv.index("--tp") + 1])
    workers: list[tuple[str, int | None]] = [
        (f"sglang::scheduler_TP{rank}", rank) for rank in range(tensor_parallel)
    ]
    workers.append(("sglang::detokenizer", None))
    reading, writing = os.pipe()
    for title, gpu in workers:
        if os.fork() == 0:
            os.close(reading)
            become(title, gpu, writing)
    os.close(writing)
    for _ in workers:
        if os.read(reading, 1) != b".":
            sys.exit("a worker ended before it was ready")
    READY.write_text(f"{os.getpid()}\n")
    while True:
        pid, status = os.wait()
        print(f"worker {pid} ended with status {status}", flush=True)


if __name__ == "__main__":
    main()
