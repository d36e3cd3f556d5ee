"""A stand-in for an SGLang server: a main process, four GPU workers, one worker without a GPU.

With --port it answers GET /health there as the real one does: 200 once all workers are ready, 503
before, and 503 whenever there is a file "server.sick" in the state folder. sglang_server.py is the
one that also generates.
"""

import contextlib
import os
import socket
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lab.guest import sglang_workers as workers
else:
    import sglang_workers as workers

ANSWER_S = 5
"""Who asks for its health gets so long to say so."""


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
                well = ready.is_set() and not workers.SICK.exists()
                status = "200 OK" if well else "503 Service Unavailable"
            head = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode())


def main() -> None:
    """Starts the workers, says so, and waits until one of them ends."""
    workers.READY.unlink(missing_ok=True)
    reading, pids = workers.start_workers(int(sys.argv[sys.argv.index("--tp") + 1]))
    ready = threading.Event()
    if "--port" in sys.argv:
        # After the workers: they must inherit neither the thread nor its socket.
        port = int(sys.argv[sys.argv.index("--port") + 1])
        listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=answer, args=(listener, ready), daemon=True).start()
    workers.wait_ready(reading, pids)
    ready.set()
    workers.say_ready()
    while True:
        workers.report(*os.wait())


if __name__ == "__main__":
    main()
