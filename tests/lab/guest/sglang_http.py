"""As much of HTTP/1.1 as the stand-in server needs: the library has no server for asyncio."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        method: GET, POST.
        path: Without what follows a question mark.
        headers: By names in lower case.
        body: As it came.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body's object.

        Raises:
            ValueError: It has none.
        """
        content = json.loads(self.body)
        if not isinstance(content, dict):
            raise ValueError("not an object")
        return content


class Reply:
    """Answers one request, at once or piece by piece."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        """Writes nothing yet."""
        self._writer = writer

    def send(self, status: int, content: object = "", kind: str = "application/json") -> None:
        """Answers with one object, or with plain text."""
        text = content if isinstance(content, str) else json.dumps(content)
        body = text.encode()
        self._head(status, kind, f"Content-Length: {len(body)}")
        self._writer.write(body)

    def start_events(self) -> None:
        """Begins a stream of events."""
        self._head(200, "text/event-stream; charset=utf-8", "Transfer-Encoding: chunked")

    def event(self, content: dict[str, Any]) -> None:
        """Sends one event."""
        self._chunk(f"data: {json.dumps(content)}\n\n".encode())

    def end_events(self) -> None:
        """Ends the stream."""
        self._chunk(b"data: [DONE]\n\n")
        self._writer.write(b"0\r\n\r\n")

    def _head(self, status: int, kind: str, length: str) -> None:
        lines = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            f"Content-Type: {kind}",
            length,
            "\r\n",
        )
        self._writer.write("\r\n".join(lines).encode())

    def _chunk(self, data: bytes) -> None:
        self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))


Handler = Callable[[Request, Reply], Awaitable[None]]


async def serve(handler: Handler, host: str, port: int) -> asyncio.Server:
    """Listens; connections are kept open between requests."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                request = await _read(reader)
                await handler(request, Reply(writer))
                await writer.drain()
                if request.headers.get("connection", "").lower() == "close":
                    break
        writer.close()

    return await asyncio.start_server(talk, host, port, backlog=1024)


async def _read(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    method, target, *_ = first.split()
    return Request(method, target.partition("?")[0], headers, body)
