"""The stand-in server's answers, and the figures it keeps of itself."""

import asyncio
import time
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lab.guest.sglang_flags import Setting
    from lab.guest.sglang_http import Reply, Request
    from lab.guest.sglang_lookup import Rows
    from lab.guest.sglang_routes import ROUTES, Asked, limits
    from lab.guest.sglang_speed import Job, Pace, Speed
    from lab.guest.sglang_state import Faults
    from lab.guest.sglang_text import Text, prompt_of
    from lab.guest.sglang_workers import SICK, STATE
else:
    from sglang_flags import Setting
    from sglang_http import Reply, Request
    from sglang_lookup import Rows
    from sglang_routes import ROUTES, Asked, limits
    from sglang_speed import Job, Pace, Speed
    from sglang_state import Faults
    from sglang_text import Text, prompt_of
    from sglang_workers import SICK, STATE

VERSION = "0.5.9"
TOKEN_CAPACITY = 500_000
NUMBERS = ("num_steps", "eagle_topk", "num_draft_tokens")


class Engine:
    """Answers requests at the speed of its setting.

    Attributes:
        setting: What the server was started with.
    """

    def __init__(
        self, setting: Setting, faults: Faults, starts: int, command: str, rows: Rows | None
    ) -> None:
        """Serves nobody until it is opened."""
        self.setting = setting
        self._faults = faults
        self._speed = Speed(STATE, setting, starts, rows)
        self._pace = Pace(self._speed.rate, setting.limit)
        self._command = command
        self._open = False
        self._startup_s = 0.0
        self._asked = self._running = self._done = 0
        self._throughput = 0.0
        self._forget()

    @property
    def busy(self) -> int:
        """How many requests for text are not answered yet."""
        return self._running

    def open(self, startup_s: float) -> None:
        """Begins to serve, after so many seconds."""
        self._open, self._startup_s = True, startup_s

    def close(self) -> None:
        """Takes no more requests."""
        self._open = False

    async def answer(self, request: Request, reply: Reply) -> None:
        """Answers one request."""
        if request.path in ("/health", "/health_generate"):
            await self._health(reply)
        elif not self._may(request):
            reply.send(401, {"error": "Unauthorized"})
        elif request.path in ROUTES:
            await self._generate(request, reply)
        elif request.path == "/flush_cache":
            self._flush(reply)
        elif (content := self._about(request.path)) is not None:
            reply.send(200, content)
        else:
            reply.send(404, {"detail": "Not Found"})

    async def _health(self, reply: Reply) -> None:
        most = self._faults.number("health hangs after N requests")
        if most is not None and self._done >= most:
            await asyncio.Event().wait()
        reply.send(200 if self._open and not SICK.exists() else 503)

    def _may(self, request: Request) -> bool:
        key = self.setting.resolved["api_key"]
        return key is None or request.headers.get("authorization") == f"Bearer {key}"

    async def _generate(self, request: Request, reply: Reply) -> None:
        self._asked += 1
        if not self._open:
            reply.send(503, {"error": {"message": "The server is not ready."}})
            return
        if self._faults.has("half fail") and self._asked % 2 == 0:
            reply.send(500, {"error": {"message": "Internal Server Error"}})
            return
        try:
            asked = self._read(request)
        except (ValueError, TypeError, KeyError) as error:
            reply.send(400, {"error": {"message": str(error)}})
            return
        self._running += 1
        try:
            most = self._faults.number("hangs after N requests")
            if self._faults.has("hangs") or (most is not None and self._done >= most):
                await asyncio.Event().wait()
            await self._tell(asked, reply)
        finally:
            self._running -= 1
        self._count(asked)

    def _read(self, request: Request) -> Asked:
        body = request.json()
        prompt = prompt_of(body)
        self._speed.garbage = self._faults.has("garbage")
        text = Text(prompt, *limits(request.path, body), self._speed.garbage)
        return Asked(
            route=request.path,
            number=self._asked,
            model=self._model(),
            body=body,
            prompt_tokens=len(prompt.split()),
            text=text,
            accept=self._speed.accept_length(),
            began=time.monotonic(),
        )

    async def _tell(self, asked: Asked, reply: Reply) -> None:
        """Sends the text as it is generated, or all of it at the end."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stream = bool(asked.body.get("stream"))
        told = 0

        def emit(tokens: int) -> None:
            nonlocal told
            # As many as run now decide which kernel it is.
            if self._speed.wrong_words(self._running):
                asked.text.spoil()
            if stream:
                reply.event(asked.event(tokens, told))
            told = tokens
            if tokens == asked.text.tokens:
                over.set_result(None)

        if stream:
            reply.start_events()
        self._pace.submit(Job(asked.text.tokens, emit))
        await over
        if stream:
            reply.end_events()
        else:
            reply.send(200, asked.event(asked.text.tokens, None))

    def _count(self, asked: Asked) -> None:
        self._done += 1
        self._throughput = self._speed.rate(self._running + 1)
        if asked.accept:
            self._accepted += asked.text.tokens
            self._steps += asked.text.tokens / asked.accept

    def _flush(self, reply: Reply) -> None:
        """Forgets the cache, and the acceptance with it; not while there is work."""
        if self._running:
            reply.send(400, "Flush cache failed.\n", "text/plain")
            return
        self._forget()
        self._speed.draw()
        reply.send(200, "Cache flushed.\n", "text/plain")

    def _forget(self) -> None:
        self._accepted = self._steps = 0.0

    def _about(self, path: str) -> dict[str, Any] | None:
        if path in ("/server_info", "/get_server_info"):
            return self._server_info()
        if path in ("/model_info", "/get_model_info"):
            args = self.setting.resolved
            tokenizer = args["tokenizer_path"] or args["model_path"]
            named = {"model_path": args["model_path"], "tokenizer_path": tokenizer}
            return {**named, "is_generation": True}
        if path == "/v1/models":
            model = {"id": self._model(), "object": "model", "owned_by": "sglang"}
            return {"object": "list", "data": [model]}
        return None

    def _server_info(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "last_gen_throughput": self._throughput,
            "memory_usage": {"weight": 60.0, "graph": 1.5, "token_capacity": TOKEN_CAPACITY},
            "effective_max_running_requests_per_dp": self.setting.limit or 2048,
        }
        if self._steps:
            state["avg_spec_accept_length"] = self._accepted / self._steps
        resolved = dict(self.setting.resolved)
        if self._faults.has("wrong flags"):
            resolved |= {f"speculative_{name}": 7 for name in NUMBERS}
        return {
            **resolved,
            "launch_command": self._command,
            "version": VERSION,
            "startup_time": self._startup_s,
            "internal_states": [state],
        }

    def _model(self) -> str:
        return str(
            self.setting.resolved["served_model_name"] or self.setting.resolved["model_path"]
        )
