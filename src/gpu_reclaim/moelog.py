"""What a server's log says of the MoE kernel configs it uses: the way to know what it wants.

The lines are those of `fused_moe_triton_config.py` in sglang 0.5.9 and 0.5.23. They are written
when a shape is first looked up, once by each rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gpu_reclaim.moeconfigs import ConfigName, parse_name

Found = Literal["own", "other", "none"]
"""The file for its own Triton; one for another Triton; none, so that a default is used."""

_PATH = r"(?P<{}>/.*?/configs/triton_[0-9_]+/E=[^/]*?\.json)"
_LINES: tuple[tuple[Found, re.Pattern[str]], ...] = (
    ("own", re.compile(rf"Using MoE kernel config from {_PATH.format('wanted')}\.")),
    (
        "other",
        re.compile(
            rf"Config file not found at {_PATH.format('wanted')}\. Fallback to triton version "
            rf"[0-9.]+ and use MoE kernel config from {_PATH.format('used')}\."
        ),
    ),
    (
        "none",
        re.compile(
            r"(?:Using default MoE kernel config|Using MoE kernel config with down_moe=False)\."
            rf".*?Config file not found at {_PATH.format('wanted')}"
        ),
    ),
    ("none", re.compile(rf"Down MoE config file not found at {_PATH.format('wanted')}")),
)
_RANK = re.compile(r"\b(?:DP|PP|TP)[0-9]+\b")


@dataclass(frozen=True)
class Lookup:
    """One lookup of one rank.

    Attributes:
        found: What there was.
        wanted: Path of the file that it looked for first.
        used: Path of the file that it uses; empty: a default.
        name: Of the file that it looked for.
        rank: Who says so, for example `TP0` or `DP1 TP0`; empty where the line does not tell.
    """

    found: Found
    wanted: str
    used: str
    name: ConfigName
    rank: str = ""

    @property
    def folder(self) -> str:
        """Folder whose `configs/` it looks in."""
        return self.wanted.rpartition("/configs/")[0]

    @property
    def triton(self) -> str:
        """Its Triton's version, for example `3.6.0`."""
        version = self.wanted.rpartition("/configs/triton_")[2].partition("/")[0]
        return version.replace("_", ".")


def lookups(lines: Iterable[str]) -> list[Lookup]:
    """All that a log tells of, each once, in order."""
    return list(dict.fromkeys(found for line in lines if (found := _lookup(line))))


def _lookup(line: str) -> Lookup | None:
    for found, pattern in _LINES:
        match = pattern.search(line)
        name = parse_name(match["wanted"].rpartition("/")[2]) if match else None
        if match is None or name is None:
            continue
        used = match["wanted"] if found == "own" else match.groupdict().get("used", "")
        rank = " ".join(_RANK.findall(line[: match.start()]))
        return Lookup(found, match["wanted"], used, name, rank)
    return None
