"""A stand-in for the Proxmox VE API: HTTPS, a token, misbehaviour; `cluster` has the rest."""

from __future__ import annotations

import json
import re
import ssl
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import parse_qs, urlsplit

from proxmox.cluster import Cluster, Params, PveError

TOKEN_ID = "reclaim@pve!gpu"
TOKEN_SECRET = "5e3c7a1e-0000-4000-8000-feedfacecafe"
PREFIX = "/api2/json"


@dataclass(frozen=True)
class Fault:
    """What the next matching requests get instead of an answer.

    Attributes:
        path: A regular expression found in the path.
        code: Status code; 0 with `cut` or `silent`.
        words: Status line.
        body: Raw body, instead of Proxmox's JSON.
        location: For a redirect.
        cut: "before" or "after" acting, the connection is closed without an answer.
        silent: No answer until the server stops.
        times: How many requests get it.
    """

    path: str
    code: int = 0
    words: str = ""
    body: bytes | None = None
    location: str = ""
    cut: str = ""
    silent: bool = False
    times: int = 1


@dataclass(frozen=True)
class Request:
    """A request that arrived."""

    method: str
    path: str
    params: Params


class PveServer(Cluster):
    """A cluster that listens on 127.0.0.1; use it as a context manager.

    Attributes:
        certificate: PEM file with certificate and key.
        requests: What arrived, in order.
        stopping: Set when the server ends.
    """

    def __init__(self, certificate: Path) -> None:
        super().__init__()
        self.certificate = certificate
        self.requests: list[Request] = []
        self.stopping = threading.Event()
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._httpd = _Listener(self)
        self._thread = threading.Thread(target=self._httpd.serve_forever, args=(0.02,), daemon=True)

    @property
    def port(self) -> int:
        """The port it listens on, on 127.0.0.1."""
        return self._httpd.server_port

    def __enter__(self) -> PveServer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stopping.set()
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join()
        self.end_all()

    def misbehave(self, *faults: Fault) -> None:
        """Give the next requests these faults."""
        self._faults += faults

    def count(self, path: str) -> int:
        """How many requests had a path ending so."""
        return sum(request.path.endswith(path) for request in self.requests)

    def fault(self, path: str) -> Fault | None:
        """Take the fault that is due for a path."""
        with self._lock:
            for index, fault in enumerate(self._faults):
                if re.search(fault.path, path):
                    left = [Fault(**{**vars(fault), "times": fault.times - 1})]
                    self._faults[index : index + 1] = left if fault.times > 1 else []
                    return fault
        return None


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, pve: PveServer) -> None:
        self.pve = pve
        super().__init__(("127.0.0.1", 0), _Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pve.certificate)
        # The handshake is left to each connection's own thread.
        self.socket = context.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that does not like our certificate is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Silence."""

    def _handle(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        params = parse_qs(body or url.query, keep_blank_values=True)
        path = url.path.removeprefix(PREFIX)
        pve = self.server.pve
        pve.requests.append(Request(self.command, path, params))
        fault = pve.fault(path)
        if fault is None or fault.cut == "after":
            self._act(path, params, cut=fault is not None)
        elif fault.silent:
            pve.stopping.wait()
            self.close_connection = True
        elif fault.cut:
            self.close_connection = True
        else:
            body_bytes = b'{"data":null}' if fault.body is None else fault.body
            self._reply(fault.code, fault.words, body_bytes, fault.location)

    def _act(self, path: str, params: Params, *, cut: bool) -> None:
        wanted = f"PVEAPIToken={TOKEN_ID}={TOKEN_SECRET}"
        try:
            if self.headers.get("Authorization") != wanted:
                raise PveError(401, "invalid token value!")
            code, words = 200, "OK"
            answer: dict[str, object] = {"data": self.server.pve.answer(self.command, path, params)}
        except PveError as error:
            code, words, answer = error.code, error.words, {"data": None}
            if error.by_parameter:
                answer["errors"] = error.by_parameter
        if cut:
            self.close_connection = True
        else:
            self._reply(code, words, json.dumps(answer).encode())

    def _reply(self, code: int, words: str, body: bytes, location: str = "") -> None:
        self.send_response(code, words)
        self.send_header("Content-Type", "application/json;charset=UTF-8")
        self.send_header("Content-Length", str(len(body)))
        if location:
            self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(body)
