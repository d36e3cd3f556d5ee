"""What SGLang's tuning script printed: which file it makes, its times, and why it failed.

Its lines are those of `tuning_fused_moe_triton.py`; what a worker says comes through Ray, with a
head and in colours, and bars of tqdm are parted by carriage returns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gpu_reclaim.commands import TIMEOUT_CODES, printable
from gpu_reclaim.moeconfigs import ConfigName, parse_name

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_START = re.compile(r"Start tuning over ([0-9]+) configurations to create (.+?\.json)\.\.\.")
_WRITING = re.compile(r"Writing best config to (.+?\.json)\.\.\.")
_COMPLETED = re.compile(r"Completed tuning for batch_size=([0-9]+)")
_TOOK = re.compile(r"Tuning took ([0-9.]+) seconds")
_SIZE = re.compile(r"Batch size: ([0-9]+), config:")
_TIME = re.compile(r"Kernel time: ([0-9.]+) us")
_BAR = re.compile(r"\| *([0-9]+)/([0-9]+) \[")
_SHARED = re.compile(r"shared memory, Required: ([0-9]+), Hardware limit: ([0-9]+)")
_ERROR = re.compile(r"^(?:\S+: error: |[A-Za-z_][\w.]*(?:Error|Exception|OutOfResources)\b).*")
_CAUSES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"CUDA (?:error: )?out of memory.*"), "a GPU had too little memory free"),
    (re.compile(r"(?:CUDA error|CUDA driver error|Triton Error \[CUDA\]): .*"), "CUDA failed"),
    (re.compile(r"KeyError: 'GPU'"), "Ray saw no GPU"),
    (re.compile(r"assert best_config is not None"), "no row of the space could be run"),
)
_LONGEST = 300


@dataclass(frozen=True)
class Log:
    """What a run of the script tells.

    Attributes:
        planned: What the file is for that it set out to make; None where it did not say, or says
            a name that no server asks for.
        planned_name: That name as it said it.
        rows: How many rows it set out to try; 0 where it did not say.
        written: Name of the file it wrote; empty: none.
        kernel_us: Time of one call by number of tokens, in microseconds; without `--tune`.
        done: Numbers of tokens that were tuned. Ray may fold lines of several workers into one.
        progress: Rows tried and rows to try, of the bar that was drawn last.
        seconds: How long the tuning took, as it says itself; None where it does not.
    """

    planned: ConfigName | None = None
    planned_name: str = ""
    rows: int = 0
    written: str = ""
    kernel_us: Mapping[int, float] = field(default_factory=dict)
    done: tuple[int, ...] = ()
    progress: tuple[int, int] | None = None
    seconds: float | None = None


def parse_log(text: str) -> Log:
    """What it tells, however early it ended."""
    lines = _lines(text)
    whole = "\n".join(lines)
    start, took = _START.search(whole), _TOOK.search(whole)
    writing, bars = _WRITING.search(whole), _BAR.findall(whole)
    return Log(
        planned=parse_name(start[2]) if start else None,
        planned_name=start[2] if start else "",
        rows=int(start[1]) if start else 0,
        written=writing[1] if writing else "",
        kernel_us=dict(_times(lines)),
        done=tuple(dict.fromkeys(int(size) for size in _COMPLETED.findall(whole))),
        progress=(int(bars[-1][0]), int(bars[-1][1])) if bars else None,
        seconds=_number(took[1]) if took else None,
    )


def _lines(text: str) -> list[str]:
    return re.split(r"[\r\n]+", _COLOUR.sub("", text))


def _times(lines: list[str]) -> Iterator[tuple[int, float]]:
    size: int | None = None
    for line in lines:
        if found := _SIZE.search(line):
            size = int(found[1])
        elif size is not None and (found := _TIME.search(line)):
            if (time := _number(found[1])) is not None:
                yield size, time
            size = None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def failure(code: int, text: str, limit_s: float) -> str:
    """Why it failed, in one sentence for people.

    Args:
        code: Its exit status, or that of `timeout` around it.
        text: All it printed.
        limit_s: The time it had, in seconds.
    """
    if code in TIMEOUT_CODES:
        bar = parse_log(text).progress
        so_far = f" (it was at row {bar[0]} of {bar[1]})" if bar else ""
        return f"it did not end within {limit_s:g} s{so_far}"
    lines = _lines(text)
    whole = "\n".join(lines)
    if shared := _SHARED.search(whole):
        return (
            f"a row needs {shared[1]} bytes of shared memory, and the GPU gives a thread block "
            f"{shared[2]}"
        )
    for pattern, what in _CAUSES:
        if found := pattern.search(whole):
            return f"{what}: {printable(found[0], limit=_LONGEST)}"
    errors = [line for x in lines if _ERROR.match(line := _without_head(x))]
    if not errors:
        return f"it ended with status {code} and named no error"
    absent = errors[-1].startswith(("ModuleNotFoundError", "ImportError"))
    what = "a module is missing" if absent else f"it ended with status {code}"
    return f"{what}: {printable(errors[-1].strip(), limit=_LONGEST)}"


def is_final(text: str) -> bool:
    """Whether it failed for a reason that stays: no row fits into the GPU's shared memory."""
    return bool(_SHARED.search(text))


def _without_head(line: str) -> str:
    return re.sub(r"^\([^)]*pid=[0-9]+[^)]*\) *", "", line)
