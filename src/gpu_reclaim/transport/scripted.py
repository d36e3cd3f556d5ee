"""A transport that answers from a script: for tests, ours and other people's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gpu_reclaim.commands import Result, Script, Section

Answer = Mapping[str, str | Section] | Exception
"""Section name to what it prints (exit status 0 unless a `Section` says otherwise), or an error."""


@dataclass
class ScriptedTransport:
    """Answers each script by calling `handler`, and remembers what it was asked.

    Example:
        ```python
        from gpu_reclaim.transport.scripted import ScriptedTransport

        link = ScriptedTransport(lambda script: {"gpus": "gpu 0, GPU-1, L40S, 0, 46068"})
        ```

    Attributes:
        handler: Gives the answer to a script; an exception in the answer's place is raised.
        name: The transport's name.
        stderr: Standard error of every answer.
        asked: The scripts so far, in order.
    """

    handler: Callable[[Script], Answer]
    name: str = "scripted"
    stderr: str = ""
    asked: list[Script] = field(default_factory=list)

    def run(self, script: Script) -> Result:
        """Answer a script; see `Transport.run`."""
        self.asked.append(script)
        answer = self.handler(script)
        if isinstance(answer, Exception):
            raise answer
        sections = {
            name: part if isinstance(part, Section) else Section(part, 0)
            for name, part in answer.items()
        }
        text = "\n".join(part.text for part in sections.values())
        return Result(script, self.name, text, self.stderr, 0, sections)

    def close(self) -> None:
        """Nothing stays open."""
