"""A stand-in for an SGLang server: a main process, four GPU workers, one worker without a GPU.

The workers' titles, what they hold and that they outlive the main process follow the real server.
With --port it answers GET /health there as the real one does: 200 once all workers are ready, 503
before, and 503 whenever there is a file "server.sick" in the state folder.
GPU_LAB_DEV and GPU_LAB_STATE as for the nvidia-smi stand-in.
"""

import contextlib
import importlib
import os
import pathlib
import signal
import socket
import sys
import threading

DEV = os.environ.get("GPU_LAB_DEV", "/dev")
STATE = pathlib.Path(os.environ.get("GPU_LAB_STATE", "/run/gpu-lab"))
READY = STATE / "server.ready"
SICK = STATE / "server.sick"
CHARGE_MIB = 90000
ANSWER_S = 5
"""Who asks for its health gets so long to say so."""


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


def answer(listener: socket.socket, ready: threading.Event) -> None:
    """Answers one request after the other; never returns.

    Nothing heavier than a socket: the library's HTTP server takes longer to import than all else.
    """
    while True:
        connection, _ = listener.accept()
        connection.settimeout(ANSWER_S)
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as request:
            asked = request.readline().split()
            while request.readline().strip():
                pass
            status = "404 Not Found"
            if asked[1:2] == [b"/health"]:
                well = ready.is_set() and not SICK.exists()
                status = "200 OK" if well else "503 Service Unavailable"
            head = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode())


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
    ready = threading.Event()
    if "--port" in sys.argv:
        # After the workers: they must inherit neither the thread nor its socket.
        port = int(sys.argv[sys.argv.index("--port") + 1])
        listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=answer, args=(listener, ready), daemon=True).start()
    for _ in workers:
        if os.read(reading, 1) != b".":
            sys.exit("a worker ended before it was ready")
    ready.set()
    READY.write_text(f"{os.getpid()}\n")
    while True:
        pid, status = os.wait()
        print(f"worker {pid} ended with status {status}", flush=True)


if __name__ == "__main__":
    main()
