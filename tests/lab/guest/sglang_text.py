"""What the stand-in server generates: words that follow from the prompt alone, one word a token."""

import hashlib
import random
from typing import Any

_LISTED = (
    "the of and to in is that it was for on are as with they be at one have this from or had by "
    "but some what there we can out other were all your when up use word how said an each she "
    "which do their time if will way about many then them would write like so these her long make "
    "thing see him two has look more day could go come did my sound no most number who over know "
    "water than call first people may down side been now find any new work part take get place "
    "made live where after back little only round man year came show every good me give our under "
    "name very through just form much great think say help low line before turn cause same mean "
    "differ move right boy old too does tell sentence set three want air well also play small end "
    "put home read hand port large spell add even land here must big high such follow act why ask "
    "men change went light kind off need house picture try us again animal point mother world "
    "near build self earth father head stand own page should country found answer school grow"
)
WORDS = tuple(_LISTED.split())
OWN_END = (16, 64)
"""Between so many tokens a text ends by itself, unless told to ignore that."""


class Text:
    """The greedy answer to a prompt, as long as asked for.

    Attributes:
        tokens: How many there are.
        reason: Why it ends there: "stop" (by itself), "length".
    """

    def __init__(self, prompt: str, most: int, ignore_eos: bool, garbage: bool = False) -> None:
        """Works out the words; a garbage text has other ones."""
        self._seed = seed = hashlib.sha256(prompt.encode()).hexdigest()
        end = random.Random(seed).randint(*OWN_END)
        self.tokens = max(1, most if ignore_eos else min(most, end))
        self.reason = "length" if ignore_eos or most < end else "stop"
        self._words = random.Random(seed).choices(WORDS, k=self.tokens)
        if garbage:
            self.spoil()

    def spoil(self) -> None:
        """Makes it garbage, of the same length."""
        self._words = random.Random(f"garbage {self._seed}").choices(WORDS, k=self.tokens)

    def up_to(self, tokens: int, since: int = 0) -> str:
        """The text from one count of tokens to another."""
        words = "".join(f" {word}" for word in self._words[since:tokens])
        return words[1:] if since == 0 else words


def prompt_of(body: dict[str, Any]) -> str:
    """The prompt of any route's request.

    Raises:
        ValueError: It has none.
    """
    if messages := body.get("messages"):
        return "\n".join(f"{each['role']}: {each['content']}" for each in messages)
    for key in ("text", "prompt", "input_ids"):
        prompt = body.get(key)
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list) and prompt and all(isinstance(x, int) for x in prompt):
            return " ".join(map(str, prompt))
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            return prompt[0]
    raise ValueError("no prompt: text, prompt, input_ids or messages, one at a time")
