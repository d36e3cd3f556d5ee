"""Does a reclaim keep its promises on this machine's real GPUs? One JSON document tells.

    python3 benchmarks/gpu_check.py > gpu.json    # root and pydantic; no Prefect, no network

It starts CUDA processes of several shapes and innocent ones beside them, plans, reclaims, and looks
for itself what became of everybody. It measures nvidia-smi, and how long the memory of a killed
process stays in use. Where somebody else uses a GPU it refuses: a reclaim would end them.

Exit status: 0 every check held; 1 "failed" names those that did not; 2 "refused" says why.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

if importlib.util.find_spec("pydantic") is None:
    print(json.dumps({"refused": f"{sys.executable} has no pydantic"}))
    sys.exit(2)

if TYPE_CHECKING:
    from benchmarks import gpu_access as access
    from benchmarks import gpu_actors as actors
    from benchmarks import gpu_rounds as rounds
    from benchmarks import gpu_rules as rules
else:
    import gpu_access as access
    import gpu_actors as actors
    import gpu_rounds as rounds
    import gpu_rules as rules

LAST_START_S = 140
"""No round starts later than this, so that a machine that works is done within three minutes."""

SMI_CALLS = 5
TOGETHER = "all together"


def say(line: str) -> None:
    """Progress, for people."""
    print(f"gpu check: {line}", file=sys.stderr, flush=True)


def machine() -> dict[str, str]:
    """What this is, for whoever reads the document elsewhere."""
    gpus = actors.ask("--query-gpu=name,driver_version")
    majors = [x for x in _lines("/proc/devices") if "nvidia" in x]
    return {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "gpus": ", ".join(row[0] for row in gpus),
        "driver": ", ".join(sorted({row[-1] for row in gpus})),
        "device majors": ", ".join(majors),
        "control groups": ", ".join(_lines("/proc/self/cgroup")),
    }


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


def smi_seconds() -> dict[str, float]:
    """How long nvidia-smi takes."""
    taken = []
    for _ in range(SMI_CALLS):
        begun = time.monotonic()
        actors.memory()
        taken.append(time.monotonic() - begun)
    return {"median": round(statistics.median(taken), 3), "max": round(max(taken), 3)}


@contextmanager
def innocents() -> Iterator[dict[str, actors.Actor]]:
    """Processes that no reclaim may touch, by name."""
    started: dict[str, actors.Actor] = {}
    try:
        for name, flags in rounds.BYSTANDERS.items():
            started[name] = actors.start(*flags)
            say(f"bystander {name}: pid {started[name].pid}")
        yield started
    finally:
        for actor in started.values():
            actor.end()


def check(found: rules.Found, asked: argparse.Namespace) -> None:
    """Measure, and carry out all rounds; what was found so far is kept, whatever happens."""
    begun = time.monotonic()
    found.machine, found.nodes = machine(), rounds.nodes()
    found.smi_seconds = smi_seconds()
    plans = {shape: [shape] for shape in rounds.SHAPES} | {TOGETHER: list(rounds.SHAPES)}
    with innocents() as bystanders:
        run = rounds.Rounds(found, bystanders, asked.settle_s, until=begun + LAST_START_S)
        for name, shapes in plans.items():
            done = run.run(name, shapes)
            found.rounds.append(done)
            say(f"{name}: {done.not_run or done.verdict}, {time.monotonic() - begun:.1f} s")
        found.release = rounds.release(found, asked.large_mib)
        say(f"release: {found.release.not_run or found.release.free_s}")


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=1024, help="memory of each holder")
    parser.add_argument("--large-mib", type=int, default=8192, help="memory of the one killed")
    parser.add_argument("--settle-s", type=float, default=20, help="longest wait for memory")
    return parser.parse_args()


def main() -> int:
    """Refuse, or check and print."""
    asked, begun = options(), time.monotonic()
    try:
        lacking = access.obstacle()
        if lacking:
            raise access.Refused(lacking)
        found = rules.Found(mib=asked.mib, idle_mib=access.alone())
    except access.Refused as refused:
        holders = [row.model_dump() for row in refused.holders]
        print(json.dumps({"refused": str(refused), "holders": holders}, indent=1))
        return 2
    try:
        check(found, asked)
    except Exception as error:
        traceback.print_exc()
        found.crashed = repr(error)
    found.seconds = round(time.monotonic() - begun, 1)
    found.failed = rules.failures(found)
    say(f"failed: {', '.join(found.failed) or 'nothing'}")
    print(found.model_dump_json(indent=1))
    return 1 if found.failed else 0


if __name__ == "__main__":
    sys.exit(main())
