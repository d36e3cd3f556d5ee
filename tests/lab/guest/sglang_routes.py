"""What a generated text looks like on each of the stand-in server's routes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lab.guest.sglang_text import Text
else:
    from sglang_text import Text

NATIVE = "/generate"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ROUTES = (NATIVE, COMPLETIONS, CHAT)
DEFAULT_TOKENS = 128


@dataclass(frozen=True)
class Asked:
    """One request for text.

    Attributes:
        route: One of ROUTES.
        number: Of the request, the first being 1.
        model: The server's name for its model.
        body: As it came.
        prompt_tokens: Of its prompt.
        text: The answer.
        accept: Tokens a step; none without drafts.
        began: When it came (time.monotonic()).
    """

    route: str
    number: int
    model: str
    body: dict[str, Any]
    prompt_tokens: int
    text: Text
    accept: float | None
    began: float

    def event(self, tokens: int, since: int | None) -> dict[str, Any]:
        """What is told when there are so many tokens; since: of these were told (none: all)."""
        shape: dict[str, Callable[[int, int | None], dict[str, Any]]] = {
            NATIVE: self._native,
            CHAT: self._chat,
            COMPLETIONS: self._completion,
        }
        return shape[self.route](tokens, since)

    def _native(self, tokens: int, _: int | None) -> dict[str, Any]:
        """Here all of the text is told each time."""
        meta: dict[str, Any] = {
            "id": f"{self.number:032x}",
            "finish_reason": self._reason(tokens),
            "prompt_tokens": self.prompt_tokens,
            "weight_version": "default",
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "e2e_latency": time.monotonic() - self.began,
        }
        if self.accept:
            steps = max(1, round(tokens / self.accept))
            meta |= {"spec_accept_length": tokens / steps, "spec_verify_ct": steps}
        return {"text": self.text.up_to(tokens), "output_ids": [], "meta_info": meta}

    def _completion(self, tokens: int, since: int | None) -> dict[str, Any]:
        choice = {"text": self.text.up_to(tokens, since or 0), **self._choice(tokens)}
        return self._openai("text_completion", choice, tokens, since)

    def _chat(self, tokens: int, since: int | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.text.up_to(tokens, since or 0)}
        key, kind = ("message", "") if since is None else ("delta", ".chunk")
        choice = {key: message, **self._choice(tokens)}
        return self._openai(f"chat.completion{kind}", choice, tokens, since)

    def _openai(
        self, kind: str, choice: dict[str, Any], tokens: int, since: int | None
    ) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "id": f"{self.number:032x}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "choices": [choice],
        }
        if since is None or (self.body.get("stream_options") or {}).get("include_usage"):
            answer["usage"] = {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": tokens,
                "total_tokens": self.prompt_tokens + tokens,
            }
        return answer

    def _choice(self, tokens: int) -> dict[str, Any]:
        reason = self.text.reason if tokens == self.text.tokens else None
        return {"index": 0, "logprobs": None, "finish_reason": reason}

    def _reason(self, tokens: int) -> dict[str, Any] | None:
        if tokens < self.text.tokens:
            return None
        return {"type": self.text.reason, **({"length": tokens} if self._by_length() else {})}

    def _by_length(self) -> bool:
        return self.text.reason == "length"


def limits(route: str, body: dict[str, Any]) -> tuple[int, bool]:
    """How many tokens are asked for at most, and whether a text's own end is ignored."""
    params = body.get("sampling_params") or {} if route == NATIVE else body
    names = ("max_new_tokens", "max_completion_tokens", "max_tokens")
    most = next((params[name] for name in names if params.get(name)), DEFAULT_TOKENS)
    return int(most), bool(params.get("ignore_eos"))
