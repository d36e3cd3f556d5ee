"""What the stand-in tuning scripts do, and what tests tell them through `moe.json`.

It is a file of the state folder, all keys optional:

    seconds   how long one number of tokens takes to tune (0.5); without --tune a tenth of it
    old       true: no --batch-sizes and no --search-space-file, as in 0.5.9
    skew      true: the scripts are newer than the package, and end when they are imported
    faults    a number of tokens as text, or "*" for all -> what happens to those with --tune:

        times out               it never ends
        ignores TERM            the same, and SIGTERM does not end it either
        out of shared memory    no candidate fits: a traceback and exit status 1
        crashes                 an illegal memory access: the same
        writes nothing          exit status 0, and says that it writes a file
        wrong name              a file for another GPU; all output says that name
        bad row                 a file with BLOCK_SIZE_M 24
        metadata                a file with one more key, "triton_version"
        wrong size              a file with twice the number of tokens
        leaves ray              all is well, but raylet and a worker with its GPU live on

A run for several numbers has the faults of all of them. Which candidate is the best is the rule of
sglang_moe.py.
"""

import json
import signal
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lab.guest.sglang_cluster import Say
    from lab.guest.sglang_moe import SHARED_MEMORY, quality, shared_memory
    from lab.guest.sglang_state import StateFile
    from lab.guest.sglang_workers import STATE
else:
    from sglang_cluster import Say
    from sglang_moe import SHARED_MEMORY, quality, shared_memory
    from sglang_state import StateFile
    from sglang_workers import STATE

IGNORES, LEAVES, WRONG_NAME = "ignores TERM", "leaves ray", "wrong name"
ENDLESS = ("times out", IGNORES)
OTHER_GPU = "NVIDIA_H200"
PARTS = 10
"""So often it says how far it is."""
NO_ROOM = (
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: {required}, "
    "Hardware limit: {limit}. Reducing block sizes or `num_stages` may help."
)
DEFAULT_REQUIRED = 147456
CRASH = (
    "CUDA error: an illegal memory access was encountered\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
)


class AcceleratorError(Exception):
    """PyTorch's, for what goes wrong on a GPU."""


class Told:
    """What tests say."""

    def __init__(self) -> None:
        """Reads it."""
        said = StateFile(STATE / "moe.json").read()
        self.seconds = float(said.get("seconds", 0.5))
        self.old = bool(said.get("old"))
        self.skew = bool(said.get("skew"))
        self._faults: Mapping[str, str] = said.get("faults", {})

    def fault(self, tokens: int) -> str:
        """What happens to a number of tokens; empty: nothing."""
        return self._faults.get(str(tokens), self._faults.get("*", ""))

    def has(self, fault: str, sizes: Iterable[int]) -> bool:
        """Whether it happens to one of them."""
        return any(self.fault(tokens) == fault for tokens in sizes)


def tune(tokens: int, space: list[dict[str, int]], told: Told, say: Say) -> dict[str, int]:
    """Tries all candidates for a number of tokens; returns the best; asserts that one runs."""
    fault = told.fault(tokens)
    for part in range(PARTS):
        say(done=len(space) * part // PARTS, total=len(space))
        while fault in ENDLESS and part:
            signal.pause()
        if fault == "crashes" and part > PARTS // 2:
            raise AcceleratorError(CRASH)
        time.sleep(told.seconds / PARTS)
    say(done=len(space), total=len(space))
    fitting = [row for row in space if shared_memory(row) <= SHARED_MEMORY]
    if fault == "out of shared memory" or not fitting:
        required = DEFAULT_REQUIRED if fitting else min(map(shared_memory, space))
        say(text=NO_ROOM.format(required=required, limit=SHARED_MEMORY))
        fitting = []
    say(text=f"{datetime.now().ctime()}] Completed tuning for batch_size={tokens}")
    best_config = max(fitting, key=lambda row: quality(row, tokens), default=None)
    assert best_config is not None
    return best_config


def obey(told: Told, sizes: Iterable[int]) -> None:
    """Ignores SIGTERM where that is told, in all processes to come too."""
    if told.has(IGNORES, sizes):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def announced(name: str, told: Told, sizes: Iterable[int]) -> str:
    """The file's name as it is said and used."""
    device = name.partition("device_name=")[2].partition(",")[0].removesuffix(".json")
    return name.replace(device, OTHER_GPU) if told.has(WRONG_NAME, sizes) else name


def save(rows: Mapping[int, Mapping[str, Any]], name: str, told: Told) -> None:
    """Writes the file, or what is told to be written instead."""
    content: dict[Any, Any] = {}
    for tokens, row in rows.items():
        fault = told.fault(tokens)
        key = 2 * tokens if fault == "wrong size" else tokens
        content[key] = dict(row) | ({"BLOCK_SIZE_M": 24} if fault == "bad row" else {})
    if told.has("metadata", rows):
        content = {"triton_version": "3.6.0", **content}
    print(f"Writing best config to {name}...")
    if not told.has("writes nothing", rows):
        Path(name).write_text(json.dumps(content, indent=4) + "\n")
